//! Attention on the CPU under its older name: `candle_nn::cpu_flash_attention`.

use candle_core::{Result, Tensor, WithDType};

use super::attention::{AttnMask, flash_attn};

/// Calls [`flash_attn`] with an optional mask tensor.
#[deprecated(since = "0.1.0", note = "use `nn::attention::{flash_attn, AttnMask}` instead, as in candle_nn")]
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
    T: WithDType + num_traits::Float + 'static,
{
    let mask = mask.map_or(AttnMask::None, |mask| AttnMask::Mask(mask.clone()));
    flash_attn::<T>(q, k, v, softmax_scale, mask, max_bias, softcap)
}
