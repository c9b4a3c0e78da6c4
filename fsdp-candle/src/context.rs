//! What the units of one model share: the buffer pool, the order in which they run, the reductions in flight, and the state of the iteration.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use candle_core::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use fsdp_core::heartbeat;

use crate::Error;
use crate::backward_order::FixedOrder;
use crate::frozen_call::{self, FrozenCall, number};
use crate::graph_cut::{GraphCut, GraphWatch, WatchedCall};
use crate::group::{ParamGroup, Reduction};
use crate::stack;
use crate::storage::Pool;

/// Room for the recursion over a deep graph in Candle's backward; only touched pages cost memory.
pub(crate) const BACKWARD_STACK_BYTES: usize = 256 << 20;

pub(crate) struct Context {
    pool: Arc<Pool>,
    groups: Mutex<Vec<Arc<ParamGroup>>>,
    iteration: Mutex<Iteration>,
    reductions: Mutex<VecDeque<Reduction>>,
    settings: Mutex<IterationSettings>,
    reported_without_gradient: Mutex<HashSet<String>>,
    graph: GraphWatch,
    /// This process's rank in the mesh: the first speaks for all.
    rank: usize,
}

/// What can be changed of the iteration of a whole model.
#[derive(Clone, Copy)]
pub(crate) struct IterationSettings {
    /// Whether the next backward ends the iteration, and so waits for reductions and hands gradients out.
    pub(crate) is_last_backward: bool,
    /// Whether `finalize_backward` does that instead of backward.
    pub(crate) manual_finalization: bool,
    /// Whether a unit gathers the next one's parameters ahead when it has no list of its own.
    pub(crate) implicit_prefetch: bool,
    /// How many units' unsharded gradients may be on their way through a reduce-scatter; one more waits for the oldest.
    pub(crate) max_reductions: usize,
}

#[derive(Default)]
struct Iteration {
    /// How many units' forwards enclose the code that runs now.
    depth: usize,
    in_backward: bool,
    /// Units in the order in which their forwards began, in this iteration and in the last whole one.
    forward_order: Vec<usize>,
    last_forward_order: Vec<usize>,
    /// Units in the order in which their forwards ended, with the number of forwards that had begun when this one's began and when it ended. Backward runs
    /// in reverse.
    post_forward_order: Vec<Ran>,
    forwards_begun: usize,
    /// The order of the collectives of the backward that runs, if it must not depend on what is used.
    fixed_order: Option<FixedOrder>,
    /// The calls of units with frozen parameters, whose graphs may come to backward.
    frozen_calls: Vec<Weak<FrozenCall>>,
    /// Units whose outputs went out without a hook at some time: their parameters must be there from the beginning of backward.
    unhooked: BTreeSet<usize>,
}

/// A forward that ended.
#[derive(Clone, Copy)]
struct Ran {
    index: usize,
    began: usize,
    ended: usize,
}

