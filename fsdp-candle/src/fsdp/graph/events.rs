//! The one call that goes up: what the graph's operations report while Candle's backward runs.

use std::sync::{Arc, Weak};

use candle_core::{Result, bail};

use crate::fsdp::unit::{FsdpParam, UnitId};

/// Hears what backward comes to.
pub(crate) trait BackwardEvents: Send + Sync {
    /// Backward is about to enter a unit, in this pass.
    fn before_unit(&self, unit: &UnitId, pass: usize) -> Result<()>;

    /// Backward has been through everything between a unit's inputs and outputs.
    fn after_unit(&self, unit: &UnitId) -> Result<()>;

    /// Every use of a parameter has been processed: nobody needs its values any more, and its gradient is whole.
    fn gradient_complete(&self, param: &FsdpParam) -> Result<()>;

    /// Every use of a parameter in one pass of its unit has been processed.
    fn pass_complete(&self, param: &FsdpParam, pass: usize) -> Result<()>;
}

/// Who hears the operations of one model, which do not keep it alive.
#[derive(Clone)]
pub(crate) struct Listener(Weak<dyn BackwardEvents>);

impl Listener {
    pub(crate) fn new<T: BackwardEvents + 'static>(events: &Arc<T>) -> Self {
        let events: Weak<T> = Arc::downgrade(events);
        Listener(events)
    }

    pub(super) fn of_unit(&self, unit: &UnitId) -> Result<Arc<dyn BackwardEvents>> {
        match self.0.upgrade() {
            Some(events) => Ok(events),
            None => bail!("the ShardedVarMap of FSDP unit `{}` was dropped; keep it as long as the model", unit.name),
        }
    }

    pub(super) fn of_parameter(&self, param: &FsdpParam) -> Result<Arc<dyn BackwardEvents>> {
        match self.0.upgrade() {
            Some(events) => Ok(events),
            None => bail!(
                "the FSDP unit of parameter `{}` is gone: keep the FsdpModule alive until after backward",
                param.name()
            ),
        }
    }
}
