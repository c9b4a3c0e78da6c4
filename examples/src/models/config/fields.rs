//! Keys of decoders' `config.json`.

use serde::{Deserialize, Deserializer, Serialize};

/// Fields of all families' `config.json`. `Some(None)` is `null` in the file, which differs from an absent field.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Fields {
    pub(super) model_type: String,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    #[serde(default, deserialize_with = "given")]
    pub(super) num_key_value_heads: Option<Option<usize>>,
    pub(super) head_dim: Option<usize>,
    pub(super) vocab_size: usize,
    #[serde(default, deserialize_with = "given")]
    pub(super) pad_token_id: Option<Option<i64>>,
    pub(super) max_position_embeddings: Option<usize>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) initializer_range: Option<f64>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) hidden_act: Option<String>,
    pub(super) hidden_activation: Option<String>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    pub(super) attention_dropout: Option<f64>,
    pub(super) resid_pdrop: Option<f64>,
    pub(super) embd_pdrop: Option<f64>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_local_base_freq: Option<f64>,
    pub(super) rope_parameters: Option<Box<RopeParameters>>,
    pub(super) rope_scaling: Option<Box<RopeParameters>>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    pub(super) sliding_window: Option<Option<usize>>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) max_window_layers: Option<usize>,
    /// transformers also writes it as `_sliding_window_pattern`, and does not read that name.
    pub(super) sliding_window_pattern: Option<usize>,
    pub(super) layer_types: Option<Vec<String>>,
    pub(super) use_bidirectional_attention: Option<bool>,
    pub(super) query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    pub(super) attn_logit_softcapping: Option<Option<f64>>,
    #[serde(default, deserialize_with = "given")]
    pub(super) final_logit_softcapping: Option<Option<f64>>,
    pub(super) num_local_experts: Option<usize>,
    pub(super) num_experts: Option<usize>,
    pub(super) num_experts_per_tok: Option<usize>,
    pub(super) moe_intermediate_size: Option<usize>,
    pub(super) norm_topk_prob: Option<bool>,
    pub(super) output_router_logits: Option<bool>,
    pub(super) router_aux_loss_coef: Option<f64>,
    pub(super) router_jitter_noise: Option<f64>,
    pub(super) decoder_sparse_step: Option<usize>,
    pub(super) mlp_only_layers: Option<Vec<usize>>,
    pub(super) n_routed_experts: Option<usize>,
    pub(super) n_shared_experts: Option<usize>,
    pub(super) first_k_dense_replace: Option<usize>,
    pub(super) moe_layer_freq: Option<usize>,
    pub(super) routed_scaling_factor: Option<f64>,
    pub(super) n_group: Option<usize>,
    pub(super) topk_group: Option<usize>,
    pub(super) topk_method: Option<String>,
    pub(super) scoring_func: Option<String>,
    pub(super) num_nextn_predict_layers: Option<usize>,
    pub(super) num_mtp_layers: Option<usize>,
    #[serde(default, deserialize_with = "given")]
    pub(super) q_lora_rank: Option<Option<usize>>,
    pub(super) kv_lora_rank: Option<usize>,
    pub(super) qk_nope_head_dim: Option<usize>,
    pub(super) qk_rope_head_dim: Option<usize>,
    pub(super) v_head_dim: Option<usize>,
    pub(super) rope_interleave: Option<bool>,
    pub(super) swiglu_alpha: Option<f64>,
    pub(super) swiglu_limit: Option<f64>,
}

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(super) struct RopeParameters {
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_type: Option<String>,
    /// Older name of `rope_type`.
    #[serde(rename = "type")]
    pub(super) old_rope_type: Option<String>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) factor: Option<f64>,
    pub(super) low_freq_factor: Option<f64>,
    pub(super) high_freq_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
    pub(super) attention_factor: Option<f64>,
    pub(super) beta_fast: Option<f64>,
    pub(super) beta_slow: Option<f64>,
    pub(super) mscale: Option<f64>,
    pub(super) mscale_all_dim: Option<f64>,
    pub(super) truncate: Option<bool>,
    pub(super) short_factor: Option<Vec<f64>>,
    pub(super) long_factor: Option<Vec<f64>>,
    /// Gemma 3 has one rotary embedding per kind of layer.
    pub(super) full_attention: Option<Box<RopeParameters>>,
    pub(super) sliding_attention: Option<Box<RopeParameters>>,
}

/// Reads a present field, including `null`.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}
