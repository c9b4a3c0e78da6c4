//! Attention over sequences of several lengths that lie packed one behind the other.

use candle_core::{DType, Result, Tensor, bail};

use super::plain::{Scores, alibi, attend};

/// Attention over packed sequences: `q` `[total_q, heads, D]`, `k` and `v` `[total_k, kv_heads, D]`, and the lengths of
/// the sequences (u32) `[batch]`: output `[total_q, heads, D]`. Queries are the last of their sequence.
///
/// As [`candle_nn::attention::flash_attn_varlen_unfused`], which has no backward.
///
/// # Errors
/// When shapes, dtypes or lengths disagree, or there is a window to the right alone.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_unfused(
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
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let window = (window_size_left, window_size_right);
    packed(q, k, v, alibi_slopes, seqlens_q, seqlens_k, softmax_scale, causal, window)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    scale: f32,
    causal: bool,
    window: (Option<usize>, Option<usize>),
) -> Result<Tensor> {
    let (total_q, heads, dim) = q.dims3()?;
    let (total_k, ..) = k.dims3()?;
    let lengths = |lengths: &Tensor| lengths.to_dtype(DType::U32)?.to_vec1::<u32>();
    let (of_q, of_k) = (lengths(seqlens_q)?, lengths(seqlens_k)?);
    let sum = |lengths: &[u32]| lengths.iter().map(|length| *length as usize).sum::<usize>();
    if of_q.len() != of_k.len() || sum(&of_q) != total_q || sum(&of_k) != total_k {
        bail!("flash_attn_varlen: lengths {of_q:?} and {of_k:?} must be of {total_q} queries and {total_k} keys");
    }
    if window.0.is_none() && window.1.is_some() {
        bail!("flash_attn_varlen: a window to the right needs one to the left");
    }
    let slopes = alibi_slopes.map(|slopes| slopes.to_dtype(DType::F32)?.to_vec1::<f32>()).transpose()?;
    if let Some(slopes) = slopes.as_ref().filter(|slopes| slopes.len() != heads) {
        bail!("flash_attn_varlen: {} slopes for {heads} heads", slopes.len());
    }
    let (mut outputs, mut at_q, mut at_k) = (vec![], 0, 0);
    for (queries, keys) in of_q.into_iter().zip(of_k) {
        let (queries, keys) = (queries as usize, keys as usize);
        let (first_q, first_k) = (at_q, at_k);
        (at_q, at_k) = (at_q + queries, at_k + keys);
        if queries == 0 {
            continue;
        }
        if keys == 0 {
            outputs.push(Tensor::zeros((queries, heads, dim), q.dtype(), q.device())?);
            continue;
        }
        let offset = keys as isize - queries as isize;
        if causal && offset < 0 {
            bail!("flash_attn_varlen: a causal sequence has {queries} queries and but {keys} keys");
        }
        let heads_first = |x: &Tensor, first, count| x.narrow(0, first, count)?.transpose(0, 1)?.unsqueeze(0);
        let bias = slopes.as_ref().map(|slopes| alibi(slopes, queries, keys, offset, q.device())).transpose()?;
        let scores = Scores { scale, softcap: None, causal_offset: causal.then_some(offset), window, bias };
        let (k, v) = (heads_first(k, first_k, keys)?, heads_first(v, first_k, keys)?);
        let out = attend(&heads_first(q, first_q, queries)?, &k, &v, &scores)?;
        outputs.push(out.squeeze(0)?.transpose(0, 1)?.to_dtype(q.dtype())?);
    }
    match outputs.is_empty() {
        true => Tensor::zeros((0, heads, dim), q.dtype(), q.device()),
        false => Tensor::cat(&outputs, 0),
    }
}
