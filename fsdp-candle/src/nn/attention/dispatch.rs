//! Attention with a mask, as `candle_nn::attention::flash_attn`.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use candle_nn::attention::AttnMask;

use super::fused::causal_attention;
use super::plain::{Scores, alibi, attend, slopes};
use crate::nn::cpu::values::served;

/// Attention of `q` `[batch, T, heads, D]` over `k` and `v` `[batch, S, kv_heads, D]`: output `[batch, heads, T, D]`.
///
/// As [`candle_nn::attention::flash_attn`], which has no backward: the output is f32 for one sequence, and of `q`'s
/// dtype for more. Causal masks without bias and soft cap run fused where every query sees the keys up to its own; the
/// rest is a composition. For f64, which Candle's computes in f32, the output is f64. More sequences than one take
/// every mask and dtype here.
///
/// # Errors
/// When shapes or dtypes disagree.
pub fn flash_attn<T>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    attn_mask: AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor>
where
    T: WithDType + num_traits::Float,
{
    if q.dtype() != T::DTYPE {
        bail!("flash_attn: q is {:?}, and attention in {:?} was asked for", q.dtype(), T::DTYPE);
    }
    let batch = q.dim(0)?;
    let dtype = match q.dtype() {
        DType::F64 => DType::F64,
        _ if batch == 1 => DType::F32,
        dtype => dtype,
    };
    masked(q, k, v, softmax_scale, &attn_mask, max_bias, softcap)?.to_dtype(dtype)
}

/// The attention, in any float dtype.
pub(super) fn masked(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    mask: &AttnMask,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let (batch, queries, heads, dim) = q.dims4()?;
    let (_, keys, kv_heads, _) = k.dims4()?;
    let max_bias = max_bias.filter(|bias| *bias > 0.0);
    let softcap = softcap.filter(|cap| *cap != 0.0);
    if let AttnMask::Causal { kv_offset } = mask
        && max_bias.is_none()
        && softcap.is_none()
        && served(q)
        && kv_offset + queries == keys
        && k.dims() == v.dims()
    {
        let out = causal_attention(q, k, v, heads, kv_heads, f64::from(scale))?;
        return out.reshape((batch, queries, heads, dim))?.transpose(1, 2);
    }
    let of_heads = |bias: f32| Tensor::from_vec(slopes(heads, bias), (1, heads, 1, 1), q.device());
    let (causal_offset, bias) = match mask {
        AttnMask::None => {
            let offset = keys as isize - queries as isize;
            // Candle's biases scores without a mask for several sequences alone.
            let bias = max_bias.filter(|_| batch > 1);
            (None, bias.map(|bias| alibi(&slopes(heads, bias), queries, keys, offset, q.device())).transpose()?)
        }
        AttnMask::Causal { kv_offset } => {
            // A single query is the last.
            let offset = if queries == 1 { keys as isize - 1 } else { *kv_offset as isize };
            let bias = max_bias.map(|bias| alibi(&slopes(heads, bias), queries, keys, offset, q.device()));
            (Some(offset), bias.transpose()?)
        }
        AttnMask::Mask(mask) => {
            let mask = mask.broadcast_as(shape_of_mask(mask, queries, keys)?)?;
            let mask = match max_bias {
                Some(bias) => mask.to_dtype(DType::F32)?.broadcast_mul(&of_heads(bias)?)?,
                None => mask,
            };
            (None, Some(mask))
        }
    };
    let apart = |x: &Tensor| x.transpose(1, 2);
    let scores = Scores { scale, softcap, causal_offset, window: (None, None), bias };
    attend(&apart(q)?, &apart(k)?, &apart(v)?, &scores)
}

/// A mask with a place for batch and heads.
fn shape_of_mask(mask: &Tensor, queries: usize, keys: usize) -> Result<Vec<usize>> {
    let dims = mask.dims();
    if dims.len() < 2 || dims.len() > 4 || dims[dims.len() - 2..] != [queries, keys] {
        bail!("flash_attn: the mask {dims:?} must end in [{queries}, {keys}], queries and keys");
    }
    Ok([&vec![1; 4 - dims.len()], dims].concat())
}
