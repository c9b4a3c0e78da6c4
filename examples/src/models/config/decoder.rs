//! Configuration of decoders: the options in which the families differ, read from `config.json`.

use anyhow::{bail, ensure};
use fsdp_candle::nn::AttentionOptions;
use serde::{Serialize, Serializer};

use crate::models::config::experts::ExpertsConfig;
use crate::models::config::families::{BiasKeys, CapKeys, Family, WindowKeys, WindowLayers};
use crate::models::config::fields::{Fields, RopeParameters};
use crate::models::config::latent::{LatentConfig, score_factor};
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
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Whether each head has a score that no key has.
    pub has_sinks: bool,
    /// Latent attention, if queries, keys and values are not products with the residual stream alone.
    pub latent: Option<LatentConfig>,
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
    prediction_layers: usize,
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
    pub(super) fn new(family: &Family, fields: Fields) -> anyhow::Result<Self> {
        let gemma = family.is_gemma;
        let heads = fields.num_attention_heads;
        let kv_heads = match fields.num_key_value_heads {
            Some(given) => given.unwrap_or(heads),
            None => family.kv_heads.unwrap_or(heads),
        };
        let positions = fields.max_position_embeddings.unwrap_or(family.positions);
        let latent = family.latent.map(|keys| LatentConfig::new(keys, &fields, kv_heads)).transpose()?;
        let own_head_dim = latent.map(|latent| latent.head_dim()).or(fields.head_dim).or(family.head_dim);
        let head_dim = own_head_dim.unwrap_or(fields.hidden_size / heads.max(1));
        let norms = Norms {
            eps: fields.rms_norm_eps.unwrap_or(family.eps),
            one_plus_weight: gemma,
            post: gemma,
            heads: family.has_head_norms,
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
            own_head_dim.is_some() || fields.hidden_size.is_multiple_of(heads),
            "hidden_size = {} must be a multiple of num_attention_heads = {heads}, or head_dim be given",
            fields.hidden_size
        );
        let rotated = latent.map_or(head_dim, |latent| latent.rotated);
        ensure!(rotated > 0 && rotated.is_multiple_of(2), "head_dim = {head_dim} must be even and at least 2");
        no_dropout(&fields)?;
        let attention_dropout = fields.attention_dropout.unwrap_or(0.);
        below_one(&[("attention_dropout", attention_dropout)])?;
        let (rope, local_rope) = ropes(family, &fields, rotated, positions)?;
        let (softcap, logit_softcap) = softcaps(family, &fields)?;
        let (window, windows) = windows(family, &fields)?;
        let width_of_scale = match fields.query_pre_attn_scalar.filter(|_| gemma) {
            Some(width) => width,
            None if gemma => 256.,
            None => head_dim as f64,
        };
        above_zero(&[("query_pre_attn_scalar", width_of_scale)])?;
        let factor = if latent.is_some() { score_factor(&own_rope(&fields))? } else { 1. };
        let scale = factor / width_of_scale.sqrt();
        ensure!(
            !gemma || fields.use_bidirectional_attention != Some(true),
            "use_bidirectional_attention = true is not supported; expected false"
        );
        let bias = fields.attention_bias.unwrap_or(false);
        let (qkv, output, mlp) = match family.biases {
            BiasKeys::None => (false, false, false),
            BiasKeys::Attention => (bias, bias, false),
            BiasKeys::UsuallyAttention => {
                let bias = fields.attention_bias.unwrap_or(true);
                (bias, bias, false)
            }
            BiasKeys::AttentionAndMlp => (bias, bias, fields.mlp_bias.unwrap_or(false)),
            BiasKeys::AlwaysQkv => (true, false, false),
        };
        let predicts = fields.num_mtp_layers.or(fields.num_nextn_predict_layers);
        let pad_token_id = fields.pad_token_id.unwrap_or(family.padding);
        Ok(DecoderConfig {
            width: fields.hidden_size,
            inner: fields.intermediate_size,
            layers: fields.num_hidden_layers,
            heads,
            kv_heads,
            head_dim,
            has_sinks: family.has_sinks,
            latent,
            vocabulary: fields.vocab_size,
            padding: padding_row(pad_token_id, fields.vocab_size)?,
            positions,
            norms,
            biases: Biases { qkv, output, mlp },
            fused: family.is_phi3,
            activation: activation(gemma, &fields)?,
            embedding_scale: gemma.then(|| (fields.hidden_size as f64).sqrt()),
            logit_softcap,
            tied: fields.tie_word_embeddings.unwrap_or(gemma),
            initializer_range,
            experts: ExpertsConfig::new(family, &fields)?,
            rope,
            local_rope,
            attention: AttentionOptions { window, softcap, ..AttentionOptions::causal(scale) },
            windows,
            attention_dropout,
            prediction_layers: if family.predicts_more { predicts.unwrap_or(1) } else { 0 },
            fields,
        })
    }

    /// Returns the elements of a head that the rotary tables are for.
    pub fn rotary_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.rotated)
    }

    /// Returns the elements of a head of the values.
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Returns the layers after the last one that a file may have, which predict further tokens. They are left out.
    pub fn is_prediction_layer(&self, layer: usize) -> bool {
        (self.layers..self.layers.saturating_add(self.prediction_layers)).contains(&layer)
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

/// Returns the parameters of the rotary embedding in a file.
fn own_rope(fields: &Fields) -> RopeParameters {
    // In transformers, the older name wins where a file has both, unless it is empty.
    let older = fields.rope_scaling.as_deref().filter(|older| **older != RopeParameters::default());
    older.or(fields.rope_parameters.as_deref()).cloned().unwrap_or_default()
}

/// Returns the rotary embedding, and that of sliding-window layers if it differs.
fn ropes(family: &Family, fields: &Fields, head_dim: usize, positions: usize) -> anyhow::Result<(Rope, Option<Rope>)> {
    let mut own = own_rope(fields);
    if family.is_yarn && own == RopeParameters::default() {
        own = RopeParameters {
            rope_type: Some("yarn".into()),
            factor: Some(32.),
            truncate: Some(false),
            original_max_position_embeddings: Some(4096.),
            ..own
        };
    }
    let theta = fields.rope_theta.unwrap_or(family.theta);
    let defaults = Defaults { fields, head_dim, positions, theta, is_phi3: family.is_phi3 };
    let apart = own.full_attention.is_some() || own.sliding_attention.is_some();
    let Some(local_theta) = family.local_theta else {
        ensure!(!apart, "rope_parameters per kind of layer are supported for gemma3_text only: use one for all layers");
        return Ok((Rope::new(&own, defaults)?, None));
    };
    let full = if apart { own.full_attention.as_deref().cloned().unwrap_or_default() } else { own.clone() };
    let local: RopeParameters = own.sliding_attention.as_deref().cloned().unwrap_or_default();
    let local_theta = fields.rope_local_base_freq.unwrap_or(local_theta);
    Ok((Rope::new(&full, defaults)?, Some(Rope::new(&local, Defaults { theta: local_theta, ..defaults })?)))
}

/// Returns the caps of attention scores and logits.
fn softcaps(family: &Family, fields: &Fields) -> anyhow::Result<(Option<f64>, Option<f64>)> {
    let (scores, logits) = match family.caps {
        CapKeys::Both { scores, logits } => (Some(scores), Some(logits)),
        CapKeys::Unused | CapKeys::Logits => (None, None),
    };
    let scores = fields.attn_logit_softcapping.unwrap_or(scores);
    let logits = fields.final_logit_softcapping.unwrap_or(logits);
    for (name, cap) in [("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)] {
        if let Some(cap) = cap {
            above_zero(&[(name, cap)])?;
        }
    }
    match (family.caps, scores) {
        (CapKeys::Unused, _) => Ok((None, None)),
        (CapKeys::Both { .. }, _) => Ok((scores, logits)),
        (CapKeys::Logits, None) => Ok((None, logits)),
        (CapKeys::Logits, Some(cap)) => {
            bail!("attn_logit_softcapping = {cap} is not supported for {}; expected null", family.name)
        }
    }
}

/// Returns the window, and the layers that have it.
fn windows(family: &Family, fields: &Fields) -> anyhow::Result<(Option<usize>, Windows)> {
    let window = match family.window {
        WindowKeys::Unused => None,
        WindowKeys::Window(usual) => fields.sliding_window.unwrap_or(usual),
        WindowKeys::Switched(usual) => {
            let used = fields.use_sliding_window.unwrap_or(false);
            fields.sliding_window.unwrap_or(Some(usual)).filter(|_| used)
        }
    };
    let windows = match (family.layers, &fields.layer_types) {
        (WindowLayers::All, _) => Windows::All,
        (_, Some(kinds)) => Windows::Listed(listed(kinds, fields.num_hidden_layers)?),
        (WindowLayers::ListedOrAllBut(step), None) => Windows::AllBut(step),
        (WindowLayers::ListedOrPattern(usual), None) => Windows::AllBut(fields.sliding_window_pattern.unwrap_or(usual)),
        (WindowLayers::ListedOrFrom(_), None) if window.is_none() => Windows::None,
        (WindowLayers::ListedOrFrom(usual), None) => Windows::From(fields.max_window_layers.unwrap_or(usual)),
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
