//! `config.json` of a Hugging Face model directory.

use std::f64::consts::TAU;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use candle_core::Device;
use fsdp_candle::nn::Rotary;
use serde::{Deserialize, Serialize};

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

/// The configuration of a model of a known architecture. It is serialised as the fields of `config.json` that matter,
/// with `model_type`.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "model_type", rename_all = "lowercase")]
pub enum ModelConfig {
    /// `"model_type": "llama"`.
    Llama(LlamaConfig),
    /// `"model_type": "gpt2"`.
    Gpt2(Gpt2Config),
}

/// What Hugging Face's `LlamaConfig` says that matters here.
#[derive(Clone, Debug, Deserialize, Serialize)]
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
    pub rope_parameters: Option<Box<RopeParameters>>,
    /// Rotary embedding, as older versions write it; `rope_parameters` comes first where both are set.
    pub rope_scaling: Option<Box<RopeParameters>>,
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
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RopeParameters {
    /// Base of the rotary frequencies.
    pub rope_theta: Option<f64>,
    /// The kind; `default` and `llama3` are known.
    pub rope_type: Option<String>,
    /// `rope_type` in the oldest files.
    #[serde(rename = "type")]
    pub old_rope_type: Option<String>,
    /// `llama3`: the context has grown by this factor.
    pub factor: Option<f64>,
    /// `llama3`: frequencies that turn less often than this over the original context are divided by `factor`.
    pub low_freq_factor: Option<f64>,
    /// `llama3`: frequencies that turn more often than this over the original context stay.
    pub high_freq_factor: Option<f64>,
    /// `llama3`: the longest sequence before the context grew.
    pub original_max_position_embeddings: Option<f64>,
}

impl RopeParameters {
    fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.old_rope_type.as_deref()).unwrap_or("default")
    }

    fn llama3(&self) -> anyhow::Result<Llama3Scaling> {
        let positive = |name: &str, value: Option<f64>| {
            let value = value.with_context(|| format!("rope_type \"llama3\" needs {name}"))?;
            ensure!(value.is_finite() && value > 0., "{name} = {value} must be above 0");
            Ok(value)
        };
        let scaling = Llama3Scaling {
            factor: positive("factor", self.factor)?,
            low: positive("low_freq_factor", self.low_freq_factor)?,
            high: positive("high_freq_factor", self.high_freq_factor)?,
            context: positive("original_max_position_embeddings", self.original_max_position_embeddings)?,
        };
        ensure!(
            scaling.low < scaling.high,
            "low_freq_factor = {} must be below high_freq_factor = {}",
            scaling.low,
            scaling.high
        );
        Ok(scaling)
    }
}

/// How Llama 3.1 and later stretch rotary frequencies over a longer context, as transformers'
/// `_compute_llama3_parameters`.
struct Llama3Scaling {
    factor: f64,
    low: f64,
    high: f64,
    context: f64,
}

impl Llama3Scaling {
    fn apply(&self, frequency: f64) -> f64 {
        // How often it turns over the original context.
        let turns = self.context * frequency / TAU;
        // 0 for the slow ones, which are divided by the factor, 1 for the fast ones, which stay.
        let smooth = ((turns - self.low) / (self.high - self.low)).clamp(0., 1.);
        (1. - smooth) * frequency / self.factor + smooth * frequency
    }
}

