//! A shard that replicas divide among them.

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::data_parallel::ShardLayout;

/// A shard that replicas divide among them. Each replica updates its part, and has the whole shard during a step.
pub(crate) struct ReplicaSharding {
    /// Shape of the whole shard.
    pub(super) shape: Vec<usize>,
    /// Layout of the replicas' parts in the shard.
    pub(super) layout: ShardLayout,
    /// The whole shard in the compute dtype, while it is gathered.
    shard: Mutex<Option<Tensor>>,
}

impl ReplicaSharding {
    pub(crate) fn new(shape: Vec<usize>, layout: ShardLayout) -> Self {
        ReplicaSharding { shape, layout, shard: Mutex::default() }
    }

    pub(super) fn shard_len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn is_gathered(&self) -> bool {
        self.shard.lock().is_some()
    }

    /// Returns the whole shard, while it is gathered.
    pub(super) fn shard(&self) -> Option<Tensor> {
        self.shard.lock().clone()
    }

    /// Sets or drops the whole shard. A collective that still reads it keeps its memory.
    pub(super) fn set_shard(&self, shard: Option<Tensor>) {
        *self.shard.lock() = shard;
    }
}
