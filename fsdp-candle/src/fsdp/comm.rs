//! Collectives of the user's own in place of a unit's: PyTorch's `set_custom_all_gather` and
//! `set_custom_reduce_scatter`.
//!
//! The group that they get is signed ([`ProcessGroup::signed`]) with the unit and the parameters that the call is for:
//! ranks whose collectives on it are for different ones get an error. It is that of this call alone; keep the result of
//! a `split`, not the group.

use std::sync::Arc;

use fsdp_core::{Allocator, Buffer, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

/// An all-gather that a unit uses instead of its process group's.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use fsdp_candle::{AllGather, ReduceScatter};
/// use fsdp_core::{Allocator, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let weight = vars.params()[0].var().clone();
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
///
/// /// Counts elements that travel, and leaves the work to the group.
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
/// // A root keeps its parameters between forward and backward: eight weights came once, and their gradients went once.
/// assert_eq!(meter.0.load(Ordering::Relaxed), 8 + 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AllGather: Send + Sync {
    /// As [`ProcessGroup::all_gather`] of `ranks`.
    fn all_gather(&self, ranks: &ProcessGroup, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work;

    /// Where its outputs come from; `None`: the unit's pool. Whatever it is takes them back when the unit is resharded.
    /// They have to be where the shards are: on a CUDA device, `Buffer::Cuda`.
    fn allocate(&self) -> Option<Arc<dyn Allocator>> {
        None
    }
}

/// A reduce-scatter that a unit uses instead of its process group's.
pub trait ReduceScatter: Send + Sync {
    /// As [`ProcessGroup::reduce_scatter`] of `ranks`. With [`crate::FsdpModule::set_reduce_scatter_unused_params`] a
    /// last part of F32 has for each of the others whether this rank used the parameter (1 or 0), and is reduced as
    /// they are.
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work;
}

/// Changes a unit's reduced gradient shards, one buffer a parameter, before they are handed out: PyTorch's
/// `set_all_reduce_hook`. On a CUDA device the buffers are the device's (`Buffer::Cuda`), and the compute stream has
/// been told to wait for them.
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
