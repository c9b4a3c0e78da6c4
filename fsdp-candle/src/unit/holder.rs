//! Who gathers and frees a parameter: the unit that it belongs to.

use std::sync::{OnceLock, Weak};

use candle_core::Result;

/// A unit, as its parameters know it.
pub(super) trait Holder: Send + Sync {
    /// Frees the full values of all its parameters.
    fn reshard(&self) -> Result<()>;
}

/// A parameter's unit. Set once.
pub(super) type HeldBy = OnceLock<Weak<dyn Holder>>;
