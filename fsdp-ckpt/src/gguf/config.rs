//! The fields of `config.json` that a GGUF file needs.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::gguf::rope::{Rope, RopeFields};
use crate::hf::ExpertNames;
use crate::text_file::{malformed, read_json};
use crate::{Error, Result};

const FILE: &str = "config.json";

/// Architectures of llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma2,
    Gemma3,
    Phi3,
    Gpt2,
    Bert,
}

/// Architectures by transformers' `model_type`. llama.cpp runs Mistral and Mixtral as Llama.
const ARCHITECTURES: [(&str, Architecture); 11] = [
    ("llama", Architecture::Llama),
    ("mistral", Architecture::Llama),
    ("mixtral", Architecture::Llama),
    ("qwen2", Architecture::Qwen2),
    ("qwen3", Architecture::Qwen3),
    ("qwen3_moe", Architecture::Qwen3Moe),
    ("gemma2", Architecture::Gemma2),
    ("gemma3_text", Architecture::Gemma3),
    ("phi3", Architecture::Phi3),
    ("gpt2", Architecture::Gpt2),
    ("bert", Architecture::Bert),
];

impl Architecture {
    /// Returns llama.cpp's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Qwen3Moe => "qwen3moe",
            Architecture::Gemma2 => "gemma2",
            Architecture::Gemma3 => "gemma3",
            Architecture::Phi3 => "phi3",
            Architecture::Gpt2 => "gpt2",
            Architecture::Bert => "bert",
        }
    }

    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Architecture::Gemma2 | Architecture::Gemma3)
    }
}

/// A model's configuration.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) path: PathBuf,
    pub(super) architecture: Architecture,
    /// Number of token ids.
    pub(super) vocabulary: usize,
    /// Width of the residual stream.
    pub(super) width: usize,
    /// Width inside an MLP.
    pub(super) inner: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) positions: usize,
    /// Number of BERT's segment types.
    pub(super) segments: usize,
    /// Epsilon of the norms.
    pub(super) eps: f64,
    /// Whether the head shares the embedding's weights.
    pub(super) tied: bool,
    pub(super) experts: Option<Experts>,
    pub(super) rope: Option<Rope>,
    /// Sliding window, and the layers that have it.
    pub(super) window: Option<(usize, Vec<bool>)>,
    /// Caps of attention scores and logits.
    pub(super) softcaps: [Option<f64>; 2],
    /// Special token ids by their names: `bos`, `eos`, ...
    pub(super) token_ids: Vec<(&'static str, u32)>,
    model_type: String,
    activation: String,
}

impl Config {
    /// Returns the names of experts in files of the original format.
    pub(super) fn expert_names(&self) -> ExpertNames {
        match self.architecture {
            Architecture::Llama => ExpertNames::MIXTRAL,
            _ => ExpertNames::QWEN3_MOE,
        }
    }
}

/// Experts, which replace MLPs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) count: usize,
    pub(super) used: usize,
    /// Width inside an expert.
    pub(super) inner: usize,
}

/// How a family's name of a field relates to the name of other families.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The family has no other name.
    Alone,
    /// If a file has both, the family's name counts.
    First,
    /// If a file has both, the other name counts.
    Second,
}

/// Fields that families call otherwise: the family, its name and the usual name. transformers reads them in this way.
const OTHER_NAMES: [(&str, &str, &str, Use); 13] = [
    ("gpt2", "n_embd", "hidden_size", Use::Second),
    ("gpt2", "n_layer", "num_hidden_layers", Use::Second),
    ("gpt2", "n_head", "num_attention_heads", Use::Second),
    ("gpt2", "n_positions", "max_position_embeddings", Use::Second),
    ("gpt2", "n_inner", "intermediate_size", Use::Alone),
    ("gpt2", "layer_norm_epsilon", "rms_norm_eps", Use::Alone),
    ("gpt2", "activation_function", "hidden_act", Use::Alone),
    ("bert", "layer_norm_eps", "rms_norm_eps", Use::Alone),
    ("gemma2", "hidden_activation", "hidden_act", Use::Alone),
    ("gemma3", "hidden_activation", "hidden_act", Use::Alone),
    ("gemma3_text", "hidden_activation", "hidden_act", Use::Alone),
    ("mixtral", "num_experts", "num_local_experts", Use::First),
    ("qwen3_moe", "num_experts", "num_local_experts", Use::Second),
];

