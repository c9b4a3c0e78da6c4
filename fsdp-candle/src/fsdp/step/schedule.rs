//! What the units of one model share while it trains: the order of their collectives, and what carries it out.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{Device, Result};

use super::order::{Action, Forward, Order, Refused};
use super::reductions::Reductions;
use super::rules::{StepSettings, UnitRules};
use super::spans;
use crate::autograd::keeps_graph;
use crate::diagnostics::Diagnostics;
use crate::error::Error;
use crate::fsdp::graph::{BackwardEvents, FrozenCall, Listener};
use crate::fsdp::policy::ReshardAfterForward;
use crate::fsdp::unit::{Downloads, FsdpParam, ParamGroup, Reduction, UnitId, Uses};
use crate::kernels;
use crate::storage::Pool;

/// No lock is held while an action is carried out: it may wait for peers, and run the user's code.
pub(crate) struct Schedule {
    pool: Arc<Pool>,
    downloads: Arc<Downloads>,
    units: Mutex<Vec<Arc<ParamGroup>>>,
    order: Mutex<Order>,
    pub(super) reductions: Reductions<Reduction>,
    /// The calls of units with frozen parameters, whose graphs may come to backward.
    frozen_calls: Mutex<Vec<Weak<FrozenCall>>>,
    diagnostics: Diagnostics,
    /// What is to be true of a model that is built.
    once_built: Mutex<Option<Arc<Check>>>,
    /// Whether shards that were gathered over replicas are what the replicas' parts make: no gradients were handed out
    /// since.
    shards_are_fresh: AtomicBool,
}

type Check = dyn Fn() -> crate::error::Result<()> + Send + Sync;

impl Schedule {
    pub(crate) fn of_rank(rank: usize, device: &Device) -> Self {
        let pool = Arc::new(Pool::new(kernels::of_device_or_cpu(device)));
        Schedule {
            downloads: Arc::new(Downloads::new(pool.clone())),
            pool,
            units: Mutex::default(),
            order: Mutex::default(),
            reductions: Reductions::new(),
            frozen_calls: Mutex::default(),
            diagnostics: Diagnostics::of_rank(rank),
            once_built: Mutex::default(),
            shards_are_fresh: AtomicBool::new(false),
        }
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The gradients of offloaded parameters that are on their way to the host.
    pub(crate) fn downloads(&self) -> &Arc<Downloads> {
        &self.downloads
    }

    pub(crate) fn diagnostics(&self) -> &Diagnostics {
        &self.diagnostics
    }

    /// Who hears the operations in the graph.
    pub(crate) fn listener(self: &Arc<Self>) -> Listener {
        Listener::new(self)
    }

    pub(super) fn order(&self) -> MutexGuard<'_, Order> {
        lock(&self.order)
    }

    /// Adds a unit, which is at its position in the order of calls.
    pub(crate) fn add(&self, unit: Arc<ParamGroup>, reshard_after_forward: ReshardAfterForward) {
        let rules = UnitRules::new(unit.trainable(), reshard_after_forward);
        self.add_with(unit, rules);
    }

    /// Adds a unit that is made by name in the one that will be at the position `called`.
    pub(crate) fn add_by_name(self: &Arc<Self>, unit: Arc<ParamGroup>, policy: ReshardAfterForward, called: usize) {
        unit.tell_uses(self);
        let has_frozen = unit.has_frozen();
        let rules = UnitRules { has_frozen, by_name_in: Some(called), ..UnitRules::new(unit.trainable(), policy) };
        self.add_with(unit, rules);
    }

    fn add_with(&self, unit: Arc<ParamGroup>, mut rules: UnitRules) {
        let mut units = lock(&self.units);
        let mut order = self.order();
        let at = |other: &Arc<ParamGroup>| other.index();
        let by_name = |other: &&Arc<ParamGroup>| order.is_by_name(other.index());
        rules.around =
            units.iter().filter(by_name).filter(|other| other.path().contains(unit.path())).map(at).collect();
        let inside: Vec<usize> = match rules.by_name_in {
            Some(_) => units.iter().filter(|other| unit.path().contains(other.path())).map(at).collect(),
            None => vec![],
        };
        order.add(rules, &inside);
        drop(order);
        units.push(unit);
    }

