//! Functions on tensors: `candle_nn::ops`, each with a backward.
//!
//! For the softmax, with `y` the probabilities: `dx = y (dy - sum(y dy))`. Dropout keeps no mask: backward draws it
//! again from the random state.

use candle_core::shape::Dim;
use candle_core::{D, DType, ModuleT, Result, Tensor, bail};

pub use candle_nn::ops::{
    Identity, hard_sigmoid, leaky_relu, log_softmax, pixel_shuffle, pixel_unshuffle, replication_pad2d, sigmoid,
};

pub use super::activation::{mish, selu, silu, swiglu};

use super::attention::{ScoreOptions, attend};
use super::cpu::simd::{dot, kernel, max, probability, sum};
use super::cpu::{map_rows, read, storage, tensor_like, to_vec};
#[cfg(feature = "cuda")]
use super::cuda;
use super::empty::if_empty;
use super::layer_norm::normalize;
use super::limits::check_input_size;
use super::weight::has_cpu_kernels;
#[cfg(feature = "cuda")]
use super::weight::on_cuda;
use crate::graph::{Reads, graph_op};
use crate::random::Mask;
use crate::storage::take;

/// Returns the softmax along a dimension, `e^x` over its sum, for any shape and float dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::ops::softmax;
///
/// let y = softmax(&Tensor::new(&[[0f32, 0.], [0., 3f32.ln()]], &Device::Cpu)?, 1)?;
/// let error = (y - Tensor::new(&[[0.5f32, 0.5], [0.25, 0.75]], &Device::Cpu)?)?.abs()?.max_all()?;
/// assert!(error.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    if dim + 1 == xs.rank() { softmax_last_dim(xs) } else { softmax_composite(xs, dim) }
}

/// Normalizes by the root mean square over the last dimension: `xs` `[.., hidden]`, `alpha` `[hidden]`. Candle's has no
/// backward. Fails if shapes, dtypes or devices disagree.
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    normalize("rms_norm", xs, alpha, None, f64::from(eps), false)
}

/// Calls [`rms_norm`], which is differentiable here.
pub fn rms_norm_slow(x: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    rms_norm(x, alpha, eps)
}

/// Applies layer normalization over the last dimension: `xs` `[.., hidden]`, `alpha` and `beta` `[hidden]`. Candle's
/// has no backward. Fails if shapes, dtypes or devices disagree.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    normalize("layer_norm", xs, alpha, Some(beta), f64::from(eps), true)
}

/// Calls [`layer_norm`], which is differentiable here.
pub fn layer_norm_slow(x: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    layer_norm(x, alpha, beta, eps)
}

/// Computes scaled dot-product attention: `q` `[batch, heads, T, D]`, `k` `[batch, kv_heads, S, D]`, `v` `[batch,
/// kv_heads, S, Dv]`, output `[batch, heads, T, Dv]`. `mask` is added to the scores, and broadcast over `[batch, heads,
/// T, S]`. With `do_causal`, query `i` sees the keys `0..=S - T + i`. With `softcapping` other than 1, the scores are
/// `cap tanh(score / cap)`.
///
/// Candle's is a kernel for Metal only, without a backward. This one is a chain of operations on every device.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let softcap = (softcapping != 1.0).then_some(softcapping);
    let offset = do_causal.then(|| k.dim(2).and_then(|keys| Ok(keys as isize - q.dim(2)? as isize))).transpose()?;
    let scores = ScoreOptions { scale, softcap, causal_offset: offset, window: (None, None), bias: mask.cloned() };
    attend(q, k, v, &scores)?.to_dtype(q.dtype())
}

/// [`softmax`] along the last dimension. Candle's has no backward.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    let Some(&width) = x.dims().last() else { bail!("softmax: the input must have a dimension") };
    if !has_cpu_kernels(x) || width == 0 {
        return softmax_composite(check_input_size("softmax", x)?, D::Minus1);
    }
    let mut y = to_vec(x)?;
    map_rows(&mut y, width, width, |_, y| softmax_rows(y, width));
    graph_op("softmax_last_dim", &[x], storage(y, x.dtype())?, x.shape(), Reads::Output, move |_, y, dy| {
        read!(probabilities, y);
        let mut dx = to_vec(dy)?;
        map_rows(&mut dx, width, width, |first, dx| softmax_rows_back(dx, &probabilities[first * width..], width));
        Ok([Some(tensor_like(dx, dy)?)])
    })
}

