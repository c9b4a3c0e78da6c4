//! Settings of a unit and of the whole model.

use std::sync::Arc;

use super::comm::{AllGather, AllReduceHook, ReduceScatter};
use super::policy::ReshardAfterForward;

/// When a unit is unsharded and resharded. The order owns it.
#[derive(Clone, Debug)]
pub(crate) struct UnshardSettings {
    pub(super) reshard_after_forward: ReshardAfterForward,
    pub(super) reshard_after_backward: bool,
    pub(super) unshard_in_backward: bool,
    /// Units to unshard when this unit's forward begins. Empty: the unit that followed it last time.
    pub(super) forward_prefetch: Vec<usize>,
    /// Units to unshard when this unit's backward begins. Empty: the unit whose forward preceded it.
    pub(super) backward_prefetch: Vec<usize>,
}

impl UnshardSettings {
    pub(super) fn new(reshard_after_forward: ReshardAfterForward) -> Self {
        UnshardSettings {
            reshard_after_forward,
            reshard_after_backward: true,
            unshard_in_backward: true,
            forward_prefetch: vec![],
            backward_prefetch: vec![],
        }
    }

    /// Removes the units from index `count` on from the prefetch lists.
    pub(super) fn keep_prefetch_below(&mut self, count: usize) {
        self.forward_prefetch.retain(|&unit| unit < count);
        self.backward_prefetch.retain(|&unit| unit < count);
    }
}

impl Default for UnshardSettings {
    fn default() -> Self {
        UnshardSettings::new(ReshardAfterForward::default())
    }
}

/// How a unit communicates. The unit owns it.
pub(crate) struct CommSettings {
    /// Whether backward reduces gradients, or keeps them for a later backward.
    pub(super) requires_gradient_sync: bool,
    /// Whether gradients are reduced over replicas, or wait for a later backward.
    pub(super) requires_all_reduce: bool,
    pub(super) reduce_scatter_unused_params: bool,
    /// Number that sums of gradients are divided by; `None` for the number of ranks.
    pub(super) gradient_divide_factor: Option<f64>,
    pub(super) force_sum_reduction: bool,
    pub(super) keep_unsharded_storage: bool,
    pub(super) separate_reduce_scatter_group: bool,
    /// Whether all-gathers and reduce-scatters go through memory of the process group.
    pub(super) memory_from_process_group: bool,
    pub(super) all_gather: Option<Arc<dyn AllGather>>,
    pub(super) reduce_scatter: Option<Arc<dyn ReduceScatter>>,
    pub(super) all_reduce_hook: Option<Arc<dyn AllReduceHook>>,
}

impl Default for CommSettings {
    fn default() -> Self {
        CommSettings {
            requires_gradient_sync: true,
            requires_all_reduce: true,
            reduce_scatter_unused_params: false,
            gradient_divide_factor: None,
            force_sum_reduction: false,
            keep_unsharded_storage: false,
            separate_reduce_scatter_group: false,
            memory_from_process_group: false,
            all_gather: None,
            reduce_scatter: None,
            all_reduce_hook: None,
        }
    }
}

/// Settings of a whole model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelSettings {
    /// Whether the next backward ends the iteration: it waits for reductions and hands gradients out.
    pub(super) is_last_backward: bool,
    /// Whether `finalize_backward` does that instead.
    pub(super) manual_finalization: bool,
    /// Whether units without a prefetch list prefetch the next unit.
    pub(super) implicit_prefetch: bool,
    /// Number of reduce-scatters that may be pending. One more waits for the oldest.
    pub(super) max_reductions: usize,
    /// Whether ranks may use different units. The order of collectives then follows from how the model was built.
    pub(super) fixed_order: bool,
}

impl Default for ModelSettings {
    fn default() -> Self {
        ModelSettings {
            is_last_backward: true,
            manual_finalization: false,
            implicit_prefetch: true,
            max_reductions: 1,
            fixed_order: false,
        }
    }
}