    /// Forgets the units from the `count`-th on: those inside one that failed to build.
    pub(crate) fn truncate(&self, count: usize) {
        lock(&self.units).truncate(count);
        self.order().truncate(count);
    }

    pub(crate) fn units(&self) -> Vec<Arc<ParamGroup>> {
        lock(&self.units).clone()
    }

    /// The position of the next unit.
    pub(crate) fn next_index(&self) -> usize {
        lock(&self.units).len()
    }

    /// The units in the order in which their forwards began, in the forward that ran last.
    pub(crate) fn forward_order(&self) -> Vec<usize> {
        self.order().forward_order()
    }

    /// Whether ranks may use different units, and need an order that does not depend on what they use.
    pub(crate) fn ranks_may_differ(&self) -> bool {
        lock(&self.units).iter().any(|unit| unit.settings().reduce_scatter_unused_params)
    }

    fn unit(&self, index: usize) -> Option<Arc<ParamGroup>> {
        lock(&self.units).get(index).cloned()
    }

    /// Whether this is a unit of the model's.
    pub(crate) fn has(&self, id: &UnitId) -> bool {
        lock(&self.units).get(id.index).is_some_and(|unit| Arc::ptr_eq(&unit.id().name, &id.name))
    }

    fn check(&self, id: &UnitId) -> Result<()> {
        if self.has(id) {
            return Ok(());
        }
        let message = "it is no part of a model: the unit around it failed to build. Build both again".into();
        Err(Error::Unit { unit: id.name.to_string(), message }.into())
    }

    /// Whether a forward or backward runs.
    pub(crate) fn is_at_work(&self) -> bool {
        self.order().is_at_work()
    }

    /// Counts each unit's trainable parameters anew, after some were frozen or are trained again.
    pub(crate) fn trainable_changed(&self) {
        for unit in self.units() {
            let mut changed = false;
            self.change_rules(unit.id(), |rules| {
                changed = rules.trainable != unit.trainable();
                rules.trainable = unit.trainable();
                rules.has_frozen = rules.by_name_in.is_some() && unit.has_frozen();
            });
            if changed {
                self.diagnostics.graph.watch_again(unit.index());
            }
        }
    }

    /// Changes when a unit communicates.
    pub(crate) fn change_rules(&self, unit: &UnitId, change: impl FnOnce(&mut UnitRules)) {
        if self.has(unit)
            && let Some(rules) = self.order().rules(unit.index)
        {
            change(rules);
        }
    }

    /// What becomes of a unit's parameters after forward.
    pub(crate) fn reshard_after_forward(&self, unit: &UnitId) -> ReshardAfterForward {
        self.order().rules(unit.index).map_or_else(Default::default, |rules| rules.reshard_after_forward)
    }

    pub(crate) fn change_settings(&self, change: impl FnOnce(&mut StepSettings)) {
        change(&mut self.order().settings);
    }

    /// Has something checked when the first forward begins.
    pub(crate) fn before_first_forward(&self, check: impl Fn() -> crate::error::Result<()> + Send + Sync + 'static) {
        *lock(&self.once_built) = Some(Arc::new(check));
    }

    /// A call of a unit with frozen parameters that begins.
    pub(crate) fn frozen_call(&self, unit: &ParamGroup) -> Arc<FrozenCall> {
        let call = Arc::new(FrozenCall::of(unit.index()));
        let mut calls = lock(&self.frozen_calls);
        if calls.len() == calls.capacity() {
            calls.retain(|call| call.strong_count() > 0);
        }
        calls.push(Arc::downgrade(&call));
        call
    }

    /// Those whose graphs are there.
    pub(super) fn frozen_calls(&self) -> Vec<Arc<FrozenCall>> {
        lock(&self.frozen_calls).iter().filter_map(Weak::upgrade).collect()
    }

