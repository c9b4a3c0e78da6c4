//! Configuration of decoders: the options in which the families differ, read from `config.json`.

use anyhow::{Context, bail, ensure};
use fsdp_candle::nn::AttentionOptions;
use fsdp_ckpt::hf::ExpertNames;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::models::config::rope::{Defaults, Rope};
use crate::models::config::{Activation, above_zero, at_least_one, below_one, not_negative, padding_row};

/// Configuration of a decoder. Absent fields have transformers' defaults.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    fields: Fields,
    /// Width of the residual stream.
    pub width: usize,
    /// Width inside an MLP.
    pub inner: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Row of the embedding that lookups do not train.
    pub padding: Option<usize>,
    /// Longest sequence.
    pub positions: usize,
    /// Norms of the blocks.
    pub norms: Norms,
    /// Biases of the projections.
    pub biases: Biases,
    /// Whether queries, keys and values are one projection, as are gate and up.
    pub fused: bool,
    /// Activation of the MLP.
    pub activation: Activation,
    /// Factor of the embeddings.
    pub embedding_scale: Option<f64>,
    /// Cap of the logits: `x` becomes `cap * tanh(x / cap)`.
    pub logit_softcap: Option<f64>,
    /// Whether the head shares the embedding's weights.
    pub tied: bool,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Experts, which replace MLPs.
    pub experts: Option<ExpertsConfig>,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of sliding-window layers, if it differs.
    pub local_rope: Option<Rope>,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    attention: AttentionOptions,
    windows: Windows,
}

/// Serialises the fields of `config.json`.
impl Serialize for DecoderConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.fields.serialize(serializer)
    }
}

/// Norms of a block.
#[derive(Clone, Copy, Debug)]
pub struct Norms {
    /// Epsilon, added to the mean square.
    pub eps: f64,
    /// Whether weights are `1 + w`, as in Gemma.
    pub one_plus_weight: bool,
    /// Whether norms also follow attention and MLP.
    pub post: bool,
    /// Whether each head's queries and keys have norms.
    pub heads: bool,
}

/// Projections that have biases.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// Layers with a sliding window.
#[derive(Clone, Debug)]
enum Windows {
    All,
    None,
    /// Layers from this one on.
    From(usize),
    /// All layers except every N-th.
    AllBut(usize),
    /// Layers whose entry is true.
    Listed(Vec<bool>),
}

impl Windows {
    fn reach(&self, layer: usize) -> bool {
        match self {
            Windows::All => true,
            Windows::None => false,
            Windows::From(first) => layer >= *first,
            Windows::AllBut(step) => !(layer + 1).is_multiple_of(*step),
            Windows::Listed(layers) => layers.get(layer).copied().unwrap_or(false),
        }
    }
}

