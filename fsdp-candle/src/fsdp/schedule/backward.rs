//! Backward, from a loss to sharded gradients.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId};
use fsdp_core::heartbeat;

use super::Schedule;
use super::explain::{HELD, RUNNING, explain, explain_backward};
use super::unit_span::{enter_unit_span, leave_unit_span};
use crate::autograd::{BACKWARD_STACK_BYTES, number, on_a_stack_of, with_grad};
use crate::error::Error;
use crate::fsdp::backward_nodes::BackwardNodes;
use crate::fsdp::frozen_call::plan_frozen_calls;
use crate::fsdp::memory_summary::explain_memory;
use crate::fsdp::order::{Order, ParamCounts};
use crate::fsdp::param::FsdpParam;
use crate::fsdp::param_group::FsdpParamGroup;
use crate::fsdp::reduction::largest;
use crate::fsdp::unit_path::UnitId;
use crate::graph;

/// Error for a model without parameters of its map.
pub(in crate::fsdp) const TAKES_NOTHING: &str = "its module took no parameter from its builder, so nothing is \
     sharded, reduced or trained here: get every parameter from the VarBuilder that the closure gets (`vb.get(shape, \
     name)`, or a layer's `new(.., vb)`), instead of a VarMap or Vars of the module's own";

/// Error for a `backward_step` of a model whose hook steps.
const STEPS_IN_BACKWARD: &str = "backward_step would have no gradients for its step, since a hook takes them \
     (set_post_accumulate_grad_hook): call `model.backward(&loss)`, in which the hook steps";

/// Error for a `backward_step` whose backward would keep gradients.
const ACCUMULATES: &str = "backward_step would have no gradients for its step, since they accumulate \
     (set_is_last_backward, set_requires_gradient_sync, set_requires_all_reduce or manual finalization): call \
     `let grads = model.backward(&loss)?` for each micro-batch, and `optim.step(&grads)` after the last";

/// Error for a `backward_step` on a loss of other tensors.
const REACHES_NOTHING: &str = "backward_step: the loss reaches no parameter of the model, so nothing was stepped: compute \
     it from the outputs of a forward of this model, through its FsdpModule (`forward` or `call`)";

impl Schedule {
    /// Runs the backward that a unit was asked for. Returns the reduced gradient shards under the ids of the parameter
    /// shards.
    pub(in crate::fsdp) fn backward(
        &self,
        unit: &FsdpParamGroup,
        loss: &Tensor,
        retains_graph: bool,
    ) -> Result<GradStore> {
        let units = self.units();
        let inside = self.units_inside(unit.path());
        if inside.iter().all(|unit| unit.is_hollow) {
            return Err(Error::unit(unit.name(), TAKES_NOTHING).into());
        }
        if inside.iter().any(|unit| self.order.lock().is_held(unit.index())) {
            return Err(Error::unit(unit.name(), HELD).into());
        }
        let counts = |unit: &Arc<FsdpParamGroup>| {
            let trainable = unit.trainable();
            ParamCounts { trainable, frozen: unit.params().len() - trainable }
        };
        let params = |unit: usize| units.get(unit).map(counts).unwrap_or_default();
        self.order.lock().begin_backward(params).map_err(|_| {
            candle_core::Error::msg(
                "backward was called inside a forward or another backward of the same model, or while another thread \
                 runs one: call forwards and backwards of a model one after the other",
            )
        })?;
        let mut guard = BackwardGuard { schedule: self, ok: false, _heartbeat: heartbeat::span("backward", "") };
        let before = RUNNING.replace(Some(unit.id().name.clone()));
        let _running = scopeguard::guard((), move |()| RUNNING.set(before));
        let grads = with_grad(|| self.run_backward(loss, &units, retains_graph));
        let grads =
            grads.map_err(|error| explain_memory(explain_backward(error, unit.id()), || self.memory_summary()))?;
        guard.ok = true;
        Ok(grads)
    }

    /// Runs the backward of the model that has a unit, for an optimizer that steps right after it. Fails if it would
    /// not hand out gradients.
    pub(super) fn backward_for_step(&self, unit: &UnitId, loss: &Tensor) -> Result<GradStore> {
        self.check(unit)?;
        let units = self.units();
        let root = &units[self.root_of(&units[unit.index])];
        if self.hand_out.lock().hook.is_some() {
            return Err(Error::unit(root.name(), STEPS_IN_BACKWARD).into());
        }
        if self.accumulates(&units) {
            return Err(Error::unit(root.name(), ACCUMULATES).into());
        }
        let grads = self.backward(root, loss, false)?;
        let is_trained = units.iter().any(|unit| unit.trainable() > 0);
        match is_trained && !grads.get_ids().any(|id| FsdpParam::of_gradient(id).is_some()) {
            true => Err(Error::unit(root.name(), REACHES_NOTHING).into()),
            false => Ok(grads),
        }
    }

    /// Returns whether the next backward keeps gradients for a later one.
    fn accumulates(&self, units: &[Arc<FsdpParamGroup>]) -> bool {
        let model = self.order.lock().settings;
        let keeps = |unit: &Arc<FsdpParamGroup>| {
            let settings = unit.settings.lock();
            unit.trainable() > 0 && !(settings.requires_gradient_sync && settings.requires_all_reduce)
        };
        !model.is_last_backward || model.manual_finalization || units.iter().any(keeps)
    }

