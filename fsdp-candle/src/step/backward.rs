//! Backward, from a loss to sharded gradients.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId};
use fsdp_core::heartbeat;

use super::schedule::Schedule;
use super::spans;
use crate::graph::{self, BACKWARD_STACK_BYTES, BackwardEvents, number, on_a_stack_of, with_grad};
use crate::unit::{FsdpParam, ParamGroup, UnitPath, parents};

impl Schedule {
    /// Runs the whole backward: gradients of `loss`, reduced and sharded, under the ids of the shards.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let units = self.units();
        let fixed = self.ranks_may_differ();
        let parents = fixed.then(|| parents(&units.iter().map(|unit| unit.path()).collect::<Vec<&UnitPath>>()));
        let first = self.order().backward_begins(parents.as_deref()).map_err(|_| {
            candle_core::Error::msg("backward was called inside a forward or another backward of the same model")
        })?;
        let mut guard = BackwardGuard { schedule: self, ok: false, _told: heartbeat::span("backward", "") };
        let first = first.and_then(|index| units.get(index));
        let grads = with_grad(|| self.run_backward(loss, &units, first, fixed))?;
        guard.ok = true;
        Ok(grads)
    }

    fn run_backward(
        &self,
        loss: &Tensor,
        units: &[Arc<ParamGroup>],
        first: Option<&Arc<ParamGroup>>,
        fixed: bool,
    ) -> Result<GradStore> {
        units.iter().for_each(|unit| unit.begin_backward());
        if fixed {
            // Gathers and reductions queue apart: how they interleave depends on what is used.
            let mut params = units.iter().flat_map(|unit| unit.params());
            params.try_for_each(|param| param.ranks().shard_apart().map(drop))?;
        }
        if let Some(first) = first {
            self.before_unit(first.id())?;
        }
        let actions = self.order().before_the_graph();
        self.carry_out(actions)?;
        let mut grads = on_a_stack_of(BACKWARD_STACK_BYTES, "backward", || {
            self.look_ahead(loss, units, fixed)?;
            loss.backward()
        })??;
        spans::leave();
        let (actions, settings) = {
            let mut order = self.order();
            (order.backward_ends(), order.settings)
        };
        self.carry_out(actions)?;
        units.iter().for_each(|unit| unit.end_backward());
        if settings.is_last_backward && !settings.manual_finalization {
            self.finalize_backward(&mut grads)?;
        } else {
            self.backward_handed_out(false);
        }
        Ok(grads)
    }

    /// Looks at the nodes that backward will go through. Recursive, as backward is.
    fn look_ahead(&self, loss: &Tensor, units: &[Arc<ParamGroup>], fixed: bool) -> Result<()> {
        let nodes: Vec<TensorId> = loss.sorted_nodes().into_iter().map(Tensor::id).collect();
        // Where ranks may differ, a rank whose loss reaches nothing takes part with zeros.
        let may_be_empty = fixed || !units.iter().any(|unit| unit.params().iter().any(|param| param.trainable()));
        if nodes.is_empty() && !may_be_empty {
            return Err(candle_core::Error::msg(
                "backward: the loss has no graph, so that no parameter would get a gradient. It was computed under \
                 no_grad, from detached tensors, or times 0: compute it from the model's outputs outside of no_grad",
            ));
        }
        let frozen_calls = self.frozen_calls();
        if !fixed && frozen_calls.is_empty() {
            return Ok(());
        }
        let numbers: Vec<usize> = nodes.iter().map(|&id| number(id)).collect();
        graph::begin_backward(&frozen_calls, &numbers);
        if fixed {
            let nodes: HashSet<TensorId> = nodes.into_iter().collect();
            let reached: Vec<usize> = units.iter().map(|unit| unit.reached(&nodes)).collect();
            let actions = self.order().backward_reaches(&reached);
            self.carry_out(actions)?;
        }
        Ok(())
    }

    /// Waits for the reductions and files the sharded gradients in `grads`.
    pub(crate) fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        self.reductions.finish()?;
        let (mut without_gradient, mut unused, mut cuts) = (vec![], vec![], vec![]);
        let mut handed_out = false;
        for unit in self.units() {
            let reduced = unit.take_gradients()?;
            handed_out |= !reduced.is_empty();
            let communicated = {
                let settings = unit.settings();
                settings.requires_gradient_sync && settings.requires_all_reduce
            };
            let ran = self.order().take_ran_forward(unit.index());
            if ran {
                cuts.extend(self.diagnostics().graph.pass(unit.index()));
            }
            if communicated {
                let silent = |param: &&Arc<FsdpParam>| {
                    param.trainable() && !reduced.iter().any(|(other, _, used)| *used && Arc::ptr_eq(other, param))
                };
                let names = unit.params().iter().filter(silent).map(|param| param.name().to_string());
                let from = unused.len();
                unused.extend(names);
                if ran {
                    without_gradient.extend_from_slice(&unused[from..]);
                }
            }
            for (param, grad, _) in reduced {
                param.file_gradient(grad, grads)?;
            }
        }
        self.backward_handed_out(handed_out);
        self.diagnostics().set_unused(unused);
        self.diagnostics().report(without_gradient, &cuts, self.ranks_may_differ());
        Ok(())
    }
}

/// A backward that runs; dropping it early means that it failed or panicked.
struct BackwardGuard<'a> {
    schedule: &'a Schedule,
    ok: bool,
    /// Ends after the spans of units, which `drop` ends.
    _told: heartbeat::Span,
}

impl Drop for BackwardGuard<'_> {
    fn drop(&mut self) {
        self.schedule.order().backward_is_over();
        spans::leave();
        if !self.ok {
            self.schedule.forget_step();
        }
    }
}
