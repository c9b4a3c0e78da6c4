//! Messages for events that the order does not allow.

use std::cell::RefCell;
use std::sync::Arc;

use crate::error::Error;
use crate::fsdp::diagnostics::is_freed_storage_error;
use crate::fsdp::order::OrderError;
use crate::fsdp::unit_path::UnitId;

/// Error for a step of a model that a handle of `unshard_all` holds.
pub(super) const HELD: &str = "a handle of `unshard_all` holds units of the model, whose forwards have no graph: drop \
     the handle before a forward or backward that trains";

thread_local! {
    /// The unit whose backward this thread runs.
    pub(super) static RUNNING: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

/// Explains Candle's message about F4 in backward, where no call of a unit is missing.
pub(super) fn explain_backward(error: candle_core::Error, unit: &UnitId) -> candle_core::Error {
    if !is_freed_storage_error(&error) {
        return error;
    }
    error.context(format!(
        "FSDP unit `{}`: backward came to parameters that are sharded (Candle calls their storage F4). Either the \
         loss's graph has been through backward, or was dropped by reset_iter_state or a failed step: run forward \
         again. If several optimizers share the loss, call `let grads = model.backward(&loss)?` once, and `step(&grads)` \
         of each. Or a unit has set_unshard_in_backward(false) and was not unsharded by hand",
        unit.name
    ))
}

/// Explains why an event is not allowed.
pub(super) fn explain(error: OrderError, unit: &UnitId) -> candle_core::Error {
    let message = match error {
        OrderError::InBackward => {
            "its forward was called while backward runs. Put a checkpoint inside the unit, not around it, and call a \
             model from one thread at a time"
        }
        OrderError::Held => HELD,
        OrderError::NotPlanned => {
            "backward came to it, which the loss's graph did not show before. Ranks may use different parameters \
             (set_reduce_scatter_unused_params): call the unit through its FsdpModule, and use its parameters inside"
        }
        OrderError::InForward | OrderError::NoBackward => {
            if let Some(other) = RUNNING.with_borrow(Clone::clone) {
                return candle_core::Error::msg(format!(
                    "the backward of unit `{other}` came to unit `{}`, which is of another ShardedVarMap: a backward \
                     reduces the gradients of one map. Build both models from one map, each with its own outermost \
                     fully_shard and its own prefix, as in the section \"Two models\" of docs/from-candle.md",
                    unit.name
                ));
            }
            return candle_core::Error::msg(
                "the loss's own backward() was called on a sharded model: call `backward(&loss)` of the FsdpModule, \
                 which reduces the gradients, and `step(&grads)`. Or `backward_step(&loss)` of an optimizer of \
                 fsdp_candle does both; CandleOptimizer wraps optimizers of other crates",
            );
        }
    };
    Error::unit(&unit.name, message).into()
}