impl Context {
    pub(crate) fn of_rank(rank: usize) -> Self {
        Context {
            pool: Arc::default(),
            groups: Mutex::default(),
            iteration: Mutex::default(),
            reductions: Mutex::default(),
            settings: Mutex::new(IterationSettings {
                is_last_backward: true,
                manual_finalization: false,
                implicit_prefetch: true,
                max_reductions: 1,
            }),
            reported_without_gradient: Mutex::default(),
            graph: GraphWatch::default(),
            rank,
        }
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, IterationSettings> {
        lock(&self.settings)
    }

    pub(crate) fn add(&self, group: Arc<ParamGroup>) {
        lock(&self.groups).push(group);
    }

    /// Forgets the units from the `count`-th on: those inside one that failed to build.
    pub(crate) fn truncate(&self, count: usize) {
        lock(&self.groups).truncate(count);
    }

    pub(crate) fn groups(&self) -> Vec<Arc<ParamGroup>> {
        lock(&self.groups).clone()
    }

    pub(crate) fn next_index(&self) -> usize {
        lock(&self.groups).len()
    }

    fn group(&self, index: usize) -> Option<Arc<ParamGroup>> {
        lock(&self.groups).get(index).cloned()
    }

    /// Runs before a unit's forward: gathers its parameters and starts on those of the units that come next.
    pub(crate) fn pre_forward(&self, group: &ParamGroup) -> Result<ForwardGuard<'_>> {
        let (is_root, began, followed) = {
            let mut iteration = lock(&self.iteration);
            if iteration.in_backward {
                return Err(Error::Unit {
                    unit: group.name().into(),
                    message:
                        "its forward was called while backward runs: put the checkpoint inside the unit, not around it"
                            .into(),
                }
                .into());
            }
            let is_root = iteration.depth == 0;
            if is_root && !iteration.forward_order.is_empty() {
                iteration.last_forward_order = std::mem::take(&mut iteration.forward_order);
            }
            iteration.depth += 1;
            iteration.forwards_begun += 1;
            let position = iteration.forward_order.len();
            iteration.forward_order.push(group.index());
            let as_last_time = iteration.last_forward_order.get(position) == Some(&group.index());
            let followed = iteration.last_forward_order.get(position + 1).copied().filter(|_| as_last_time);
            (is_root, iteration.forwards_begun, followed)
        };
        let guard = ForwardGuard { context: self, is_root, began, ok: false };
        if is_root {
            self.groups().iter().try_for_each(|group| group.drop_what_forward_left())?;
        }
        group.unshard()?;
        group.mark_forward();
        let listed: Vec<_> = group.settings().forward_prefetch.iter().filter_map(|unit| unit.upgrade()).collect();
        for next in self.next_units(listed, followed) {
            next.prefetch_for_forward()?;
        }
        Ok(guard)
    }

    /// The units to gather ahead: those of a unit's own list, or else the one that the order implies.
    fn next_units(&self, listed: Vec<Arc<ParamGroup>>, implied: Option<usize>) -> Vec<Arc<ParamGroup>> {
        if !listed.is_empty() {
            return listed;
        }
        implied.filter(|_| self.settings().implicit_prefetch).and_then(|index| self.group(index)).into_iter().collect()
    }

    /// Runs after a unit's forward, of which `parts` modules make one. Tells whether its outputs need a hook that unshards it before their backward.
    pub(crate) fn post_forward(&self, group: &ParamGroup, mut guard: ForwardGuard<'_>, parts: usize) -> Result<bool> {
        {
            // Each unit once, where it ran last: bounded when no backward comes, and right for several forwards before one.
            let mut iteration = lock(&self.iteration);
            let ran = Ran { index: group.index(), began: guard.began, ended: iteration.forwards_begun };
            iteration.post_forward_order.retain(|other| other.index != ran.index);
            iteration.post_forward_order.push(ran);
        }
        let resharded = group.reshard_after_forward(guard.is_root, parts)?;
        guard.ok = true;
        // A root that keeps its parameters has nothing to do before backward that `backward` does not do itself.
        let hook = resharded || !guard.is_root;
        if !hook {
            lock(&self.iteration).unhooked.insert(group.index());
        }
        Ok(hook)
    }

