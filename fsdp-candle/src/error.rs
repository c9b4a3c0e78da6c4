//! What can go wrong when parameters are sharded.

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
    /// The gradients' norm is infinite or not a number.
    #[error(
        "the gradients' norm is {norm}: lower the learning rate or the loss scale, or find the layer that overflows"
    )]
    NonFinite {
        /// The norm.
        norm: f64,
    },
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

/// A [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
