//! `config.json` of a Hugging Face model directory.

pub mod activation;
pub mod bert;
mod checks;
pub mod decoder;
mod dropout;
pub mod experts;
pub mod fields;
pub mod gpt2;
pub mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

pub use bert::BertConfig;
pub use decoder::DecoderConfig;
pub use dropout::Dropout;
use fields::{FAMILIES, Fields};
pub use gpt2::Gpt2Config;

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

/// The configuration of a model of a known architecture. It is serialised as the fields of `config.json` that matter.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ModelConfig {
    /// A decoder of one of the families that [`decoder`] tells apart.
    Decoder(Box<DecoderConfig>),
    /// `"model_type": "gpt2"`.
    Gpt2(Gpt2Config),
    /// `"model_type": "bert"`.
    Bert(BertConfig),
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

    /// Reads a file that is a model's `config.json`, whatever its name.
    ///
    /// # Errors
    /// As those of [`from_dir`](Self::from_dir).
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("can't read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Kind {
            model_type: Option<String>,
        }
        let kind: Kind = serde_json::from_str(text).context("not a JSON object")?;
        let known = || format!("known are {}, gpt2, bert", FAMILIES.map(|family| family.0).join(", "));
        match kind.model_type.as_deref() {
            Some("gpt2") => {
                let config: Gpt2Config = serde_json::from_str(text).context("not a GPT-2 configuration")?;
                config.check()?;
                Ok(ModelConfig::Gpt2(config))
            }
            Some("bert") => {
                let config: BertConfig = serde_json::from_str(text).context("not a BERT configuration")?;
                Ok(ModelConfig::Bert(config.checked()?))
            }
            Some(name) => match FAMILIES.iter().find(|family| family.0 == name) {
                Some((_, family)) => {
                    let fields: Fields =
                        serde_json::from_str(text).with_context(|| format!("not a configuration of {name}"))?;
                    Ok(ModelConfig::Decoder(Box::new(DecoderConfig::new(*family, fields)?)))
                }
                None => bail!("model_type \"{name}\" is not known; {}", known()),
            },
            None => bail!("model_type is missing; {}", known()),
        }
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
            ModelConfig::Decoder(config) => config.vocabulary,
            ModelConfig::Gpt2(config) => config.vocab_size,
            ModelConfig::Bert(config) => config.vocab_size,
        }
    }

    /// The longest sequence.
    pub fn max_positions(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.positions,
            ModelConfig::Gpt2(config) => config.n_positions,
            ModelConfig::Bert(config) => config.max_position_embeddings,
        }
    }

    /// What `config.json` says of dropout.
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

    /// Whether it is a masked language model: one that sees a whole sequence and predicts what is masked in it.
    pub fn is_masked(&self) -> bool {
        matches!(self, ModelConfig::Bert(_))
    }
}
