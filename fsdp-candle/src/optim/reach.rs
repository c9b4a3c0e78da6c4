//! Checks that an optimizer trains something: that it has parameters, and that gradients of them come to it.

use std::sync::Arc;

use candle_core::backprop::GradStore;

use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::{FsdpParam, listed};

/// Number of steps without a gradient after which an optimizer that has never had one is reported. Steps of a GAN's
/// critic, or of another task's head, pass the optimizers of the others by.
const PATIENCE: u32 = 100;

/// Returns an error when an optimizer has no parameters. A rank with empty shards has them.
pub(super) fn check_not_empty(name: &str, is_empty: bool) -> Result<()> {
    match is_empty {
        true => Err(Error::Argument(format!(
            "{name}: it has no parameters, so it would train nothing. Make it after the model, of the same map: \
             `{name}::new(vars.trainable(), ..)`. If all parameters are frozen, there is nothing to train"
        ))),
        false => Ok(()),
    }
}

/// Returns whether a backward handed out a gradient of the parameter.
fn has_gradient(param: &FsdpParam, grads: &GradStore) -> bool {
    grads.get(param.var()).is_some() || param.is_empty_with_gradient(grads)
}

fn names<'a>(params: impl IntoIterator<Item = &'a Arc<FsdpParam>>) -> String {
    let mut names: Vec<String> = params.into_iter().map(|param| param.name().to_string()).collect();
    names.sort();
    listed(&names)
}

/// The steps of an optimizer that came without a gradient.
#[derive(Debug)]
pub(super) struct Reach {
    /// Number of steps without a gradient since the last that had one.
    idle: u32,
    told: bool,
}

impl Reach {
    /// Begins to watch the steps of an optimizer with these states, which calls [`Reach::begin_step`].
    pub(super) fn of(states: &[ParamState]) -> Self {
        states.iter().for_each(|state| state.param.set_has_optimizer());
        Reach { idle: 0, told: false }
    }

    /// Begins a step: frees unsharded values that it makes stale, and checks that gradients come to the optimizer.
    ///
    /// Returns an error when gradients of another map come to it, of parameters that no optimizer has. Warns of other
    /// steps that look wrong. All ranks decide alike, since a rank with an empty shard knows of the others' gradients.
    pub(super) fn begin_step(&mut self, states: &[ParamState], grads: &GradStore) -> Result<()> {
        let stepped = || states.iter().map(|state| &state.param).filter(|param| has_gradient(param, grads));
        if stepped().next().is_some() {
            self.idle = 0;
            return FsdpParam::free_stale(stepped());
        }
        let own: Vec<&Arc<FsdpParam>> = states.iter().map(|state| &state.param).filter(|p| p.trainable()).collect();
        let Some(first) = own.first() else { return Ok(()) }; // all are frozen for now
        let model = first.model()?;
        if model.hands_out_to_hook() {
            return Ok(()); // a step in backward has a part of the gradients
        }
        let others: Vec<Arc<FsdpParam>> = grads.get_ids().filter_map(FsdpParam::of_gradient).collect();
        self.idle += 1;
        let (has, are_of) = (names(own.iter().copied()), || names(&others));
        let is_of_own_map = |param: &Arc<FsdpParam>| own.iter().any(|own| own.is_of_same_map(param));
        let message = if others.is_empty() {
            format!(
                "an optimizer got no gradients at all, so its step changes nothing: it has {has}. Pass the GradStore of \
                 FsdpModule::backward, after a backward that hands out gradients (set_requires_gradient_sync, \
                 set_is_last_backward, finalize_backward)"
            )
        } else if others.iter().any(|param| param.has_optimizer()) {
            // These gradients are for another optimizer.
            if self.idle < PATIENCE || states.iter().any(|state| state.step > 0) {
                return Ok(());
            }
            format!("an optimizer got no gradient of its parameters in {PATIENCE} steps: it has {has}")
        } else if others.iter().any(is_of_own_map) {
            format!(
                "an optimizer got no gradient of its parameters: it has {has}, and the gradients are of {}, which no \
                 optimizer of fsdp_candle has",
                are_of()
            )
        } else {
            return Err(first.error(format!(
                "its optimizer got gradients of another ShardedVarMap only: the optimizer has {has}, the gradients are \
                 of {}. Make the optimizer of the map that the model was built from",
                are_of()
            )));
        };
        if !std::mem::replace(&mut self.told, true) {
            model.warn(&message);
        }
        Ok(())
    }
}
