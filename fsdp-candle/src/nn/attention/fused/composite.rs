//! Attention as a chain of Candle's operations, for other devices and for f64.

use std::sync::{Mutex, PoisonError};

use candle_core::{D, DType, Device, Result, Tensor};

use super::options::AttentionOptions;
use crate::nn::attention::documents::Documents;
use crate::nn::dropout::dropped;
use crate::nn::limits::scores_fit;

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
    let has_graph = [q, k, v].iter().any(|x| x.track_op());
    scores_fit("attention", [batch, n_heads, queries, keys], copies(options, has_graph), wide, q.device())?;
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
    let mask = match documents {
        Some(_) => mask(options, queries, keys, documents, q.device())?,
        None => kept_mask(options, queries, keys, q.device())?,
    };
    let mask = mask.to_dtype(wide)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    let weights = dropped(&weights, options.dropout)?;
    weights.matmul(&spread(v)?)?.transpose(1, 2)?.reshape((batch, queries, ()))?.to_dtype(dtype)
}

/// Returns how many matrices of scores a forward has at a time. A graph keeps each of them: the product, scaled,
/// capped, masked, shifted, the powers, the weights, and with dropout the mask and what it leaves. Without a graph
/// the product and the shifted scores are gone when the weights come.
fn copies(options: &AttentionOptions, has_graph: bool) -> usize {
    match has_graph {
        true => 6 + if options.softcap.is_some() { 3 } else { 0 } + if options.dropout > 0. { 2 } else { 0 },
        false => 4,
    }
}

/// What each query may not see, `[rows, 1, T, S]` of f32: one row for all of a batch where there are no documents.
fn mask(
    options: &AttentionOptions,
    queries: usize,
    keys: usize,
    documents: Option<&Documents>,
    device: &Device,
) -> Result<Tensor> {
    let rows = documents.map_or(1, Documents::batch);
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| options.sights(queries, keys, documents, row))
        .flat_map(|sight| sight.queries().map(move |i| sight.of(i)))
        .flat_map(|seen| (0..keys).map(move |j| if seen.contains(&j) { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (rows, 1, queries, keys), device)
}

/// Masks without documents that a device keeps: as many as a model has kinds of layers.
const KEPT: usize = 4;

/// [`mask`] without documents, which a device keeps: layer after layer has the same, and a copy there takes time.
fn kept_mask(options: &AttentionOptions, queries: usize, keys: usize, device: &Device) -> Result<Tensor> {
    if device.is_cpu() {
        return mask(options, queries, keys, None, device);
    }
    static MASKS: Mutex<Vec<(AttentionOptions, Tensor)>> = Mutex::new(vec![]);
    let mut masks = MASKS.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |(of, mask): &&(AttentionOptions, Tensor)| {
        (of.causal, of.window) == (options.causal, options.window)
            && mask.dims()[2..] == [queries, keys]
            && mask.device().same_device(device)
    };
    if let Some((_, mask)) = masks.iter().find(fits) {
        return Ok(mask.clone());
    }
    let mask = mask(options, queries, keys, None, device)?;
    if masks.len() == KEPT {
        masks.remove(0);
    }
    masks.push((*options, mask.clone()));
    Ok(mask)
}