    /// A call of a unit that begins, if cuts of its graph are still looked for.
    pub(crate) fn watch(&self, unit: &Arc<ParamGroup>, inputs: Vec<Tensor>) -> Result<Option<WatchedCall<'_>>> {
        self.graph.begin(unit, inputs)
    }

    pub(crate) fn is_watched(&self, unit: &ParamGroup) -> bool {
        self.graph.is_watched(unit.index())
    }

    pub(crate) fn graph_cuts(&self) -> Vec<GraphCut> {
        self.graph.told()
    }

    /// A call of a unit with frozen parameters that begins.
    pub(crate) fn frozen_call(&self, unit: &ParamGroup) -> Arc<FrozenCall> {
        let call = Arc::new(FrozenCall::of(unit.index()));
        let mut iteration = lock(&self.iteration);
        if iteration.frozen_calls.len() == iteration.frozen_calls.capacity() {
            iteration.frozen_calls.retain(|call| call.strong_count() > 0);
        }
        iteration.frozen_calls.push(Arc::downgrade(&call));
        call
    }

    pub(crate) fn check_in_backward(&self) -> Result<()> {
        if lock(&self.iteration).in_backward {
            return Ok(());
        }
        Err(candle_core::Error::msg(
            "the loss's own backward() was called on a sharded model: call `backward(&loss)` of the FsdpModule, which \
             reduces the gradients, and `step(&grads)` in place of an optimizer's backward_step",
        ))
    }

    /// Runs before the backward of anything inside a unit: gathers its parameters and starts on those of the units that come next in backward.
    pub(crate) fn pre_backward(&self, group: &Arc<ParamGroup>) -> Result<()> {
        self.check_in_backward()?;
        trace::enter(group.name());
        let (preceded, later) = {
            let iteration = lock(&self.iteration);
            let order = &iteration.post_forward_order;
            match order.iter().position(|ran| ran.index == group.index()) {
                Some(position) => {
                    let known = iteration.fixed_order.is_some();
                    let later = order.iter().filter(|ran| !known && ran.began > order[position].ended);
                    let later: Vec<usize> = later.map(|ran| ran.index).collect();
                    (position.checked_sub(1).map(|before| order[before].index), later)
                }
                None => (None, vec![]),
            }
        };
        // Units that ran after this one are done; with a fixed order each knows by itself. One that still waits has parameters that got no gradient: it need not wait for the end.
        for later in
            later.into_iter().rev().filter_map(|index| self.group(index)).filter(|later| later.waits_for_gradients())
        {
            later.mark_reduced();
            self.reduce(&later)?;
        }
        let (unshard, listed) = {
            let settings = group.settings();
            let listed: Vec<_> = settings.backward_prefetch.iter().filter_map(|unit| unit.upgrade()).collect();
            (settings.unshard_in_backward, listed)
        };
        if unshard {
            self.start_unshard_in_backward(group)?;
            group.unshard()?;
        }
        let mut next = self.next_units(listed, preceded);
        next.retain(|next| next.settings().unshard_in_backward);
        next.iter().try_for_each(|next| self.start_unshard_in_backward(next))
    }

    /// Issues a unit's all-gather, after those of the units that come before it in a fixed order.
    fn start_unshard_in_backward(&self, group: &ParamGroup) -> Result<()> {
        self.start_gathers_up_to(group)?;
        group.start_unshard()
    }

    fn start_gathers_up_to(&self, group: &ParamGroup) -> Result<()> {
        let turn = lock(&self.iteration).fixed_order.as_mut().map(|order| order.gathers_up_to(group.index()));
        turn.into_iter().flatten().filter_map(|index| self.group(index)).try_for_each(|group| group.start_unshard())
    }

    /// Issues the reduction of a unit's gradients, when its turn has come.
    pub(crate) fn reduce(&self, group: &Arc<ParamGroup>) -> Result<()> {
        let turn = lock(&self.iteration).fixed_order.as_mut().map(|order| order.ready(group.index()));
        match turn {
            None => self.issue_reduction(group, false),
            // Another rank may need a unit's parameters before it can get to its gradients: they are gathered first.
            Some(turn) => turn.into_iter().filter_map(|index| self.group(index)).try_for_each(|group| {
                self.start_gathers_up_to(&group)?;
                self.issue_reduction(&group, true)
            }),
        }
    }

    fn issue_reduction(&self, group: &Arc<ParamGroup>, apart: bool) -> Result<()> {
        let max = self.settings().max_reductions.max(1);
        // Which reductions go on depends on their number alone, never on their speed: all ranks issue their collectives in the same order.
        let mut waiting: VecDeque<Reduction> = lock(&self.reductions).drain(..).collect();
        let mut over_shards = waiting.iter().filter(|reduction| reduction.is_over_shards()).count();
        let mut over_replicas = waiting.len() - over_shards;
        while let Some(reduction) = waiting.pop_front() {
            let count = if reduction.is_over_shards() { &mut over_shards } else { &mut over_replicas };
            let next = if *count >= max {
                *count -= 1;
                match reduction.advance() {
                    Ok(next) => next,
                    Err(error) => {
                        // The others are still in flight, and are waited for when the step is forgotten.
                        lock(&self.reductions).extend(waiting);
                        return Err(error);
                    }
                }
            } else {
                Some(reduction)
            };
            lock(&self.reductions).extend(next);
        }
        let mut started = vec![];
        let outcome = Reduction::start(group, apart, &mut started);
        lock(&self.reductions).extend(started);
        outcome
    }

    /// Runs the whole backward: gradients of `loss`, reduced and sharded, under the ids of the shards.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        {
            let mut iteration = lock(&self.iteration);
            if iteration.in_backward || iteration.depth > 0 {
                return Err(candle_core::Error::msg(
                    "backward was called inside a forward or another backward of the same model",
                ));
            }
            iteration.in_backward = true;
        }
        let mut guard = BackwardGuard { context: self, ok: false, _told: heartbeat::span("backward", "") };
        let grads = self.run_backward(loss)?;
        guard.ok = true;
        Ok(grads)
    }

    fn run_backward(&self, loss: &Tensor) -> Result<GradStore> {
        let groups = self.groups();
        groups.iter().for_each(|group| group.begin_backward());
        if groups.iter().any(|group| group.settings().reduce_scatter_unused_params) {
            // Gathers and reductions queue apart: how they interleave depends on what is used.
            groups
                .iter()
                .flat_map(|group| group.params())
                .try_for_each(|param| param.ranks().shard_apart().map(drop))?;
            let mut iteration = lock(&self.iteration);
            let order = FixedOrder::new(&groups, iteration.post_forward_order.iter().map(|ran| ran.index));
            iteration.fixed_order = Some(order);
        }
        let last = lock(&self.iteration).post_forward_order.last().copied();
        if let Some(root) = last.and_then(|ran| self.group(ran.index)) {
            self.pre_backward(&root)?;
        }
        let unhooked = lock(&self.iteration).unhooked.clone();
        for group in unhooked.into_iter().filter_map(|index| self.group(index)) {
            group.unshard()?;
        }
        let (fixed, frozen_calls) = {
            let iteration = lock(&self.iteration);
            let alive: Vec<_> = iteration.frozen_calls.iter().filter_map(Weak::upgrade).collect();
            (iteration.fixed_order.is_some(), alive)
        };
        let nodes = || loss.sorted_nodes().into_iter().map(Tensor::id).collect();
        let nodes: Vec<TensorId> = match fixed || !frozen_calls.is_empty() {
            true => stack::with(BACKWARD_STACK_BYTES, "backward", nodes)?,
            false => vec![],
        };
        let numbers: Vec<usize> = nodes.iter().map(|&id| number(id)).collect();
        frozen_call::begin_backward(&frozen_calls, &numbers);
        drop(frozen_calls);
        if fixed {
            let reached: HashSet<TensorId> = nodes.into_iter().collect();
            // Told before any reduces.
            let unreached =
                groups.iter().map(|group| Ok((group, group.expect(&reached)?))).collect::<Result<Vec<_>>>()?;
            for (group, _) in unreached.into_iter().filter(|(_, reached)| !reached) {
                group.mark_reduced();
                self.reduce(group)?;
            }
        }
        let mut grads = stack::with(BACKWARD_STACK_BYTES, "backward", || loss.backward())??;
        trace::leave();
        let left = lock(&self.iteration).fixed_order.as_mut().map(FixedOrder::gathers_left);
        for group in left.into_iter().flatten().filter_map(|index| self.group(index)) {
            group.start_unshard()?;
        }
        for group in &groups {
            // What has not reported by now never will: unused parameters, and those behind a cut.
            if !group.has_reduced() {
                self.reduce(group)?;
            }
            group.finish_backward()?;
        }
        lock(&self.iteration).fixed_order = None;
        let settings = *self.settings();
        if settings.is_last_backward {
            lock(&self.iteration).post_forward_order.clear();
        }
        if settings.is_last_backward && !settings.manual_finalization {
            self.finalize_backward(&mut grads)?;
        }
        Ok(grads)
    }

    /// Waits for the reductions and files the sharded gradients in `grads`.
    pub(crate) fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        loop {
            let Some(oldest) = lock(&self.reductions).pop_front() else { break };
            finish(oldest)?;
        }
        let (mut without_gradient, mut cuts) = (vec![], vec![]);
        for group in self.groups() {
            let reduced = group.take_gradients()?;
            let communicated = {
                let settings = group.settings();
                settings.requires_gradient_sync && settings.requires_all_reduce
            };
            let ran = group.take_ran_forward();
            if ran {
                cuts.extend(self.graph.pass(group.index()));
            }
            if ran && communicated {
                let silent = |param: &&Arc<crate::FsdpParam>| {
                    param.trainable() && !reduced.iter().any(|(other, _, used)| *used && Arc::ptr_eq(other, param))
                };
                without_gradient.extend(group.params().iter().filter(silent).map(|param| param.name().to_string()));
            }
            for (param, grad, _) in reduced {
                param.file_gradient(grad, grads)?;
            }
        }
        self.report(without_gradient, &cuts);
        Ok(())
    }

    /// Says once what is wrong with gradients: on the first rank, for all others ran the same units.
    fn report(&self, names: Vec<String>, cuts: &[GraphCut]) {
        let mut reported = lock(&self.reported_without_gradient);
        let new: Vec<String> = names.into_iter().filter(|name| reported.insert(name.clone())).collect();
        drop(reported);
        let Some(message) = crate::graph_cut::report(&new, cuts) else { return };
        if self.rank != 0 {
            tracing::debug!("{message}");
        } else if tracing::dispatcher::has_been_set() {
            tracing::warn!("{message}");
        } else {
            // Too grave to go unheard in a program that has no subscriber.
            // `eprintln!` panics where stderr is on a full disk.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("warning: {message}\n"));
        }
    }

    /// The names reported so far, sorted.
    pub(crate) fn without_gradient(&self) -> Vec<String> {
        let mut names: Vec<String> = lock(&self.reported_without_gradient).iter().cloned().collect();
        names.sort();
        names
    }

    pub(crate) fn reset_iter_state(&self) {
        *lock(&self.iteration) = Iteration::default();
        let reductions: Vec<Reduction> = lock(&self.reductions).drain(..).collect();
        reductions.into_iter().for_each(Reduction::abandon);
        for group in self.groups() {
            group.reset();
        }
        self.pool.clear();
    }
}