#[derive(Deserialize)]
struct Fields {
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    type_vocab_size: Option<usize>,
    rms_norm_eps: Option<f64>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    #[serde(flatten)]
    rope: RopeFields,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
    query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    attn_logit_softcapping: Option<Option<f64>>,
    #[serde(default, deserialize_with = "given")]
    final_logit_softcapping: Option<Option<f64>>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    attention_bias: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    position_embedding_type: Option<String>,
    bos_token_id: Option<Value>,
    eos_token_id: Option<Value>,
    pad_token_id: Option<Value>,
}

/// Reads a present field, including `null`.
fn given<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl Config {
    /// Reads the configuration in a model directory.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE);
        let Some(mut json) = read_json::<Map<String, Value>>(dir, FILE)? else {
            let looked_for = format!("{FILE}; --config-from names the directory that has it");
            return Err(Error::NotFound { path: dir.to_path_buf(), looked_for });
        };
        let family = json.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
        for (_, name, usual, what) in OTHER_NAMES.iter().filter(|(of, ..)| *of == family) {
            if *what == Use::Alone {
                json.remove(*usual);
            }
            let own = json.remove(*name).filter(|value| !value.is_null());
            if let Some(own) = own.filter(|_| *what != Use::Second || json.get(*usual).is_none_or(Value::is_null)) {
                json.insert((*usual).to_string(), own);
            }
        }
        let fields = serde_json::from_value(Value::Object(json));
        Self::new(&path, fields.map_err(|error| malformed(&path, None, format!("it can't be read: {error}")))?)
    }

    fn new(path: &Path, fields: Fields) -> Result<Self> {
        let known = ARCHITECTURES.map(|(name, _)| name).join(", ");
        let Some(model_type) = fields.model_type.clone() else {
            return Err(malformed(path, Some("model_type"), format!("it is missing, expected one of {known}")));
        };
        let Some((_, architecture)) = ARCHITECTURES.iter().find(|(name, _)| *name == model_type) else {
            let reason = format!("{model_type:?} can't be written as GGUF, expected one of {known}");
            return Err(malformed(path, Some("model_type"), reason));
        };
        let architecture = *architecture;
        let needed = |name: &str, value: Option<usize>| match value {
            // llama.cpp reads 32 bits. The limit also keeps products of a few sizes from overflowing.
            Some(value) if (1..=MOST).contains(&value) => Ok(value),
            Some(value) => Err(malformed(path, Some(name), format!("it is {value}, expected 1 to {MOST}"))),
            None => Err(malformed(path, Some(name), "it is missing, expected a number")),
        };
        let width = needed("hidden_size", fields.hidden_size)?;
        let heads = needed("num_attention_heads", fields.num_attention_heads)?;
        let layers = needed("num_hidden_layers", fields.num_hidden_layers)?;
        if layers > MOST_LAYERS {
            let reason = format!("it is {layers}, expected at most {MOST_LAYERS}, llama.cpp's limit");
            return Err(malformed(path, Some("num_hidden_layers"), reason));
        }
        let usual_head = if architecture.is_gemma() { 256 } else { width / heads };
        let head_dim = needed("head_dim", Some(fields.head_dim.unwrap_or(usual_head)))?;
        let positions = needed("max_position_embeddings", fields.max_position_embeddings)?;
        let inner = match architecture {
            Architecture::Gpt2 => fields.intermediate_size.or(Some(4 * width)),
            _ => fields.intermediate_size,
        };
        let experts = match (architecture, model_type.as_str()) {
            (Architecture::Qwen3Moe, _) => Some(("moe_intermediate_size", fields.moe_intermediate_size)),
            (_, "mixtral") => Some(("intermediate_size", fields.intermediate_size)),
            _ => None,
        };
        let experts = match experts {
            Some((name, inner)) => Some(Experts {
                count: needed("num_local_experts", fields.num_local_experts)?,
                used: needed("num_experts_per_tok", fields.num_experts_per_tok)?,
                inner: needed(name, inner)?,
            }),
            None => None,
        };
        let rope = match architecture {
            Architecture::Gpt2 | Architecture::Bert => None,
            _ => Some(Rope::new(path, architecture, &fields.rope, head_dim, positions)?),
        };
        let norm_eps = match architecture {
            Architecture::Bert => 1e-12,
            Architecture::Gpt2 => 1e-5,
            _ => 1e-6,
        };
        let tied = matches!(architecture, Architecture::Gpt2 | Architecture::Gemma2 | Architecture::Gemma3);
        let activation = match architecture {
            Architecture::Gemma2 | Architecture::Gemma3 => "gelu_pytorch_tanh",
            Architecture::Gpt2 => "gelu_new",
            Architecture::Bert => "gelu",
            _ => "silu",
        };
        let config = Config {
            path: path.to_path_buf(),
            architecture,
            vocabulary: needed("vocab_size", fields.vocab_size)?,
            width,
            inner: needed("intermediate_size", inner)?,
            layers,
            heads,
            kv_heads: needed("num_key_value_heads", Some(fields.num_key_value_heads.unwrap_or(heads)))?,
            head_dim,
            positions,
            segments: needed("type_vocab_size", Some(fields.type_vocab_size.unwrap_or(2)))?,
            eps: fields.rms_norm_eps.unwrap_or(norm_eps),
            tied: fields.tie_word_embeddings.unwrap_or(tied),
            experts,
            rope,
            window: window(path, architecture, &model_type, &fields, layers)?,
            softcaps: softcaps(architecture, &fields),
            token_ids: token_ids(&fields),
            activation: fields.hidden_act.clone().unwrap_or_else(|| activation.to_string()),
            model_type,
        };
        config.check(&fields)?;
        Ok(config)
    }

    /// Fails if llama.cpp would compute something else.
    fn check(&self, fields: &Fields) -> Result<()> {
        let fail = |name: &str, found: String, expected: String| {
            let reason = format!("it is {found}, and llama.cpp's {} needs {expected}", self.architecture.name());
            Err(malformed(&self.path, Some(name), reason))
        };
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of num_attention_heads = {}", self.heads);
            return fail("num_key_value_heads", self.kv_heads.to_string(), expected);
        }
        let fixed = matches!(
            self.architecture,
            Architecture::Qwen2 | Architecture::Phi3 | Architecture::Gpt2 | Architecture::Bert
        );
        if fixed && self.head_dim * self.heads != self.width {
            let expected = "hidden_size / num_attention_heads";
            return fail("head_dim", self.head_dim.to_string(), expected.to_string());
        }
        let allowed: &[&str] = match self.architecture {
            Architecture::Gpt2 | Architecture::Gemma2 | Architecture::Gemma3 => &["gelu_new", "gelu_pytorch_tanh"],
            Architecture::Bert => &["gelu", "gelu_new", "gelu_pytorch_tanh"],
            _ => &["silu", "swish"],
        };
        if !allowed.contains(&self.activation.as_str()) {
            return fail("hidden_act", format!("{:?}", self.activation), allowed.join(" or "));
        }
        if self.architecture.is_gemma() {
            // llama.cpp knows the 27 B models by their number of layers.
            let of_27b = if self.architecture == Architecture::Gemma2 { 46 } else { 62 };
            let computed = if self.layers == of_27b { self.width / self.heads } else { self.head_dim };
            let scalar = fields.query_pre_attn_scalar.unwrap_or(256.);
            if scalar != computed as f64 {
                return fail("query_pre_attn_scalar", scalar.to_string(), computed.to_string());
            }
        }
        if self.architecture == Architecture::Gemma2 && self.softcaps.contains(&None) {
            return fail("attn_logit_softcapping or final_logit_softcapping", "null".into(), "a number".into());
        }
        if self.architecture == Architecture::Qwen3Moe {
            if fields.norm_topk_prob != Some(true) {
                return fail("norm_topk_prob", "false".into(), "true".into());
            }
            if fields.decoder_sparse_step.unwrap_or(1) != 1 || fields.mlp_only_layers.iter().flatten().next().is_some()
            {
                return fail("mlp_only_layers", "not empty".into(), "experts in every layer".into());
            }
        }
        if let Some(experts) = self.experts
            && experts.used > experts.count
        {
            let expected = format!("at most {} experts", experts.count);
            return fail("num_experts_per_tok", experts.used.to_string(), expected);
        }
        let has_output_bias = matches!(self.architecture, Architecture::Llama | Architecture::Bert);
        if fields.attention_bias == Some(true) && !has_output_bias {
            return fail("attention_bias", "true".into(), "false".into());
        }
        if fields.scale_attn_by_inverse_layer_idx == Some(true) {
            return fail("scale_attn_by_inverse_layer_idx", "true".into(), "false".into());
        }
        match fields.position_embedding_type.as_deref() {
            None | Some("absolute") => Ok(()),
            Some(other) => fail("position_embedding_type", format!("{other:?}"), "absolute".into()),
        }
    }

    /// Returns the layers with a sliding window if llama.cpp does not assume them.
    pub(super) fn unusual_windows(&self) -> Option<&[bool]> {
        let step = if self.architecture == Architecture::Gemma2 { 2 } else { 6 };
        let (_, layers) = self.window.as_ref()?;
        let usual = layers.iter().enumerate().all(|(at, local)| *local == ((at + 1) % step != 0));
        if usual { None } else { Some(layers) }
    }

    /// Describes where llama.cpp computes something else.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some((window, _)) = self.window
            && !self.architecture.is_gemma()
        {
            notes.push(format!(
                "llama.cpp ignores the sliding window of {}: beyond {window} tokens it attends to all",
                self.model_type
            ));
        }
        if self.architecture == Architecture::Bert {
            notes.push("llama.cpp computes embeddings of a BERT: the heads were left out".into());
            if self.activation == "gelu" {
                notes.push("llama.cpp computes gelu by its approximation with tanh".into());
            }
        }
        notes
    }
}

