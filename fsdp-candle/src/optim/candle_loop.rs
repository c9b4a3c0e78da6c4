//! Support for training loops over [`candle_nn::Optimizer`]: an optimizer's parameters from variables, and
//! `backward_step`.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var, bail};

use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;

thread_local! {
    /// The loss that a [`crate::GradScaler`] scaled last on this thread.
    static SCALED: Cell<Option<TensorId>> = const { Cell::new(None) };
}

/// Records that a loss is scaled, so that its gradients are not those of a step.
pub(super) fn note_scaled(loss: &Tensor) {
    SCALED.set(Some(loss.id()));
}

/// Returns the parameters of these shards.
pub(super) fn params_of(optimizer: &str, vars: &[Var]) -> candle_core::Result<Vec<Arc<FsdpParam>>> {
    let param = |var: &Var| match FsdpParam::of_shard(var) {
        Some(param) => Ok(param),
        None => bail!(
            "fsdp_candle::{optimizer}: a variable of shape {:?} is not a shard of a ShardedVarMap: pass \
             `vars.trainable_vars()`, and plain variables (ignored parameters) to an optimizer of candle_nn",
            var.dims()
        ),
    };
    vars.iter().map(param).collect()
}

/// Runs the backward of the model that an optimizer with these states trains. Returns the reduced gradients.
pub(super) fn backward(states: &[&ParamState], loss: &Tensor) -> Result<GradStore> {
    let Some(first) = states.first().map(|state| &state.param) else {
        return Err(Error::Argument(
            "backward_step: the optimizer has no parameters: make it after the model, of `vars.trainable()`".into(),
        ));
    };
    if let Some(other) = states.iter().map(|state| &state.param).find(|param| !param.is_of_same_map(first)) {
        return Err(first.error(format!(
            "its optimizer also has `{}`, of another ShardedVarMap, so backward_step can't tell which model's gradients \
             to reduce: call `optim.step(&model.backward(&loss)?)` with the outermost FsdpModule of each map",
            other.name()
        )));
    }
    if SCALED.get() == Some(loss.id()) {
        return Err(Error::Argument(
            "backward_step: a GradScaler scaled the loss, so its gradients must be unscaled before the step: call \
             `let mut grads = model.backward(&loss)?`, `scaler.unscale(&vars, &mut grads)?`, \
             `scaler.step(&mut optim, &grads)?` and, after all optimizers, `scaler.update()?`"
                .into(),
        ));
    }
    let (unit, _) = first.unit()?;
    Ok(first.model()?.backward_for_step(unit, loss)?)
}
