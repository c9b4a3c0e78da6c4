//! `candle_nn::attention::cpu_flash`: its functions by their own names.

pub mod causal;
pub mod standard;
pub mod varlen;

pub use super::dispatch::flash_attn;