/// What Hugging Face's `GPT2Config` says that matters here.
#[derive(Clone, Debug, Deserialize, Serialize)]
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
    /// Whether attention scores are divided by the square root of a head's width; `true` is known.
    #[serde(default = "yes")]
    pub scale_attn_weights: bool,
    /// Whether they are divided by the layer's number too; `false` is known.
    #[serde(default)]
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether attention is computed in another order and in 32 bits; `false` is known.
    #[serde(default)]
    pub reorder_and_upcast_attn: bool,
    /// Whether the head is the embedding; `true` is known.
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
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
fn yes() -> bool {
    true
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

    fn rope(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_deref().or(self.rope_scaling.as_deref())
    }

    /// Base of the rotary frequencies.
    pub fn theta(&self) -> f64 {
        let parameters = self.rope().and_then(|rope| rope.rope_theta);
        parameters.or(self.rope_theta).unwrap_or(10000.)
    }

    /// The tables of the rotary embedding for `positions` positions.
    ///
    /// # Errors
    /// When the configuration's `rope_type` is not known or lacks a value, or there is no memory.
    pub fn rotary(&self, positions: usize, device: &Device) -> anyhow::Result<Rotary> {
        Ok(match self.frequencies()? {
            Some(frequencies) => Rotary::from_frequencies(&frequencies, positions, device)?,
            None => Rotary::new(self.theta(), self.head_dim(), positions, device)?,
        })
    }

    /// What becomes of the plain rotary frequencies, if anything.
    fn scaling(&self) -> anyhow::Result<Option<Llama3Scaling>> {
        let Some(rope) = self.rope() else { return Ok(None) };
        match rope.kind() {
            "default" => Ok(None),
            "llama3" => rope.llama3().map(Some),
            other => bail!("rope_type = \"{other}\" is not known; \"default\" and \"llama3\" are"),
        }
    }

    /// The rotary frequencies, where they are not the plain ones.
    fn frequencies(&self) -> anyhow::Result<Option<Vec<f32>>> {
        let Some(scaling) = self.scaling()? else { return Ok(None) };
        let width = self.head_dim() as f64;
        let plain = (0..self.head_dim() / 2).map(|i| self.theta().powf(-2. * i as f64 / width));
        Ok(Some(plain.map(|frequency| scaling.apply(frequency) as f32).collect()))
    }

    fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        not_negative(&[("rms_norm_eps", self.rms_norm_eps), ("initializer_range", self.initializer_range)])?;
        ensure!(
            self.num_attention_heads.is_multiple_of(self.kv_heads()),
            "num_attention_heads = {} must be a multiple of num_key_value_heads = {}",
            self.num_attention_heads,
            self.kv_heads()
        );
        ensure!(
            self.head_dim.is_some() || self.hidden_size.is_multiple_of(self.num_attention_heads),
            "hidden_size = {} must be a multiple of num_attention_heads = {}, or head_dim be given",
            self.hidden_size,
            self.num_attention_heads
        );
        ensure!(
            self.head_dim() > 0 && self.head_dim().is_multiple_of(2),
            "head_dim = {} must be even and at least 2",
            self.head_dim()
        );
        ensure!(self.theta().is_finite() && self.theta() > 0., "rope_theta = {} must be above 0", self.theta());
        ensure!(self.hidden_act == "silu", "hidden_act = \"{}\" is not known; \"silu\" is", self.hidden_act);
        self.scaling().map(drop)
    }
}

/// Numbers of things there must be.
fn at_least_one(fields: &[(&str, usize)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(*value > 0, "{name} = {value} must be at least 1");
        Ok(())
    })
}

fn not_negative(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value >= 0., "{name} = {value} must be at least 0");
        Ok(())
    })
}

impl Gpt2Config {
    /// Width inside the MLP.
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    fn check(&self) -> anyhow::Result<()> {
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
        ensure!(
            self.n_embd.is_multiple_of(self.n_head),
            "n_embd = {} must be a multiple of n_head = {}",
            self.n_embd,
            self.n_head
        );
        ensure!(
            ["gelu_new", "gelu", "gelu_pytorch_tanh"].contains(&self.activation_function.as_str()),
            "activation_function = \"{}\" is not known; \"gelu_new\", \"gelu_pytorch_tanh\" and \"gelu\" are",
            self.activation_function
        );
        for (name, value, known) in [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("reorder_and_upcast_attn", self.reorder_and_upcast_attn, false),
            ("tie_word_embeddings", self.tie_word_embeddings, true),
        ] {
            ensure!(value == known, "{name} = {value} is not supported for GPT-2; {known} is");
        }
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
                "can't read {}: --model takes a Hugging Face model directory, with config.json and, for --init \
                    pretrained, model.safetensors",
                path.display()
            )
        })?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
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
mod tests;
