//! Attention over packed sequences.

use candle_core::{Result, Tensor};

use super::super::varlen::packed;

/// The same as [`flash_attn_varlen_unfused`](crate::nn::attention::flash_attn_varlen_unfused), as
/// [`candle_nn::attention::flash_attn_varlen_cpu`], which has no backward.
///
/// # Errors
/// When shapes, dtypes or lengths disagree, or there is a window to the right alone.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_cpu(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    _max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    window_left: Option<usize>,
    window_right: Option<usize>,
) -> Result<Tensor> {
    let window = (window_left, window_right);
    packed(q, k, v, alibi_slopes, seqlens_q, seqlens_k, softmax_scale, causal, window)
}
