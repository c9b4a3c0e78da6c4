//! Attention as a chain of Candle's operations, for f64 on the CPU and for devices without kernels. It keeps every matrix
//! of scores.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use parking_lot::Mutex;

use super::documents::Documents;
use super::options::AttentionOptions;
use crate::context_parallel::Positions;
use crate::nn::dropout::drop_probabilities;
use crate::nn::empty::if_empty;
use crate::nn::limits::check_size;
use crate::nn::softmax::softmax_composite;

/// [`attention()`] on checked operands as a chain of Candle's operations. `positions` are those of the queries, if they
/// are not the last ones.
#[allow(clippy::too_many_arguments)]
pub(in crate::nn) fn composite(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_heads: usize,
    n_kv_heads: usize,
    options: &AttentionOptions,
    positions: Option<Positions>,
    documents: Option<&Documents>,
    sinks: Option<&Tensor>,
) -> Result<Tensor> {
    if let Some(empty) = if_empty("attention", q, &[q, k, v], q.shape())? {
        return Ok(empty);
    }
    let (batch, queries, keys) = (q.dim(0)?, q.dim(1)?, k.dim(1)?);
    let dtype = q.dtype();
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    check_size("attention", "the scores [batch, heads, queries, keys]", &[batch, n_heads, queries, keys], q.device())?;
    let heads = |x: &Tensor, steps: usize, n: usize| -> Result<Tensor> {
        x.to_dtype(wide)?.reshape((batch, steps, n, ()))?.transpose(1, 2)?.contiguous()
    };
    let spread = |x: &Tensor| repeat_kv_heads(&heads(x, keys, n_kv_heads)?, n_heads, wide);
    let scores = (heads(q, queries, n_heads)?.matmul(&spread(k)?.t()?.contiguous()?)? * options.scale)?;
    let scores = match options.softcap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let at = positions.unwrap_or(Positions::from(keys.saturating_sub(queries)));
    let mask = match documents {
        Some(_) => mask(options, queries, keys, at, documents, q.device())?,
        None => cached_mask(options, queries, keys, at, q.device())?,
    };
    let mask = mask.to_dtype(wide)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = match sinks {
        None => softmax_composite(&scores, D::Minus1)?,
        Some(sinks) => {
            let sinks = sinks.to_dtype(wide)?.reshape((1, n_heads, 1, 1))?;
            let sinks = sinks.broadcast_as((batch, n_heads, queries, 1))?;
            softmax_composite(&Tensor::cat(&[&scores, &sinks], D::Minus1)?, D::Minus1)?
                .narrow(3, 0, keys)?
                .contiguous()?
        }
    };
    let weights = drop_probabilities(&weights, options.dropout, positions)?;
    weights.matmul(&spread(v)?)?.transpose(1, 2)?.reshape((batch, queries, ()))?.to_dtype(dtype)
}

/// Returns the mask of hidden keys, `[rows, 1, T, S]`, f32. Without documents, all rows of a batch share one.
fn mask(
    options: &AttentionOptions,
    queries: usize,
    keys: usize,
    positions: Positions,
    documents: Option<&Documents>,
    device: &Device,
) -> Result<Tensor> {
    let rows = documents.map_or(1, Documents::batch);
    let mask: Vec<f32> = (0..rows)
        .flat_map(|row| options.visible_keys(queries, keys, positions, documents, row))
        .flat_map(|visible| visible.queries().map(move |i| visible.of(i)))
        .flat_map(|visible| (0..keys).map(move |j| if visible.contains(&j) { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (rows, 1, queries, keys), device)
}

/// Number of cached masks: as many as a model has kinds of layers.
const CACHED_MASKS: usize = 4;

/// [`mask`] without documents, cached for a device. Successive layers use the same mask, and a copy to the device takes
/// time.
fn cached_mask(
    options: &AttentionOptions,
    queries: usize,
    keys: usize,
    positions: Positions,
    device: &Device,
) -> Result<Tensor> {
    if device.is_cpu() {
        return mask(options, queries, keys, positions, None, device);
    }
    static MASKS: Mutex<Vec<(AttentionOptions, Positions, Tensor)>> = Mutex::new(vec![]);
    let mut masks = MASKS.lock();
    let fits = |(of, at, mask): &&(AttentionOptions, Positions, Tensor)| {
        (of.causal, of.window, *at) == (options.causal, options.window, positions)
            && mask.dims()[2..] == [queries, keys]
            && mask.device().same_device(device)
    };
    if let Some((.., mask)) = masks.iter().find(fits) {
        return Ok(mask.clone());
    }
    let mask = mask(options, queries, keys, positions, None, device)?;
    if masks.len() == CACHED_MASKS {
        masks.remove(0);
    }
    masks.push((*options, positions, mask.clone()));
    Ok(mask)
}

/// Repeats each key or value head for all of its query heads, in the dtype.
pub(super) fn repeat_kv_heads(x: &Tensor, heads: usize, dtype: DType) -> Result<Tensor> {
    let (batch, own, keys, dim) = x.dims4()?;
    if own == 0 || !heads.is_multiple_of(own) {
        bail!("attention: {heads} query heads can't share {own} key or value heads evenly");
    }
    let x = x.to_dtype(dtype)?;
    if own == heads {
        return x.contiguous();
    }
    let x = x.unsqueeze(2)?.broadcast_as((batch, own, heads / own, keys, dim))?;
    x.contiguous()?.reshape((batch, heads, keys, dim))
}
