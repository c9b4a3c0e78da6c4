//! Normalization over the last dimension: `candle_nn::layer_norm`.
//!
//! Layer normalization (Ba et al., 2016, arXiv:1607.06450) and root-mean-square normalization (Zhang and Sennrich,
//! 2019, arXiv:1910.07467). For each row of `n` elements, with mean `m` (0 for RMS) and
//! `r = 1 / sqrt(mean((x - m)^2) + eps)`: `h = (x - m) r`, `y = h w + b`. With `g = dy w`:
//! `dx = r (g - mean(g) - h mean(g h))` (RMS has no `mean(g)`), `dw` = sum over rows of `dy h`, `db` = sum over rows of
//! `dy`. Backward computes the f32 statistics again, which costs less than keeping them.

use candle_core::{D, DType, Module, Result, Storage, Tensor, bail};
use candle_nn::{Init, VarBuilder};

pub use candle_nn::LayerNormConfig;

use super::cpu::simd::{dot, kernel, sum, sum_squares};
use super::cpu::{map_rows, read, same_kind, small_weight_grad, storage, tensor_like};
use super::cuda::Cuda;
use super::empty::if_empty;
use super::limits::check_input_size;
use super::weight::{Weight, has_cpu_kernels, register_layer};
use crate::graph::{Reads, graph_op};
use crate::kernels::Normalization;

/// Layer normalization over the last dimension, as [`candle_nn::LayerNorm`]: weight `[hidden]`, optional bias
/// `[hidden]`, input and output `[.., hidden]`.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use fsdp_candle::nn::LayerNorm;
///
/// let ones = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let norm = LayerNorm::new_no_bias(ones, 0.0);
/// let y = norm.forward(&Tensor::new(&[[3f32, 5.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[-1., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// Returns a layer with this weight and bias, each `[hidden]`. `eps` is added to the variance.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self::of(weight, Some(bias), true, eps)
    }

    /// Returns a layer without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, true, eps)
    }

    /// Returns a layer that does not subtract the mean, as [`RmsNorm`].
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, false, eps)
    }

    fn of(weight: Tensor, bias: Option<Tensor>, remove_mean: bool, eps: f64) -> Self {
        register_layer(&weight);
        bias.iter().for_each(register_layer);
        Self { weight, bias, remove_mean, eps }
    }

    /// Returns the weight, `[hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[hidden]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the number that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Returns whether the mean is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalize("LayerNorm", x, &self.weight, self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

/// Returns a [`LayerNorm`] from the tensors `weight` and `bias` of `vb`, which start as one and zero. If `vb` has
/// `gamma` and `beta` instead, these are used. A number as config is the epsilon.
pub fn layer_norm<C: Into<LayerNormConfig>>(hidden: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    let named = |name: &'static str, older: &'static str| {
        if !vb.contains_tensor(name) && vb.contains_tensor(older) { older } else { name }
    };
    let weight = vb.get_with_hints(hidden, named("weight", "gamma"), Init::Const(1.))?;
    let bias = affine.then(|| vb.get_with_hints(hidden, named("bias", "beta"), Init::Const(0.))).transpose()?;
    Ok(LayerNorm::of(weight, bias, remove_mean, eps))
}

/// Returns a [`LayerNorm`] without a bias, from the tensor `weight` of `vb`, which starts as one.
pub fn layer_norm_no_bias(hidden: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(hidden, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

/// Root-mean-square normalization over the last dimension: weight `[hidden]`, input and output `[.., hidden]`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Returns a layer with this weight, `[hidden]`. `eps` is added to the mean square.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        register_layer(&weight);
        Self { weight, eps }
    }

    /// Returns the weight, `[hidden]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the number that is added to the mean square.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Converts to a [`LayerNorm`] that does not subtract the mean.
    pub fn into_inner(self) -> LayerNorm {
        LayerNorm::rms_norm(self.weight, self.eps)
    }

    /// Calls [`Module::forward`], which is differentiable here.
    pub fn forward_diff(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalize("RmsNorm", x, &self.weight, None, self.eps, false)
    }
}

/// Returns an [`RmsNorm`] from the tensor `weight` of `vb`, which starts as one. If `vb` has `gamma` instead, it is
/// used.
pub fn rms_norm(hidden: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let norm = layer_norm(hidden, LayerNormConfig { eps, remove_mean: false, affine: false }, vb)?;
    Ok(RmsNorm::new(norm.weight, eps))
}

/// Normalizes `x` over its last dimension, multiplies by the weight, and adds the bias, each `[hidden]`. The mean is
/// subtracted if `centered`.
pub(super) fn normalize(
    function: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
    centered: bool,
) -> Result<Tensor> {
    let hidden = weight.dims1()?;
    if x.rank() == 0 || x.dims()[x.rank() - 1] != hidden || hidden == 0 {
        bail!("{function}: the input {:?} must end in {hidden} (not zero), for the weight is [{hidden}]", x.dims());
    }
    same_kind(function, ("the input", x), ("the weight", weight))?;
    if let Some(bias) = bias {
        if bias.dims() != [hidden] {
            bail!("{function}: the bias {:?} must be [{hidden}] as the weight is", bias.dims());
        }
        same_kind(function, ("the input", x), ("the bias", bias))?;
    }
    check_input_size(function, x)?;
    if let Some(cuda) = Cuda::of(x) {
        let (weight, bias) = (Weight::of(weight)?, bias.map(Weight::of).transpose()?);
        return cuda.normalize(function, x, weight, bias, Normalization { width: hidden, eps, centered });
    }
    if !has_cpu_kernels(x) {
        let (weight, bias) = (Weight::in_graph(weight)?, bias.map(Weight::in_graph).transpose()?);
        let sources: Vec<&Tensor> = [x, &weight].into_iter().chain(&bias).collect();
        return match if_empty(function, x, &sources, x.shape())? {
            Some(empty) => Ok(empty),
            None => composite(x, &weight, bias.as_ref(), eps, centered),
        };
    }
    let (weight, bias) = (Weight::of(weight)?, bias.map(Weight::of).transpose()?);
    let arguments = weight.arguments(x, bias.as_ref());
    let norm = Norm { weight, bias, hidden, eps: eps as f32, centered };
    graph_op(function, &arguments, norm.forward(x)?, x.shape(), Reads::Sources, move |x, _, dy| norm.backward(x[0], dy))
}

