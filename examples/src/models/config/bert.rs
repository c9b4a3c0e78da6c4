//! Configuration of BERT.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::models::config::{
    Activation, at_least_one, below_one, default_dropout, default_stdev, not_negative, padding_row, yes,
};

/// The fields of Hugging Face's `BertConfig` that are used.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct BertConfig {
    /// `bert`.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Width inside an MLP.
    pub intermediate_size: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Id of the padding token.
    #[serde(default = "default_padding")]
    pub pad_token_id: Option<i64>,
    /// Longest sequence.
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    /// Number of segment types. All tokens have the first.
    #[serde(default = "default_types")]
    pub type_vocab_size: usize,
    /// Epsilon of layer norms.
    #[serde(default = "default_norm_eps_bert")]
    pub layer_norm_eps: f64,
    /// Activation of MLPs and of the head.
    #[serde(default = "default_bert_act")]
    pub hidden_act: String,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_stdev")]
    pub initializer_range: f64,
    /// Type of position embeddings. Only `absolute` is supported.
    #[serde(default = "default_position_kind")]
    pub position_embedding_type: String,
    /// Whether attention is causal. Only `false` is supported.
    #[serde(default)]
    pub is_decoder: bool,
    /// Whether there is cross-attention. Only `false` is supported.
    #[serde(default)]
    pub add_cross_attention: bool,
    /// Whether the head shares the embedding's weights. Only `true` is supported.
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
    /// Dropout of embeddings, and of the outputs of attention and MLP.
    #[serde(default = "default_dropout")]
    pub hidden_dropout_prob: f64,
    /// Dropout of attention weights.
    #[serde(default = "default_dropout")]
    pub attention_probs_dropout_prob: f64,
    /// Dropout before the classifier. Only that of the outputs is supported.
    #[serde(default)]
    pub classifier_dropout: Option<f64>,
    /// Parsed `hidden_act`.
    #[serde(skip, default = "default_activation")]
    pub activation: Activation,
    /// Row of the token embedding that lookups do not train.
    #[serde(skip)]
    pub padding: Option<usize>,
}

fn default_padding() -> Option<i64> {
    Some(0)
}

fn default_positions() -> usize {
    512
}
fn default_types() -> usize {
    2
}
fn default_norm_eps_bert() -> f64 {
    1e-12
}
fn default_bert_act() -> String {
    "gelu".into()
}
fn default_position_kind() -> String {
    "absolute".into()
}
fn default_activation() -> Activation {
    Activation::GeluErf
}

impl BertConfig {
    /// Checks that the model can be built, and fills in the parsed fields.
    pub(super) fn checked(mut self) -> anyhow::Result<Self> {
        at_least_one(&[
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_hidden_layers", self.num_hidden_layers),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
        ])?;
        not_negative(&[("layer_norm_eps", self.layer_norm_eps), ("initializer_range", self.initializer_range)])?;
        below_one(&[
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ])?;
        ensure!(
            self.hidden_size.is_multiple_of(self.num_attention_heads),
            "hidden_size = {} must be a multiple of num_attention_heads = {}",
            self.hidden_size,
            self.num_attention_heads
        );
        ensure!(
            self.position_embedding_type == "absolute",
            "position_embedding_type = \"{}\" is not supported; expected \"absolute\"",
            self.position_embedding_type
        );
        for (name, value, known) in [
            ("is_decoder", self.is_decoder, false),
            ("add_cross_attention", self.add_cross_attention, false),
            ("tie_word_embeddings", self.tie_word_embeddings, true),
        ] {
            ensure!(value == known, "{name} = {value} is not supported for BERT; expected {known}");
        }
        if let Some(own) = self.classifier_dropout {
            ensure!(
                own == self.hidden_dropout_prob,
                "classifier_dropout = {own} is not supported; expected null, or hidden_dropout_prob = {}",
                self.hidden_dropout_prob
            );
        }
        self.activation = Activation::parse("hidden_act", &self.hidden_act)?;
        self.padding = padding_row(self.pad_token_id, self.vocab_size)?;
        Ok(self)
    }
}
