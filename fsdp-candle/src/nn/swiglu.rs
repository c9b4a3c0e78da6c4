//! The MLP of Llama: `down(silu(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020,
//! arXiv:2002.05202).
//!
//! As one operation on the CPU, its graph keeps the gate and the up projection of each row. A chain of layers also keeps
//! their product, and in backward Candle adds four gradients of the inner width to zeros. With `g` and `u` for the two
//! projections, `h = silu(g) u`:
//!
//! - `dh = dy W_down`, `dW_down = dy^T h`
//! - `dg` and `du` as in SwiGLU
//! - `dx = dg W_gate + du W_up`, `dW_gate = dg^T x`, `dW_up = du^T x`

use std::sync::Arc;

use candle_core::{DType, Module, Result, Storage, Tensor, bail};
use candle_nn::ops::sigmoid;

use super::activation::{silu_mul, swiglu_back, swiglu_values};
use super::cpu::matrix::{Mat, MatMut, product, product_of};
use super::cpu::{cpu, floats_in, map_rows, map_rows2, read_rows, storage, tensor_like, weight_grad};
use super::linear::{Linear, with_matrix};
use super::weight::{Weight, has_cpu_kernels};
use crate::activation_checkpoint::{Operation, operation};
use crate::fsdp::FsdpParam;
use crate::graph::{Reads, graph_op};

/// Values that are computed at once. In f32 they fit into a core's first cache.
const PART: usize = 1024;

/// The MLP of Llama: `down(silu(gate(x)) * up(x))`, input `[.., in]`, output `[.., out]`.
///
/// On the CPU in f32, f16 and bf16, it is one operation if its layers have no bias, no limits, no adapter, and no
/// plan of tensor parallelism. It keeps the outputs of `gate` and `up` for backward. Otherwise it is the chain of its layers, with the
/// same values up to rounding.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::nn::{Linear, SwiGlu};
///
/// let weight = |value: f32, shape| Tensor::full(value, shape, &Device::Cpu);
/// let (gate, up, down) = (weight(1., (3, 2))?, weight(0.5, (3, 2))?, weight(2., (4, 3))?);
/// let mlp = SwiGlu::new(Linear::new(gate, None), Linear::new(up, None), Linear::new(down, None));
/// let y = mlp.forward(&Tensor::ones((5, 2), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [5, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SwiGlu {
    gate: Linear,
    up: Linear,
    down: Linear,
    clamp: Option<SwiGluClamp>,
}

/// Limits of the projections in a [`SwiGlu`], as in gpt-oss (arXiv:2508.10925, section 2.2): with `g = min(gate, limit)` and
/// `u` for `up` within `-limit..=limit`, `g sigmoid(alpha g) (u + 1)` replaces `silu(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwiGluClamp {
    /// Factor within the sigmoid.
    pub alpha: f64,
    /// The limit. Above 0.
    pub limit: f64,
}

impl SwiGluClamp {
    /// Returns what replaces `silu(gate) * up`.
    fn apply(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let SwiGluClamp { alpha, limit } = self;
        let (gate, up) = (gate.minimum(limit)?, up.clamp(-limit, limit)?);
        let gated = (&gate * sigmoid(&(&gate * alpha)?)?)?;
        gated * (up + 1.)?
    }
}

impl SwiGlu {
    /// Returns a layer of these projections, with weights `[inner, in]`, `[inner, in]` and `[out, inner]`.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Self {
        let layer = SwiGlu { gate, up, down, clamp: None };
        layer.tensors().filter_map(FsdpParam::of).for_each(|param| param.set_of_expert());
        layer
    }

    /// Limits the projections. The layer is then a chain of operations.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use fsdp_candle::nn::{Linear, SwiGlu, SwiGluClamp};
    ///
    /// let layer = |value: f32| Ok::<_, candle_core::Error>(Linear::new(Tensor::full(value, (1, 1), &Device::Cpu)?, None));
    /// let clamp = SwiGluClamp { alpha: 0., limit: 7. };
    /// let mlp = SwiGlu::new(layer(8.)?, layer(-9.)?, layer(1.)?).with_clamp(clamp);
    /// // The sigmoid is a half: 7 / 2 (-7 + 1).
    /// assert_eq!(mlp.forward(&Tensor::ones((1, 1), DType::F32, &Device::Cpu)?)?.to_vec2::<f32>()?, [[-21.]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_clamp(self, clamp: SwiGluClamp) -> Self {
        SwiGlu { clamp: Some(clamp), ..self }
    }

    /// Returns the weight `[out, inner]`.
    pub(super) fn output_weight(&self) -> &Tensor {
        self.down.weight()
    }

    /// Returns the weights, biases and adapters' matrices.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(Linear::tensors)
    }

    /// Returns the three weights, if the layer is a product with each alone and they fit inputs like `x`.
    pub(super) fn plain_weights(&self, x: &Tensor) -> Option<[&Tensor; 3]> {
        if self.clamp.is_some() {
            return None;
        }
        let weights = [self.gate.plain_weight()?, self.up.plain_weight()?, self.down.plain_weight()?];
        let [(inner, inputs), up, (_, of_down)] =
            [weights[0].dims2().ok()?, weights[1].dims2().ok()?, weights[2].dims2().ok()?];
        // If shapes or dtypes disagree, the chain's layers name what does not fit.
        let fits = x.dims().last() == Some(&inputs)
            && up == (inner, inputs)
            && of_down == inner
            && weights.iter().all(|weight| weight.dtype() == x.dtype() && weight.device().same_device(x.device()));
        fits.then_some(weights)
    }
}

