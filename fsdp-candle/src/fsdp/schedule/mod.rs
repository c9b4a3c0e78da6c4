//! The state that the units of one model share: the order of their collectives, and the execution of its actions.
//!
//! Hooks call in from forward ([`Schedule::pre_forward`], [`Schedule::post_forward`], [`Schedule::pre_use`]) and from
//! backward ([`Schedule::pre_backward`], [`Schedule::post_accumulate_grad`]). Each passes the event to [`Order`] and
//! executes the actions that it returns. The order is not locked meanwhile: an action may wait for peers and run the
//! user's code. Uses of units by name wait for each other (`Schedule::uses`).
//!
//! | file | subject |
//! |---|---|
//! | `forward` | hooks around a called unit |
//! | `backward` | from a loss to sharded gradients |
//! | `hand_out` | the way of reduced gradients to the caller or to a hook |
//! | `by_hand` | units that the user unshards and reshards |
//! | `replica_gathers` | gathers over replicas of the shards that replicas divide |
//! | `explain` | messages for events that are not allowed |
//! | `unit_span` | traces of the unit whose backward runs |

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Weak};

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor};
use parking_lot::{Mutex, ReentrantMutex};

use self::explain::explain;
use self::hand_out::HandOut;
use self::unit_span::enter_unit_span;
use super::callers::Callers;
use super::diagnostics::Diagnostics;
use super::frozen_call::FrozenCall;
use super::gradient::Gradient;
use super::memory_summary::MemorySummary;
use super::offload::Downloads;
use super::order::{Action, Order, UnitInfo};
use super::param::FsdpParam;
use super::param_events::ParamModel;
use super::param_group::FsdpParamGroup;
use super::policy::ReshardAfterForward;
use super::reduction::{Reduction, ReductionQueue};
use super::settings::{CommSettings, ModelSettings, UnshardSettings};
use super::unit_path::{UnitId, UnitPath};
use crate::autograd::keeps_graph;
use crate::error::Error;
use crate::kernels;
use crate::storage::Pool;

mod backward;
mod by_hand;
mod explain;
mod forward;
mod hand_out;
mod replica_gathers;
mod unit_span;

pub(super) use self::backward::TAKES_NOTHING;

/// The shared state of one model's units: PyTorch's `FSDPStateContext`.
pub(crate) struct Schedule {
    pub(super) pool: Arc<Pool>,
    /// Device that layers compute on.
    device: Device,
    /// Copies of offloaded parameters' gradients to the host.
    pub(super) downloads: Arc<Downloads>,
    pub(crate) diagnostics: Diagnostics,
    /// The number of the map, which its units' collectives name.
    pub(super) map: u64,
    units: Mutex<Vec<Arc<FsdpParamGroup>>>,
    order: Mutex<Order>,
    /// Held while the actions of a use run, so that another thread that uses the same unit waits for them.
    uses: ReentrantMutex<()>,
    callers: Callers,
    reductions: ReductionQueue<Reduction>,
    /// Calls of units with frozen parameters whose graphs exist.
    frozen_calls: Mutex<Vec<Weak<FrozenCall>>>,
    /// Checks of the complete model, which run in the first forward.
    first_forward_checks: Mutex<Vec<Arc<Check>>>,
    hand_out: Mutex<HandOut>,
}

type Check = dyn Fn() -> crate::error::Result<()> + Send + Sync;

/// Units and settings.
impl Schedule {
    /// Makes the schedule of the `map`-th map of its ranks.
    pub(crate) fn new(rank: usize, map: u64, device: &Device) -> Self {
        let pool = Arc::new(Pool::new(kernels::of_device_or_cpu(device)));
        Schedule {
            downloads: Arc::new(Downloads::new(pool.clone())),
            pool,
            device: device.clone(),
            map,
            diagnostics: Diagnostics::of_rank(rank),
            units: Mutex::default(),
            order: Mutex::default(),
            uses: ReentrantMutex::default(),
            callers: Callers::default(),
            reductions: ReductionQueue::default(),
            frozen_calls: Mutex::default(),
            first_forward_checks: Mutex::default(),
            hand_out: Mutex::default(),
        }
    }

