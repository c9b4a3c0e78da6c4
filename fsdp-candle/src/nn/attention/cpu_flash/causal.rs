//! Causal attention of one sequence.

use candle_core::{DType, Result, Tensor, WithDType, bail};
use candle_nn::attention::AttnMask;

pub use candle_nn::attention::cpu_flash::causal::causal_decode_f32_interleaved;

use super::super::dispatch::masked;

/// Causal attention of `q` `[1, T, heads, D]` over `k` and `v` `[1, S, kv_heads, D]`, of which query `i` sees
/// `0..=i + kv_offset`: output `[1, heads, T, D]`, f32 (f64 for f64). Candle's has no backward.
///
/// # Errors
/// When shapes or dtypes disagree, or there is more than one sequence.
pub fn run_causal_attn_cpu<T>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    kv_offset: usize,
    max_bias: Option<f32>,
    softcap: Option<f32>,
) -> Result<Tensor>
where
    T: WithDType + num_traits::Float,
{
    if q.dim(0)? != 1 || q.dtype() != T::DTYPE {
        bail!("run_causal_attn_cpu: q is {:?} of {:?}, not one sequence of {:?}", q.dims(), q.dtype(), T::DTYPE);
    }
    let wide = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    masked(q, k, v, softmax_scale, &AttnMask::Causal { kv_offset }, max_bias, softcap)?.to_dtype(wide)
}
