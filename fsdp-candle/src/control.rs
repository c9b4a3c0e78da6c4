//! The methods of an FSDP module that steer it: unsharding by hand, prefetch, gradient synchronisation, and the rest of PyTorch's `FSDPModule`.
//!
//! Settings with `recurse` reach the units inside this one as well: those whose path starts with its own. For a unit that was taken apart
//! ([`FsdpModule::into_parts`]) those are the units inside its modules, which the paths of its own parameters tell, and not those beside them.

use std::sync::Arc;

use candle_core::Result;
use candle_core::backprop::GradStore;

use crate::comm::{AllGather, AllReduceHook, ReduceScatter};
use crate::context::Context;
use crate::group::{ParamGroup, Settings};
use crate::module::FsdpModule;
use crate::policy::ReshardAfterForward;

/// A unit, as prefetch lists name it.
#[derive(Clone)]
pub struct Unit(Arc<ParamGroup>);

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unit({})", self.0.name())
    }
}

/// An unshard in flight.
#[must_use = "the parameters are there when wait() returns, or when the unit's forward begins"]
pub struct UnshardHandle(Arc<ParamGroup>);

impl UnshardHandle {
    /// Waits until the parameters are there. A forward that begins before waits itself.
    ///
    /// # Errors
    /// Those of the all-gather.
    pub fn wait(self) -> Result<()> {
        self.0.unshard()
    }
}

/// A finalization in flight.
#[must_use = "gradients come from wait()"]
pub struct FinalizeHandle(Arc<Context>);

impl FinalizeHandle {
    /// Waits for the reductions and files the sharded gradients in `grads`.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        self.0.finalize_backward(grads)
    }
}

impl<M> FsdpModule<M> {
    /// The unit, for prefetch lists.
    pub fn unit(&self) -> Unit {
        Unit(self.group().clone())
    }

    /// Gathers the unit's parameters until [`FsdpModule::reshard`], the next forward that frees them, or backward. Not recursive. Collective.
    ///
    /// # Errors
    /// Those of the all-gather.
    pub fn unshard(&self) -> Result<()> {
        self.group().unshard()
    }

    /// As [`FsdpModule::unshard`], without waiting: PyTorch's `unshard(async_op=True)`.
    ///
    /// # Errors
    /// When the all-gather can't be issued.
    pub fn unshard_async(&self) -> Result<UnshardHandle> {
        self.group().start_unshard()?;
        Ok(UnshardHandle(self.group().clone()))
    }

    /// Frees the unit's full parameters. Not recursive.
    ///
    /// # Errors
    /// Candle's.
    pub fn reshard(&self) -> Result<()> {
        self.group().reshard()
    }

    /// Makes the whole model ready for a new iteration after one that failed: what is in flight is waited for, gradients are dropped, parameters freed.
    /// Gradients that accumulated without synchronisation are lost.
    ///
    /// An error of a forward or backward does this by itself. Call it when the iteration ends in another way, between a forward and its backward, say. It can't
    /// bring ranks together that stand at different collectives: what ends an iteration must do so on every rank at the same point.
    pub fn reset_iter_state(&self) {
        self.context().reset_iter_state();
    }

    /// This unit, and those inside it where `recurse`.
    fn reached(&self, recurse: bool) -> impl Iterator<Item = Arc<ParamGroup>> {
        let groups = self.context().groups().into_iter();
        groups.filter(move |group| Arc::ptr_eq(group, self.group()) || recurse && self.group().contains(group))
    }

    fn change(&self, recurse: bool, change: impl Fn(&mut Settings)) {
        self.reached(recurse).for_each(|group| change(&mut group.settings()));
    }

    /// The units to gather when this one's forward begins. An empty list: the unit that followed it in the last iteration.
    pub fn set_modules_to_forward_prefetch(&self, units: &[Unit]) {
        self.group().settings().forward_prefetch = units.iter().map(|unit| Arc::downgrade(&unit.0)).collect();
    }

    /// The units to gather when this one's backward begins. An empty list: the unit whose forward preceded it.
    pub fn set_modules_to_backward_prefetch(&self, units: &[Unit]) {
        self.group().settings().backward_prefetch = units.iter().map(|unit| Arc::downgrade(&unit.0)).collect();
    }

    /// Whether units without a list gather the next one ahead, for the whole model. True at first.
    pub fn set_implicit_prefetch(&self, implicit: bool) {
        self.context().settings().implicit_prefetch = implicit;
    }

    /// Whether backward reduces gradients. Without, they stay unsharded, in the reduce dtype, and join those of the next backward that does.
    pub fn set_requires_gradient_sync(&self, sync: bool, recurse: bool) {
        self.change(recurse, |settings| settings.requires_gradient_sync = sync);
    }

    /// Whether gradients are reduced over replicas (HSDP). Without, they are reduced over the shard ranks alone and join those of the next backward that does.
    pub fn set_requires_all_reduce(&self, all_reduce: bool, recurse: bool) {
        self.change(recurse, |settings| settings.requires_all_reduce = all_reduce);
    }

    /// Whether the next backward ends the iteration. If not, it does not wait for its reductions and hands no gradients out; the last one hands out the sum.
    pub fn set_is_last_backward(&self, last: bool) {
        self.context().settings().is_last_backward = last;
    }