/// The normalization as a chain of Candle's operations.
pub(super) fn composite(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
    centered: bool,
) -> Result<Tensor> {
    let dtype = x.dtype();
    let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    let x = x.to_dtype(wide)?;
    let x = if centered { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    let y = x.broadcast_div(&scale)?.broadcast_mul(&weight.to_dtype(wide)?)?;
    match bias {
        None => y,
        Some(bias) => y.broadcast_add(&bias.to_dtype(wide)?)?,
    }
    .to_dtype(dtype)
}

struct Norm {
    weight: Weight,
    bias: Option<Weight>,
    hidden: usize,
    eps: f32,
    centered: bool,
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Result<Storage> {
        read!(values, x);
        let mut y = vec![0f32; values.len()];
        read!(weight, self.weight.value()?);
        let bias = match &self.bias {
            Some(bias) => {
                read!(bias, bias.value()?);
                bias.into_owned()
            }
            None => vec![0f32; self.hidden],
        };
        map_rows(&mut y, self.hidden, self.hidden, |first, y| {
            norm_rows(y, &values[first * self.hidden..], &weight, &bias, self.eps, self.centered);
        });
        storage(y, x.dtype())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 3]> {
        read!(values, x);
        read!(grad, dy);
        let mut dx = vec![0f32; values.len()];
        let mut dw = vec![0f32; self.hidden];
        let mut db = vec![0f32; self.hidden];
        {
            read!(weight, self.weight.value()?);
            let block = ROWS_OF_SUM * self.hidden;
            let parts = map_rows(&mut dx, block, block, |first, dx| {
                let of_block = |(i, dx): (usize, &mut [f32])| {
                    let (mut dw, mut db) = (vec![0f32; self.hidden], vec![0f32; self.hidden]);
                    let (x, dy) = (&values[(first + i) * block..], &grad[(first + i) * block..]);
                    norm_rows_back(dx, &mut dw, &mut db, x, dy, &weight, self.eps, self.centered);
                    (dw, db)
                };
                dx.chunks_mut(block).enumerate().map(of_block).collect::<Vec<_>>()
            });
            for (part_w, part_b) in parts.iter().flatten() {
                dw.iter_mut().zip(part_w).for_each(|(sum, part)| *sum += part);
                db.iter_mut().zip(part_b).for_each(|(sum, part)| *sum += part);
            }
        }
        let dw = small_weight_grad(&self.weight, &dw)?;
        let db = match &self.bias {
            Some(bias) => small_weight_grad(bias, &db)?,
            None => None,
        };
        Ok([Some(tensor_like(dx, x)?), dw, db])
    }
}

/// Rows whose terms of the weight's gradient are added one after another. The sums of such blocks are added in order, so
/// the number of threads does not change the result.
const ROWS_OF_SUM: usize = 64;

/// Returns a row's mean (0 unless `centered`) and 1 / sqrt(variance + eps).
#[inline(always)]
fn statistics(row: &[f32], eps: f32, centered: bool) -> (f32, f32) {
    let n = row.len() as f32;
    let mean = if centered { sum(row) / n } else { 0.0 };
    (mean, 1.0 / (sum_squares(row, mean) / n + eps).sqrt())
}

kernel! {
    fn norm_rows(y: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], eps: f32, centered: bool) {
        let hidden = weight.len();
        for (y, x) in y.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden)) {
            let (mean, scale) = statistics(x, eps, centered);
            for (((y, &x), &w), &b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = ((x - mean) * scale).mul_add(w, b);
            }
        }
    }

    fn norm_rows_back(
        dx: &mut [f32],
        dw: &mut [f32],
        db: &mut [f32],
        x: &[f32],
        dy: &[f32],
        weight: &[f32],
        eps: f32,
        centered: bool,
    ) {
        let hidden = weight.len();
        let n = hidden as f32;
        let (dw, db) = (&mut dw[..hidden], &mut db[..hidden]);
        for ((dx, x), dy) in dx.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden)).zip(dy.chunks_exact(hidden)) {
            let (mean, scale) = statistics(x, eps, centered);
            // The row of dx holds g = dy w until the row's sums are known.
            for i in 0..hidden {
                let h = (x[i] - mean) * scale;
                dx[i] = dy[i] * weight[i];
                dw[i] = dy[i].mul_add(h, dw[i]);
                db[i] += dy[i];
            }
            let mean_g = if centered { sum(dx) / n } else { 0.0 };
            let mean_gh = dot(dx, x, mean) * scale / n;
            for (dx, &x) in dx.iter_mut().zip(x) {
                let h = (x - mean) * scale;
                *dx = scale * (*dx - mean_g - h * mean_gh);
            }
        }
    }
}