/// The span of the unit whose backward runs on this thread. Candle runs backward without telling where one unit ends and the next begins: a unit's span lasts
/// until the next one's.
mod trace {
    use std::cell::RefCell;

    use fsdp_core::heartbeat;
    use tracing::span::EnteredSpan;

    thread_local! {
        static UNIT: RefCell<Option<(EnteredSpan, heartbeat::Span)>> = const { RefCell::new(None) };
    }

    pub(super) fn enter(unit: &str) {
        leave();
        let entered = (tracing::debug_span!("backward", unit).entered(), heartbeat::span("backward", unit));
        UNIT.with_borrow_mut(|unit| *unit = Some(entered));
    }

    pub(super) fn leave() {
        UNIT.with_borrow_mut(|unit| drop(unit.take()));
    }
}

/// Waits for a reduction to its end.
fn finish(reduction: Reduction) -> Result<()> {
    let mut next = Some(reduction);
    while let Some(reduction) = next {
        next = reduction.advance()?;
    }
    Ok(())
}

/// A backward that runs; dropping it early means that it failed or panicked.
struct BackwardGuard<'a> {
    context: &'a Context,
    ok: bool,
    /// Ends after the spans of units, which `drop` ends.
    _told: heartbeat::Span,
}

impl Drop for BackwardGuard<'_> {
    fn drop(&mut self) {
        lock(&self.context.iteration).in_backward = false;
        trace::leave();
        if !self.ok {
            self.context.reset_iter_state();
        }
    }
}

/// A forward that runs; dropping it without [`Context::post_forward`] means that it failed.
pub(crate) struct ForwardGuard<'a> {
    context: &'a Context,
    is_root: bool,
    /// The number of forwards that had begun with this one.
    began: usize,
    ok: bool,
}

impl Drop for ForwardGuard<'_> {
    fn drop(&mut self) {
        {
            let mut iteration = lock(&self.context.iteration);
            iteration.depth = iteration.depth.saturating_sub(1);
        }
        if !self.ok && self.is_root {
            self.context.reset_iter_state();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
