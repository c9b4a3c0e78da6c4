//! `config.json` of a Hugging Face model directory.

use std::path::Path;

use anyhow::{Context, bail, ensure};
pub use bert::BertConfig;
pub use decoder::DecoderConfig;
use families::FAMILIES;
use fields::Fields;
pub use gpt2::Gpt2Config;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::input::read_text;
use crate::json;

pub mod bert;
pub mod decoder;
pub mod experts;
mod families;
mod fields;
pub mod gpt2;
mod keys;
pub mod latent;
pub mod rope;
#[cfg(test)]
mod tests;

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

/// Configuration of a model. Serialises as the fields of `config.json` that are used.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ModelConfig {
    /// A decoder of a family in [`decoder`].
    Decoder(Box<DecoderConfig>),
    /// `"model_type": "gpt2"`.
    Gpt2(Gpt2Config),
    /// `"model_type": "bert"`.
    Bert(BertConfig),
}

/// Reads the fields of a configuration. Errors name the key.
fn read<T: DeserializeOwned>(fields: Value) -> anyhow::Result<T> {
    Ok(serde_path_to_error::deserialize(fields)?)
}

impl ModelConfig {
    /// Reads `config.json` in a model directory.
    pub fn from_dir(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path).with_context(|| {
            format!(
                "can't read {}: --model takes a Hugging Face model directory, with config.json and, for --init \
                 pretrained, the weights",
                path.display()
            )
        })?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    /// Reads a `config.json` with any file name.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = read_text(path).with_context(|| format!("can't read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    /// Returns the keys of `config.json` in a model directory that neither the configuration nor transformers reads.
    pub fn unknown_keys(&self, dir: &Path) -> anyhow::Result<Vec<String>> {
        let keys: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(dir.join("config.json"))?)?;
        Ok(keys::unknown(&serde_json::to_value(self)?, &keys))
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut fields = json::parse(text).context("not a JSON object")?;
        ensure!(fields.is_object(), "not a JSON object");
        let kind = fields["model_type"].as_str().map(str::to_owned);
        keys::check(kind.as_deref().unwrap_or_default(), fields.as_object().expect("checked above"))?;
        let expected = || format!("expected {}, gpt2 or bert", FAMILIES.map(|family| family.name).join(", "));
        match kind.as_deref() {
            Some("gpt2") => {
                for (general, own) in gpt2::GENERAL_NAMES {
                    if let Some(value) = fields.as_object_mut().and_then(|fields| fields.remove(general)) {
                        fields[own] = value;
                    }
                }
                let config: Gpt2Config = read(fields).context("not a GPT-2 configuration")?;
                config.check()?;
                Ok(ModelConfig::Gpt2(config))
            }
            Some("bert") => {
                let config: BertConfig = read(fields).context("not a BERT configuration")?;
                Ok(ModelConfig::Bert(config.checked()?))
            }
            Some(name) => match FAMILIES.iter().find(|family| family.name == name) {
                Some(family) => {
                    let fields: Fields = read(fields).with_context(|| format!("not a configuration of {name}"))?;
                    Ok(ModelConfig::Decoder(Box::new(DecoderConfig::new(family, fields)?)))
                }
                None => bail!("model_type \"{name}\" is not supported; {}", expected()),
            },
            None => bail!("model_type is missing; {}", expected()),
        }
    }

    /// Returns the built-in byte-level Llama with about 5 million parameters.
    pub fn builtin() -> anyhow::Result<Self> {
        Self::parse(BUILTIN)
    }

    /// Returns the number of token ids.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.vocabulary,
            ModelConfig::Gpt2(config) => config.vocab_size,
            ModelConfig::Bert(config) => config.vocab_size,
        }
    }

    /// Returns the length of the longest sequence.
    pub fn max_positions(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.positions,
            ModelConfig::Gpt2(config) => config.n_positions,
            ModelConfig::Bert(config) => config.max_position_embeddings,
        }
    }

    /// Returns the dropout of `config.json`.
    pub fn dropout(&self) -> Dropout {
        match self {
            ModelConfig::Decoder(config) => Dropout { attention: config.attention_dropout, ..Dropout::default() },
            ModelConfig::Gpt2(config) => {
                let &Gpt2Config { embd_pdrop: embedding, attn_pdrop: attention, resid_pdrop: hidden, .. } = config;
                Dropout { embedding, attention, hidden }
            }
            ModelConfig::Bert(config) => {
                let (hidden, attention) = (config.hidden_dropout_prob, config.attention_probs_dropout_prob);
                Dropout { embedding: hidden, attention, hidden }
            }
        }
    }

    /// Makes the model count the tokens of its experts, if it has some. See
    /// [`LanguageModel::take_expert_tokens`](crate::models::LanguageModel::take_expert_tokens).
    pub fn count_expert_tokens(&mut self) {
        if let ModelConfig::Decoder(config) = self
            && let Some(experts) = &mut config.experts
        {
            experts.counted = true;
        }
    }

    /// Returns whether this is a masked language model, which sees a whole sequence and predicts its masked tokens.
    pub fn is_masked(&self) -> bool {
        matches!(self, ModelConfig::Bert(_))
    }
}

