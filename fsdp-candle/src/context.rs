//! What the units of one model share: the buffer pool, the order in which they run, and the state of the iteration.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Result;
use candle_core::Tensor;
use candle_core::backprop::GradStore;

use crate::Error;
use crate::group::ParamGroup;
use crate::policy::ReshardAfterForward;
use crate::storage::Pool;

/// Room for the recursion over a deep graph in Candle's backward; only touched pages cost memory.
const BACKWARD_STACK_BYTES: usize = 256 << 20;

#[derive(Default)]
pub(crate) struct Context {
    pool: Arc<Pool>,
    groups: Mutex<Vec<Arc<ParamGroup>>>,
    iteration: Mutex<Iteration>,
    reported_without_gradient: Mutex<HashSet<String>>,
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

impl Context {
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
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

    /// Runs before a unit's forward: gathers its parameters and starts on those of the unit that followed it in the last iteration. Tells whether the unit is a
    /// root, that is, not called inside another.
    pub(crate) fn pre_forward(&self, group: &ParamGroup) -> Result<ForwardGuard<'_>> {
        let (is_root, next) = {
            let mut iteration = lock(&self.iteration);
            if iteration.in_backward {
                return Err(Error::Unit {
                    unit: group.name().into(),
                    message: "its forward was called while backward runs; finish backward first".into(),
                }
                .into());
            }
            let is_root = iteration.depth == 0;
            if is_root {
                iteration.last_forward_order = std::mem::take(&mut iteration.forward_order);
                iteration.post_forward_order.clear();
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
        if let Some(next) = next.and_then(|index| self.group(index)) {
            next.start_unshard()?;
        }
        Ok(guard)
    }

    /// Runs after a unit's forward. Tells whether its outputs need a hook that unshards it before their backward.
    pub(crate) fn post_forward(&self, group: &ParamGroup, mut guard: ForwardGuard<'_>) -> Result<bool> {
        lock(&self.iteration).post_forward_order.push(group.index());
        let reshard = match group.reshard_after_forward {
            ReshardAfterForward::Default => !guard.is_root,
            ReshardAfterForward::Always => true,
            ReshardAfterForward::Never => false,
        };
        if reshard {
            group.reshard()?;
        }
        guard.ok = true;
        // A root that keeps its parameters has nothing to do before backward that `backward` does not do itself.
        Ok(reshard || !guard.is_root)
    }

    pub(crate) fn check_in_backward(&self) -> Result<()> {
        if lock(&self.iteration).in_backward {
            return Ok(());
        }
        Err(candle_core::Error::msg(
            "the loss's own backward() was called on a sharded model: call `backward(&loss)` of the FsdpModule, which reduces the gradients",
        ))
    }

    /// Runs before the backward of anything inside a unit: gathers its parameters and starts on those of the unit that comes next in backward.
    pub(crate) fn pre_backward(&self, group: &ParamGroup) -> Result<()> {
        self.check_in_backward()?;
        group.unshard()?;
        let next = {
            let iteration = lock(&self.iteration);
            let order = &iteration.post_forward_order;
            let position = order.iter().rposition(|&index| index == group.index());
            position.and_then(|position| order[..position].iter().rev().find(|&&index| index != group.index()).copied())
        };
        match next.and_then(|index| self.group(index)) {
            Some(next) => next.start_unshard(),
            None => Ok(()),
        }
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
        let groups = self.groups();
        let mut without_gradient = vec![];
        for group in &groups {
            let ran = group.take_ran_forward();
            let reduced = group.finish_backward()?;
            if ran {
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
        Ok(grads)
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
        for group in self.groups() {
            group.reset();
        }
        self.pool.clear();
    }
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
