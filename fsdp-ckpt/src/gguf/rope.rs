//! Rotary embeddings: `config.json`'s fields, and what llama.cpp reads instead.

use std::f64::consts::TAU;
use std::path::Path;

use serde::Deserialize;

use crate::Result;
use crate::gguf::config::Architecture;
use crate::text_file::malformed;

/// Fields of `config.json`.
#[derive(Deserialize)]
pub(super) struct RopeFields {
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    rope_parameters: Option<Box<Parameters>>,
    rope_scaling: Option<Box<Parameters>>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// `rope_parameters`, or the older `rope_scaling`.
#[derive(Clone, Default, PartialEq, Deserialize)]
struct Parameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// Older name of `rope_type`.
    #[serde(rename = "type")]
    old_rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    /// Gemma 3 has one rotary embedding per kind of layer.
    full_attention: Option<Box<Parameters>>,
    sliding_attention: Option<Box<Parameters>>,
}

impl Parameters {
    fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.old_rope_type.as_deref()).unwrap_or("default")
    }
}

/// A rotary embedding.
#[derive(Debug)]
pub(super) struct Rope {
    /// Base of the frequencies.
    pub(super) theta: f64,
    /// Base for layers with a sliding window, if it may differ.
    pub(super) local_theta: Option<f64>,
    /// Elements of a head that are rotated.
    pub(super) width: usize,
    pub(super) scaling: Scaling,
}

/// Scaling of the frequencies.
#[derive(Debug)]
pub(super) enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    /// Llama 3's scaling, as a divisor for each frequency.
    Divisors(Vec<f32>),
    Yarn {
        factor: f64,
        context: f64,
        attention: f64,
    },
    Long {
        context: f64,
        short: Vec<f32>,
        long: Vec<f32>,
        attention: f64,
    },
}

impl Rope {
    pub(super) fn new(
        path: &Path,
        architecture: Architecture,
        fields: &RopeFields,
        head_dim: usize,
        positions: usize,
    ) -> Result<Self> {
        // In transformers, the older name wins where a file has both, unless it is empty.
        let older = fields.rope_scaling.as_deref().filter(|older| **older != Parameters::default());
        let own = older.or(fields.rope_parameters.as_deref()).cloned().unwrap_or_default();
        let full = own.full_attention.as_deref().unwrap_or(&own);
        let fail = |item: &str, reason: String| Err(malformed(path, Some(item), reason));
        let usual = if architecture == Architecture::Gemma3 { 1e6 } else { 1e4 };
        let theta = full.rope_theta.or(fields.rope_theta).unwrap_or(usual);
        let local = own.sliding_attention.as_deref();
        if let Some(local) = local
            && local.kind() != "default"
        {
            let found = format!("its sliding_attention has type {:?}, and llama.cpp scales only", local.kind());
            return fail("rope_parameters", format!("{found} full_attention; expected \"default\""));
        }
        let local_theta = match architecture {
            Architecture::Gemma3 => {
                local.and_then(|local| local.rope_theta).or(fields.rope_local_base_freq).or(Some(1e4))
            }
            _ => None,
        };
        let part = match full.partial_rotary_factor.or(fields.partial_rotary_factor) {
            // transformers ignores it for the default kind, except for Phi-3.
            Some(part) if architecture == Architecture::Phi3 || full.kind() != "default" => part,
            _ => 1.,
        };
        let width = (head_dim as f64 * part) as usize;
        if width == 0 || !width.is_multiple_of(2) || width > head_dim {
            return fail("head_dim", format!("{width} of {head_dim} elements are rotated, expected an even number"));
        }
        if width != head_dim && architecture != Architecture::Phi3 {
            let name = architecture.name();
            return fail("partial_rotary_factor", format!("it is {part}, and llama.cpp's {name} needs 1"));
        }
        // Phi-3 has the field for models without scaling, too.
        let context = fields.original_max_position_embeddings.or(full.original_max_position_embeddings);
        let scaling = match full.kind() {
            // `dynamic` differs only beyond the model's positions.
            "default" | "dynamic" => Ok(Scaling::None),
            "linear" => full.number("factor", full.factor).map(|factor| Scaling::Linear { factor }),
            "llama3" if architecture == Architecture::Llama => {
                full.llama3(theta, width, context.unwrap_or(positions as f64))
            }
            "yarn" if architecture != Architecture::Phi3 && !architecture.is_gemma() => {
                full.yarn(context.unwrap_or(positions as f64), positions)
            }
            "longrope" | "su" | "yarn" if matches!(architecture, Architecture::Phi3 | Architecture::Llama) => {
                full.long(context.unwrap_or(positions as f64), positions, width)
            }
            other => Err(format!("{other:?} is not supported by llama.cpp's {}", architecture.name())),
        };
        match scaling {
            Ok(scaling) => Ok(Rope { theta, local_theta, width, scaling }),
            Err(reason) => fail("rope_parameters", reason),
        }
    }

