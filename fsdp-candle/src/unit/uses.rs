//! Who hears of uses: a unit that nobody calls is gathered when one of its parameters is first used.

use std::sync::{OnceLock, Weak};

use candle_core::Result;

use super::path::UnitId;

/// Hears that a layer is about to use a parameter of a unit.
pub(crate) trait Uses: Send + Sync {
    /// Gathers the unit, if a forward or backward runs.
    fn used(&self, unit: &UnitId) -> Result<()>;
}

/// Who hears of a parameter's uses, if anybody does. Set once.
pub(super) type Told = OnceLock<Weak<dyn Uses>>;
