//! Attention of one sequence with a mask that is a tensor.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use candle_nn::attention::AttnMask;

use super::super::dispatch::masked;

/// Attention of `q` `[1, T, heads, D]` over `k` and `v` `[1, S, kv_heads, D]`, with a mask that ends in `[T, S]`:
/// output `[1, heads, T, D]`, f32 (f64 for f64). Candle's has no backward.
///
/// # Errors
/// When shapes or dtypes disagree, or there is more than one sequence.
pub fn run_flash_attn_cpu<T>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    softmax_scale: f32,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor>
where
    T: WithDType,
{
    if q.dim(0)? != 1 || q.dtype() != T::DTYPE {
        bail!("run_flash_attn_cpu: q is {:?} of {:?}, not one sequence of {:?}", q.dims(), q.dtype(), T::DTYPE);
    }
    let wide = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mask = mask.map_or(AttnMask::None, |mask| AttnMask::Mask(mask.clone()));
    masked(q, k, v, softmax_scale, &mask, max_bias, softcap)?.to_dtype(wide)
}
