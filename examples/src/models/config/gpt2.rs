//! Configuration of GPT-2.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::models::config::{at_least_one, below_one, default_dropout, default_stdev, not_negative, yes};

/// Names of other families for GPT-2's fields. If both are there, transformers uses the value of the general name.
pub(super) const GENERAL_NAMES: [(&str, &str); 4] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

/// The fields of Hugging Face's `GPT2Config` that are used.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Gpt2Config {
    /// `gpt2`.
    pub model_type: String,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Attention heads.
    pub n_head: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Longest sequence.
    pub n_positions: usize,
    /// Width inside the MLP. Default: `4 * n_embd`.
    pub n_inner: Option<usize>,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Epsilon of layer norms.
    #[serde(default = "default_norm_eps_gpt2")]
    pub layer_norm_epsilon: f64,
    /// Activation of the MLP: `gelu_new` or `gelu`.
    #[serde(default = "default_gpt2_act")]
    pub activation_function: String,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_stdev")]
    pub initializer_range: f64,
    /// Whether attention scores are divided by the square root of the head width. Only `true` is supported.
    #[serde(default = "yes")]
    pub scale_attn_weights: bool,
    /// Whether scores are also divided by the layer number. Only `false` is supported.
    #[serde(default)]
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether attention is reordered and upcast. Only `false` is supported.
    #[serde(default)]
    pub reorder_and_upcast_attn: bool,
    /// Whether the head shares the embedding's weights. Only `true` is supported.
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
    /// Dropout of the outputs of attention and MLP.
    #[serde(default = "default_dropout")]
    pub resid_pdrop: f64,
    /// Dropout of embeddings.
    #[serde(default = "default_dropout")]
    pub embd_pdrop: f64,
    /// Dropout of attention weights.
    #[serde(default = "default_dropout")]
    pub attn_pdrop: f64,
}

fn default_norm_eps_gpt2() -> f64 {
    1e-5
}
fn default_gpt2_act() -> String {
    "gelu_new".into()
}

impl Gpt2Config {
    /// Returns the width inside the MLP.
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_layer", self.n_layer),
            ("n_positions", self.n_positions),
            ("n_inner", self.inner()),
            ("vocab_size", self.vocab_size),
        ])?;
        not_negative(&[
            ("layer_norm_epsilon", self.layer_norm_epsilon),
            ("initializer_range", self.initializer_range),
        ])?;
        below_one(&[
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
            ("attn_pdrop", self.attn_pdrop),
        ])?;
        ensure!(
            self.n_embd.is_multiple_of(self.n_head),
            "n_embd = {} must be a multiple of n_head = {}",
            self.n_embd,
            self.n_head
        );
        ensure!(
            ["gelu_new", "gelu", "gelu_pytorch_tanh"].contains(&self.activation_function.as_str()),
            "activation_function = \"{}\" is not supported; expected \"gelu_new\", \"gelu_pytorch_tanh\" or \"gelu\"",
            self.activation_function
        );
        for (name, value, known) in [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("reorder_and_upcast_attn", self.reorder_and_upcast_attn, false),
            ("tie_word_embeddings", self.tie_word_embeddings, true),
        ] {
            ensure!(value == known, "{name} = {value} is not supported for GPT-2; expected {known}");
        }
        Ok(())
    }
}
