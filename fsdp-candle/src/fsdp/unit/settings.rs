//! How a unit communicates, as far as it can be changed while a model trains. When it does is for the step to say.

use std::sync::Arc;

use crate::fsdp::comm::{AllGather, AllReduceHook, ReduceScatter};

/// The settings of one unit.
pub(crate) struct Settings {
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
    pub(crate) all_gather: Option<Arc<dyn AllGather>>,
    pub(crate) reduce_scatter: Option<Arc<dyn ReduceScatter>>,
    pub(crate) all_reduce_hook: Option<Arc<dyn AllReduceHook>>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            requires_gradient_sync: true,
            requires_all_reduce: true,
            reduce_scatter_unused_params: false,
            gradient_divide_factor: None,
            force_sum_reduction: false,
            keep_unsharded_storage: false,
            separate_reduce_scatter_group: false,
            all_gather: None,
            reduce_scatter: None,
            all_reduce_hook: None,
        }
    }
}