/// The softmax as a chain of Candle's operations, along any dimension.
pub(super) fn softmax_composite<D: Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "softmax")?;
    if let Some(empty) = if_empty("softmax", x, &[x], x.shape())? {
        return Ok(empty);
    }
    let dtype = x.dtype();
    let x = if matches!(dtype, DType::F16 | DType::BF16) { x.to_dtype(DType::F32)? } else { x.clone() };
    // The result does not depend on the subtracted value.
    let powers = x.broadcast_sub(&x.max_keepdim(dim)?.detach())?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(dim)?)?.to_dtype(dtype)
}

kernel! {
    /// Replaces each row by its softmax.
    fn softmax_rows(rows: &mut [f32], width: usize) {
        for row in rows.chunks_exact_mut(width) {
            let highest = max(row);
            row.iter_mut().for_each(|x| *x = probability(*x - highest));
            let inverse = 1.0 / sum(row);
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    }

    /// Replaces each row of the probabilities' gradients by the scores' gradients.
    fn softmax_rows_back(grads: &mut [f32], probabilities: &[f32], width: usize) {
        for (grad, y) in grads.chunks_exact_mut(width).zip(probabilities.chunks_exact(width)) {
            let delta = dot(y, grad, 0.0);
            grad.iter_mut().zip(y).for_each(|(grad, y)| *grad = y * (*grad - delta));
        }
    }
}

/// Sets elements to 0 with the probability `drop_p`, in `[0, 1)`, and multiplies the others by `1 / (1 - drop_p)`. The
/// input has any shape and float dtype. The dropped elements follow from this thread's [random state](crate::random),
/// and no mask is kept. Fails if the probability is not in `[0, 1)`, or `xs` is not of the size that its
/// [part](crate::random::Part) implies.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_candle::{nn::ops::dropout, random};
///
/// random::manual_seed(3);
/// let y = dropout(&Tensor::ones(1000, DType::F32, &Device::Cpu)?, 0.5)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| *y == 0. || *y == 2.));
/// assert!((400..600).contains(&y.iter().filter(|y| **y == 0.).count()));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    drop_elements(xs, check_probability("dropout", f64::from(drop_p))?)
}

/// Returns the probability if it is in `[0, 1)`.
pub(super) fn check_probability(function: &str, probability: f64) -> Result<f64> {
    if !(0. ..1.).contains(&probability) {
        bail!("{function}: the probability of dropping an element must be in [0, 1), found {probability}")
    }
    Ok(probability)
}

/// [`dropout`] with a checked probability.
pub(super) fn drop_elements(xs: &Tensor, probability: f64) -> Result<Tensor> {
    if probability == 0. {
        return Ok(xs.clone());
    }
    if !xs.dtype().is_float() {
        bail!("dropout: the input must have a float dtype, found {:?}", xs.dtype())
    }
    let mask = Mask::draw(probability, xs.dims())?;
    let y = dropped(xs, &mask)?;
    graph_op("dropout", &[xs], take(&y)?, xs.shape(), Reads::Nothing, move |_, _, dy| Ok([Some(dropped(dy, &mask)?)]))
}

/// Returns the tensor with the dropped elements set to 0, in its own memory and outside the graph.
fn dropped(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let apply = |values: &mut [f32]| {
        map_rows(values, 1, 1, |first, values| mask.apply(first, values));
    };
    if has_cpu_kernels(x) {
        let mut values = to_vec(x)?;
        apply(&mut values);
        return tensor_like(values, x);
    }
    #[cfg(feature = "cuda")]
    if on_cuda(x) {
        return cuda::dropped(x, mask);
    }
    let mut mask = vec![1f32; x.elem_count()];
    apply(&mut mask);
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mask = Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(wide)?;
    x.detach().to_dtype(wide)?.mul(&mask)?.to_dtype(x.dtype())
}

/// [`dropout`] as a layer.
///
/// ```
/// use candle_core::{Device, ModuleT, Tensor};
/// use fsdp_candle::nn::Dropout;
///
/// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = Dropout::new(0.5).forward_t(&x, false)?; // in evaluation, nothing is dropped
/// assert_eq!(y.to_vec1::<f32>()?, [1., 2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Returns a layer that drops elements with this probability.
    pub fn new(drop_p: f32) -> Dropout {
        Dropout { drop_p }
    }

    /// Drops elements if `train`, else returns `xs`. Errors: see [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train { dropout(xs, self.drop_p) } else { Ok(xs.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}
