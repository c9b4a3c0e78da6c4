//! Collectives of the user's own in place of a unit's: PyTorch's `set_custom_all_gather` and `set_custom_reduce_scatter`.

use std::sync::Arc;

use fsdp_core::{Allocator, Buffer, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

/// An all-gather that a unit uses instead of its process group's.
pub trait AllGather: Send + Sync {
    /// As [`ProcessGroup::all_gather`] of `ranks`.
    fn all_gather(&self, ranks: &Arc<dyn ProcessGroup>, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work;

    /// Where its outputs come from; `None`: the unit's pool. Whatever it is takes them back when the unit is resharded.
    fn allocate(&self) -> Option<Arc<dyn Allocator>> {
        None
    }
}

/// A reduce-scatter that a unit uses instead of its process group's.
pub trait ReduceScatter: Send + Sync {
    /// As [`ProcessGroup::reduce_scatter`] of `ranks`.
    fn reduce_scatter(
        &self,
        ranks: &Arc<dyn ProcessGroup>,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work;
}

/// Changes a unit's reduced gradient shards, one buffer a parameter, before they are handed out: PyTorch's `set_all_reduce_hook`.
pub trait AllReduceHook: Send + Sync {
    /// Returns the buffers, with the same lengths.
    ///
    /// # Errors
    /// Ends the backward.
    fn reduce(&self, shards: Vec<Buffer>) -> candle_core::Result<Vec<Buffer>>;
}

impl<F: Fn(Vec<Buffer>) -> candle_core::Result<Vec<Buffer>> + Send + Sync> AllReduceHook for F {
    fn reduce(&self, shards: Vec<Buffer>) -> candle_core::Result<Vec<Buffer>> {
        self(shards)
    }
}
