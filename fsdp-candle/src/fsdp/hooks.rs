//! Nodes of Candle's graph at the boundaries of a unit, which run hooks in backward.
//!
//! - An output of a unit passes a [`BoundaryHook`], whose backward runs before the unit's.
//! - An input of a unit with frozen parameters passes one too, whose backward runs after the unit's ([`FrozenCall`]).

use std::sync::{Arc, Weak};

use candle_core::{Result, Tensor, bail};

use super::frozen_call::FrozenCall;
use super::schedule::Schedule;
use super::unit_path::UnitId;
use crate::autograd::number;
use crate::graph::{followed, node_without_values};
use crate::storage::copied_storage;

/// Adds the pre-backward hook to a unit's output: its backward runs before anything inside the unit.
pub(super) fn pre_backward(output: &Tensor, unit: &UnitId, pass: usize, schedule: &Arc<Schedule>) -> Result<Tensor> {
    let hook = BoundaryHook { unit: unit.clone(), schedule: Arc::downgrade(schedule), at: Boundary::Output { pass } };
    hooked(output, hook)
}

/// Adds the post-backward hook to a unit's input: its backward runs after everything inside the unit, unless the unit's
/// closure captured further tensors with a graph.
pub(super) fn post_backward(
    input: &Tensor,
    unit: &UnitId,
    schedule: &Arc<Schedule>,
    call: &Arc<FrozenCall>,
) -> Result<Tensor> {
    let at = Boundary::Input(call.clone());
    let input_hook = BoundaryHook { unit: unit.clone(), schedule: Arc::downgrade(schedule), at };
    let hooked = hooked(input, input_hook)?;
    if input.dtype().is_float() {
        call.add_input(number(followed(&hooked)));
    }
    Ok(hooked)
}

fn hooked(tensor: &Tensor, hook: BoundaryHook) -> Result<Tensor> {
    if !tensor.dtype().is_float() {
        return Ok(tensor.clone());
    }
    let memory = copied_storage(tensor)
        .map_err(|error| error.context(format!("of an input or output of FSDP unit `{}`", hook.unit.name)))?;
    let name = match &hook.at {
        Boundary::Input(_) => "fsdp-post-backward",
        Boundary::Output { .. } => "fsdp-pre-backward",
    };
    node_without_values(name, tensor, memory, tensor.shape(), move |gradient| {
        hook.backward()?;
        Ok(Some(gradient.clone()))
    })
}

/// The identity, with a hook in backward.
struct BoundaryHook {
    unit: UnitId,
    schedule: Weak<Schedule>,
    at: Boundary,
}

enum Boundary {
    Input(Arc<FrozenCall>),
    Output { pass: usize },
}

impl BoundaryHook {
    fn backward(&self) -> Result<()> {
        let schedule = || match self.schedule.upgrade() {
            Some(schedule) => Ok(schedule),
            None => {
                bail!("the ShardedVarMap of FSDP unit `{}` was dropped; keep it as long as the model", self.unit.name)
            }
        };
        match &self.at {
            Boundary::Input(call) if call.input_done() => schedule()?.post_backward(&self.unit),
            Boundary::Input(_) => Ok(()),
            Boundary::Output { pass } => schedule()?.pre_backward(&self.unit, *pass),
        }
    }
}
