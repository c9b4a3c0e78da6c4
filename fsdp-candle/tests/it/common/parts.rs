//! Parts that tests replace: collectives, initial values, and an operation with a backward of its own.

use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use candle_nn::Init;
use fsdp_candle::initializer::{Initializer, Philox, ShardRequest};
use fsdp_candle::{AllGather, ReduceOp, ReduceScatter};
use fsdp_core::{Allocator, GatherPart, ProcessGroup, ScatterPart, Work};

/// The arguments of a custom collective.
pub(crate) enum Parts<'a> {
    Gather { ranks: &'a ProcessGroup, parts: &'a [GatherPart], memory: &'a Arc<dyn Allocator> },
    Scatter(&'a [ScatterPart]),
}

/// Returns the memory of an all-gather's outputs, or `None` for the unit's own.
type Allocate = Box<dyn Fn() -> Option<Arc<dyn Allocator>> + Send + Sync>;

/// A custom collective that first calls a closure, which may read the parts and replace the unit's own collective.
pub(crate) struct Own<F> {
    call: F,
    allocate: Allocate,
}

impl<F: Fn(Parts<'_>) -> Option<Work> + Send + Sync> Own<F> {
    pub(crate) fn new(call: F) -> Arc<Self> {
        Arc::new(Own { call, allocate: Box::new(|| None) })
    }

    /// Creates a custom collective whose outputs are in the memory that `allocate` returns.
    pub(crate) fn in_memory(call: F, allocate: impl Fn() -> Arc<dyn Allocator> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Own { call, allocate: Box::new(move || Some(allocate())) })
    }
}

impl<F: Fn(Parts<'_>) -> Option<Work> + Send + Sync> AllGather for Own<F> {
    fn all_gather(&self, ranks: &ProcessGroup, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        let own = (self.call)(Parts::Gather { ranks, parts: &parts, memory: &memory });
        own.unwrap_or_else(|| ranks.all_gather(parts, memory))
    }

    fn allocate(&self) -> Option<Arc<dyn Allocator>> {
        (self.allocate)()
    }
}

impl<F: Fn(Parts<'_>) -> Option<Work> + Send + Sync> ReduceScatter for Own<F> {
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        (self.call)(Parts::Scatter(&parts)).unwrap_or_else(|| ranks.reduce_scatter(parts, op, memory))
    }
}

/// A custom collective that records `entry` when it is issued.
pub(crate) fn journal(
    entry: String,
    entries: &Arc<Mutex<Vec<String>>>,
) -> Arc<Own<impl Fn(Parts<'_>) -> Option<Work> + use<>>> {
    let entries = entries.clone();
    Own::new(move |_: Parts<'_>| {
        entries.lock().unwrap().push(entry.clone());
        None
    })
}

/// Draws values from a seed, by the distribution that a function chooses for each parameter.
pub(crate) struct Draws(pub(crate) u64, pub(crate) fn(&ShardRequest<'_>) -> Init);

impl Initializer for Draws {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
        Philox::new(self.0).fill(&ShardRequest { init: (self.1)(request), ..*request }, shard)
    }
}

/// The identity, whose backward is a closure from the output's gradient to the input's.
pub(crate) struct Identity<F>(pub(crate) F);

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync> CustomOp1 for Identity<F> {
    fn name(&self) -> &'static str {
        "identity"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.0)(grad).map(Some)
    }
}
