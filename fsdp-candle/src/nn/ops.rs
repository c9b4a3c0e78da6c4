//! Functions on tensors: `candle_nn::ops`, each with a backward.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};

pub use candle_nn::ops::{
    Identity, hard_sigmoid, leaky_relu, log_softmax, pixel_shuffle, pixel_unshuffle, replication_pad2d, sigmoid,
};

pub use super::activation::composed::{mish, selu, swiglu};
pub use super::dropout::{Dropout, dropout};

use super::activation::fused;
use super::attention::plain::{Scores, attend};
use super::norm::rows;

/// The softmax along a dimension: `e^x` over its sum. Any shape and float dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::ops::softmax;
///
/// let y = softmax(&Tensor::new(&[[0f32, 0.], [0., 3f32.ln()]], &Device::Cpu)?, 1)?;
/// let apart = (y - Tensor::new(&[[0.5f32, 0.5], [0.25, 0.75]], &Device::Cpu)?)?.abs()?.max_all()?;
/// assert!(apart.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    if dim + 1 == xs.rank() { softmax_last_dim(xs) } else { super::softmax::composite(xs, dim) }
}

/// [`softmax`] along the last dimension. Candle's has no backward.
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    super::softmax::softmax_last_dim(xs)
}

/// `x / (1 + e^-x)`, of any shape.
pub fn silu(xs: &Tensor) -> Result<Tensor> {
    fused::silu(xs)
}

/// Root-mean-square normalization over the last dimension: `xs` `[.., hidden]`, `alpha` `[hidden]`. Candle's has no
/// backward. An error if shapes, dtypes or devices disagree.
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    rows::normalize("rms_norm", xs, alpha, None, f64::from(eps), false)
}

/// The same as [`rms_norm`], which is differentiable here.
pub fn rms_norm_slow(x: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    rms_norm(x, alpha, eps)
}

/// Layer normalization over the last dimension: `xs` `[.., hidden]`, `alpha` and `beta` `[hidden]`. Candle's has no
/// backward. An error if shapes, dtypes or devices disagree.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    rows::normalize("layer_norm", xs, alpha, Some(beta), f64::from(eps), true)
}

/// The same as [`layer_norm`], which is differentiable here.
pub fn layer_norm_slow(x: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    layer_norm(x, alpha, beta, eps)
}

/// Scaled dot-product attention: `q` `[batch, heads, T, D]`, `k` `[batch, kv_heads, S, D]`, `v`
/// `[batch, kv_heads, S, Dv]`, output `[batch, heads, T, Dv]`. `mask` is added to the scores and of a shape that is
/// broadcast over `[batch, heads, T, S]`; with `do_causal` query `i` sees the keys `0..=S - T + i`. With `softcapping`
/// other than 1 the scores are `cap tanh(score / cap)`.
///
/// Candle's is a kernel for Metal alone, without backward; this one is a composition on every device.
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
    let scores = Scores { scale, softcap, causal_offset: offset, window: (None, None), bias: mask.cloned() };
    attend(q, k, v, &scores)?.to_dtype(q.dtype())
}
