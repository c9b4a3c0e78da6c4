//! Rotary embeddings in `config.json`.

use std::f64::consts::TAU;

use anyhow::{Context, bail, ensure};

use crate::models::config::above_zero;
use crate::models::config::fields::{Fields, RopeParameters};

/// Frequencies for sequences of more than this many positions, if they differ.
pub type LongFrequencies = Option<(usize, Vec<f32>)>;

/// Configuration of a rotary embedding.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated.
    pub width: usize,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Plain,
    Linear { factor: f64 },
    Llama3(Llama3Scaling),
    Yarn { factor: f64, low: f64, high: f64, growth: f64 },
    Long { context: f64, short: Vec<f64>, long: Vec<f64>, growth: f64 },
}

/// Frequency scaling of Llama 3.1, as in transformers' `_compute_llama3_parameters`.
#[derive(Clone, Debug)]
struct Llama3Scaling {
    factor: f64,
    low: f64,
    high: f64,
    context: f64,
}

impl Llama3Scaling {
    fn apply(&self, frequency: f64) -> f64 {
        // Rotations over the original context.
        let turns = self.context * frequency / TAU;
        // 0 for slow frequencies, which are divided by the factor. 1 for fast ones, which stay.
        let smooth = ((turns - self.low) / (self.high - self.low)).clamp(0., 1.);
        (1. - smooth) * frequency / self.factor + smooth * frequency
    }
}

/// Fields of the model on which a rotary embedding depends.
#[derive(Clone, Copy)]
pub(super) struct Defaults<'a> {
    pub(super) fields: &'a Fields,
    pub(super) head_dim: usize,
    pub(super) positions: usize,
    /// Default base.
    pub(super) theta: f64,
    /// Whether heads may be rotated in part, and LongRoPE may have its names from older files.
    pub(super) is_phi3: bool,
}

impl Rope {
    pub(super) fn new(own: &RopeParameters, defaults: Defaults<'_>) -> anyhow::Result<Self> {
        let Defaults { fields, head_dim, positions, .. } = defaults;
        let theta = own.rope_theta.unwrap_or(defaults.theta);
        above_zero(&[("rope_theta", theta)])?;
        let kind = own.rope_type.as_deref().or(own.old_rope_type.as_deref()).unwrap_or("default");
        let part = own.partial_rotary_factor.or(fields.partial_rotary_factor).unwrap_or(1.);
        ensure!(part > 0. && part <= 1., "partial_rotary_factor = {part} must be above 0 and at most 1");
        // Elsewhere, transformers reads it for other kinds only, and then can't multiply the shapes.
        let part = match kind {
            _ if defaults.is_phi3 || part == 1. => part,
            "default" => 1.,
            _ => bail!("partial_rotary_factor = {part} is not supported with rope_type \"{kind}\"; expected 1"),
        };
        let width = (head_dim as f64 * part) as usize;
        ensure!(
            width > 0 && width.is_multiple_of(2),
            "head_dim = {head_dim} and its product with partial_rotary_factor = {part} must be even and at least 2"
        );
        let needed = |name: &str, value: Option<f64>| {
            let value = value.with_context(|| format!("rope_type \"{kind}\" needs {name}"))?;
            above_zero(&[(name, value)])?;
            Ok::<f64, anyhow::Error>(value)
        };
        let context = || {
            let of_file = fields.original_max_position_embeddings.or(own.original_max_position_embeddings);
            needed("original_max_position_embeddings", Some(of_file.unwrap_or(positions as f64)))
        };
        // Default ratio of the new context to the original one.
        let growth = |context: f64| own.factor.unwrap_or(positions as f64 / context);
        let kind = match kind {
            // `dynamic` differs only beyond the model's positions, and sequences are never as long.
            "default" | "dynamic" => Kind::Plain,
            "linear" => Kind::Linear { factor: needed("factor", own.factor)? },
            "llama3" => Kind::Llama3(own.llama3(needed, context()?)?),
            "su" | "yarn" if defaults.is_phi3 => own.long(width, context()?, growth)?,
            "longrope" => own.long(width, context()?, growth)?,
            "yarn" => own.yarn(theta, width, context()?, growth)?,
            other => bail!(
                "rope_type = \"{other}\" is not supported; expected \"default\", \"linear\", \"dynamic\", \"llama3\", \
                 \"yarn\" or \"longrope\""
            ),
        };
        Ok(Rope { theta, width, kind })
    }