/// Dropout probabilities, below 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Dropout of embeddings. Decoders have none.
    pub embedding: f64,
    /// Dropout of attention weights.
    pub attention: f64,
    /// Dropout of the outputs of attention and MLP. Decoders have none.
    pub hidden: f64,
}

impl Dropout {
    /// Returns one probability for all layers.
    pub fn everywhere(probability: f64) -> Self {
        Dropout { embedding: probability, attention: probability, hidden: probability }
    }
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Activation {
    Silu,
    Gelu,
    GeluErf,
}

impl Activation {
    /// Returns the activation with transformers' name `name` in the field `field`.
    pub(super) fn parse(field: &str, name: &str) -> anyhow::Result<Self> {
        Ok(match name {
            "silu" | "swish" => Activation::Silu,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::Gelu,
            "gelu" => Activation::GeluErf,
            _ => bail!(
                "{field} = \"{name}\" is not supported; expected \"silu\", \"gelu_pytorch_tanh\", \"gelu_new\" or \"gelu\""
            ),
        })
    }
}

fn default_dropout() -> f64 {
    0.1
}
fn default_stdev() -> f64 {
    0.02
}
fn yes() -> bool {
    true
}

/// Fails if one of the fields is 0.
pub(super) fn at_least_one(fields: &[(&str, usize)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(*value > 0, "{name} = {value} must be at least 1");
        Ok(())
    })
}

pub(super) fn not_negative(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value >= 0., "{name} = {value} must be at least 0");
        Ok(())
    })
}

pub(super) fn below_one(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!((0. ..1.).contains(value), "{name} = {value} must be at least 0 and below 1");
        Ok(())
    })
}

/// Returns the row of the embedding that lookups do not train: `padding_idx` of PyTorch's `nn.Embedding`. A negative id
/// counts from the end of the vocabulary.
pub(super) fn padding_row(pad_token_id: Option<i64>, vocabulary: usize) -> anyhow::Result<Option<usize>> {
    let Some(id) = pad_token_id else { return Ok(None) };
    let from = if id < 0 { vocabulary as i128 } else { 0 };
    let row = usize::try_from(i128::from(id) + from).ok().filter(|row| *row < vocabulary);
    ensure!(
        row.is_some(),
        "pad_token_id = {id} (which may be the default of this model_type) is not in the vocabulary of {vocabulary} \
         ids: use an id in it, or null"
    );
    Ok(row)
}

pub(super) fn above_zero(fields: &[(&str, f64)]) -> anyhow::Result<()> {
    fields.iter().try_for_each(|(name, value)| {
        ensure!(value.is_finite() && *value > 0., "{name} = {value} must be above 0");
        Ok(())
    })
}
