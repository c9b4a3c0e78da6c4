//! Who gathers and frees a parameter: the unit that it belongs to.

use std::sync::{OnceLock, Weak};

use candle_core::Result;

/// A unit, as its parameters know it.
pub(super) trait Holder: Send + Sync {
    /// Frees the full values of all its parameters.
    fn reshard(&self) -> Result<()>;
}

/// A parameter's unit, once it is built.
pub(super) struct HeldBy(OnceLock<Weak<dyn Holder>>);

impl HeldBy {
    pub(super) fn nobody() -> Self {
        HeldBy(OnceLock::new())
    }

    /// Set once, by the unit that built the parameter.
    pub(super) fn set(&self, holder: Weak<dyn Holder>) {
        let _ = self.0.set(holder);
    }

    /// Frees the full values of the unit, which are those of a shard that is about to change.
    pub(super) fn reshard(&self) -> Result<()> {
        self.0.get().and_then(Weak::upgrade).map_or(Ok(()), |unit| unit.reshard())
    }
}