    /// Returns the frequencies and the factor of rotated elements. For types with other frequencies for longer
    /// sequences, also returns the longest length of the first, and the others.
    pub fn frequencies(&self) -> (Vec<f32>, f64, LongFrequencies) {
        let each = |of: &dyn Fn(usize, f64) -> f64| -> Vec<f32> {
            let plain = |i: usize| self.theta.powf(-2. * i as f64 / self.width as f64);
            (0..self.width / 2).map(|i| of(i, plain(i)) as f32).collect()
        };
        match &self.kind {
            Kind::Plain => (each(&|_, plain| plain), 1., None),
            Kind::Linear { factor } => (each(&|_, plain| plain / factor), 1., None),
            Kind::Llama3(scaling) => (each(&|_, plain| scaling.apply(plain)), 1., None),
            Kind::Yarn { factor, low, high, growth } => {
                // 0 for fast frequencies, which stay. 1 for slow ones, which are divided.
                let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0., 1.);
                (each(&|i, plain| plain / factor * ramp(i) + plain * (1. - ramp(i))), *growth, None)
            }
            Kind::Long { context, short, long, growth } => {
                let divided = |by: &[f64]| each(&|i, plain| plain / by[i]);
                (divided(short), *growth, Some((*context as usize, divided(long))))
            }
        }
    }

    /// Returns the number of sine and cosine tables.
    pub fn tables(&self) -> f64 {
        if matches!(self.kind, Kind::Long { .. }) { 2. } else { 1. }
    }
}

impl RopeParameters {
    fn llama3(
        &self,
        needed: impl Fn(&str, Option<f64>) -> anyhow::Result<f64>,
        context: f64,
    ) -> anyhow::Result<Llama3Scaling> {
        let factor = needed("factor", self.factor)?;
        let low = needed("low_freq_factor", self.low_freq_factor)?;
        let high = needed("high_freq_factor", self.high_freq_factor)?;
        ensure!(low < high, "low_freq_factor = {low} must be below high_freq_factor = {high}");
        Ok(Llama3Scaling { factor, low, high, context })
    }

    /// Reads YaRN (Peng et al., 2023, arXiv:2309.00071), as transformers' `_compute_yarn_parameters` does.
    fn yarn(&self, theta: f64, width: usize, context: f64, growth: impl Fn(f64) -> f64) -> anyhow::Result<Kind> {
        let factor = growth(context);
        let (fast, slow) = (self.beta_fast.unwrap_or(32.), self.beta_slow.unwrap_or(1.));
        above_zero(&[("factor", factor), ("beta_fast", fast), ("beta_slow", slow)])?;
        let width = width as f64;
        // Index of the pair with this many rotations over the original context.
        let pair = |turns: f64| width * (context / (turns * TAU)).ln() / (2. * theta.ln());
        let (low, high) = match self.truncate {
            Some(false) => (pair(fast), pair(slow)),
            _ => (pair(fast).floor(), pair(slow).ceil()),
        };
        let (low, high) = (low.max(0.), high.min(width - 1.));
        let high = if low == high { high + 0.001 } else { high };
        let mscale = |by: f64| if factor <= 1. { 1. } else { 0.1 * by * factor.ln() + 1. };
        let given = |value: Option<f64>| value.filter(|value| *value != 0.);
        let growth = match (self.attention_factor, given(self.mscale), given(self.mscale_all_dim)) {
            (Some(growth), ..) => growth,
            (None, Some(own), Some(all)) => mscale(own) / mscale(all),
            _ => mscale(1.),
        };
        Ok(Kind::Yarn { factor, low, high, growth })
    }

    /// Reads LongRoPE (Ding et al., 2024, arXiv:2402.13753), as transformers' `_compute_longrope_parameters` does.
    fn long(&self, width: usize, context: f64, growth: impl Fn(f64) -> f64) -> anyhow::Result<Kind> {
        let list = |name: &str, list: &Option<Vec<f64>>| {
            let list = list.clone().with_context(|| format!("rope_type \"longrope\" needs {name}"))?;
            ensure!(list.len() == width / 2, "{name} has {} numbers, but {} pairs are rotated", list.len(), width / 2);
            list.iter().try_for_each(|factor| above_zero(&[(name, *factor)]))?;
            Ok::<_, anyhow::Error>(list)
        };
        let factor = growth(context);
        let usual = if factor <= 1. { 1. } else { (1. + factor.ln() / context.ln()).sqrt() };
        Ok(Kind::Long {
            context,
            short: list("short_factor", &self.short_factor)?,
            long: list("long_factor", &self.long_factor)?,
            growth: self.attention_factor.unwrap_or(usual),
        })
    }
}
