//! Collectives of the user that replace a unit's collectives: PyTorch's `set_custom_all_gather` and
//! `set_custom_reduce_scatter`.
//!
//! The group that they get is signed ([`ProcessGroup::signed`]) with the unit and the parameters of the call, so ranks
//! whose collectives are for different parameters get an error. The signature holds for one call: keep the result of a
//! `split`, not the group.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use fsdp_core::{Allocator, Buffer, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

/// An all-gather that replaces a unit's own.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use fsdp_candle::{AllGather, ReduceScatter};
/// use fsdp_core::{Allocator, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
///
/// /// Counts the elements of all collectives, which the group runs.
/// #[derive(Default)]
/// struct Meter(AtomicUsize);
///
/// impl AllGather for Meter {
///     fn all_gather(
///         &self,
///         ranks: &ProcessGroup,
///         parts: Vec<GatherPart>,
///         memory: Arc<dyn Allocator>,
///     ) -> Work {
///         self.0.fetch_add(parts.iter().map(|part| part.counts.iter().sum::<usize>()).sum(), Ordering::Relaxed);
///         ranks.all_gather(parts, memory)
///     }
/// }
///
/// impl ReduceScatter for Meter {
///     fn reduce_scatter(
///         &self,
///         ranks: &ProcessGroup,
///         parts: Vec<ScatterPart>,
///         op: ReduceOp,
///         memory: Arc<dyn Allocator>,
///     ) -> Work {
///         self.0.fetch_add(parts.iter().map(|part| part.input.len()).sum(), Ordering::Relaxed);
///         ranks.reduce_scatter(parts, op, memory)
///     }
/// }
///
/// let meter = Arc::new(Meter::default());
/// model.set_custom_all_gather(Some(meter.clone()));
/// model.set_custom_reduce_scatter(Some(meter.clone()));
/// model.backward(&model.forward(&x)?.sum_all()?)?;
/// // A root keeps its parameters between forward and backward: one all-gather and one reduce-scatter of eight weights.
/// assert_eq!(meter.0.load(Ordering::Relaxed), 8 + 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AllGather: Send + Sync {
    /// Gathers `parts`, as [`ProcessGroup::all_gather`] of `ranks`.
    fn all_gather(&self, ranks: &ProcessGroup, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work;

    /// Returns the allocator of the outputs; `None` for the unit's pool. The allocator takes the outputs back when the
    /// unit is resharded. Outputs must be on the shards' device: `Buffer::Cuda` on a CUDA device.
    fn allocate(&self) -> Option<Arc<dyn Allocator>> {
        None
    }
}

/// A reduce-scatter that replaces a unit's own.
pub trait ReduceScatter: Send + Sync {
    /// Reduces `parts`, as [`ProcessGroup::reduce_scatter`] of `ranks`. With
    /// [`crate::FsdpModule::set_reduce_scatter_unused_params`], a last part of F32 tells for each parameter whether
    /// this rank used it (1 or 0). It is reduced like the others.
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work;
}

/// Changes a unit's reduced gradient shards, one buffer for each parameter, before they are handed out: PyTorch's
/// `set_all_reduce_hook`. On a CUDA device the buffers are `Buffer::Cuda`, and the compute stream already waits for
/// them.
pub trait AllReduceHook: Send + Sync {
    /// Returns the changed buffers, with the same lengths. An error ends the backward.
    fn reduce(&self, shards: Vec<Buffer>) -> candle_core::Result<Vec<Buffer>>;
}

/// Takes the gradients of each unit as soon as they are reduced, while backward goes on: PyTorch's
/// `register_post_accumulate_grad_hook`, for an optimizer that steps in backward.
pub trait PostAccumulateGradHook: Send + Sync {
    /// Takes the sharded gradients of some parameters, stored as [`crate::FsdpModule::backward`] stores them. An error
    /// ends the backward.
    fn accumulated(&self, grads: GradStore) -> candle_core::Result<()>;
}

impl<F: Fn(GradStore) -> candle_core::Result<()> + Send + Sync> PostAccumulateGradHook for F {
    fn accumulated(&self, grads: GradStore) -> candle_core::Result<()> {
        self(grads)
    }
}

impl<F: Fn(Vec<Buffer>) -> candle_core::Result<Vec<Buffer>> + Send + Sync> AllReduceHook for F {
    fn reduce(&self, shards: Vec<Buffer>) -> candle_core::Result<Vec<Buffer>> {
        self(shards)
    }
}
