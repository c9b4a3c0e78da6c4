//! Functions on tensors: `candle_nn::ops`, each with a backward.

use candle_core::{Result, Tensor};

pub use candle_nn::ops::{
    Identity, hard_sigmoid, leaky_relu, log_softmax, pixel_shuffle, pixel_unshuffle, replication_pad2d, sigmoid,
};

pub use super::activation::{mish, selu, silu, swiglu};
pub use super::dropout::{Dropout, dropout};
pub use super::softmax::{softmax, softmax_last_dim};

use super::attention::{ScoreOptions, attend};
use super::layer_norm::normalize;

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
