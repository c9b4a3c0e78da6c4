//! Backward, from a loss to sharded gradients.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};
use fsdp_core::heartbeat;

use super::order::Order;
use super::schedule::Schedule;
use super::spans;
use crate::autograd::{BACKWARD_STACK_BYTES, number, on_a_stack_of, with_grad};
use crate::fsdp::graph;
use crate::fsdp::unit::{FsdpParam, ParamGroup, largest};

impl Schedule {
    /// Runs the whole backward: gradients of `loss`, reduced and sharded, under the ids of the shards.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let units = self.units();
        self.order().backward_begins().map_err(|_| {
            candle_core::Error::msg("backward was called inside a forward or another backward of the same model")
        })?;
        let mut guard = BackwardGuard { schedule: self, ok: false, _told: heartbeat::span("backward", "") };
        let grads = with_grad(|| self.run_backward(loss, &units))?;
        guard.ok = true;
        Ok(grads)
    }

    fn run_backward(&self, loss: &Tensor, units: &[Arc<ParamGroup>]) -> Result<GradStore> {
        units.iter().for_each(|unit| unit.begin_backward());
        let mut grads = on_a_stack_of(BACKWARD_STACK_BYTES, "backward", || {
            self.look_ahead(loss, units)?;
            let (first, actions) = self.order().before_the_graph();
            if let Some(first) = first.and_then(|first| units.get(first)) {
                spans::enter(first.name());
            }
            self.carry_out(actions)?;
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
    fn look_ahead(&self, loss: &Tensor, units: &[Arc<ParamGroup>]) -> Result<()> {
        let nodes = loss.sorted_nodes();
        let (differ, again) = (self.ranks_may_differ(), self.order().ran_again());
        // Where ranks may differ, a rank whose loss reaches nothing takes part with zeros.
        let may_be_empty = differ || !units.iter().any(|unit| unit.params().iter().any(|param| param.trainable()));
        if nodes.is_empty() && !may_be_empty {
            return Err(candle_core::Error::msg(
                "backward: the loss has no graph, so that no parameter would get a gradient. It was computed under \
                 no_grad, from detached tensors, or times 0: compute it from the model's outputs outside of no_grad",
            ));
        }
        let frozen_calls = self.frozen_calls();
        if !differ && !again && frozen_calls.is_empty() {
            return Ok(());
        }
        let numbers: Vec<usize> = nodes.iter().map(|node| number(node.id())).collect();
        graph::begin_backward(&frozen_calls, &numbers);
        if differ {
            let unit_of = |param: Arc<FsdpParam>| Ok::<_, candle_core::Error>(param.unit()?.0.index);
            let uses = nodes.iter().enumerate().filter_map(|(at, node)| Some((FsdpParam::of(node)?, at)));
            let uses = uses.map(|(param, at)| Ok((unit_of(param)?, at))).collect::<Result<Vec<_>>>()?;
            self.agree_on_a_plan(units, &numbers, &uses)?;
        } else if again {
            self.order().plan_passes(&numbers);
        }
        Ok(())
    }

    /// Plans a backward in which ranks may use different units: all ranks gather and reduce the units that any uses.
    fn agree_on_a_plan(&self, units: &[Arc<ParamGroup>], numbers: &[usize], uses: &[(usize, usize)]) -> Result<()> {
        // In one order, and not when a rank first gathers a unit.
        units.iter().try_for_each(|unit| unit.gather_shards())?;
        let reached = self.order().reach(numbers, uses);
        let keys = self.order().keys(&reached);
        let order = Order::in_order(&largest(units, keys)?);
        let lasts = largest(units, Order::lasts(&order, &reached))?;
        self.order().plan_units(&order, &lasts);
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
