//! What can go wrong when parameters are sharded.

use std::fmt::{Display, Formatter};

/// The errors of this crate. Each names the parameter or unit, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Between ranks, or in a mesh.
    #[error(transparent)]
    Core(#[from] fsdp_core::Error),
    /// In a checkpoint or a model file.
    #[error(transparent)]
    Checkpoint(#[from] fsdp_ckpt::Error),
    /// In Candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A parameter was used, declared or loaded in a way that can't be.
    #[error("parameter `{name}`: {message}")]
    Parameter {
        /// The parameter's FQN.
        name: String,
        /// What was expected, what was found, and the way out.
        message: String,
    },
    /// A unit (one `fully_shard` call) was used in a way that can't be.
    #[error("FSDP unit `{unit}`: {message}")]
    Unit {
        /// The unit's path in the model; the root's is `(root)`.
        unit: String,
        /// What was expected, what was found, and the way out.
        message: String,
    },
    /// A unit's module could not be built.
    #[error("FSDP unit `{unit}`, while it was built: {cause}")]
    Build {
        /// The unit's path in the model; the root's is `(root)`.
        unit: String,
        /// Why: what the closure of `fully_shard` returned.
        cause: Box<Error>,
    },
    /// A unit's collective failed.
    #[error("FSDP unit `{unit}`: {what} of {parameters} parameters failed")]
    Communication {
        /// The unit's path in the model.
        unit: String,
        /// The collective.
        what: String,
        /// How many parameters it was for.
        parameters: usize,
        /// Why.
        source: Box<fsdp_core::Error>,
    },
    /// Parameters, gradients or an optimizer's moments hold values that are infinite or not a number.
    #[error("{0}; lower the learning rate or the loss scale, or find the layer that overflows")]
    NonFinite(NonFinite),
    /// Gradients are not those of the loss.
    #[error("{0}")]
    Gradcheck(GradientMismatch),
    /// An argument that can't be.
    #[error("{0}")]
    Argument(String),
    /// The device can't be used.
    #[error("device: {0}")]
    Device(String),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            // Candle's wrapper shows its content and no source, so the cause goes along.
            error @ Error::Communication { .. } => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                candle_core::Error::wrap(error).context(cause)
            }
            error => candle_core::Error::wrap(error),
        }
    }
}

/// Tensors with values that are infinite or not a number; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFinite {
    /// The norm of the gradients, where that is what was not finite.
    pub norm: Option<f64>,
    /// The tensors, in the order in which the parameters were built. Empty when every value is finite and only their
    /// norm is not.
    pub tensors: Vec<NonFiniteTensor>,
    /// The ranks of the map's mesh whose shards hold such values.
    pub ranks: Vec<usize>,
}

/// A tensor of [`NonFinite`].
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteTensor {
    /// The parameter's FQN.
    pub parameter: String,
    /// What of the parameter it is: empty for its values, else `gradient`, `exp_avg` or `exp_avg_sq`.
    pub what: &'static str,
    /// How many values are infinite or not a number, over all shards; replicas count once.
    pub values: u64,
    /// How many there are.
    pub of: u64,
}

/// What [`gradcheck`](crate::gradcheck) found of one unit, along the direction in which it is worst.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitGradient {
    /// The unit's path in the model; the root's is `(root)`.
    pub unit: String,
    /// The product of the gradient with the direction.
    pub analytic: f64,
    /// What the loss changes by along the direction.
    pub numeric: f64,
    /// How far the two may be apart: what was asked for, and rounding.
    pub tolerance: f64,
}

impl UnitGradient {
    /// Whether the gradient is right, as far as was looked.
    pub fn agrees(&self) -> bool {
        self.excess() <= 1.
    }

    /// How far the two are apart, of what they may be.
    pub(crate) fn excess(&self) -> f64 {
        let apart = (self.analytic - self.numeric).abs();
        if apart.is_nan() || self.tolerance.is_nan() {
            f64::INFINITY
        } else {
            apart / self.tolerance.max(f64::MIN_POSITIVE)
        }
    }
}

/// Units whose gradients are not those of the loss; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientMismatch {
    /// All units with trainable parameters, in the order in which they run.
    pub units: Vec<UnitGradient>,
}

impl GradientMismatch {
    /// Those whose gradients are wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &UnitGradient> {
        self.units.iter().filter(|unit| !unit.agrees())
    }

    /// The units that the gradient was lost in: the last whose gradient is wrong, behind its parameters, or the one
    /// that runs after it, before its own.
    pub fn lost_in(&self) -> &[UnitGradient] {
        match self.units.iter().rposition(|unit| !unit.agrees()) {
            Some(last) => &self.units[last..self.units.len().min(last + 2)],
            None => &[],
        }
    }
}

impl Display for GradientMismatch {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let show = |unit: &UnitGradient| {
            format!(
                "`{}` (the loss changes by {:.4e}, the gradient says {:.4e})",
                unit.unit, unit.numeric, unit.analytic
            )
        };
        let wrong: Vec<String> = self.wrong().map(show).collect();
        write!(f, "gradients are wrong in {} of {} units: {}. ", wrong.len(), self.units.len(), list(&wrong))?;
        let lost: Vec<String> = self.lost_in().iter().map(|unit| format!("`{}`", unit.unit)).collect();
        match &lost[..] {
            [last, next] => write!(
                f,
                "The last of them in forward is {last}: gradient is lost in it, or in {next} before the parameters \
                 there"
            )?,
            _ => write!(f, "Gradient is lost in {}", lost.join(", "))?,
        }
        f.write_str(
            ". candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward: use those of \
             fsdp_candle::nn. (Where a router chooses other experts nearby, the loss jumps, and what is right may \
             look wrong.)",
        )
    }
}

/// How many tensors and ranks a message names.
const NAMED: usize = 4;

impl Display for NonFinite {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        if let Some(norm) = self.norm {
            write!(f, "the gradients' norm is {norm}: ")?;
        }
        if self.tensors.is_empty() {
            return f.write_str("each value is finite, and the sum of their powers is not");
        }
        let total: u64 = self.tensors.iter().map(|tensor| tensor.values).sum();
        write!(f, "{total} values are infinite or not a number (on rank {}): ", list(&self.ranks))?;
        write!(f, "{}", list(&self.tensors))
    }
}

impl Display for NonFiniteTensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let NonFiniteTensor { parameter, what, values, of } = self;
        match *what {
            "" => write!(f, "{values} of {of} in `{parameter}`"),
            what => write!(f, "{values} of {of} in the {what} of `{parameter}`"),
        }
    }
}

/// The first of them, and how many more there are.
fn list(items: &[impl Display]) -> String {
    let named: Vec<String> = items.iter().take(NAMED).map(ToString::to_string).collect();
    match items.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
