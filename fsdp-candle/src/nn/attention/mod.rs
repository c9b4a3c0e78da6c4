//! Attention: `candle_nn::attention` with a backward, and this crate's fused attention.

pub mod cpu_flash;
mod dispatch;
mod documents;
pub(in crate::nn) mod fused;
pub(in crate::nn) mod plain;
pub mod varlen;

pub use candle_nn::attention::AttnMask;
pub use cpu_flash::varlen::flash_attn_varlen_cpu;
pub use dispatch::flash_attn;
pub use documents::Documents;
pub use varlen::flash_attn_varlen_unfused;
