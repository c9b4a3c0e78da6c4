//! What the units of one model share: the buffer pool, the order in which they run, the reductions in flight, and the state of the iteration.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Result;
use candle_core::Tensor;
use candle_core::backprop::GradStore;

use crate::Error;
use crate::group::{ParamGroup, Reduction};
use crate::storage::Pool;

/// Room for the recursion over a deep graph in Candle's backward; only touched pages cost memory.
const BACKWARD_STACK_BYTES: usize = 256 << 20;

pub(crate) struct Context {
    pool: Arc<Pool>,
    groups: Mutex<Vec<Arc<ParamGroup>>>,
    iteration: Mutex<Iteration>,
    reductions: Mutex<VecDeque<Reduction>>,
    settings: Mutex<IterationSettings>,
    reported_without_gradient: Mutex<HashSet<String>>,
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
    /// Units in the order in which their forwards ended: backward runs in reverse.
    post_forward_order: Vec<usize>,
}

impl Default for Context {
    fn default() -> Self {
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
        }
    }
}

impl Context {
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, IterationSettings> {
        lock(&self.settings)
    }

    pub(crate) fn add(&self, group: Arc<ParamGroup>) {
        lock(&self.groups).push(group);
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
        let (is_root, followed) = {
            let mut iteration = lock(&self.iteration);
            if iteration.in_backward {
                return Err(Error::Unit {
                    unit: group.name().into(),
                    message: "its forward was called while backward runs: put the checkpoint inside the unit, not around it".into(),
                }
                .into());
            }
            let is_root = iteration.depth == 0;
            if is_root && !iteration.forward_order.is_empty() {
                iteration.last_forward_order = std::mem::take(&mut iteration.forward_order);
            }
            iteration.depth += 1;
            let position = iteration.forward_order.len();
            iteration.forward_order.push(group.index());
            let as_last_time = iteration.last_forward_order.get(position) == Some(&group.index());
            (is_root, iteration.last_forward_order.get(position + 1).copied().filter(|_| as_last_time))
        };
        let guard = ForwardGuard { context: self, is_root, ok: false };
        group.unshard()?;
        group.mark_forward();
        let listed: Vec<_> = group.settings().forward_prefetch.iter().filter_map(|unit| unit.upgrade()).collect();
        self.prefetch(listed, followed)?;
        Ok(guard)
    }

    fn prefetch(&self, listed: Vec<Arc<ParamGroup>>, implicit: Option<usize>) -> Result<()> {
        if !listed.is_empty() {
            return listed.iter().try_for_each(|group| group.start_unshard());
        }
        match implicit.filter(|_| self.settings().implicit_prefetch).and_then(|index| self.group(index)) {
            Some(next) => next.start_unshard(),
            None => Ok(()),
        }
    }

    /// Runs after a unit's forward, of which `parts` modules make one. Tells whether its outputs need a hook that unshards it before their backward.
    pub(crate) fn post_forward(&self, group: &ParamGroup, mut guard: ForwardGuard<'_>, parts: usize) -> Result<bool> {
        {
            // Each unit once, where it ran last: bounded when no backward comes, and right for several forwards before one.
            let mut iteration = lock(&self.iteration);
            iteration.post_forward_order.retain(|&index| index != group.index());
            iteration.post_forward_order.push(group.index());
        }
        let resharded = group.reshard_after_forward(guard.is_root, parts)?;
        guard.ok = true;
        // A root that keeps its parameters has nothing to do before backward that `backward` does not do itself.
        Ok(resharded || !guard.is_root)
    }

    pub(crate) fn check_in_backward(&self) -> Result<()> {
        if lock(&self.iteration).in_backward {
            return Ok(());
        }
        Err(candle_core::Error::msg(
            "the loss's own backward() was called on a sharded model: call `backward(&loss)` of the FsdpModule, which reduces the gradients",
        ))
    }

