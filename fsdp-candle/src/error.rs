//! The errors of this crate.

use std::fmt::{Display, Formatter};

/// An error of this crate. Names the parameter or unit, and how to fix it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of ranks or a mesh.
    #[error(transparent)]
    Core(#[from] fsdp_core::Error),
    /// An error of a checkpoint or a model file.
    #[error(transparent)]
    Checkpoint(#[from] fsdp_ckpt::Error),
    /// An error of Candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An invalid use, declaration or load of a parameter.
    #[error("parameter `{name}`: {message}")]
    Parameter {
        /// FQN of the parameter.
        name: String,
        /// Description of the error: found and expected values, and a fix.
        message: String,
    },
    /// An invalid use of a unit (one `fully_shard` call).
    #[error("FSDP unit `{unit}`: {message}")]
    Unit {
        /// Path of the unit in the model; `(root)` for the root.
        unit: String,
        /// Description of the error: found and expected values, and a fix.
        message: String,
    },
    /// A unit's module failed to build.
    #[error("FSDP unit `{unit}` failed to build: {cause}")]
    Build {
        /// Path of the unit in the model; `(root)` for the root.
        unit: String,
        /// Error of the closure of `fully_shard`.
        cause: Box<Error>,
    },
    /// A unit's collective failed.
    #[error("FSDP unit `{unit}`: {what} of {parameters} parameters failed")]
    Communication {
        /// Path of the unit in the model.
        unit: String,
        /// Name of the collective.
        what: String,
        /// Number of parameters in the collective.
        parameters: usize,
        /// Cause.
        source: Box<fsdp_core::Error>,
    },
    /// A file of shards or optimizer state could not be allocated, read or written. See [`crate::StateOnDisk`].
    #[error("rank {rank}, state on disk in {}: {message}", dir.display())]
    StateOnDisk {
        /// Rank whose state it is.
        rank: usize,
        /// Directory of the file.
        dir: std::path::PathBuf,
        /// Kind of the system's error.
        kind: std::io::ErrorKind,
        /// Description of the error: found and expected values, and a fix.
        message: String,
    },
    /// Offloaded activations could not be written or read. See
    /// [`ActivationOffload`](crate::activation_checkpoint::ActivationOffload).
    #[error(
        "rank {rank}, activations offloaded to {}: {message}",
        dir.as_ref().map_or_else(|| "host memory".into(), |dir| dir.display().to_string())
    )]
    ActivationOffload {
        /// Rank whose activations they are.
        rank: usize,
        /// Directory of the file, unless they are offloaded to host memory.
        dir: Option<std::path::PathBuf>,
        /// Kind of the system's error.
        kind: std::io::ErrorKind,
        /// Description of the error, and a fix.
        message: String,
    },
    /// Parameters, gradients or an optimizer's moments are not finite.
    #[error("{0}; lower the learning rate or the loss scale, or find the layer that overflows")]
    NonFinite(NonFinite),
    /// Gradients differ from finite differences of the loss.
    #[error("{0}")]
    Gradcheck(GradientMismatch),
    /// An invalid argument.
    #[error("{0}")]
    Argument(String),
    /// A device error.
    #[error("device: {0}")]
    Device(String),
}

impl Error {
    pub(crate) fn parameter(name: &str, message: impl Into<String>) -> Self {
        Error::Parameter { name: name.into(), message: message.into() }
    }

    pub(crate) fn unit(unit: &str, message: impl Into<String>) -> Self {
        Error::Unit { unit: unit.into(), message: message.into() }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            // Candle's wrapper shows no source, so the cause becomes context.
            error @ Error::Communication { .. } => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                candle_core::Error::wrap(error).context(cause)
            }
            error => candle_core::Error::wrap(error),
        }
    }
}

/// Error of a model's constructor or forward, of any type: `anyhow::Error`, an error of the model's own, or a text.
type ModelError = Box<dyn std::error::Error + Send + Sync>;

