//! Who hears of uses: a unit that nobody calls is gathered when one of its parameters is first used.

use std::ops::Range;
use std::sync::{OnceLock, Weak};

use candle_core::Result;

use super::path::UnitId;

/// Hears that a layer is about to use a parameter of a unit.
pub(crate) trait Uses: Send + Sync {
    /// Gathers the unit, if a forward or backward runs. `misses` tells whether the layer needs values that are absent.
    fn used(&self, unit: &UnitId, misses: bool) -> Result<()>;

    /// Notes that backward will run a closure again when it comes to the node with the number `node`. In forward it
    /// made the nodes with the numbers `made`.
    fn replays(&self, made: Range<usize>, node: usize);
}

/// Who hears of a parameter's uses, if anybody does. Set once.
pub(super) type Told = OnceLock<Weak<dyn Uses>>;
