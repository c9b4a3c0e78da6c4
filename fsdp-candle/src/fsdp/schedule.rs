//! The state that the units of one model share: the order of their collectives, and the execution of its actions.
//!
//! Hooks call in from forward ([`Schedule::pre_forward`], [`Schedule::post_forward`], [`Schedule::pre_use`]) and from
//! backward ([`Schedule::pre_backward`], [`Schedule::post_accumulate_grad`]). Each passes the event to [`Order`] and
//! executes the actions that it returns. No lock is held meanwhile: an action may wait for peers and run the user's
//! code.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, TensorId};
use fsdp_core::heartbeat;
use parking_lot::{Mutex, ReentrantMutex};
use tracing::span::EnteredSpan;

use super::callers::{Callers, Entered};
use super::comm::PostAccumulateGradHook;
use super::diagnostics::Diagnostics;
use super::frozen_call::{FrozenCall, plan_frozen_calls};
use super::gradient::Gradient;
use super::offload::Downloads;
use super::order::{Action, Forward, GraphExists, Order, OrderError, UnitInfo};
use super::param::FsdpParam;
use super::param_events::ParamModel;
use super::param_group::FsdpParamGroup;
use super::reduction::{Reduction, ReductionQueue, largest};
use super::settings::{ModelSettings, UnitSettings};
use super::unit_path::{UnitId, UnitPath};
use crate::autograd::{BACKWARD_STACK_BYTES, keeps_graph, number, on_a_stack_of, with_grad};
use crate::error::Error;
use crate::graph;
use crate::kernels;
use crate::storage::Pool;

/// The shared state of one model's units: PyTorch's `FSDPStateContext`.
pub(crate) struct Schedule {
    pub(super) pool: Arc<Pool>,
    /// Copies of offloaded parameters' gradients to the host.
    pub(super) downloads: Arc<Downloads>,
    pub(crate) diagnostics: Diagnostics,
    units: Mutex<Vec<Arc<FsdpParamGroup>>>,
    order: Mutex<Order>,
    /// Held while the actions of a use run, so that another thread that uses the same unit waits for them.
    uses: ReentrantMutex<()>,
    callers: Callers,
    reductions: ReductionQueue<Reduction>,
    /// Calls of units with frozen parameters whose graphs exist.
    frozen_calls: Mutex<Vec<Weak<FrozenCall>>>,
    /// A check of the complete model, which runs in the first forward.
    first_forward_check: Mutex<Option<Arc<Check>>>,
    /// Whether the shards gathered over replicas are up to date: no gradients were handed out since.
    replica_shards_are_fresh: AtomicBool,
    hand_out: Mutex<HandOut>,
}

/// How reduced gradients reach the user.
#[derive(Default)]
struct HandOut {
    /// Takes them instead of the backward's caller.
    hook: Option<Arc<dyn PostAccumulateGradHook>>,
    /// Whether the running backward hands out a unit's gradients as soon as they are reduced.
    is_early: bool,
    /// Gradients that it has handed out: the unit, the parameter, and whether any rank used the parameter.
    early: Vec<(usize, Arc<FsdpParam>, bool)>,
}

/// Error for a model without parameters of its map.
pub(super) const TAKES_NOTHING: &str = "its module took no parameter from its builder, so nothing is sharded, reduced or \
     trained here: get every parameter from the VarBuilder that the closure gets (`vb.get(shape, name)`, or a layer's \
     `new(.., vb)`), instead of a VarMap or Vars of the module's own";

/// Error for a step of a model that a handle of `unshard_all` holds.
const HELD: &str = "a handle of `unshard_all` holds units of the model, whose forwards have no graph: drop the handle \
     before a forward or backward that trains";