/// Returns an error of a user's closure as Candle's. An error of Candle or of this crate stays what it is. Others become
/// text, with their causes: Candle's wrapper shows no sources.
pub(crate) fn to_candle(error: impl Into<ModelError>) -> candle_core::Error {
    let error = match error.into().downcast::<candle_core::Error>() {
        Ok(error) => return *error,
        Err(error) => error,
    };
    match error.downcast::<Error>() {
        Ok(error) => (*error).into(),
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                let cause_text = cause.to_string();
                if !text.contains(&cause_text) {
                    text = format!("{text}: {cause_text}");
                }
                source = cause.source();
            }
            candle_core::Error::wrap(text)
        }
    }
}

/// Tensors with NaN or infinity; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct NonFinite {
    /// Norm of the gradients, if the norm was checked.
    pub norm: Option<f64>,
    /// The tensors, in the order of construction. Empty if every value is finite and only the norm is not.
    pub tensors: Vec<NonFiniteTensor>,
    /// Ranks of the map's mesh whose shards have such values.
    pub ranks: Vec<usize>,
}

/// A tensor of [`NonFinite`].
#[derive(Clone, Debug, PartialEq)]
pub struct NonFiniteTensor {
    /// FQN of the parameter.
    pub parameter: String,
    /// Kind of tensor: empty for the parameter's values, else `gradient`, `exp_avg` or `exp_avg_sq`.
    pub what: &'static str,
    /// Number of values that are NaN or infinite, over all shards; replicas count once.
    pub values: u64,
    /// Number of all values.
    pub of: u64,
}

/// The result of [`gradcheck`](crate::gradcheck) for one unit, along its worst direction.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitGradient {
    /// Path of the unit in the model; `(root)` for the root.
    pub unit: String,
    /// Product of the gradient with the direction.
    pub analytic: f64,
    /// Finite difference of the loss along the direction.
    pub numeric: f64,
    /// Largest accepted difference of the two: the requested tolerance and rounding.
    pub tolerance: f64,
}

impl UnitGradient {
    /// Returns whether the gradient agrees with the difference.
    pub fn agrees(&self) -> bool {
        self.excess() <= 1.
    }

    /// Returns the difference of the two, relative to the tolerance.
    pub(crate) fn excess(&self) -> f64 {
        let apart = (self.analytic - self.numeric).abs();
        if apart.is_nan() || self.tolerance.is_nan() {
            f64::INFINITY
        } else {
            apart / self.tolerance.max(f64::MIN_POSITIVE)
        }
    }
}

/// Units whose gradients differ from the loss's; the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientMismatch {
    /// All units with trainable parameters, in forward order.
    pub units: Vec<UnitGradient>,
}

impl GradientMismatch {
    /// Returns the units whose gradients are wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &UnitGradient> {
        self.units.iter().filter(|unit| !unit.agrees())
    }

    /// Returns the units that lost the gradient: the last unit whose gradient is wrong and the unit that runs after it.
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
                "`{}` (the loss changes by {:.4e}, the gradient gives {:.4e})",
                unit.unit, unit.numeric, unit.analytic
            )
        };
        let wrong: Vec<String> = self.wrong().map(show).collect();
        write!(f, "gradients are wrong in {} of {} units: {}. ", wrong.len(), self.units.len(), list(&wrong))?;
        let lost: Vec<String> = self.lost_in().iter().map(|unit| format!("`{}`", unit.unit)).collect();
        match &lost[..] {
            [last, next] => write!(
                f,
                "The last in forward is {last}: the gradient is lost in it, or in {next} before its parameters"
            )?,
            _ => write!(f, "The gradient is lost in {}", lost.join(", "))?,
        }
        f.write_str(
            ". candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward: use those of \
             fsdp_candle::nn. (A router that switches experts makes the loss jump, which may look like \
             a wrong gradient.)",
        )
    }
}

/// Number of tensors and ranks that a message names.
const NAMED: usize = 4;

impl Display for NonFinite {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        if let Some(norm) = self.norm {
            write!(f, "the gradients' norm is {norm}: ")?;
        }
        if self.tensors.is_empty() {
            return f.write_str("each value is finite, but the sum of their powers is not");
        }
        let total: u64 = self.tensors.iter().map(|tensor| tensor.values).sum();
        write!(f, "{total} values are infinite or NaN (on rank {}): ", list(&self.ranks))?;
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

/// Lists the first few items and counts the rest.
fn list(items: &[impl Display]) -> String {
    let named: Vec<String> = items.iter().take(NAMED).map(ToString::to_string).collect();
    match items.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