    /// Runs before a unit's forward: gathers its parameters and starts on those of the units that come next.
    pub(crate) fn pre_forward(&self, unit: &ParamGroup) -> Result<ForwardGuard<'_>> {
        self.check(unit.id())?;
        let once_built = lock(&self.once_built).clone();
        if let Some(check) = once_built {
            check()?;
            *lock(&self.once_built) = None;
        }
        let (forward, actions) =
            self.order().forward_begins(unit.index(), keeps_graph()).map_err(|refused| explain(refused, unit.id()))?;
        let guard = ForwardGuard { schedule: self, forward, ok: false };
        if forward.is_root {
            self.gather_shards(unit)?;
        }
        self.carry_out(actions)?;
        Ok(guard)
    }

    /// Runs after a unit's forward, of which `parts` modules make one. Tells whether its outputs need a hook that
    /// unshards it before their backward. The guard is dropped when they have it.
    pub(crate) fn post_forward(&self, unit: &ParamGroup, guard: &mut ForwardGuard<'_>, parts: usize) -> Result<bool> {
        let (hook, actions) = self.order().forward_ends(unit.index(), guard.forward, parts);
        self.carry_out(actions)?;
        if guard.forward.is_root && !keeps_graph() {
            self.drop_shards();
        }
        guard.ok = true;
        Ok(hook)
    }

    /// Begins to gather the shards of the units inside a root that replicas hold parts of: all at once and in one
    /// order, whatever the forward will use.
    fn gather_shards(&self, root: &ParamGroup) -> Result<()> {
        let units = self.units();
        if !units.iter().any(|unit| unit.is_divided()) {
            return Ok(());
        }
        if !self.shards_are_fresh.load(Ordering::Relaxed) {
            units.iter().for_each(|unit| unit.drop_shards());
        }
        let is_inside = |unit: &&Arc<ParamGroup>| unit.index() == root.index() || root.path().contains(unit.path());
        units.iter().filter(is_inside).try_for_each(|unit| unit.gather_shards())
    }

    /// Drops the shards that were gathered over replicas.
    fn drop_shards(&self) {
        self.units().iter().for_each(|unit| unit.drop_shards());
    }

    /// Notes that a backward has ended, and whether it has handed out gradients, with which an optimizer may step.
    pub(super) fn backward_handed_out(&self, gradients: bool) {
        self.shards_are_fresh.store(!gradients, Ordering::Relaxed);
        if gradients {
            self.drop_shards();
        }
    }

    /// Frees what was gathered of a unit. An optimizer may step before it is gathered again, unless micro-batches share
    /// what replicas gathered.
    pub(crate) fn reshard(&self, unit: &ParamGroup) -> Result<()> {
        if !self.shards_are_fresh.load(Ordering::Relaxed) {
            unit.drop_shards();
        }
        unit.reshard()
    }

    /// Frees what was gathered of every unit, for parameters have changed.
    pub(crate) fn reshard_all(&self) -> Result<()> {
        self.shards_are_fresh.store(false, Ordering::Relaxed);
        self.units().iter().try_for_each(|unit| unit.reshard())?;
        self.drop_shards();
        Ok(())
    }

    /// Does what the order says.
    pub(super) fn carry_out(&self, actions: impl IntoIterator<Item = Action>) -> Result<()> {
        actions.into_iter().try_for_each(|action| self.carry_out_one(action))
    }

    fn carry_out_one(&self, action: Action) -> Result<()> {
        let (Action::Gather(index)
        | Action::Await(index)
        | Action::Free(index)
        | Action::FreeFrozen(index)
        | Action::FreeBut { unit: index, .. }
        | Action::FreeParameter { unit: index, .. }
        | Action::Reduce(index)
        | Action::NextPass { unit: index, .. }) = action;
        let Some(unit) = self.unit(index) else { return Ok(()) };
        match action {
            Action::Gather(_) => unit.start_unshard(),
            Action::Await(_) => unit.unshard(),
            Action::Free(_) => unit.reshard(),
            Action::FreeFrozen(_) => unit.reshard_frozen(),
            Action::FreeBut { ranks, .. } => unit.reshard_to(ranks),
            Action::FreeParameter { position, .. } => unit.reshard_parameter(position),
            Action::Reduce(_) => self.reduce(&unit),
            Action::NextPass { pass, .. } => {
                unit.next_pass(pass);
                Ok(())
            }
        }
    }

    fn reduce(&self, unit: &Arc<ParamGroup>) -> Result<()> {
        let max = self.order().settings.max_reductions;
        self.reductions.make_room(max)?;
        let mut started = vec![];
        let outcome = Reduction::start(unit, &mut started);
        self.reductions.add(started);
        outcome
    }

    /// Makes the model ready for a new iteration after one that failed.
    pub(crate) fn forget_step(&self) {
        self.order().forget_step();
        lock(&self.frozen_calls).clear();
        self.shards_are_fresh.store(false, Ordering::Relaxed);
        self.reductions.abandon();
        for unit in self.units() {
            unit.forget_step();
        }
        self.pool.clear();
    }
}