    fn run_backward(&self, loss: &Tensor, units: &[Arc<FsdpParamGroup>], retains_graph: bool) -> Result<GradStore> {
        let has_hook = self.hand_out.lock().hook.is_some();
        if has_hook {
            // A reduction of an earlier backward must not count as one of this backward.
            self.reductions.finish()?;
        }
        units.iter().for_each(|unit| unit.begin_backward());
        let mut grads = on_a_stack_of(BACKWARD_STACK_BYTES, "backward", || {
            let (settings, again) = {
                let order = self.order.lock();
                (order.settings, order.ran_again())
            };
            // A unit that ran several times is reduced as often, and a unit that ranks use differently at another time.
            self.hand_out.lock().is_early =
                settings.is_last_backward && !settings.manual_finalization && !again && !self.ranks_may_differ();
            self.plan_backward(loss, units)?;
            let (first, actions) = self.order.lock().root_pre_backward();
            if let Some(first) = first.and_then(|first| units.get(first)) {
                enter_unit_span(first.name());
            }
            self.execute(actions)?;
            graph::backward(loss, !retains_graph)
        })??;
        leave_unit_span();
        let (actions, settings) = {
            let mut order = self.order.lock();
            (order.root_post_backward(), order.settings)
        };
        self.execute(actions)?;
        units.iter().for_each(|unit| unit.end_backward());
        if settings.is_last_backward && !settings.manual_finalization {
            self.finalize_backward(&mut grads)?;
        } else {
            self.handed_out(false);
        }
        Ok(grads)
    }

    /// Looks at the nodes that backward will visit, and plans the backward where needed. Recursive, as backward is.
    fn plan_backward(&self, loss: &Tensor, units: &[Arc<FsdpParamGroup>]) -> Result<()> {
        let nodes = loss.sorted_nodes();
        let (differ, again) = (self.ranks_may_differ(), self.order.lock().ran_again());
        // Where ranks may differ, a rank whose loss reaches no unit takes part with zeros.
        let may_be_empty = differ || !units.iter().any(|unit| unit.params().iter().any(|param| param.trainable()));
        if nodes.is_empty() && !may_be_empty {
            return Err(candle_core::Error::msg(
                "backward: the loss has no graph, so no parameter would get a gradient. It was computed under no_grad, \
                 from detached tensors, or times 0: compute it from the model's outputs outside of no_grad",
            ));
        }
        self.note_variables(&nodes, units);
        let frozen_calls: Vec<_> = self.frozen_calls.lock().iter().filter_map(Weak::upgrade).collect();
        if !differ && !again && frozen_calls.is_empty() {
            return Ok(());
        }
        let numbered = BackwardNodes::new(nodes.iter().map(|node| number(node.id())));
        plan_frozen_calls(&frozen_calls, &numbered);
        if differ {
            let unit_of = |param: Arc<FsdpParam>| Ok::<_, candle_core::Error>(param.unit()?.0.index);
            let uses = nodes.iter().enumerate().filter_map(|(at, node)| Some((FsdpParam::of(node)?, at)));
            let uses = uses.map(|(param, at)| Ok((unit_of(param)?, at))).collect::<Result<Vec<_>>>()?;
            self.agree_on_plan(units, &numbered, &uses)?;
        } else if again {
            self.order.lock().plan_passes(&numbered);
        }
        Ok(())
    }

    /// Passes the graph's variables that are not parameters to the diagnostics.
    fn note_variables(&self, nodes: &[&Tensor], units: &[Arc<FsdpParamGroup>]) {
        let params = || units.iter().flat_map(|unit| unit.params());
        let leaves: HashSet<TensorId> = params().map(|param| param.leaf).collect();
        let is_other = |node: &&&Tensor| node.is_variable() && !leaves.contains(&node.id());
        let others: Vec<&Tensor> = nodes.iter().filter(is_other).copied().collect();
        let ranks = params().map(|param| param.spec.ranks.data.size()).max().unwrap_or(1);
        self.diagnostics.note_variables(&others, ranks);
    }

    /// Plans a backward in which ranks may use different units: all ranks unshard and reduce the units that any rank
    /// uses.
    fn agree_on_plan(
        &self,
        units: &[Arc<FsdpParamGroup>],
        nodes: &BackwardNodes,
        uses: &[(usize, usize)],
    ) -> Result<()> {
        // In one order, rather than when a rank first unshards a unit.
        units.iter().try_for_each(|unit| unit.start_replica_gather())?;
        let (reached, keys) = {
            let order = self.order.lock();
            let reached = order.reach(nodes, uses);
            let keys = order.keys(&reached);
            (reached, keys)
        };
        let order = Order::in_order(&largest(units, keys)?);
        let lasts = largest(units, Order::lasts(&order, &reached))?;
        self.order.lock().plan_units(&order, &lasts);
        Ok(())
    }

    /// Runs before the backward of a called unit.
    pub(in crate::fsdp) fn pre_backward(&self, unit: &UnitId, pass: usize) -> Result<()> {
        self.check(unit)?;
        let entered = self.order.lock().pre_backward(unit.index, Some(pass));
        let actions = entered.map_err(|error| explain(error, unit))?;
        enter_unit_span(&unit.name);
        self.execute(actions)
    }

    /// Runs after the backward of everything between a unit's inputs and outputs.
    pub(in crate::fsdp) fn post_backward(&self, unit: &UnitId) -> Result<()> {
        self.check(unit)?;
        let action = self.order.lock().post_backward(unit.index);
        self.execute(action)
    }
}

/// A running backward. Dropping it before `ok` is set means that the backward failed or panicked.
struct BackwardGuard<'a> {
    schedule: &'a Schedule,
    ok: bool,
    /// Ends after the spans of units.
    _heartbeat: heartbeat::Span,
}

impl Drop for BackwardGuard<'_> {
    fn drop(&mut self) {
        self.schedule.order.lock().end_backward();
        leave_unit_span();
        if !self.ok {
            self.schedule.reset();
        }
    }
}