impl Module for SwiGlu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.gate.weight().elem_count() == 0
            && let Some(param) = FsdpParam::of(self.gate.weight())
            && let Some((ranks, owner)) = param.owner()
        {
            bail!(
                "SwiGlu of parameter `{}`: the expert is on rank {owner} of {} ranks of experts, not on rank {}: call it by \
                 mixture_of_experts",
                param.name(),
                ranks.size(),
                ranks.rank()
            )
        }
        match self.plain_weights(x).filter(|_| has_cpu_kernels(x)) {
            Some(weights) => fused(x, weights),
            None => {
                let (gate, up) = (self.gate.forward(x)?, self.up.forward(x)?);
                self.down.forward(&match self.clamp {
                    None => silu_mul(&gate, &up)?,
                    Some(clamp) => clamp.apply(&gate, &up)?,
                })
            }
        }
    }
}

fn fused(x: &Tensor, weights: [&Tensor; 3]) -> Result<Tensor> {
    let shape = [&x.dims()[..x.rank() - 1], &[weights[2].dim(0)?]].concat();
    operation(Operation::SwiGlu, &shape, |known| {
        let known = known.and_then(|(y, projections)| Some((y, projections.downcast::<Projections>().ok()?)));
        let (weights, y, projections) = match known {
            Some((y, projections)) => (read_weights(weights)?, y, projections),
            None => {
                read_rows!(rows, x);
                let (weights, projections, y) = forward(weights, rows, x.dtype())?;
                (weights, storage(y, x.dtype())?, Arc::new(projections))
            }
        };
        let joined = Weight::joined(&weights)?;
        let (arguments, kept) = ([x.clone(), joined.node().clone()], projections.clone());
        let y = graph_op("SwiGlu", &arguments, y, &shape[..], Reads::Sources, move |arguments, _, dy| {
            let x = arguments[0];
            read_rows!(rows, x);
            read_rows!(of_rows, dy);
            let gradients = backward(&weights, &projections, rows, of_rows, None, x.track_op())?;
            let dx = gradients.x.map(|dx| tensor_like(dx, x)).transpose()?;
            Ok([dx, joined.set_gradients(gradients.weights)?])
        })?;
        Ok((y, kept))
    })
}

/// The outputs of `gate` and `up`, which backward reads.
pub(super) struct Projections {
    gate: Storage,
    up: Storage,
    len: usize,
}

impl Projections {
    /// Calls `f(first, gate, up)` with the values `first..first + len` of both in f32, in several parts.
    fn for_each_part(&self, first: usize, len: usize, mut f: impl FnMut(usize, &[f32], &[f32])) -> Result<()> {
        let (gate, up) = (cpu(&self.gate)?, cpu(&self.up)?);
        let (mut of_gate, mut of_up) = ([0f32; PART], [0f32; PART]);
        for start in (first..first + len).step_by(PART) {
            let part = start..(first + len).min(start + PART);
            f(start, floats_in(gate, part.clone(), &mut of_gate)?, floats_in(up, part, &mut of_up)?);
        }
        Ok(())
    }

    /// Returns `silu(gate) * up`.
    fn hidden(&self) -> Result<Vec<f32>> {
        let mut hidden = vec![0f32; self.len];
        let of_rows = map_rows(&mut hidden, 1, 1, |first, hidden| {
            self.for_each_part(first, hidden.len(), |start, gate, up| {
                swiglu_values(&mut hidden[start - first..][..gate.len()], gate, up);
            })
        });
        of_rows.into_iter().collect::<Result<()>>()?;
        Ok(hidden)
    }
}