    /// Returns the tensors of frequency divisors, by name.
    pub(super) fn tensors(&self) -> Vec<(&'static str, Vec<f32>)> {
        match &self.scaling {
            Scaling::Divisors(divisors) => vec![("rope_freqs.weight", divisors.clone())],
            Scaling::Long { short, long, .. } => {
                vec![("rope_factors_long.weight", long.clone()), ("rope_factors_short.weight", short.clone())]
            }
            _ => Vec::new(),
        }
    }
}

type Reason = String;

/// llama.cpp's constants of YaRN.
const FAST: f64 = 32.;
const SLOW: f64 = 1.;

impl Parameters {
    fn number(&self, name: &str, value: Option<f64>) -> Result<f64, Reason> {
        let found = value.map_or("missing".to_string(), |value| value.to_string());
        let valid = value.filter(|value| value.is_finite() && *value > 0.);
        valid.ok_or_else(|| format!("type {:?} needs {name} above 0, it is {found}", self.kind()))
    }

    /// Computes the divisors of Llama 3.1, as transformers' `_compute_llama3_parameters` does.
    fn llama3(&self, theta: f64, width: usize, context: f64) -> Result<Scaling, Reason> {
        let factor = self.number("factor", self.factor)?;
        let low = self.number("low_freq_factor", self.low_freq_factor)?;
        let high = self.number("high_freq_factor", self.high_freq_factor)?;
        if low >= high {
            return Err(format!("low_freq_factor is {low}, expected less than high_freq_factor = {high}"));
        }
        let divisors = (0..width / 2).map(|at| {
            let frequency = theta.powf(-2. * at as f64 / width as f64);
            // 0 for slow frequencies, which are divided by the factor. 1 for fast ones, which stay.
            let smooth = ((context * frequency / TAU - low) / (high - low)).clamp(0., 1.);
            (1. / ((1. - smooth) / factor + smooth)) as f32
        });
        Ok(Scaling::Divisors(divisors.collect()))
    }

    /// Reads YaRN, as transformers' `_compute_yarn_parameters` does.
    fn yarn(&self, context: f64, positions: usize) -> Result<Scaling, Reason> {
        let factor = self.number("factor", Some(self.factor.unwrap_or(positions as f64 / context)))?;
        if self.truncate == Some(false) {
            return Err("truncate is false, and llama.cpp always rounds the range of YaRN".into());
        }
        let (fast, slow) = (self.beta_fast.unwrap_or(FAST), self.beta_slow.unwrap_or(SLOW));
        if (fast, slow) != (FAST, SLOW) {
            return Err(format!("beta_fast is {fast} and beta_slow is {slow}, and llama.cpp uses {FAST} and {SLOW}"));
        }
        let mscale = |by: f64| if factor <= 1. { 1. } else { 0.1 * by * factor.ln() + 1. };
        let given = |value: Option<f64>| value.filter(|value| *value != 0.);
        let attention = match (self.attention_factor, given(self.mscale), given(self.mscale_all_dim)) {
            (Some(attention), ..) => attention,
            (None, Some(own), Some(all)) => mscale(own) / mscale(all),
            _ => mscale(1.),
        };
        // llama.cpp multiplies its own factor by the one in the file.
        Ok(Scaling::Yarn { factor, context, attention: attention / mscale(1.) })
    }

    /// Reads LongRoPE, as transformers' `_compute_longrope_parameters` does.
    fn long(&self, context: f64, positions: usize, width: usize) -> Result<Scaling, Reason> {
        let list = |name: &str, list: &Option<Vec<f64>>| {
            let list = list.as_ref().ok_or_else(|| format!("type {:?} needs {name}", self.kind()))?;
            if list.len() != width / 2 {
                return Err(format!("{name} has {} numbers, expected {}", list.len(), width / 2));
            }
            Ok(list.iter().map(|value| *value as f32).collect())
        };
        let factor = self.factor.unwrap_or(positions as f64 / context);
        let usual = if factor <= 1. { 1. } else { (1. + factor.ln() / context.ln()).sqrt() };
        Ok(Scaling::Long {
            context,
            short: list("short_factor", &self.short_factor)?,
            long: list("long_factor", &self.long_factor)?,
            attention: self.attention_factor.unwrap_or(usual),
        })
    }
}