impl DecoderConfig {
    pub(super) fn new(family: Family, fields: Fields) -> anyhow::Result<Self> {
        let gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
        let heads = fields.num_attention_heads;
        let kv_heads = match (fields.num_key_value_heads, family) {
            (Some(given), _) => given.unwrap_or(heads),
            (None, Family::Llama | Family::Phi3) => heads,
            (None, Family::Qwen2 | Family::Qwen3) => 32,
            (None, Family::Mistral | Family::Mixtral) => 8,
            (None, Family::Gemma2 | Family::Gemma3 | Family::Qwen3Moe) => 4,
        };
        let positions = fields.max_position_embeddings.unwrap_or(match family {
            Family::Llama => 2048,
            Family::Phi3 => 4096,
            Family::Gemma2 => 8192,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => 32768,
            Family::Mistral | Family::Mixtral | Family::Gemma3 => 131_072,
        });
        let head_dim = fields.head_dim.unwrap_or(match family {
            Family::Gemma2 | Family::Gemma3 => 256,
            Family::Qwen3 => 128,
            _ => fields.hidden_size / heads.max(1),
        });
        let eps = if matches!(family, Family::Phi3 | Family::Mixtral) { 1e-5 } else { 1e-6 };
        let norms = Norms {
            eps: fields.rms_norm_eps.unwrap_or(eps),
            one_plus_weight: gemma,
            post: gemma,
            heads: matches!(family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3),
        };
        let initializer_range = fields.initializer_range.unwrap_or(0.02);
        at_least_one(&[
            ("hidden_size", fields.hidden_size),
            ("intermediate_size", fields.intermediate_size),
            ("num_hidden_layers", fields.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("vocab_size", fields.vocab_size),
            ("max_position_embeddings", positions),
        ])?;
        not_negative(&[("rms_norm_eps", norms.eps), ("initializer_range", initializer_range)])?;
        ensure!(
            heads.is_multiple_of(kv_heads),
            "num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        );
        ensure!(
            fields.head_dim.is_some() || gemma || family == Family::Qwen3 || fields.hidden_size.is_multiple_of(heads),
            "hidden_size = {} must be a multiple of num_attention_heads = {heads}, or head_dim be given",
            fields.hidden_size
        );
        ensure!(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim = {head_dim} must be even and at least 2");
        no_dropout(&fields)?;
        let attention_dropout = fields.attention_dropout.unwrap_or(0.);
        below_one(&[("attention_dropout", attention_dropout)])?;
        let (rope, local_rope) = ropes(family, &fields, head_dim, positions)?;
        let (softcap, logit_softcap) = softcaps(family, &fields)?;
        let (window, windows) = windows(family, &fields)?;
        let width_of_scale = match fields.query_pre_attn_scalar.filter(|_| gemma) {
            Some(width) => width,
            None if gemma => 256.,
            None => head_dim as f64,
        };
        above_zero(&[("query_pre_attn_scalar", width_of_scale)])?;
        ensure!(
            !gemma || fields.use_bidirectional_attention != Some(true),
            "use_bidirectional_attention = true is not supported; expected false"
        );
        let qkv = match family {
            Family::Qwen2 => true,
            Family::Mistral | Family::Phi3 | Family::Mixtral => false,
            _ => fields.attention_bias.unwrap_or(false),
        };
        let mlp = family == Family::Llama && fields.mlp_bias.unwrap_or(false);
        let pad_token_id = fields.pad_token_id.unwrap_or(match family {
            Family::Gemma2 | Family::Gemma3 => Some(0),
            Family::Phi3 => Some(32000),
            _ => None,
        });
        Ok(DecoderConfig {
            width: fields.hidden_size,
            inner: fields.intermediate_size,
            layers: fields.num_hidden_layers,
            heads,
            kv_heads,
            head_dim,
            vocabulary: fields.vocab_size,
            padding: padding_row(pad_token_id, fields.vocab_size)?,
            positions,
            norms,
            biases: Biases { qkv, output: qkv && family != Family::Qwen2, mlp },
            fused: family == Family::Phi3,
            activation: activation(gemma, &fields)?,
            embedding_scale: gemma.then(|| (fields.hidden_size as f64).sqrt()),
            logit_softcap,
            tied: fields.tie_word_embeddings.unwrap_or(gemma),
            initializer_range,
            experts: ExpertsConfig::new(family, &fields)?,
            rope,
            local_rope,
            attention: AttentionOptions { window, softcap, ..AttentionOptions::causal(1. / width_of_scale.sqrt()) },
            windows,
            attention_dropout,
            fields,
        })
    }

    /// Returns the attention options of a layer.
    pub fn attention(&self, layer: usize) -> AttentionOptions {
        let window = self.attention.window.filter(|_| self.windows.reach(layer));
        AttentionOptions { window, ..self.attention }
    }

    /// Returns whether a layer uses the rotary embedding of sliding-window layers.
    pub fn is_local(&self, layer: usize) -> bool {
        self.local_rope.is_some() && self.windows.reach(layer)
    }

    /// Returns the experts of a layer, if any.
    pub fn experts(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.are_in(layer))
    }
}

fn no_dropout(fields: &Fields) -> anyhow::Result<()> {
    for (name, value) in [("resid_pdrop", fields.resid_pdrop), ("embd_pdrop", fields.embd_pdrop)] {
        let value = value.unwrap_or(0.);
        ensure!(
            value == 0.,
            "{name} = {value} is not supported; expected 0, because decoders drop only attention weights"
        );
    }
    Ok(())
}

/// Returns the rotary embedding, and that of sliding-window layers if it differs.
fn ropes(family: Family, fields: &Fields, head_dim: usize, positions: usize) -> anyhow::Result<(Rope, Option<Rope>)> {
    // In transformers, the older name wins where a file has both, unless it is empty.
    let older = fields.rope_scaling.as_deref().filter(|older| **older != RopeParameters::default());
    let own = older.or(fields.rope_parameters.as_deref()).cloned().unwrap_or_default();
    let usual = match family {
        Family::Mixtral | Family::Gemma3 => 1e6,
        _ => 1e4,
    };
    let theta = fields.rope_theta.unwrap_or(usual);
    let defaults = Defaults { fields, head_dim, positions, theta, is_phi3: family == Family::Phi3 };
    let apart = own.full_attention.is_some() || own.sliding_attention.is_some();
    if family != Family::Gemma3 {
        ensure!(!apart, "rope_parameters per kind of layer are supported for gemma3_text only: use one for all layers");
        return Ok((Rope::new(&own, defaults)?, None));
    }
    let full = if apart { own.full_attention.as_deref().cloned().unwrap_or_default() } else { own.clone() };
    let local: RopeParameters = own.sliding_attention.as_deref().cloned().unwrap_or_default();
    let local_theta = fields.rope_local_base_freq.unwrap_or(1e4);
    Ok((Rope::new(&full, defaults)?, Some(Rope::new(&local, Defaults { theta: local_theta, ..defaults })?)))
}

/// Returns the caps of attention scores and logits.
fn softcaps(family: Family, fields: &Fields) -> anyhow::Result<(Option<f64>, Option<f64>)> {
    let usual = |cap| if family == Family::Gemma2 { Some(cap) } else { None };
    let scores = fields.attn_logit_softcapping.unwrap_or(usual(50.));
    let logits = fields.final_logit_softcapping.unwrap_or(usual(30.));
    for (name, cap) in [("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)] {
        if let Some(cap) = cap {
            above_zero(&[(name, cap)])?;
        }
    }
    match (family, scores) {
        (Family::Gemma2, _) => Ok((scores, logits)),
        // transformers ignores this field.
        (Family::Gemma3, Some(cap)) => {
            bail!("attn_logit_softcapping = {cap} is not supported for gemma3_text; expected null")
        }
        (Family::Gemma3, None) => Ok((None, logits)),
        _ => Ok((None, None)),
    }
}

/// Returns the window, and the layers that have it.
fn windows(family: Family, fields: &Fields) -> anyhow::Result<(Option<usize>, Windows)> {
    let used = fields.use_sliding_window.unwrap_or(false);
    let window = match family {
        Family::Llama => None,
        Family::Mixtral | Family::Phi3 => fields.sliding_window.flatten(),
        Family::Mistral | Family::Gemma2 | Family::Gemma3 => fields.sliding_window.unwrap_or(Some(4096)),
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            fields.sliding_window.unwrap_or(Some(4096)).filter(|_| used)
        }
    };
    let listed = fields.layer_types.as_ref();
    let windows = match family {
        Family::Qwen2 | Family::Qwen3 | Family::Gemma2 | Family::Gemma3 => match listed {
            Some(kinds) => Windows::Listed(self::listed(kinds, fields.num_hidden_layers)?),
            None if family == Family::Gemma2 => Windows::AllBut(2),
            None if family == Family::Gemma3 => Windows::AllBut(fields.sliding_window_pattern.unwrap_or(6)),
            None if window.is_none() => Windows::None,
            None => Windows::From(fields.max_window_layers.unwrap_or(28)),
        },
        _ => Windows::All,
    };
    if let Windows::AllBut(step) = &windows {
        at_least_one(&[("sliding_window_pattern", *step)])?;
    }
    if let Windows::Listed(kinds) = &windows {
        ensure!(
            window.is_some() || !kinds.contains(&true),
            "layer_types has \"sliding_attention\", but sliding_window is missing"
        );
    }
    if let Some(window) = window {
        at_least_one(&[("sliding_window", window)])?;
    }
    Ok((window, windows))
}

fn listed(kinds: &[String], layers: usize) -> anyhow::Result<Vec<bool>> {
    ensure!(kinds.len() == layers, "layer_types has {} layers, but num_hidden_layers = {layers}", kinds.len());
    let kinds = kinds.iter().map(|kind| match kind.as_str() {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => bail!("layer_types has \"{other}\"; expected \"full_attention\" or \"sliding_attention\""),
    });
    kinds.collect()
}

fn activation(gemma: bool, fields: &Fields) -> anyhow::Result<Activation> {
    let (name, value) = match gemma {
        true => ("hidden_activation", fields.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh")),
        false => ("hidden_act", fields.hidden_act.as_deref().unwrap_or("silu")),
    };
    Activation::parse(name, value)
}

/// Decoder families, which share one implementation.
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

/// Families by `model_type`.
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

/// Fields of all families' `config.json`. `Some(None)` is `null` in the file, which differs from an absent field.
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
    /// transformers also writes it as `_sliding_window_pattern`, and does not read that name.
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

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[allow(missing_docs)]
pub struct RopeParameters {
    pub rope_theta: Option<f64>,
    pub rope_type: Option<String>,
    /// Older name of `rope_type`.
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
    /// Gemma 3 has one rotary embedding per kind of layer.
    pub full_attention: Option<Box<RopeParameters>>,
    pub sliding_attention: Option<Box<RopeParameters>>,
}

/// Reads a present field, including `null`.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// Experts: MLPs of which each token uses some.
#[derive(Clone, Debug)]
pub struct ExpertsConfig {
    /// Number of experts.
    pub count: usize,
    /// Experts per token.
    pub per_token: usize,
    /// Width inside an expert.
    pub inner: usize,
    /// Name of the width in `config.json`.
    pub width_name: &'static str,
    /// Whether the weights of the chosen experts are normalised to sum up to 1.
    pub renormalized: bool,
    /// Coefficient of the load-balancing loss, if any.
    pub auxiliary: Option<f64>,
    /// Names of the experts' parameters.
    pub names: ExpertNames,
    sparse_step: usize,
    dense_layers: Vec<usize>,
}

impl ExpertsConfig {
    pub(super) fn new(family: Family, fields: &Fields) -> anyhow::Result<Option<Self>> {
        // transformers lets the name of the other family win, if a file has both.
        let (names, count, (width_name, inner), per_token, renormalized) = match family {
            Family::Mixtral => {
                let count = fields.num_experts.or(fields.num_local_experts).unwrap_or(8);
                let inner = ("intermediate_size", fields.intermediate_size);
                (ExpertNames::MIXTRAL, count, inner, 2, true)
            }
            Family::Qwen3Moe => {
                let count = fields.num_local_experts.or(fields.num_experts).unwrap_or(128);
                let name = "moe_intermediate_size";
                let inner = (name, fields.moe_intermediate_size.with_context(|| format!("missing field `{name}`"))?);
                (ExpertNames::QWEN3_MOE, count, inner, 8, fields.norm_topk_prob.unwrap_or(false))
            }
            _ => return Ok(None),
        };
        let per_token = fields.num_experts_per_tok.unwrap_or(per_token);
        let sparse_step = fields.decoder_sparse_step.filter(|_| family == Family::Qwen3Moe).unwrap_or(1);
        let mut dense_layers = match family {
            Family::Qwen3Moe => fields.mlp_only_layers.clone().unwrap_or_default(),
            _ => vec![],
        };
        dense_layers.sort_unstable();
        dense_layers.dedup();
        at_least_one(&[
            ("num_experts", count),
            ("num_experts_per_tok", per_token),
            (width_name, inner),
            ("decoder_sparse_step", sparse_step),
        ])?;
        ensure!(per_token <= count, "num_experts_per_tok = {per_token} must be at most the {count} experts");
        let noise = fields.router_jitter_noise.unwrap_or(0.);
        ensure!(noise == 0., "router_jitter_noise = {noise} is not supported; expected 0");
        let hidden_act = fields.hidden_act.as_deref().unwrap_or("silu");
        ensure!(
            activation(false, fields)? == Activation::Silu,
            "hidden_act = \"{hidden_act}\" is not supported for experts; expected \"silu\""
        );
        let coefficient = fields.router_aux_loss_coef.unwrap_or(0.001);
        not_negative(&[("router_aux_loss_coef", coefficient)])?;
        let auxiliary = fields.output_router_logits.unwrap_or(false).then_some(coefficient);
        Ok(Some(ExpertsConfig {
            count,
            per_token,
            inner,
            width_name,
            renormalized,
            auxiliary,
            names,
            sparse_step,
            dense_layers,
        }))
    }

    /// Returns whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.sparse_step) && self.dense_layers.binary_search(&layer).is_err()
    }
}