/// What an event that may not happen means.
fn explain(refused: Refused, unit: &UnitId) -> candle_core::Error {
    match refused {
        Refused::InBackward => Error::Unit {
            unit: unit.name.to_string(),
            message: "its forward was called while backward runs: put the checkpoint inside the unit, not around it"
                .into(),
        }
        .into(),
        Refused::NotPlanned => Error::Unit {
            unit: unit.name.to_string(),
            message: "backward came to it, which the loss's graph did not show before. Ranks may use different \
                      parameters (set_reduce_scatter_unused_params), so every unit that backward comes to must be \
                      known when it begins: call the unit through its FsdpModule, and use its parameters inside"
                .into(),
        }
        .into(),
        Refused::InForward | Refused::NoBackward => candle_core::Error::msg(
            "the loss's own backward() was called on a sharded model: call `backward(&loss)` of the FsdpModule, which \
             reduces the gradients, and `step(&grads)` in place of an optimizer's backward_step",
        ),
    }
}

impl BackwardEvents for Schedule {
    fn before_unit(&self, unit: &UnitId, pass: usize) -> Result<()> {
        self.check(unit)?;
        let actions = self.order().before_unit(unit.index, Some(pass)).map_err(|refused| explain(refused, unit))?;
        spans::enter(&unit.name);
        self.carry_out(actions)
    }

    fn after_unit(&self, unit: &UnitId) -> Result<()> {
        self.check(unit)?;
        let action = self.order().after_unit(unit.index);
        self.carry_out(action)
    }

    fn gradient_complete(&self, param: &FsdpParam) -> Result<()> {
        let (unit, position) = param.unit()?;
        self.check(unit)?;
        let outcome = self.order().gradient_complete(unit.index, position);
        let (is_done, actions) = outcome.map_err(|refused| explain(refused, unit))?;
        if is_done {
            param.gradient().complete();
        }
        self.carry_out(actions)
    }

    fn pass_complete(&self, param: &FsdpParam, pass: usize) -> Result<()> {
        let (unit, position) = param.unit()?;
        self.check(unit)?;
        let action = self.order().pass_complete(unit.index, position, pass);
        self.carry_out(action)
    }
}

impl Uses for Schedule {
    fn used(&self, unit: &UnitId, misses: bool) -> Result<()> {
        self.check(unit)?;
        let (actions, in_backward) = {
            let mut order = self.order();
            let actions = order.used(unit.index, keeps_graph(), misses).map_err(|refused| explain(refused, unit))?;
            (actions, order.is_in_backward())
        };
        if in_backward && !actions.is_empty() {
            spans::enter(&unit.name);
        }
        self.carry_out(actions)
    }

    fn replays(&self, made: Range<usize>, node: usize) {
        self.order().replays(made, node);
    }
}

/// A forward that runs; dropping it without [`Schedule::post_forward`] means that it failed.
pub(crate) struct ForwardGuard<'a> {
    schedule: &'a Schedule,
    forward: Forward,
    ok: bool,
}

impl ForwardGuard<'_> {
    /// The pass of the unit that the forward belongs to.
    pub(crate) fn pass(&self) -> usize {
        self.forward.pass
    }
}

impl Drop for ForwardGuard<'_> {
    fn drop(&mut self) {
        self.schedule.order().forward_is_over(self.forward);
        if !self.ok && self.forward.is_root {
            self.schedule.forget_step();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
