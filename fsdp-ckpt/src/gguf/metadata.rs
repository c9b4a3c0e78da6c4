//! The key-value pairs of a GGUF file.

use crate::gguf::config::{Architecture, Config};
use crate::gguf::quantize::Quantization;
use crate::gguf::rope::{Rope, Scaling};

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
}

impl From<usize> for Value {
    /// Converts a size. `Config` checks that sizes fit.
    fn from(value: usize) -> Self {
        Value::U32(value as u32)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Value::F32(value as f32)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::Text(value.to_string())
    }
}

/// Version of the quantized types' layouts.
const QUANTIZATION_VERSION: usize = 2;

/// Key-value pairs in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    pub(super) entries: Vec<(String, Value)>,
}

impl Metadata {
    pub(super) fn add(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.entries.push((key.into(), value.into()));
    }

    /// Adds the description of a model.
    pub(super) fn describe(&mut self, config: &Config, quantization: Quantization, name: Option<&str>) {
        let arch = config.architecture.name();
        self.add("general.architecture", arch);
        self.add("general.type", "model");
        if let Some(name) = name {
            self.add("general.name", name);
        }
        self.add("general.file_type", quantization.file_type());
        self.add("general.quantization_version", QUANTIZATION_VERSION);
        let mut own = |key: &str, value: Value| self.add(format!("{arch}.{key}"), value);
        own("vocab_size", config.vocabulary.into());
        own("context_length", config.positions.into());
        own("embedding_length", config.width.into());
        own("block_count", config.layers.into());
        own("feed_forward_length", config.inner.into());
        own("attention.head_count", config.heads.into());
        match config.architecture {
            Architecture::Gpt2 => own("attention.layer_norm_epsilon", config.eps.into()),
            Architecture::Bert => {
                own("attention.layer_norm_epsilon", config.eps.into());
                own("attention.causal", Value::Bool(false));
            }
            _ => {
                own("attention.head_count_kv", config.kv_heads.into());
                own("attention.key_length", config.head_dim.into());
                own("attention.value_length", config.head_dim.into());
                own("attention.layer_norm_rms_epsilon", config.eps.into());
            }
        }
        if let Some(experts) = config.experts {
            own("expert_count", experts.count.into());
            own("expert_used_count", experts.used.into());
            if config.architecture == Architecture::Qwen3Moe {
                own("expert_feed_forward_length", experts.inner.into());
            }
        }
        if config.architecture.is_gemma()
            && let Some((window, _)) = config.window
        {
            own("attention.sliding_window", window.into());
            if let Some(layers) = config.unusual_windows() {
                own("attention.sliding_window_pattern", Value::Bools(layers.to_vec()));
            }
        }
        for (key, cap) in ["attn_logit_softcapping", "final_logit_softcapping"].into_iter().zip(config.softcaps) {
            if let Some(cap) = cap {
                own(key, cap.into());
            }
        }
        if let Some(rope) = &config.rope {
            self.describe_rope(arch, rope);
        }
        if config.architecture == Architecture::Bert {
            self.add("tokenizer.ggml.token_type_count", config.segments);
        }
    }

    fn describe_rope(&mut self, arch: &str, rope: &Rope) {
        let mut own = |key: &str, value: Value| self.add(format!("{arch}.rope.{key}"), value);
        own("dimension_count", rope.width.into());
        own("freq_base", rope.theta.into());
        if let Some(theta) = rope.local_theta {
            own("freq_base_swa", theta.into());
        }
        match &rope.scaling {
            Scaling::None | Scaling::Divisors(_) => {}
            Scaling::Linear { factor } => {
                own("scaling.type", "linear".into());
                own("scaling.factor", (*factor).into());
            }
            Scaling::Yarn { factor, context, attention } => {
                own("scaling.type", "yarn".into());
                own("scaling.factor", (*factor).into());
                own("scaling.original_context_length", (*context as usize).into());
                own("scaling.attn_factor", (*attention).into());
            }
            Scaling::Long { context, attention, .. } => {
                own("scaling.type", "longrope".into());
                own("scaling.original_context_length", (*context as usize).into());
                own("scaling.attn_factor", (*attention).into());
            }
        }
    }

    /// Marks the model as one without a tokenizer, and returns the tokenizer's kind.
    pub(super) fn without_vocabulary(&mut self) -> &'static str {
        self.add("tokenizer.ggml.model", "no_vocab");
        "no_vocab"
    }
}