    /// Runs before the backward of anything inside a unit: gathers its parameters and starts on those of the units that come next in backward.
    pub(crate) fn pre_backward(&self, group: &ParamGroup) -> Result<()> {
        self.check_in_backward()?;
        let (unshard, listed) = {
            let settings = group.settings();
            let listed: Vec<_> = settings.backward_prefetch.iter().filter_map(|unit| unit.upgrade()).collect();
            (settings.unshard_in_backward, listed)
        };
        if unshard {
            group.unshard()?;
        }
        let preceded = {
            let iteration = lock(&self.iteration);
            let order = &iteration.post_forward_order;
            let position = order.iter().rposition(|&index| index == group.index());
            position.and_then(|position| order[..position].iter().rev().find(|&&index| index != group.index()).copied())
        };
        self.prefetch(listed, preceded)
    }

    /// Issues the reduction of a unit's gradients.
    pub(crate) fn reduce(&self, group: &Arc<ParamGroup>) -> Result<()> {
        let max = self.settings().max_reductions.max(1);
        // Which reductions go on depends on their number alone, never on their speed: all ranks issue their collectives in the same order.
        let waiting: Vec<Reduction> = lock(&self.reductions).drain(..).collect();
        let mut over_shards = waiting.iter().filter(|reduction| reduction.is_over_shards()).count();
        for reduction in waiting {
            let next = if reduction.is_over_shards() && over_shards >= max {
                over_shards -= 1;
                reduction.advance()?
            } else {
                Some(reduction)
            };
            lock(&self.reductions).extend(next);
        }
        let started = Reduction::start(group)?;
        lock(&self.reductions).extend(started);
        Ok(())
    }

    /// Runs the whole backward: gradients of `loss`, reduced and sharded, under the ids of the shards.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        {
            let mut iteration = lock(&self.iteration);
            if iteration.in_backward || iteration.depth > 0 {
                return Err(candle_core::Error::msg("backward was called inside a forward or another backward of the same model"));
            }
            iteration.in_backward = true;
        }
        let grads = self.run_backward(loss);
        lock(&self.iteration).in_backward = false;
        if grads.is_err() {
            self.reset_iter_state();
        }
        grads
    }

    fn run_backward(&self, loss: &Tensor) -> Result<GradStore> {
        let last = lock(&self.iteration).post_forward_order.last().copied();
        if let Some(root) = last.and_then(|index| self.group(index)) {
            self.pre_backward(&root)?;
        }
        let mut grads = stacker::grow(BACKWARD_STACK_BYTES, || loss.backward())?;
        for group in &self.groups() {
            // What has not reported by now never will: unused parameters, and those behind a cut.
            if !group.has_reduced() {
                self.reduce(group)?;
            }
            group.finish_backward()?;
        }
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
        let mut without_gradient = vec![];
        for group in self.groups() {
            let reduced = group.take_gradients()?;
            let communicated = {
                let settings = group.settings();
                settings.requires_gradient_sync && settings.requires_all_reduce
            };
            if group.take_ran_forward() && communicated {
                let silent = |param: &&Arc<crate::FsdpParam>| {
                    param.trainable() && !reduced.iter().any(|(other, _)| Arc::ptr_eq(other, param))
                };
                without_gradient.extend(group.params().iter().filter(silent).map(|param| param.name().to_string()));
            }
            for (param, grad) in reduced {
                grads.insert(param.var().as_tensor(), grad);
            }
        }
        self.report_without_gradient(without_gradient);
        Ok(())
    }

    fn report_without_gradient(&self, names: Vec<String>) {
        let mut reported = lock(&self.reported_without_gradient);
        let new: Vec<String> = names.into_iter().filter(|name| reported.insert(name.clone())).collect();
        if !new.is_empty() {
            tracing::warn!(
                "these trainable parameters took part in forward and got no gradient: {}. Either they do not reach the loss, or a layer cut the graph: \
                 candle_nn's LayerNorm, RmsNorm, softmax_last_dim and rotary_emb have no backward; use those of fsdp_candle::nn",
                new.join(", ")
            );
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

/// Waits for a reduction to its end.
fn finish(reduction: Reduction) -> Result<()> {
    let mut next = Some(reduction);
    while let Some(reduction) = next {
        next = reduction.advance()?;
    }
    Ok(())
}

/// A forward that runs; dropping it without [`Context::post_forward`] means that it failed.
pub(crate) struct ForwardGuard<'a> {
    context: &'a Context,
    is_root: bool,
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