    /// Adds a unit. `by_name_in` is the index of the unit whose call runs it, for a unit by name.
    pub(super) fn add(&self, unit: Arc<FsdpParamGroup>, settings: UnshardSettings, by_name_in: Option<usize>) {
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
        order.add(UnitInfo { by_name_in, enclosing, settings, holds: 0 }, &inside);
        drop(order);
        units.push(unit);
    }

    /// Removes the units from index `count` on: the units inside one that failed to build.
    pub(super) fn truncate(&self, count: usize) {
        self.units.lock().truncate(count);
        self.order.lock().truncate(count);
    }

    pub(crate) fn units(&self) -> Vec<Arc<FsdpParamGroup>> {
        self.units.lock().clone()
    }

    /// Returns the index of the next unit.
    pub(super) fn next_index(&self) -> usize {
        self.units.lock().len()
    }

    /// Returns what the device's memory holds.
    pub(super) fn memory_summary(&self) -> Result<MemorySummary> {
        MemorySummary::of(self.diagnostics.rank(), &self.units(), &self.pool, kernels::device_id(&self.device)?)
    }

    /// Returns the units in the order in which their forwards began, in the last root forward.
    pub(crate) fn forward_order(&self) -> Vec<usize> {
        self.order.lock().forward_order()
    }

    /// Returns whether the unit belongs to the model.
    pub(super) fn has(&self, id: &UnitId) -> bool {
        self.units.lock().get(id.index).is_some_and(|unit| Arc::ptr_eq(&unit.id().name, &id.name))
    }

    /// Returns the units that a path contains.
    pub(super) fn units_inside(&self, path: &UnitPath) -> Vec<Arc<FsdpParamGroup>> {
        let mut units = self.units();
        units.retain(|unit| path.contains(unit.path()));
        units
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

    /// Watches the graphs of the units of `changed`: parameters that were frozen, or are trained again.
    pub(super) fn requires_grad_changed(&self, changed: &[Arc<FsdpParam>]) {
        let ids = changed.iter().filter_map(|param| Some(param.unit().ok()?.0));
        let units: BTreeSet<usize> = ids.filter(|id| self.has(id)).map(|id| id.index).collect();
        units.into_iter().for_each(|unit| self.diagnostics.graph.watch_again(unit));
    }

    /// Changes how a unit communicates.
    pub(super) fn change_comm_settings(&self, unit: &FsdpParamGroup, change: impl FnOnce(&mut CommSettings)) {
        change(&mut unit.settings.lock());
        let ranks_may_differ = self.ranks_may_differ();
        self.order.lock().settings.fixed_order = ranks_may_differ;
    }

    /// Changes when a unit is unsharded and resharded.
    pub(super) fn change_unshard_settings(&self, unit: &FsdpParamGroup, change: impl FnOnce(&mut UnshardSettings)) {
        if self.has(unit.id())
            && let Some(info) = self.order.lock().unit(unit.index())
        {
            change(&mut info.settings);
        }
    }

    /// Returns a unit's policy for the end of its forward.
    pub(crate) fn reshard_after_forward(&self, unit: &FsdpParamGroup) -> ReshardAfterForward {
        let mut order = self.order.lock();
        let info = if self.has(unit.id()) { order.unit(unit.index()) } else { None };
        info.map(|info| info.settings.reshard_after_forward).unwrap_or_default()
    }

    /// Changes the settings of the whole model.
    pub(super) fn change_model_settings(&self, change: impl FnOnce(&mut ModelSettings)) {
        change(&mut self.order.lock().settings);
    }

    /// Adds a check that runs when the first forward begins.
    pub(super) fn before_first_forward(&self, check: impl Fn() -> crate::error::Result<()> + Send + Sync + 'static) {
        self.first_forward_checks.lock().push(Arc::new(check));
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
        self.reductions.discard();
        self.hand_out.lock().early.clear();
        for unit in self.units() {
            unit.reset();
        }
        self.pool.clear();
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

    fn backward_for_step(&self, unit: &UnitId, loss: &Tensor) -> Result<GradStore> {
        Schedule::backward_for_step(self, unit, loss)
    }

    fn hands_out_to_hook(&self) -> bool {
        self.hand_out.lock().hook.is_some()
    }

    fn warn(&self, message: &str) {
        self.diagnostics.warn(message);
    }
}
