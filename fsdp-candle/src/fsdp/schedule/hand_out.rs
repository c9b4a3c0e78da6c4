//! The hand-out of reduced gradients: to the backward's caller, or to a hook.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor};

use super::Schedule;
use crate::fsdp::comm::PostAccumulateGradHook;
use crate::fsdp::param::FsdpParam;
use crate::fsdp::param_group::FsdpParamGroup;

/// How reduced gradients reach the user.
#[derive(Default)]
pub(super) struct HandOut {
    /// Hook that takes reduced gradients instead of the backward's caller.
    pub(super) hook: Option<Arc<dyn PostAccumulateGradHook>>,
    /// Whether the running backward hands out a unit's gradients as soon as they are reduced.
    pub(super) is_early: bool,
    /// Gradients that the running backward has handed out early: the unit, the parameter, and whether any rank used the
    /// parameter.
    pub(super) early: Vec<(usize, Arc<FsdpParam>, bool)>,
}

impl Schedule {
    /// Sets the hook that takes reduced gradients instead of the backward's caller.
    pub(in crate::fsdp) fn set_post_accumulate_grad_hook(&self, hook: Option<Arc<dyn PostAccumulateGradHook>>) {
        self.hand_out.lock().hook = hook;
    }

    /// Hands reduced gradients to the hook, if there is one and no more gradients will come to them.
    pub(super) fn hand_out_early(&self) -> Result<()> {
        let hook = {
            let hand_out = self.hand_out.lock();
            hand_out.hook.clone().filter(|_| hand_out.is_early)
        };
        let Some(hook) = hook else { return Ok(()) };
        for unit in self.units() {
            let reduced = unit.take_gradients(|param| param.gradient.is_reduced())?;
            if !reduced.is_empty() {
                let taken = reduced.iter().map(|(param, _, used)| (unit.index(), param.clone(), *used));
                self.hand_out.lock().early.extend(taken);
                hook.accumulated(stored(reduced)?)?;
            }
        }
        Ok(())
    }

    /// Waits for the reductions, and stores the sharded gradients in `grads`, or hands them to the hook.
    pub(in crate::fsdp) fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        self.reductions.finish()?;
        let (hook, early) = {
            let mut hand_out = self.hand_out.lock();
            (hand_out.hook.clone(), std::mem::take(&mut hand_out.early))
        };
        let (mut without_gradient, mut unused, mut cuts) = (vec![], vec![], vec![]);
        let (mut handed_out, mut reached) = (false, vec![]);
        for unit in self.units() {
            let reduced = unit.take_gradients(|_| true)?;
            let of_unit = early.iter().filter(|(index, ..)| *index == unit.index());
            let mut known: Vec<_> = of_unit.map(|(_, param, used)| (param.clone(), *used)).collect();
            known.extend(reduced.iter().map(|(param, _, used)| (param.clone(), *used)));
            handed_out |= !known.is_empty();
            if known.iter().any(|(_, used)| *used) {
                reached.push(unit.clone());
            }
            let communicated = {
                let settings = unit.settings.lock();
                settings.requires_gradient_sync && settings.requires_all_reduce
            };
            let ran = self.order.lock().take_ran_forward(unit.index());
            if ran {
                cuts.extend(self.diagnostics.graph.pass(unit.index()));
            }
            if communicated {
                let lacks_gradient = |param: &&Arc<FsdpParam>| {
                    param.trainable() && !known.iter().any(|(other, used)| *used && Arc::ptr_eq(other, param))
                };
                let names = unit.params().iter().filter(lacks_gradient).map(|param| param.name().to_string());
                let from = unused.len();
                unused.extend(names);
                if ran && unused.len() > from {
                    without_gradient.push((unit.clone(), unused[from..].to_vec()));
                }
            }
            match &hook {
                Some(hook) if !reduced.is_empty() => hook.accumulated(stored(reduced)?)?,
                _ => reduced.into_iter().try_for_each(|(param, grad, _)| param.store_gradient(grad, grads))?,
            }
        }
        self.handed_out(handed_out);
        *self.diagnostics.unused.lock() = unused;
        // A loss that reaches only one of several models leaves the others out on purpose, as a GAN's critic step does.
        let is_left_out = |unit: &FsdpParamGroup| {
            !reached.is_empty() && !reached.iter().any(|other| self.root_of(other) == self.root_of(unit))
        };
        let names = without_gradient.into_iter().filter(|(unit, _)| !is_left_out(unit)).flat_map(|(_, names)| names);
        self.diagnostics.report(names.collect(), &cuts, self.ranks_may_differ());
        Ok(())
    }

    /// Returns the index of the outermost unit that encloses a unit: the model that it belongs to.
    pub(super) fn root_of(&self, unit: &FsdpParamGroup) -> usize {
        let units = self.units.lock();
        let enclosing = units.iter().rev().find(|other| other.path().contains(unit.path()));
        enclosing.map_or(unit.index(), |root| root.index())
    }
}

/// Stores the gradients of some parameters.
fn stored(reduced: Vec<(Arc<FsdpParam>, Tensor, bool)>) -> Result<GradStore> {
    // Candle makes an empty store in no other way.
    let scalar = Tensor::new(0f32, &Device::Cpu)?;
    let mut grads = scalar.backward()?;
    grads.remove(&scalar);
    reduced.into_iter().try_for_each(|(param, grad, _)| param.store_gradient(grad, &mut grads))?;
    Ok(grads)
}