/// Reads the weights of a layer.
pub(super) fn read_weights([gate, up, down]: [&Tensor; 3]) -> Result<[Weight; 3]> {
    Ok([Weight::of(gate)?, Weight::of(up)?, Weight::of(down)?])
}

/// Computes the output for rows of the input, which have `dtype`.
pub(super) fn forward(
    [gate, up, down]: [&Tensor; 3],
    x: Mat<'_>,
    dtype: DType,
) -> Result<([Weight; 3], Projections, Vec<f32>)> {
    let inner = gate.dim(0)?;
    // If each weight is a unit of its own, reading one may free the one before.
    let gate = Weight::of(gate)?;
    let of_gate = storage(multiply(x, &gate)?, dtype)?;
    let up = Weight::of(up)?;
    let of_up = multiply(x, &up)?;
    let projections = Projections { gate: of_gate, len: of_up.len(), up: storage(of_up, dtype)? };
    let down = Weight::of(down)?;
    let hidden = projections.hidden()?;
    let y = multiply(Mat::new(&hidden, x.rows(), inner).as_dtype(dtype), &down)?;
    Ok(([gate, up, down], projections, y))
}

/// Returns `x W^T`.
fn multiply(x: Mat<'_>, weight: &Weight) -> Result<Vec<f32>> {
    with_matrix(weight, |w, _| product_of(x, w.t()))
}

/// The gradients of the input, if it is wanted, and of the weights.
pub(super) struct Gradients {
    pub(super) x: Option<Vec<f32>>,
    pub(super) weights: [Option<Tensor>; 3],
}

/// Factors of the rows of the output, and their gradients.
pub(super) struct RowWeights<'a> {
    pub(super) values: &'a [f32],
    pub(super) gradients: &'a mut [f32],
}

/// Returns the gradients, given the gradient `dy` of the output, or of the weighted output with `of_rows`.
pub(super) fn backward(
    [gate, up, down]: &[Weight; 3],
    projections: &Projections,
    x: Mat<'_>,
    dy: Mat<'_>,
    of_rows: Option<RowWeights<'_>>,
    wants_dx: bool,
) -> Result<Gradients> {
    let (mut dh, [_, inner]) = with_matrix(down, |w, shape| (product_of(dy, w), shape))?;
    let mut hidden = projections.hidden()?;
    if let Some(RowWeights { values, gradients }) = of_rows {
        let rows = dh.chunks_exact_mut(inner.max(1)).zip(hidden.chunks_exact_mut(inner.max(1)));
        for (((dh, hidden), weight), gradient) in rows.zip(values).zip(gradients) {
            // The gradient is dy W h = dh h, before dh is weighted.
            *gradient = dh.iter().zip(&*hidden).map(|(dh, h)| dh * h).sum();
            dh.iter_mut().for_each(|dh| *dh *= weight);
            hidden.iter_mut().for_each(|h| *h *= weight);
        }
    }
    let (rows, dtype) = (x.rows(), down.dtype());
    let d_down = gradient(down, dy, Mat::new(&hidden, rows, inner).as_dtype(dtype))?;
    let (mut d_gate, mut d_up) = (hidden, vec![0f32; dh.len()]);
    let of_rows = map_rows2(&mut d_gate, &mut d_up, |first, d_gate, d_up| {
        projections.for_each_part(first, d_gate.len(), |start, gate, up| {
            let part = start - first..start - first + gate.len();
            swiglu_back(&mut d_gate[part.clone()], &mut d_up[part], gate, up, &dh[start..]);
        })
    });
    of_rows.into_iter().collect::<Result<()>>()?;
    drop(dh);
    let [d_gate, d_up] = [&d_gate, &d_up].map(|values| Mat::new(values, rows, inner).as_dtype(dtype));
    let mut dx = wants_dx.then(|| with_matrix(up, |w, _| product_of(d_up, w))).transpose()?;
    let of_up = gradient(up, d_up, x)?;
    if let Some(dx) = &mut dx {
        with_matrix(gate, |w, [_, inputs]| product(MatMut::new(dx, rows, inputs), true, d_gate, w))?;
    }
    let of_gate = gradient(gate, d_gate, x)?;
    Ok(Gradients { x: dx, weights: [of_gate, of_up, d_down] })
}

/// Returns the gradient `dy^T x` of a weight.
fn gradient(weight: &Weight, dy: Mat<'_>, x: Mat<'_>) -> Result<Option<Tensor>> {
    weight_grad(weight, |buffer, accumulate| {
        product(MatMut::new(buffer, dy.cols(), x.cols()), accumulate, dy.t(), x);
        Ok(())
    })
}
