//! Layers and functions that are differentiable and fast.
//!
//! Candle's own `LayerNorm` (with a bias), `RmsNorm`, `softmax_last_dim` and `rotary_emb` have no backward: they cut
//! the graph silently, and everything before them trains as if frozen, or wrongly where a residual leads around them.
//! The ones here carry a hand-written backward, make few temporaries, and accumulate a weight's gradient where the
//! parameter keeps it. On the CPU they serve f32, f16 and bf16 (half floats are computed in f32 and rounded once); on
//! other devices and for f64 each is a chain of Candle's differentiable operations.
//!
//! Of one name and signature with `candle_nn`'s, so that another `use` is all it takes: [`Linear`], [`linear()`],
//! [`linear_no_bias`], [`linear_b`], [`LayerNorm`], [`layer_norm`], [`layer_norm_no_bias`], [`RmsNorm`], [`rms_norm`],
//! [`embedding()`], [`silu`] (Candle's in `ops`) and [`cross_entropy()`] (in `loss`), which takes batches of more
//! dimensions too. These differ:
//!
//! | here | in Candle |
//! |---|---|
//! | [`Embedding::new`] takes the table alone, and fails if it is no matrix | takes its width as well |
//! | [`conv1d`], [`Conv1D`]: GPT-2's fully connected layer | `candle_nn::conv1d` is a convolution |
//! | [`gelu`] (tanh), [`gelu_erf`] | `Tensor::gelu`, `Tensor::gelu_erf` |
//! | [`swiglu`] of two tensors | of one that holds both halves |
//! | [`Rotary`], [`attention()`], [`causal_attention`] | `rotary_emb` on heads apart; masks and softmax by hand |
//!
//! All other layers of `candle_nn` train as they are: convolutions (but `ConvTranspose1d`, whose backward is an error),
//! `GroupNorm`, `BatchNorm` (its running statistics are [`buffers`](crate::ShardedVarMap::buffers)), `PReLU`, `LSTM`,
//! `GRU`, and `LayerNorm` without a bias; so do `RmsNorm::forward_diff`, `ops::softmax` and `rotary_emb::rope_slow`.
//! `tests/it/layers.rs` holds each of them against plain Candle.
//!
//! The layers:
//!
//! | | input | output | parameters |
//! |---|---|---|---|
//! | [`Linear`], [`Conv1D`] | `[.., in]` | `[.., out]` | `weight`, `bias` |
//! | [`Lora`] | `[.., in]` | `[.., out]` | `lora_A.weight`, `lora_B.weight`, the base's |
//! | [`Embedding`] | ids `[..]` | `[.., hidden]` | `weight` |
//! | [`LayerNorm`], [`RmsNorm`] | `[.., hidden]` | same | `weight`, `bias` |
//! | [`Rotary`] | `[batch, T, heads * D]` | same | |
//! | [`attention()`], [`attention_qkv`] | q, k, v `[batch, T, heads * D]` | `[batch, T, heads * D]` | |
//! | [`silu`], [`gelu`], [`gelu_erf`], [`swiglu`] | any | same | |
//! | [`cross_entropy()`], [`linear_cross_entropy()`] | logits `[.., V]`, targets `[..]` | scalar | |

mod activation;
mod attention;
mod cross_entropy;
mod embedding;
mod linear;
mod linear_cross_entropy;
mod lora;
mod matrix;
mod norm;
mod parallel;
mod rotary;
mod simd;
mod values;
mod weight;
mod weighted_op;

#[cfg(test)]
mod tests;

pub use activation::{gelu, gelu_erf, silu, swiglu};
pub use attention::{AttentionOptions, attention, attention_qkv, causal_attention, causal_attention_qkv};
pub use cross_entropy::cross_entropy;
pub use embedding::{Embedding, embedding};
pub use linear::{Conv1D, Linear, conv1d, linear, linear_b, linear_no_bias};
pub use linear_cross_entropy::linear_cross_entropy;
pub use lora::{Lora, LoraConfig, is_adapter, lora};
pub use norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use rotary::{Rotary, RotaryOptions};