/// Largest size in `config.json`.
const MOST: usize = 1 << 30;
/// llama.cpp's largest number of layers.
const MOST_LAYERS: usize = 512;

/// Returns the sliding window and the layers that have it; `None` if no layer has one.
fn window(
    path: &Path,
    architecture: Architecture,
    model_type: &str,
    fields: &Fields,
    layers: usize,
) -> Result<Option<(usize, Vec<bool>)>> {
    let used = fields.use_sliding_window.unwrap_or(false);
    let window = match architecture {
        Architecture::Llama if model_type == "llama" => None,
        Architecture::Gpt2 | Architecture::Bert => None,
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe if !used => None,
        Architecture::Gemma2 | Architecture::Gemma3 => Some(fields.sliding_window.unwrap_or(4096)),
        _ => fields.sliding_window,
    };
    let Some(window) = window else { return Ok(None) };
    let listed = fields.layer_types.as_ref().filter(|_| architecture != Architecture::Llama);
    let local: Vec<bool> = match (listed, architecture) {
        (Some(kinds), _) => kinds.iter().map(|kind| kind == "sliding_attention").collect(),
        (None, Architecture::Gemma2) => (1..=layers).map(|layer| layer % 2 != 0).collect(),
        (None, Architecture::Gemma3) => {
            let step = fields.sliding_window_pattern.unwrap_or(6).max(1);
            (1..=layers).map(|layer| layer % step != 0).collect()
        }
        (None, Architecture::Qwen2 | Architecture::Qwen3) => {
            let first = fields.max_window_layers.unwrap_or(28);
            (0..layers).map(|layer| layer >= first).collect()
        }
        _ => vec![true; layers],
    };
    if local.len() != layers {
        let reason = format!("it has {} layers, expected num_hidden_layers = {layers}", local.len());
        return Err(malformed(path, Some("layer_types"), reason));
    }
    let window = u32::try_from(window).map_err(|_| malformed(path, Some("sliding_window"), "it is too large"))?;
    Ok(local.contains(&true).then_some((window as usize, local)))
}

fn softcaps(architecture: Architecture, fields: &Fields) -> [Option<f64>; 2] {
    let logits = fields.final_logit_softcapping;
    match architecture {
        Architecture::Gemma2 => [fields.attn_logit_softcapping.unwrap_or(Some(50.)), logits.unwrap_or(Some(30.))],
        Architecture::Gemma3 => [None, logits.flatten()],
        _ => [None, None],
    }
}

/// Returns the special tokens with one id. Models with several end tokens list them in `generation_config.json`.
fn token_ids(fields: &Fields) -> Vec<(&'static str, u32)> {
    let ids = [("bos", &fields.bos_token_id), ("eos", &fields.eos_token_id), ("pad", &fields.pad_token_id)];
    let id = |value: &Option<Value>| u32::try_from(value.as_ref()?.as_u64()?).ok();
    ids.into_iter().filter_map(|(name, value)| Some((name, id(value)?))).collect()
}