    /// Leaves the end of backward to [`FsdpModule::finalize_backward`].
    pub fn set_manual_backward_finalization(&self, manual: bool) {
        self.context().settings().manual_finalization = manual;
    }

    /// Waits for the reductions and files the sharded gradients in `grads`. Collective.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        self.context().finalize_backward(grads)
    }

    /// As [`FsdpModule::finalize_backward`], to be waited for later: PyTorch's `finalize_backward(async_op=True)`. The reductions run meanwhile.
    pub fn finalize_backward_async(&self) -> FinalizeHandle {
        FinalizeHandle(self.context().clone())
    }

    /// Gives reductions a process group of their own, so that they do not queue behind gathers: more overlap, and one more group. Collective.
    ///
    /// # Errors
    /// When the group can't be made.
    pub fn set_separate_reduce_scatter_group(&self, separate: bool, recurse: bool) -> crate::Result<()> {
        if separate {
            for group in self.reached(recurse) {
                group.params().iter().try_for_each(|param| param.ranks().shard_apart().map(drop))?;
            }
        }
        self.change(recurse, |settings| settings.separate_reduce_scatter_group = separate);
        Ok(())
    }

    /// What becomes of unsharded parameters after forward. Collective for [`ReshardAfterForward::To`], which makes groups.
    ///
    /// # Errors
    /// When the number of ranks of `To` does not divide those that a parameter is sharded over, or is trivial.
    pub fn set_reshard_after_forward(&self, policy: ReshardAfterForward, recurse: bool) -> crate::Result<()> {
        if let ReshardAfterForward::To(size) = policy {
            for group in self.reached(recurse) {
                group.params().iter().try_for_each(|param| param.ranks().neighbours(size).map(drop))?;
            }
        }
        self.change(recurse, |settings| settings.reshard_after_forward = policy);
        Ok(())
    }

    /// Whether parameters are freed after backward. Without, they are stale once the optimizer has stepped: for several backwards before a step only.
    pub fn set_reshard_after_backward(&self, reshard: bool, recurse: bool) {
        self.change(recurse, |settings| settings.reshard_after_backward = reshard);
    }

    /// Whether backward gathers parameters. Without, they must be there.
    pub fn set_unshard_in_backward(&self, unshard: bool) {
        self.group().settings().unshard_in_backward = unshard;
    }

    /// Whether each parameter keeps the buffer of its full values while it is sharded, from its next unshard on: its address is then the same whenever it
    /// is unsharded, until a step fails. With a custom all-gather values are copied there once more.
    pub fn set_keep_unsharded_storage(&self, keep: bool, recurse: bool) {
        self.change(recurse, |settings| settings.keep_unsharded_storage = keep);
        if !keep {
            self.reached(recurse).for_each(|group| group.release_kept());
        }
    }

    /// What sums of gradients are divided by; `None`: the number of ranks.
    pub fn set_gradient_divide_factor(&self, factor: Option<f64>, recurse: bool) {
        self.change(recurse, |settings| settings.gradient_divide_factor = factor);
    }

    /// Makes reductions sums, with the division apart.
    pub fn set_force_sum_reduction_for_comms(&self, force: bool, recurse: bool) {
        self.change(recurse, |settings| settings.force_sum_reduction = force);
    }

    /// Whether parameters without a gradient take part in the reduction with zeros, so that ranks which used different ones still match. Set it alike on all
    /// ranks. The next backward makes a process group for the reductions of the whole model.
    ///
    /// A unit's parameters, and whole units, may then be without a gradient on some ranks: while any unit is set so, all units' collectives come in an order
    /// that does not depend on what a rank's loss reaches. Reductions go from the unit built last to the first, a unit after those inside it: build
    /// units in the order in which they run, and none waits for its turn. In backward a rank gathers the units that ran in forward, whether its loss reaches
    /// them or not.
    ///
    /// Forward gathers a unit when it is called, and no setting changes that: every rank must call the same units in the same order, whatever it does with
    /// their outputs, or the ranks' all-gathers do not match, which is an error on all of them. To call different ones, `unshard()` all of them on every rank
    /// first, and let them keep their parameters ([`ReshardAfterForward::Never`]).
    pub fn set_reduce_scatter_unused_params(&self, reduce: bool, recurse: bool) {
        self.change(recurse, |settings| settings.reduce_scatter_unused_params = reduce);
    }

    /// How many units' gradients may be in a reduce-scatter at once, for the whole model: more overlap for more memory. 1 at first.
    pub fn set_reduce_scatter_max_input_buffers(&self, max: usize) {
        self.context().settings().max_reductions = max.max(1);
    }

    /// A reduction of the user's own on the reduced shards, before they are handed out.
    pub fn set_all_reduce_hook(&self, hook: Option<Arc<dyn AllReduceHook>>) {
        self.group().settings().all_reduce_hook = hook;
    }

    /// An all-gather of the user's own.
    pub fn set_custom_all_gather(&self, custom: Option<Arc<dyn AllGather>>) {
        self.group().settings().all_gather = custom;
    }

    /// A reduce-scatter of the user's own.
    pub fn set_custom_reduce_scatter(&self, custom: Option<Arc<dyn ReduceScatter>>) {
        self.group().settings().reduce_scatter = custom;
    }
}
