//! Every item of `candle_nn`, with layers and functions that have a backward and support sharded weights.
//!
//! In a model's file, change only this line:
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
//! Every public path of `candle_nn` 0.11.1 exists here with the same signature and the same values. Candle's own item
//! is re-exported if it has a right backward and holds no weight. `docs/from-candle-nn.md` lists each path as
//! re-exported or reimplemented. The reimplemented items differ from Candle's:
//!
//! - Candle's `LayerNorm` with a bias, `RmsNorm`, `softmax_last_dim`, `rope`, `flash_attn` and caches of keys and
//!   values have no backward. They cut the graph silently: the layers before them do not train, or train wrongly if a
//!   residual connection bypasses the cut. The items here have a backward.
//! - Gradients that are wrong in Candle are right here: that of `Linear` for an input that is not contiguous, of
//!   `Conv1d`'s weight, of `ConvTranspose1d` (an error in Candle), and of convolutions whose stride does not divide the
//!   input. That of `Tensor::max_pool2d` is divided by the elements under the kernel: call [`max_pool2d`] instead.
//! - Layers recognize the sharded parameter of their weight, and accumulate its gradient in the parameter's buffer.
//! - Under a plan of tensor parallelism ([`crate::parallelize`]), `Linear`, `Embedding` and the cross-entropies run the
//!   collectives. Modules with other collectives use [`crate::collectives`].
//! - On the CPU, f32, f16 and bf16 run fused; half floats are computed in f32 and rounded once. On CUDA devices,
//!   norms, rotary embedding, activations, dropout and cross-entropies do so for f64 as well. Everything else is a chain
//!   of Candle's differentiable operations.
//!
//! Beyond `candle_nn`:
//!
//! | | input | output | parameters |
//! |---|---|---|---|
//! | [`Gpt2Linear`], [`gpt2_linear`] | `[.., in]` | `[.., out]` | `weight` `[in, out]`, `bias` |
//! | [`Lora`] | `[.., in]` | `[.., out]` | `lora_A.weight`, `lora_B.weight`, the base's |
//! | [`Rotary`] | `[batch, T, heads * D]` | same | |
//! | [`attention()`], [`attention_qkv`] | q, k, v `[batch, T, heads * D]` | `[batch, T, heads * D]` | |
//! | [`attention_in_documents`], [`attention_qkv_in_documents`] | the same, and [`Documents`] | the same | |
//! | [`attention_with_sinks`] | the same, and a score `[heads]` | the same | |
//! | [`max_pool2d_with_stride`], [`avg_pool2d_with_stride`] | `[batch, C, H, W]` | `[batch, C, h, w]` | |
//! | [`add`] | any, twice | same | |
//! | [`SwiGlu`] | `[.., in]` | `[.., out]` | its projections' |
//! | [`choose_experts`] | probabilities `[tokens, E]` | numbers `[tokens, K]` | |
//! | [`mixture_of_experts`] | `[tokens, in]`, experts and weights `[tokens, K]` | `[tokens, out]` | its experts' |
//! | [`silu`], [`gelu`] (tanh), [`gelu_erf`], [`silu_mul`] | any | same | |
//! | [`cross_entropy()`], [`cross_entropy_with()`] | logits `[.., V]`, targets `[..]` | scalar | |
//! | [`linear_cross_entropy()`], [`linear_cross_entropy_with()`] | `[.., in]`, `[V, in]`, targets `[..]` | scalar | |
//! | [`vocab_parallel_cross_entropy()`] | logits `[.., V / N]`, targets `[..]` | scalar | |

// [Note: the layout of this folder]
//
// One file mirrors one file of candle_nn; `experts`, `pool`, `residual`, `rotary` and `swiglu` hold what it has not, and
// `softmax` and `dropout` the functions of `ops` that attention calls. Below the layers are `weight` (a layer's weight as
// an operation sees it), `input` (an input that parallel layers share), `tensor_parallel` (a layer under a plan),
// `limits` (size limits of devices), `target_rows` (the targets of a cross-entropy), `last_upload` (copies to a device
// that layers share), and the operations' own kernels in `cpu` and `cuda`.
//
// `cuda` holds the versions of operations for CUDA devices, and `attention/cuda` attention's. In a build without the
// feature `cuda`, `no_cuda` replaces them, so that the layers above do not ask for the feature.
//
// An operation has up to three versions. The fused version runs on the CPU for f32, f16 and bf16
// (`weight::has_cpu_kernels`). The CUDA version runs on devices for every float dtype (`cuda::Cuda`): kernels, or
// Candle's forward for layers with large weights, whose backward writes the weight's gradient into the parameter's
// buffer. `composite` is a chain of Candle's operations for everything else. Tests compare the first two against
// `composite`, and `composite` against candle_nn and finite differences.

pub mod activation;
pub mod attention;
pub mod batch_norm;
pub mod conv;
mod cpu;
pub mod cpu_flash_attention;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
mod dropout;
pub mod embedding;
mod empty;
mod expert_parallel;
mod experts;
pub mod group_norm;
mod input;
pub mod kv_cache;
mod last_upload;
pub mod layer_norm;
mod limits;
pub mod linear;
mod local_experts;
pub mod loss;
pub mod moe;
pub mod ops;
mod pool;
mod residual;
pub mod rnn;
mod rotary;
pub mod rotary_emb;
mod softmax;
mod swiglu;
mod target_rows;
mod tensor_parallel;
mod weight;

#[cfg(test)]
mod tests;

/// Attention over packed sequences under its older name: `candle_nn::varlen_attention`.
pub mod varlen_attention {
    pub use super::attention::varlen::flash_attn_varlen_unfused;
}

pub use candle_core::{Module, ModuleT};
pub use candle_nn::{encoding, func, init, optim, sampling, sequential, var_builder, var_map};

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

pub use crate::adapter::{LoraConfig, is_adapter, without_adapters};
pub use activation::{gelu, gelu_erf, silu, silu_mul};
pub use attention::Documents;
pub use attention::functions::{
    attention, attention_in_documents, attention_library, attention_qkv, attention_qkv_in_documents,
    attention_with_sinks, causal_attention, causal_attention_qkv,
};
pub use attention::options::AttentionOptions;
pub use experts::{choose_experts, mixture_of_experts};
pub use linear::{Gpt2Linear, Lora, gpt2_linear, lora};
pub use loss::cross_entropy::{
    CrossEntropyOptions, IGNORED, Reduction, cross_entropy, cross_entropy_with, vocab_parallel_cross_entropy,
};
pub use loss::linear_cross_entropy::{linear_cross_entropy, linear_cross_entropy_with};
pub use pool::{avg_pool2d, avg_pool2d_with_stride, max_pool2d, max_pool2d_with_stride};
pub use residual::add;
pub use rotary::{Rotary, RotaryOptions};
pub use swiglu::{SwiGlu, SwiGluClamp};
