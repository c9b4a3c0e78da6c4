//! The handles that an [`FsdpModule`](crate::FsdpModule) returns: for units, pending unshards and pending
//! reductions.

use std::sync::Arc;

use candle_core::Result;
use candle_core::backprop::GradStore;

use super::param::FsdpParam;
use super::param_group::FsdpParamGroup;
use super::schedule::Schedule;

/// Handle of the units that [`FsdpModule::unshard_all`](crate::FsdpModule::unshard_all) holds unsharded. Dropping it
/// reshards them, without a collective.
#[must_use = "the units are resharded when the handle is dropped"]
pub struct UnshardedUnits {
    pub(super) schedule: Arc<Schedule>,
    pub(super) units: Vec<Arc<FsdpParamGroup>>,
}

impl Drop for UnshardedUnits {
    fn drop(&mut self) {
        self.schedule.release(&self.units);
    }
}

impl std::fmt::Debug for UnshardedUnits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.units.iter().map(|unit| unit.name())).finish()
    }
}

/// A unit, for prefetch lists. Units by name have no other handle.
#[derive(Clone)]
pub struct Unit(pub(super) Arc<FsdpParamGroup>);

impl Unit {
    /// Returns the unit's path in the model, `(root)` for the root.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the unit's parameters.
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.0.params()
    }

    /// Returns the unit's position in the order in which units were made.
    pub(crate) fn index(&self) -> usize {
        self.0.index()
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unit({})", self.name())
    }
}

/// A pending unshard.
#[must_use = "the parameters are unsharded when wait() returns, or when the unit's forward begins"]
pub struct UnshardHandle(pub(super) Vec<Arc<FsdpParamGroup>>);

impl UnshardHandle {
    /// Waits until the parameters are unsharded. A forward that begins earlier waits for them, too.
    pub fn wait(self) -> Result<()> {
        self.0.iter().try_for_each(|unit| unit.unshard())
    }
}

/// A pending finalization of a backward.
#[must_use = "wait() stores the gradients"]
pub struct GradientReductionHandle(pub(super) Arc<Schedule>);

impl GradientReductionHandle {
    /// Waits for the reductions and stores the sharded gradients in `grads`.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        self.0.finalize_backward(grads)
    }
}
