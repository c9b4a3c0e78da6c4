//! What stands for a unit, an unshard or a finalization.

use std::sync::Arc;

use candle_core::Result;
use candle_core::backprop::GradStore;

use crate::fsdp::step::Schedule;
use crate::fsdp::unit::{FsdpParam, ParamGroup, UnitId};

/// A unit, as prefetch lists name it. Units by name have no other handle.
#[derive(Clone)]
pub struct Unit(pub(super) Arc<ParamGroup>);

impl Unit {
    /// The unit's path in the model, `(root)` for the root.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Its parameters.
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.0.params()
    }

    /// Its position in the order in which units were made.
    pub(crate) fn index(&self) -> usize {
        self.0.index()
    }

    pub(super) fn id(&self) -> &UnitId {
        self.0.id()
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unit({})", self.0.name())
    }
}

/// An unshard in flight.
#[must_use = "the parameters are there when wait() returns, or when the unit's forward begins"]
pub struct UnshardHandle(pub(super) Arc<ParamGroup>);

impl UnshardHandle {
    /// Waits until the parameters are there. A forward that begins before waits itself.
    ///
    /// # Errors
    /// Those of the all-gather.
    pub fn wait(self) -> Result<()> {
        self.0.unshard()
    }
}

/// A finalization in flight.
#[must_use = "gradients come from wait()"]
pub struct FinalizeHandle(pub(super) Arc<Schedule>);

impl FinalizeHandle {
    /// Waits for the reductions and files the sharded gradients in `grads`.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        self.0.finalize_backward(grads)
    }
}
