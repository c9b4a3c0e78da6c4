//! All of `candle_nn`, with layers and functions that train, and that know sharded weights.
//!
//! In a model's file this line is all it takes:
//!
//! ```
//! use fsdp_candle::nn as candle_nn;
//!
//! use candle_core::{Module, Result, Tensor};
//! use candle_nn::{Activation, Linear, RmsNorm, VarBuilder, linear_no_bias, rms_norm};
//!
//! struct Mlp(RmsNorm, Linear, Activation, Linear);
//!
//! impl Mlp {
//!     fn new(width: usize, vb: VarBuilder) -> Result<Self> {
//!         let norm = rms_norm(width, 1e-6, vb.pp("norm"))?;
//!         let up = linear_no_bias(width, 4 * width, vb.pp("up"))?;
//!         Ok(Mlp(norm, up, Activation::Silu, linear_no_bias(4 * width, width, vb.pp("down"))?))
//!     }
//! }
//!
//! impl Module for Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         x + x.apply(&self.0)?.apply(&self.1)?.apply(&self.2)?.apply(&self.3)?
//!     }
//! }
//! ```
//!
//! Every public path of `candle_nn` 0.11.1 is here with the same signature and the same values. Candle's own is shown
//! again where it has a backward that is right and holds no weight; `docs/from-candle-nn.md` says of each which it is.
//! This crate's differ in what Candle's lack:
//!
//! - Candle's `LayerNorm` with a bias, `RmsNorm`, `softmax_last_dim`, `rope`, `flash_attn` and caches of keys and
//!   values have no backward: they cut the graph silently, and everything before them trains as if frozen, or wrongly
//!   where a residual leads around them. Those here are whole.
//! - Gradients that are wrong in Candle are right here: that of `Linear` for an input that is not contiguous, of
//!   `Conv1d`'s weight, of `ConvTranspose1d` (an error in Candle), and of convolutions whose stride leaves a rest.
//! - Layers find the sharded parameter behind their weight, and leave its gradient where the parameter keeps it.
//! - Under a plan of tensor parallelism ([`crate::parallelize`]) `Linear`, `Embedding` and the cross-entropies do the
//!   collectives; [`crate::collectives`] is for modules that do something else.
//! - On the CPU f32, f16 and bf16 run fused, half floats computed in f32 and rounded once; on other devices and for f64
//!   each is a chain of Candle's differentiable operations.
//!
//! Beyond `candle_nn`:
//!
//! | | input | output | parameters |
//! |---|---|---|---|
//! | [`Conv1D`], [`gpt2_linear`] | `[.., in]` | `[.., out]` | `weight` `[in, out]`, `bias` |
//! | [`Lora`] | `[.., in]` | `[.., out]` | `lora_A.weight`, `lora_B.weight`, the base's |
//! | [`Rotary`] | `[batch, T, heads * D]` | same | |
//! | [`attention()`], [`attention_qkv`] | q, k, v `[batch, T, heads * D]` | `[batch, T, heads * D]` | |
//! | [`attention_in_documents`], [`attention_qkv_in_documents`] | the same, and [`Documents`] | the same | |
//! | [`silu`], [`gelu`] (tanh), [`gelu_erf`], [`silu_mul`] | any | same | |
//! | [`cross_entropy()`], [`cross_entropy_with()`] | logits `[.., V]`, targets `[..]` | scalar | |
//! | [`linear_cross_entropy()`], [`linear_cross_entropy_with()`] | `[.., in]`, `[V, in]`, targets `[..]` | scalar | |
//! | [`vocab_parallel_cross_entropy()`] | logits `[.., V / N]`, targets `[..]` | scalar | |

pub mod activation;
pub mod attention;
pub mod conv;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod dropout;
pub mod embedding;
mod input;
pub mod kv_cache;
mod limits;
pub mod linear;
mod lora;
pub mod loss;
pub mod moe;
mod norm;
pub mod ops;
mod parallel;
pub mod rnn;
mod rotary;
mod softmax;
mod weight;

#[cfg(test)]
mod tests;

/// Attention on the CPU under its older name.
pub mod cpu_flash_attention;

/// Attention over packed sequences under its older name.
pub mod varlen_attention {
    pub use super::attention::varlen::flash_attn_varlen_unfused;
}

pub use candle_core::{Module, ModuleT};
pub use candle_nn::{encoding, func, init, optim, sampling, sequential, var_builder, var_map};
pub use norm::{batch_norm, group_norm, layer_norm};
pub use rotary::rotary_emb;

pub use activation::{Activation, PReLU, prelu};
pub use batch_norm::{BatchNorm, BatchNormConfig, batch_norm};
pub use conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig, ConvTranspose2d,
    ConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d, conv_transpose2d_no_bias,
    conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use embedding::{Embedding, embedding};
pub use func::{Func, FuncT, func_t};
pub use group_norm::{GroupNorm, group_norm};
pub use init::Init;
pub use layer_norm::{LayerNorm, LayerNormConfig, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use ops::Dropout;
pub use optim::{AdamW, Optimizer, ParamsAdamW, SGD};
pub use rnn::{GRU, GRUConfig, LSTM, LSTMConfig, RNN, gru, lstm};
pub use sequential::{Sequential, seq};
pub use var_builder::VarBuilder;
pub use var_map::VarMap;

pub use crate::adapter::{LoraConfig, is_adapter};
pub use activation::fused::{gelu, gelu_erf, silu, silu_mul};
pub use attention::Documents;
pub use attention::fused::{
    AttentionOptions, attention, attention_in_documents, attention_qkv, attention_qkv_in_documents, causal_attention,
    causal_attention_qkv,
};
pub use linear::{Conv1D, gpt2_linear};
pub use lora::{Lora, lora};
pub use loss::cross_entropy::{cross_entropy, cross_entropy_with};
pub use loss::linear_cross_entropy::{linear_cross_entropy, linear_cross_entropy_with};
pub use loss::options::{CrossEntropyOptions, IGNORED, Reduction};
pub use loss::vocab_parallel::vocab_parallel_cross_entropy;
pub use rotary::table::{Rotary, RotaryOptions};
