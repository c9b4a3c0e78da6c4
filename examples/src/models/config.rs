//! `config.json` of a Hugging Face model directory.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

/// `config.json` of the built-in model.
pub const BUILTIN: &str = r#"{
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": 256,
  "intermediate_size": 688,
  "num_hidden_layers": 7,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "vocab_size": 256,
  "max_position_embeddings": 1024,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "hidden_act": "silu",
  "initializer_range": 0.02,
  "tie_word_embeddings": false,
  "attention_bias": false,
  "mlp_bias": false
}
"#;

/// The configuration of a model of a known architecture.
#[derive(Clone, Debug)]
pub enum ModelConfig {
    /// `"model_type": "llama"`.
    Llama(LlamaConfig),
    /// `"model_type": "gpt2"`.
    Gpt2(Gpt2Config),
}

/// What Hugging Face's `LlamaConfig` says that matters here.
#[derive(Clone, Debug, Deserialize)]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; unset: as many as query heads.
    pub num_key_value_heads: Option<usize>,
    /// Width of a head; unset: `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest sequence.
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMS norms.
    #[serde(default = "default_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies, where `rope_parameters` is unset.
    pub rope_theta: Option<f64>,
    /// Rotary embedding, as newer versions of transformers write it.
    #[serde(alias = "rope_scaling")]
    pub rope_parameters: Option<RopeParameters>,
    /// Whether the head is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Whether the attention's projections have biases.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the MLP's projections have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    /// The MLP's activation; `silu` is known.
    #[serde(default = "default_llama_act")]
    pub hidden_act: String,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
}

/// `rope_parameters` (or the older `rope_scaling`).
#[derive(Clone, Debug, Deserialize)]
pub struct RopeParameters {
    /// Base of the rotary frequencies.
    pub rope_theta: Option<f64>,
    /// The kind; `default` is known.
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
}

/// What Hugging Face's `GPT2Config` says that matters here.
#[derive(Clone, Debug, Deserialize)]
pub struct Gpt2Config {
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Heads.
    pub n_head: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Longest sequence.
    pub n_positions: usize,
    /// Width inside the MLP; unset: `4 * n_embd`.
    pub n_inner: Option<usize>,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Added to the variance in layer norms.
    #[serde(default = "default_norm_eps_gpt2")]
    pub layer_norm_epsilon: f64,
    /// The MLP's activation; `gelu_new` and `gelu` are known.
    #[serde(default = "default_gpt2_act")]
    pub activation_function: String,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
}

fn default_positions() -> usize {
    2048
}
fn default_norm_eps() -> f64 {
    1e-6
}
fn default_norm_eps_gpt2() -> f64 {
    1e-5
}
fn default_llama_act() -> String {
    "silu".into()
}
fn default_gpt2_act() -> String {
    "gelu_new".into()
}
fn default_initializer_range() -> f64 {
    0.02
}

impl LlamaConfig {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Base of the rotary frequencies.
    pub fn theta(&self) -> f64 {
        let parameters = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        parameters.or(self.rope_theta).unwrap_or(10000.)
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.num_attention_heads > 0
                && self.kv_heads() > 0
                && self.num_attention_heads.is_multiple_of(self.kv_heads()),
            "num_attention_heads = {} must be a multiple of num_key_value_heads = {}",
            self.num_attention_heads,
            self.kv_heads()
        );
        ensure!(
            self.head_dim() > 0 && self.head_dim().is_multiple_of(2),
            "head_dim = {} must be even",
            self.head_dim()
        );
        ensure!(self.hidden_act == "silu", "hidden_act = \"{}\" is not known; \"silu\" is", self.hidden_act);
        if let Some(kind) = self.rope_parameters.as_ref().and_then(|rope| rope.rope_type.as_deref()) {
            ensure!(kind == "default", "rope_type = \"{kind}\" is not known; \"default\" is");
        }
        Ok(())
    }
}

impl Gpt2Config {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.n_head > 0 && self.n_embd.is_multiple_of(self.n_head),
            "n_embd = {} must be a multiple of n_head = {}",
            self.n_embd,
            self.n_head
        );
        ensure!(
            ["gelu_new", "gelu", "gelu_pytorch_tanh"].contains(&self.activation_function.as_str()),
            "activation_function = \"{}\" is not known; \"gelu_new\", \"gelu_pytorch_tanh\" and \"gelu\" are",
            self.activation_function
        );
        Ok(())
    }
}

impl ModelConfig {
    /// Reads `config.json` in a model directory.
    ///
    /// # Errors
    /// When there is none, it is no JSON, or the architecture is not known.
    pub fn from_dir(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!(
                "can't read {}: --model takes a Hugging Face model directory, with config.json and, for --init pretrained, model.safetensors",
                path.display()
            )
        })?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Kind {
            model_type: Option<String>,
        }
        let kind: Kind = serde_json::from_str(text).context("not a JSON object")?;
        let config = match kind.model_type.as_deref() {
            Some("llama") => ModelConfig::Llama(serde_json::from_str(text).context("not a Llama configuration")?),
            Some("gpt2") => ModelConfig::Gpt2(serde_json::from_str(text).context("not a GPT-2 configuration")?),
            Some(other) => bail!("model_type \"{other}\" is not known; \"llama\" and \"gpt2\" are"),
            None => bail!("model_type is missing; \"llama\" and \"gpt2\" are known"),
        };
        match &config {
            ModelConfig::Llama(config) => config.check()?,
            ModelConfig::Gpt2(config) => config.check()?,
        }
        Ok(config)
    }

    /// The built-in byte-level Llama of about 5 million parameters.
    ///
    /// # Errors
    /// Never: its text is a constant.
    pub fn builtin() -> anyhow::Result<Self> {
        Self::parse(BUILTIN)
    }

    /// The number of token ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Llama(config) => config.vocab_size,
            ModelConfig::Gpt2(config) => config.vocab_size,
        }
    }

    /// The longest sequence.
    pub fn max_positions(&self) -> usize {
        match self {
            ModelConfig::Llama(config) => config.max_position_embeddings,
            ModelConfig::Gpt2(config) => config.n_positions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_write_the_rotary_base_are_read() {
        let base = r#""model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 4"#;
        for rope in
            [r#""rope_theta": 500000.0"#, r#""rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}"#]
        {
            let Ok(ModelConfig::Llama(config)) = ModelConfig::parse(&format!("{{{base}, {rope}}}")) else {
                panic!("{rope}")
            };
            assert_eq!(config.theta(), 500000.);
        }
    }

    #[test]
    fn what_is_not_known_is_named() {
        let llama = |more: &str| {
            format!(
                r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 4, {more}}}"#
            )
        };
        for (text, part) in [
            (r#"{"model_type": "mamba"}"#.to_string(), "\"mamba\" is not known"),
            ("{}".to_string(), "model_type is missing"),
            ("[".to_string(), "not a JSON object"),
            (r#"{"model_type": "gpt2"}"#.to_string(), "missing field `n_embd`"),
            (llama(r#""num_key_value_heads": 3"#), "multiple of num_key_value_heads = 3"),
            (llama(r#""rope_parameters": {"rope_type": "yarn"}"#), "\"yarn\" is not known"),
            (llama(r#""hidden_act": "relu""#), "\"relu\" is not known"),
        ] {
            let error = format!("{:#}", ModelConfig::parse(&text).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }
}
