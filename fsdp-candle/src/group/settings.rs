//! What can be changed of a unit while a model trains.

use std::sync::{Arc, Weak};

use super::ParamGroup;
use crate::comm::{AllGather, AllReduceHook, ReduceScatter};
use crate::policy::ReshardAfterForward;

/// The settings of one unit.
pub(crate) struct Settings {
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) reshard_after_backward: bool,
    pub(crate) unshard_in_backward: bool,
    /// Whether backward reduces gradients, or keeps them unsharded for a later one.
    pub(crate) requires_gradient_sync: bool,
    /// Whether gradients are reduced over replicas too, or wait for a later backward.
    pub(crate) requires_all_reduce: bool,
    pub(crate) reduce_scatter_unused_params: bool,
    /// What the sum of gradients is divided by; the number of ranks where unset.
    pub(crate) gradient_divide_factor: Option<f64>,
    pub(crate) force_sum_reduction: bool,
    pub(crate) keep_unsharded_storage: bool,
    /// Whether reductions have a group of their own.
    pub(crate) separate_reduce_scatter_group: bool,
    /// Units to gather when this one's forward begins, in place of the one that followed last time.
    pub(crate) forward_prefetch: Vec<Weak<ParamGroup>>,
    /// Units to gather when this one's backward begins.
    pub(crate) backward_prefetch: Vec<Weak<ParamGroup>>,
    pub(crate) all_gather: Option<Arc<dyn AllGather>>,
    pub(crate) reduce_scatter: Option<Arc<dyn ReduceScatter>>,
    pub(crate) all_reduce_hook: Option<Arc<dyn AllReduceHook>>,
}

impl Settings {
    pub(crate) fn new(reshard_after_forward: ReshardAfterForward) -> Self {
        Settings {
            reshard_after_forward,
            reshard_after_backward: true,
            unshard_in_backward: true,
            requires_gradient_sync: true,
            requires_all_reduce: true,
            reduce_scatter_unused_params: false,
            gradient_divide_factor: None,
            force_sum_reduction: false,
            keep_unsharded_storage: false,
            separate_reduce_scatter_group: false,
            forward_prefetch: vec![],
            backward_prefetch: vec![],
            all_gather: None,
            reduce_scatter: None,
            all_reduce_hook: None,
        }
    }
}