thread_local! {
    /// The unit whose backward this thread runs.
    static RUNNING: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

type Check = dyn Fn() -> crate::error::Result<()> + Send + Sync;

/// Units and settings.
impl Schedule {
    pub(crate) fn new(rank: usize, device: &Device) -> Self {
        let pool = Arc::new(Pool::new(kernels::of_device_or_cpu(device)));
        Schedule {
            downloads: Arc::new(Downloads::new(pool.clone())),
            pool,
            diagnostics: Diagnostics::of_rank(rank),
            units: Mutex::default(),
            order: Mutex::default(),
            uses: ReentrantMutex::default(),
            callers: Callers::default(),
            reductions: ReductionQueue::default(),
            frozen_calls: Mutex::default(),
            first_forward_check: Mutex::default(),
            replica_shards_are_fresh: AtomicBool::new(false),
            hand_out: Mutex::default(),
        }
    }

    /// Adds a unit. `by_name_in` is the index of the unit whose call runs it, for a unit by name.
    pub(super) fn add(&self, unit: Arc<FsdpParamGroup>, by_name_in: Option<usize>) {
        let settings = unit.settings.lock().clone();
        let mut units = self.units.lock();
        let mut order = self.order.lock();
        let at = |other: &Arc<FsdpParamGroup>| other.index();
        let by_name = |other: &&Arc<FsdpParamGroup>| order.is_by_name(other.index());
        let enclosing =
            units.iter().filter(by_name).filter(|other| other.path().contains(unit.path())).map(at).collect();
        let inside: Vec<usize> = match by_name_in {
            Some(_) => units.iter().filter(|other| unit.path().contains(other.path())).map(at).collect(),
            None => vec![],
        };
        let (trainable, has_frozen) = (unit.trainable(), unit.has_frozen());
        order.add(UnitInfo { trainable, has_frozen, by_name_in, enclosing, settings, holds: 0 }, &inside);
        drop(order);
        units.push(unit);
    }

    /// Removes the units from index `count` on: the units inside one that failed to build.
    pub(super) fn truncate(&self, count: usize) {
        let mut units = self.units.lock();
        units.truncate(count);
        units.iter().for_each(|unit| unit.settings.lock().keep_prefetch_below(count));
        drop(units);
        self.order.lock().truncate(count);
    }

    pub(crate) fn units(&self) -> Vec<Arc<FsdpParamGroup>> {
        self.units.lock().clone()
    }

    /// Returns the index of the next unit.
    pub(super) fn next_index(&self) -> usize {
        self.units.lock().len()
    }

    /// Returns the units in the order in which their forwards began, in the last root forward.
    pub(crate) fn forward_order(&self) -> Vec<usize> {
        self.order.lock().forward_order()
    }

    /// Returns whether the unit belongs to the model.
    pub(super) fn has(&self, id: &UnitId) -> bool {
        self.units.lock().get(id.index).is_some_and(|unit| Arc::ptr_eq(&unit.id().name, &id.name))
    }

    fn check(&self, id: &UnitId) -> Result<()> {
        if self.has(id) {
            return Ok(());
        }
        let message = "it does not belong to a model: the unit around it failed to build. Build both again";
        Err(Error::unit(&id.name, message).into())
    }

    /// Returns whether a forward or backward runs.
    pub(super) fn is_running(&self) -> bool {
        self.order.lock().is_running()
    }

    /// Returns whether ranks may use different units, so that the order of collectives must not depend on uses.
    fn ranks_may_differ(&self) -> bool {
        self.units.lock().iter().any(|unit| unit.settings.lock().reduce_scatter_unused_params)
    }

    /// Updates each unit's number of trainable parameters, after some were frozen or are trained again.
    pub(super) fn requires_grad_changed(&self) {
        for unit in self.units() {
            let trainable = unit.trainable();
            let mut changed = false;
            if let Some(info) = self.order.lock().unit(unit.index()) {
                changed = std::mem::replace(&mut info.trainable, trainable) != trainable;
                info.has_frozen = unit.has_frozen();
            }
            if changed {
                self.diagnostics.graph.watch_again(unit.index());
            }
        }
    }

    /// Changes a unit's settings.
    pub(super) fn change_settings(&self, unit: &FsdpParamGroup, change: impl FnOnce(&mut UnitSettings)) {
        let is_in_model = self.has(unit.id());
        let mut settings = unit.settings.lock();
        change(&mut settings);
        if is_in_model && let Some(info) = self.order.lock().unit(unit.index()) {
            info.settings = settings.clone();
        }
        drop(settings);
        let ranks_may_differ = self.ranks_may_differ();
        self.order.lock().settings.fixed_order = ranks_may_differ;
    }

    /// Changes the settings of the whole model.
    pub(super) fn change_model_settings(&self, change: impl FnOnce(&mut ModelSettings)) {
        change(&mut self.order.lock().settings);
    }

    /// Sets a check that runs when the first forward begins.
    pub(super) fn before_first_forward(&self, check: impl Fn() -> crate::error::Result<()> + Send + Sync + 'static) {
        *self.first_forward_check.lock() = Some(Arc::new(check));
    }

    /// Executes the actions of the order.
    fn execute(&self, actions: impl IntoIterator<Item = Action>) -> Result<()> {
        actions.into_iter().try_for_each(|action| self.execute_one(action))
    }

    fn execute_one(&self, action: Action) -> Result<()> {
        let (Action::Unshard(index)
        | Action::WaitForUnshard(index)
        | Action::Reshard(index)
        | Action::ReshardFrozen(index)
        | Action::ReshardTo { unit: index, .. }
        | Action::ReshardParam { unit: index, .. }
        | Action::Reduce(index)
        | Action::BeginPass { unit: index, .. }) = action;
        let unit = self.units.lock().get(index).cloned();
        let Some(unit) = unit else { return Ok(()) };
        match action {
            Action::Unshard(_) => unit.start_unshard(),
            Action::WaitForUnshard(_) => unit.unshard(),
            Action::Reshard(_) => unit.reshard(),
            Action::ReshardFrozen(_) => unit.reshard_frozen(),
            Action::ReshardTo { ranks, .. } => unit.reshard_to(ranks),
            Action::ReshardParam { position, .. } => unit.reshard_param(position),
            Action::Reduce(_) => self.reduce(&unit),
            Action::BeginPass { pass, .. } => {
                unit.begin_pass(pass);
                Ok(())
            }
        }
    }

    fn reduce(&self, unit: &Arc<FsdpParamGroup>) -> Result<()> {
        let max = self.order.lock().settings.max_reductions;
        self.reductions.limit(max)?;
        self.hand_out_early()?;
        let mut started = vec![];
        let outcome = Reduction::start(unit, &mut started);
        self.reductions.add(started);
        outcome
    }

    /// Prepares the model for a new iteration after a failed one.
    pub(super) fn reset(&self) {
        self.order.lock().reset();
        self.frozen_calls.lock().clear();
        self.replica_shards_are_fresh.store(false, Ordering::Relaxed);
        self.reductions.discard();
        self.hand_out.lock().early.clear();
        for unit in self.units() {
            unit.reset();
        }
        self.pool.clear();
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

/// Forward.
impl Schedule {
    /// Runs before the forward of a called unit: unshards it, and prefetches the next units.
    pub(super) fn pre_forward(&self, unit: &Arc<FsdpParamGroup>) -> Result<ForwardGuard<'_>> {
        self.check(unit.id())?;
        let entered = self.callers.enter(unit)?;
        self.check_model()?;
        let begun = {
            let units = self.units.lock();
            let may_be_stale = |unit: usize| units.get(unit).is_some_and(|unit| unit.may_be_stale());
            self.order.lock().pre_forward(unit.index(), keeps_graph(), may_be_stale)
        };
        let (forward, actions) = begun.map_err(|error| explain(error, unit.id()))?;
        let guard = ForwardGuard { schedule: self, forward, exists: None, ok: false, _entered: entered };
        if forward.is_root {
            self.start_replica_gathers(unit)?;
        }
        self.execute(actions)?;
        Ok(guard)
    }

    /// Runs the check of the complete model, once.
    fn check_model(&self) -> Result<()> {
        let check = self.first_forward_check.lock().clone();
        if let Some(check) = check {
            check()?;
            *self.first_forward_check.lock() = None;
        }
        Ok(())
    }

    /// Runs after the forward of a called unit, which consists of `parts` modules. Returns whether its outputs need a
    /// pre-backward hook. Drop the guard when they have it.
    pub(super) fn post_forward(
        &self,
        unit: &FsdpParamGroup,
        guard: &mut ForwardGuard<'_>,
        parts: usize,
    ) -> Result<bool> {
        let (hook, actions) = self.order.lock().post_forward(unit.index(), guard.forward, parts);
        self.execute(actions)?;
        if guard.forward.is_root && !keeps_graph() {
            self.drop_replica_gathers();
        }
        guard.ok = true;
        Ok(hook)
    }

    /// Begins a call of a unit with frozen parameters.
    pub(super) fn frozen_call(&self, unit: &FsdpParamGroup) -> Arc<FrozenCall> {
        let call = Arc::new(FrozenCall::new(unit.index()));
        let mut calls = self.frozen_calls.lock();
        if calls.len() == calls.capacity() {
            calls.retain(|call| call.strong_count() > 0);
        }
        calls.push(Arc::downgrade(&call));
        call
    }

    /// Issues the all-gathers over replicas for the units inside a root: all at once and in one order, whatever the
    /// forward will use.
    fn start_replica_gathers(&self, root: &FsdpParamGroup) -> Result<()> {
        let units = self.units();
        if !units.iter().any(|unit| unit.is_sharded_over_replicas()) {
            return Ok(());
        }
        if !self.replica_shards_are_fresh.load(Ordering::Relaxed) {
            units.iter().for_each(|unit| unit.drop_replica_gather());
        }
        let is_inside = |unit: &&Arc<FsdpParamGroup>| unit.index() == root.index() || root.path().contains(unit.path());
        units.iter().filter(is_inside).try_for_each(|unit| unit.start_replica_gather())
    }

    fn drop_replica_gathers(&self) {
        self.units().iter().for_each(|unit| unit.drop_replica_gather());
    }

    /// Records whether a backward handed out gradients: an optimizer may then change the shards.
    fn handed_out(&self, gradients: bool) {
        self.replica_shards_are_fresh.store(!gradients, Ordering::Relaxed);
        if gradients {
            self.drop_replica_gathers();
        }
    }

    /// Reshards a unit. An optimizer may step before the next unshard, unless micro-batches share the shards that were
    /// gathered over replicas.
    pub(super) fn reshard(&self, unit: &FsdpParamGroup) -> Result<()> {
        if !self.replica_shards_are_fresh.load(Ordering::Relaxed) {
            unit.drop_replica_gather();
        }
        unit.reshard()
    }

    /// Returns the units that a path contains.
    pub(super) fn units_inside(&self, path: &UnitPath) -> Vec<Arc<FsdpParamGroup>> {
        let mut units = self.units();
        units.retain(|unit| path.contains(unit.path()));
        units
    }

    /// Returns a called unit and the units by name that its call runs.
    fn called_with(&self, called: &FsdpParamGroup) -> Vec<Arc<FsdpParamGroup>> {
        let units = self.units();
        let with = self.order.lock().called_with(called.index());
        with.into_iter().filter_map(|unit| units.get(unit).cloned()).collect()
    }

    /// Issues the all-gathers of a called unit and its units by name. Returns these units. They stay unsharded until the
    /// user reshards them, a forward with a graph does, or backward.
    pub(super) fn start_unshard_by_hand(&self, called: &FsdpParamGroup) -> Result<Vec<Arc<FsdpParamGroup>>> {
        let units = self.called_with(called);
        for unit in &units {
            self.refresh(unit, |order| order.unshard_by_hand(unit.index()))?;
            unit.start_unshard()?;
        }
        Ok(units)
    }

    /// Reshards a unit that a forward left unsharded, if its values may be stale. `left` tells whether a forward did.
    fn refresh(&self, unit: &FsdpParamGroup, left: impl FnOnce(&mut Order) -> bool) -> Result<()> {
        let left = left(&mut self.order.lock());
        if left && unit.may_be_stale() { unit.reshard() } else { Ok(()) }
    }

    /// Reshards a called unit and its units by name, by the user's hand.
    pub(super) fn reshard_by_hand(&self, called: &FsdpParamGroup) -> Result<()> {
        self.called_with(called).iter().try_for_each(|unit| {
            self.order.lock().reshard_by_hand(unit.index());
            self.reshard(unit)
        })
    }

    /// Unshards units for [`Schedule::release`], one after the other.
    pub(super) fn hold(&self, units: &[Arc<FsdpParamGroup>]) -> Result<()> {
        self.check_model()?;
        for (at, unit) in units.iter().enumerate() {
            let held = self.refresh(unit, |order| order.hold(unit.index())).and_then(|()| unit.unshard());
            if let Err(error) = held {
                self.release(&units[..=at]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Reshards units that [`Schedule::hold`] unsharded, unless another handle holds them.
    pub(super) fn release(&self, units: &[Arc<FsdpParamGroup>]) {
        for unit in units.iter().filter(|unit| self.has(unit.id())) {
            let is_held = self.order.lock().release(unit.index());
            if !is_held && let Err(error) = self.reshard(unit) {
                tracing::warn!(unit = unit.name(), %error, "reshard of a unit that was held unsharded");
            }
        }
    }

    /// Returns whether a forward of this unit runs without hooks: no other forward runs, and all units inside it are
    /// held unsharded, or were unsharded by hand and need no graph. Such a forward leaves no trace, so ranks may run
    /// different numbers of them.
    pub(super) fn runs_without_hooks(&self, unit: &FsdpParamGroup) -> Result<bool> {
        let is_held = {
            let order = self.order.lock();
            if order.is_running() {
                return Ok(false);
            }
            order.is_held(unit.index())
        };
        if !is_held && keeps_graph() {
            return Ok(false);
        }
        let inside = self.units_inside(unit.path());
        let freed = inside.iter().find(|unit| !unit.is_whole());
        match freed {
            Some(freed) if is_held => Err(Error::unit(
                freed.name(),
                "`unshard_all` held it, and an optimizer's step, a load or a failed step has freed its values since: \
                 drop the handle, and call `unshard_all` again on every rank",
            )
            .into()),
            Some(_) => Ok(false),
            None => {
                let order = self.order.lock();
                let by_hand =
                    |unit: &Arc<FsdpParamGroup>| unit.params().is_empty() || order.is_unsharded_by_hand(unit.index());
                Ok(is_held || inside.iter().all(by_hand))
            }
        }
    }

    /// Reshards every unit, since shards have changed.
    pub(crate) fn reshard_all(&self) -> Result<()> {
        self.replica_shards_are_fresh.store(false, Ordering::Relaxed);
        self.units().iter().try_for_each(|unit| unit.reshard())?;
        self.drop_replica_gathers();
        Ok(())
    }
}

/// Backward, from a loss to sharded gradients.
impl Schedule {
    /// Runs the backward that a unit was asked for. Returns the reduced gradient shards under the ids of the parameter
    /// shards.
    pub(super) fn backward(&self, unit: &FsdpParamGroup, loss: &Tensor, retains_graph: bool) -> Result<GradStore> {
        let units = self.units();
        let inside = self.units_inside(unit.path());
        if inside.iter().all(|unit| unit.is_hollow) {
            return Err(Error::unit(unit.name(), TAKES_NOTHING).into());
        }
        if inside.iter().any(|unit| self.order.lock().is_held(unit.index())) {
            return Err(Error::unit(unit.name(), HELD).into());
        }
        self.order.lock().begin_backward().map_err(|_| {
            candle_core::Error::msg(
                "backward was called inside a forward or another backward of the same model, or while another thread \
                 runs one: call forwards and backwards of a model one after the other",
            )
        })?;
        let mut guard = BackwardGuard { schedule: self, ok: false, _heartbeat: heartbeat::span("backward", "") };
        let before = RUNNING.replace(Some(unit.id().name.clone()));
        let _running = scopeguard::guard((), move |()| RUNNING.set(before));
        let grads = with_grad(|| self.run_backward(loss, &units, retains_graph))?;
        guard.ok = true;
        Ok(grads)
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
        let numbers: Vec<usize> = nodes.iter().map(|node| number(node.id())).collect();
        plan_frozen_calls(&frozen_calls, &numbers);
        if differ {
            let unit_of = |param: Arc<FsdpParam>| Ok::<_, candle_core::Error>(param.unit()?.0.index);
            let uses = nodes.iter().enumerate().filter_map(|(at, node)| Some((FsdpParam::of(node)?, at)));
            let uses = uses.map(|(param, at)| Ok((unit_of(param)?, at))).collect::<Result<Vec<_>>>()?;
            self.agree_on_plan(units, &numbers, &uses)?;
        } else if again {
            self.order.lock().plan_passes(&numbers);
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
    fn agree_on_plan(&self, units: &[Arc<FsdpParamGroup>], numbers: &[usize], uses: &[(usize, usize)]) -> Result<()> {
        // In one order, rather than when a rank first unshards a unit.
        units.iter().try_for_each(|unit| unit.start_replica_gather())?;
        let (reached, keys) = {
            let order = self.order.lock();
            let reached = order.reach(numbers, uses);
            let keys = order.keys(&reached);
            (reached, keys)
        };
        let order = Order::in_order(&largest(units, keys)?);
        let lasts = largest(units, Order::lasts(&order, &reached))?;
        self.order.lock().plan_units(&order, &lasts);
        Ok(())
    }

    /// Sets what takes reduced gradients instead of the backward's caller.
    pub(super) fn set_post_accumulate_grad_hook(&self, hook: Option<Arc<dyn PostAccumulateGradHook>>) {
        self.hand_out.lock().hook = hook;
    }

    /// Hands reduced gradients to the hook, if there is one and no more gradients will come to them.
    fn hand_out_early(&self) -> Result<()> {
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
    pub(super) fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
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
    fn root_of(&self, unit: &FsdpParamGroup) -> usize {
        let units = self.units.lock();
        let enclosing = units.iter().rev().find(|other| other.path().contains(unit.path()));
        enclosing.map_or(unit.index(), |root| root.index())
    }

    /// Runs before the backward of a called unit.
    pub(super) fn pre_backward(&self, unit: &UnitId, pass: usize) -> Result<()> {
        self.check(unit)?;
        let entered = self.order.lock().pre_backward(unit.index, Some(pass));
        let actions = entered.map_err(|error| explain(error, unit))?;
        enter_unit_span(&unit.name);
        self.execute(actions)
    }

    /// Runs after the backward of everything between a unit's inputs and outputs.
    pub(super) fn post_backward(&self, unit: &UnitId) -> Result<()> {
        self.check(unit)?;
        let action = self.order.lock().post_backward(unit.index);
        self.execute(action)
    }
}

impl ParamModel for Schedule {
    fn is_running(&self) -> bool {
        Schedule::is_running(self)
    }

    fn pre_use(&self, unit: &UnitId, misses: bool) -> Result<()> {
        self.check(unit)?;
        let _uses = self.uses.lock();
        let (used, in_backward) = {
            let mut order = self.order.lock();
            (order.pre_use(unit.index, keeps_graph(), misses), order.is_in_backward())
        };
        let actions = used.map_err(|error| explain(error, unit))?;
        if in_backward && !actions.is_empty() {
            enter_unit_span(&unit.name);
        }
        self.execute(actions)
    }

    fn add_recomputation(&self, made: Range<usize>, node: usize) {
        self.order.lock().add_recomputation(made, node);
    }

    fn post_accumulate_grad(&self, unit: &UnitId, position: usize, gradient: &Gradient) -> Result<()> {
        self.check(unit)?;
        let outcome = self.order.lock().post_accumulate_grad(unit.index, position);
        let (is_done, actions) = outcome.map_err(|error| explain(error, unit))?;
        if is_done {
            gradient.set_complete();
        }
        self.execute(actions)
    }

    fn post_pass(&self, unit: &UnitId, position: usize, pass: usize) -> Result<()> {
        self.check(unit)?;
        let action = self.order.lock().post_pass(unit.index, position, pass);
        self.execute(action)
    }

    fn hands_out_to_hook(&self) -> bool {
        self.hand_out.lock().hook.is_some()
    }

    fn warn(&self, message: &str) {
        self.diagnostics.warn(message);
    }
}

/// Explains why an event is not allowed.
fn explain(error: OrderError, unit: &UnitId) -> candle_core::Error {
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
                 which reduces the gradients, and `step(&grads)` instead of an optimizer's backward_step",
            );
        }
    };
    Error::unit(&unit.name, message).into()
}

/// A running forward. Dropping it before [`Schedule::post_forward`] means that the forward failed.
pub(super) struct ForwardGuard<'a> {
    schedule: &'a Schedule,
    pub(super) forward: Forward,
    /// Returns whether the graph of the outputs exists, if that can be told.
    pub(super) exists: Option<GraphExists>,
    ok: bool,
    /// Ends after the forward.
    _entered: Entered<'a>,
}

impl Drop for ForwardGuard<'_> {
    fn drop(&mut self) {
        self.schedule.order.lock().end_forward(self.forward, self.exists.take());
        if !self.ok && self.forward.is_root {
            self.schedule.reset();
        }
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

thread_local! {
    /// Span of the unit whose backward runs on this thread. Candle does not tell where a unit's backward ends, so the
    /// span lasts until the next unit's.
    static UNIT_SPAN: RefCell<Option<(EnteredSpan, heartbeat::Span)>> = const { RefCell::new(None) };
}

fn enter_unit_span(unit: &str) {
    leave_unit_span();
    let entered = (tracing::debug_span!("backward", unit).entered(), heartbeat::span("backward", unit));
    UNIT_SPAN.with_borrow_mut(|span| *span = Some(entered));
}

fn leave_unit_span() {
    UNIT_SPAN.with_borrow_mut(|span| drop(span.take()));
}
