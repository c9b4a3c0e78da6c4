//! The fields that `config.json` of a decoder may have, and the families of decoders.

use serde::{Deserialize, Deserializer, Serialize};

/// Decoders whose layers are alike but for options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma2,
    Gemma3,
    Phi3,
    Mixtral,
    Qwen3Moe,
}

/// The families by their `model_type`.
pub(super) const FAMILIES: [(&str, Family); 9] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("gemma2", Family::Gemma2),
    ("gemma3_text", Family::Gemma3),
    ("phi3", Family::Phi3),
    ("mixtral", Family::Mixtral),
    ("qwen3_moe", Family::Qwen3Moe),
];

/// Whatever the families' configurations say that matters here, by transformers' names. What is `None` inside `Some` is
/// `null` in the file, which is something else than a default.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[allow(missing_docs)]
pub struct Fields {
    pub model_type: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    #[serde(default, deserialize_with = "given")]
    pub num_key_value_heads: Option<Option<usize>>,
    pub head_dim: Option<usize>,
    pub vocab_size: usize,
    #[serde(default, deserialize_with = "given")]
    pub pad_token_id: Option<Option<i64>>,
    pub max_position_embeddings: Option<usize>,
    pub rms_norm_eps: Option<f64>,
    pub initializer_range: Option<f64>,
    pub tie_word_embeddings: Option<bool>,
    pub hidden_act: Option<String>,
    pub hidden_activation: Option<String>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub attention_dropout: Option<f64>,
    pub resid_pdrop: Option<f64>,
    pub embd_pdrop: Option<f64>,
    pub rope_theta: Option<f64>,
    pub rope_local_base_freq: Option<f64>,
    pub rope_parameters: Option<Box<RopeParameters>>,
    pub rope_scaling: Option<Box<RopeParameters>>,
    pub partial_rotary_factor: Option<f64>,
    pub original_max_position_embeddings: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    pub sliding_window: Option<Option<usize>>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    #[serde(alias = "_sliding_window_pattern")]
    pub sliding_window_pattern: Option<usize>,
    pub layer_types: Option<Vec<String>>,
    pub use_bidirectional_attention: Option<bool>,
    pub query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    pub attn_logit_softcapping: Option<Option<f64>>,
    #[serde(default, deserialize_with = "given")]
    pub final_logit_softcapping: Option<Option<f64>>,
    pub num_local_experts: Option<usize>,
    pub num_experts: Option<usize>,
    pub num_experts_per_tok: Option<usize>,
    pub moe_intermediate_size: Option<usize>,
    pub norm_topk_prob: Option<bool>,
    pub output_router_logits: Option<bool>,
    pub router_aux_loss_coef: Option<f64>,
    pub router_jitter_noise: Option<f64>,
    pub decoder_sparse_step: Option<usize>,
    pub mlp_only_layers: Option<Vec<usize>>,
}

/// `rope_parameters` (or the older `rope_scaling`).
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[allow(missing_docs)]
pub struct RopeParameters {
    pub rope_theta: Option<f64>,
    pub rope_type: Option<String>,
    /// `rope_type` in the oldest files.
    #[serde(rename = "type")]
    pub old_rope_type: Option<String>,
    pub partial_rotary_factor: Option<f64>,
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<f64>,
    pub attention_factor: Option<f64>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: Option<bool>,
    pub short_factor: Option<Vec<f64>>,
    pub long_factor: Option<Vec<f64>>,
    /// Gemma 3 has one rotary embedding for each kind of layer.
    pub full_attention: Option<Box<RopeParameters>>,
    pub sliding_attention: Option<Box<RopeParameters>>,
}

/// A field that is there, be it `null`.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}
