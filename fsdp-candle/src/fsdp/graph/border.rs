//! What stands at the border of a unit. Its outputs pass through [`PassOn`], whose backward runs before anything inside
//! the unit; the inputs of one with frozen parameters do too, and theirs runs after it (unless the closure captured
//! more: see [`FrozenCall`]).

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::events::Listener;
use super::frozen_call::FrozenCall;
use crate::fsdp::unit::UnitId;
use crate::kernels::{Backward, node};
use crate::storage::copied_storage;

/// Passes a unit's output on so that its backward tells before it comes to the unit, in this pass.
pub(crate) fn output(output: &Tensor, unit: &UnitId, pass: usize, to: Listener) -> Result<Tensor> {
    pass_on(output, PassOn { unit: unit.clone(), to, at: At::Output { pass } })
}

/// Passes a unit's input on so that its backward, when it comes after everything inside the unit, tells.
pub(crate) fn input(input: &Tensor, unit: &UnitId, to: Listener, call: &Arc<FrozenCall>) -> Result<Tensor> {
    let passed = pass_on(input, PassOn { unit: unit.clone(), to, at: At::Input(call.clone()) })?;
    if input.dtype().is_float() {
        call.add_input(&passed);
    }
    Ok(passed)
}

fn pass_on(tensor: &Tensor, op: PassOn) -> Result<Tensor> {
    if !tensor.dtype().is_float() {
        return Ok(tensor.clone());
    }
    let memory = copied_storage(tensor)
        .map_err(|error| error.context(format!("of a tensor at the border of FSDP unit `{}`", op.unit.name)))?;
    node(tensor, memory, tensor.shape().clone(), op)
}

/// The identity, with a hook in backward.
struct PassOn {
    unit: UnitId,
    to: Listener,
    at: At,
}

enum At {
    Input(Arc<FrozenCall>),
    Output { pass: usize },
}

impl Backward for PassOn {
    fn name(&self) -> &'static str {
        match &self.at {
            At::Input(_) => "fsdp-post-backward",
            At::Output { .. } => "fsdp-pre-backward",
        }
    }

    fn backward(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match &self.at {
            At::Input(call) if call.input_done() => self.to.of_unit(&self.unit)?.after_unit(&self.unit)?,
            At::Input(_) => {}
            At::Output { pass } => self.to.of_unit(&self.unit)?.before_unit(&self.unit, *pass)?,
        }
        Ok(Some(grad.clone()))
    }
}
