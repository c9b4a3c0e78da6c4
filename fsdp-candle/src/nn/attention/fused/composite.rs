//! Attention as a chain of Candle's operations, for other devices and for f64.

use candle_core::{D, DType, Result, Tensor};

use super::options::AttentionOptions;
use crate::nn::attention::documents::Documents;

/// [`super::attention()`] on operands that fit together.
pub(in crate::nn) fn composite(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    documents: Option<&Documents>,
) -> Result<Tensor> {
    let (batch, queries, keys) = (q.dim(0)?, q.dim(1)?, k.dim(1)?);
    let dtype = q.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let heads = |x: &Tensor, steps: usize, n: usize| -> Result<Tensor> {
        x.to_dtype(wide)?.reshape((batch, steps, n, ()))?.transpose(1, 2)?.contiguous()
    };
    let spread = |x: &Tensor| -> Result<Tensor> {
        let x = heads(x, keys, n_kv_heads)?;
        let dim = x.dim(3)?;
        let x = x.unsqueeze(2)?.broadcast_as((batch, n_kv_heads, n_heads / n_kv_heads, keys, dim))?;
        x.contiguous()?.reshape((batch, n_heads, keys, dim))
    };
    let scores = (heads(q, queries, n_heads)?.matmul(&spread(k)?.t()?.contiguous()?)? * options.scale)?;
    let scores = match options.softcap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let rows = documents.map_or(1, Documents::batch);
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| options.sights(queries, keys, documents, row))
        .flat_map(|sight| sight.queries().map(move |i| sight.of(i)))
        .flat_map(|seen| (0..keys).map(move |j| if seen.contains(&j) { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    let mask = Tensor::from_vec(mask, (rows, 1, queries, keys), q.device())?.to_dtype(wide)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&spread(v)?)?.transpose(1, 2)?.reshape((batch, queries, ()))?.to_dtype(dtype)
}
