//! What the families of decoders differ in, as options.

use anyhow::{bail, ensure};
use fsdp_candle::nn::AttentionOptions;
use serde::Serialize;

use super::activation::Activation;
use super::checks::{above_zero, at_least_one, below_one, not_negative, padding_row};
use super::experts::ExpertsConfig;
use super::fields::{Family, Fields, RopeParameters};
use super::rope::{Around, Rope};

/// A decoder: what its `config.json` says, and what follows for its layers. Whatever a file leaves out is as
/// transformers has it.
#[derive(Clone, Debug, Serialize)]
pub struct DecoderConfig {
    #[serde(flatten)]
    fields: Fields,
    /// Width of the residual stream.
    #[serde(skip)]
    pub width: usize,
    /// Width inside an MLP.
    #[serde(skip)]
    pub inner: usize,
    /// Number of blocks.
    #[serde(skip)]
    pub layers: usize,
    /// Query heads.
    #[serde(skip)]
    pub heads: usize,
    /// Key and value heads.
    #[serde(skip)]
    pub kv_heads: usize,
    /// Width of a head.
    #[serde(skip)]
    pub head_dim: usize,
    /// Number of token ids.
    #[serde(skip)]
    pub vocabulary: usize,
    /// The embedding's row that lookups do not train.
    #[serde(skip)]
    pub padding: Option<usize>,
    /// Longest sequence.
    #[serde(skip)]
    pub positions: usize,
    /// Norms.
    #[serde(skip)]
    pub norms: Norms,
    /// Biases.
    #[serde(skip)]
    pub biases: Biases,
    /// Whether queries, keys and values are one projection, and so are gate and up.
    #[serde(skip)]
    pub fused: bool,
    /// The MLP's activation.
    #[serde(skip)]
    pub activation: Activation,
    /// What becomes of embeddings: they are multiplied by this.
    #[serde(skip)]
    pub embedding_scale: Option<f64>,
    /// Logits `x` become `cap * tanh(x / cap)`.
    #[serde(skip)]
    pub logit_softcap: Option<f64>,
    /// Whether the head is the embedding.
    #[serde(skip)]
    pub tied: bool,
    /// Standard deviation of random initial weights.
    #[serde(skip)]
    pub initializer_range: f64,
    /// Experts in place of MLPs.
    #[serde(skip)]
    pub experts: Option<ExpertsConfig>,
    /// The rotary embedding, but for layers with a window of their own kind.
    #[serde(skip)]
    pub rope: Rope,
    /// The rotary embedding of layers with a window, where it is another.
    #[serde(skip)]
    pub local_rope: Option<Rope>,
    /// Dropout of attention weights.
    #[serde(skip)]
    pub attention_dropout: f64,
    #[serde(skip)]
    attention: AttentionOptions,
    #[serde(skip)]
    windows: Windows,
}

/// The norms of a block.
#[derive(Clone, Copy, Debug)]
pub struct Norms {
    /// Added to the mean square.
    pub eps: f64,
    /// Whether a weight `w` stands for `1 + w`, as in Gemma.
    pub from_one: bool,
    /// Whether there are norms behind attention and MLP as well.
    pub behind: bool,
    /// Whether there are norms on each head's queries and keys.
    pub heads: bool,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// Which layers have a window.
#[derive(Clone, Debug)]
enum Windows {
    All,
    None,
    /// Those from this one on.
    From(usize),
    /// All but every so many-th.
    AllBut(usize),
    /// As listed.
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
            from_one: gemma,
            behind: gemma,
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
            "use_bidirectional_attention = true is not supported; false is"
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

    /// What a layer's attention is.
    pub fn attention(&self, layer: usize) -> AttentionOptions {
        let window = self.attention.window.filter(|_| self.windows.reach(layer));
        AttentionOptions { window, ..self.attention }
    }

    /// Whether a layer has the rotary embedding of layers with a window.
    pub fn is_local(&self, layer: usize) -> bool {
        self.local_rope.is_some() && self.windows.reach(layer)
    }

    /// The experts of a layer.
    pub fn experts(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.are_in(layer))
    }
}

fn no_dropout(fields: &Fields) -> anyhow::Result<()> {
    for (name, value) in [("resid_pdrop", fields.resid_pdrop), ("embd_pdrop", fields.embd_pdrop)] {
        let value = value.unwrap_or(0.);
        ensure!(value == 0., "{name} = {value} is not supported; 0 is: decoders drop attention weights alone");
    }
    Ok(())
}

/// The rotary embedding, and another one of layers with a window.
fn ropes(family: Family, fields: &Fields, head_dim: usize, positions: usize) -> anyhow::Result<(Rope, Option<Rope>)> {
    let own = fields.rope_parameters.as_deref().or(fields.rope_scaling.as_deref()).cloned().unwrap_or_default();
    let usual = match family {
        Family::Mixtral | Family::Gemma3 => 1e6,
        _ => 1e4,
    };
    let theta = fields.rope_theta.unwrap_or(usual);
    let around = Around { fields, head_dim, positions, theta, old_names: family == Family::Phi3 };
    let apart = own.full_attention.is_some() || own.sliding_attention.is_some();
    if family != Family::Gemma3 {
        ensure!(
            !apart,
            "rope_parameters of each kind of layer are not supported but for gemma3_text: give one for all"
        );
        return Ok((Rope::new(&own, around)?, None));
    }
    let full = if apart { own.full_attention.as_deref().cloned().unwrap_or_default() } else { own.clone() };
    let local: RopeParameters = own.sliding_attention.as_deref().cloned().unwrap_or_default();
    let local_theta = fields.rope_local_base_freq.unwrap_or(1e4);
    Ok((Rope::new(&full, around)?, Some(Rope::new(&local, Around { theta: local_theta, ..around })?)))
}

/// The caps of scores and of logits.
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
        // Transformers has the field and does nothing with it.
        (Family::Gemma3, Some(cap)) => {
            bail!("attn_logit_softcapping = {cap} is not supported for gemma3_text; null is")
        }
        (Family::Gemma3, None) => Ok((None, logits)),
        _ => Ok((None, None)),
    }
}

/// The window, and the layers that have it.
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
            "layer_types has \"sliding_attention\", but there is no sliding_window"
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
        other => bail!("layer_types has \"{other}\"; \"full_attention\" and \"sliding_attention\" are known"),
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
