//! A shard that replicas hold parts of: each updates its own, and has the whole shard while a step lasts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor, bail};
use fsdp_core::Work;

use crate::data_parallel::ShardLayout;

/// The parts of one parameter's shard.
pub(crate) struct Parts {
    /// The shape of the shard.
    shape: Vec<usize>,
    /// How the replicas' parts lie in it.
    layout: ShardLayout,
    /// The shard in the dtype that travels, while it is there.
    shard: Mutex<Option<Tensor>>,
}

/// A gather over replicas in flight, with the positions of its parameters.
pub(super) struct ShardGathering {
    pub(super) work: Work,
    pub(super) members: Vec<usize>,
}

impl Parts {
    pub(crate) fn new(shape: Vec<usize>, layout: ShardLayout) -> Self {
        Parts { shape, layout, shard: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn shard_len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn are_gathered(&self) -> bool {
        self.lock().is_some()
    }

    /// The shard of the parameter called `name`.
    pub(super) fn shard(&self, name: &str) -> Result<Tensor> {
        match &*self.lock() {
            Some(shard) => Ok(shard.clone()),
            None => bail!("parameter `{name}`: its shard is not gathered over the replicas now"),
        }
    }

    /// Sets the shard, or drops it: a collective that still reads it keeps its memory.
    pub(super) fn set(&self, shard: Option<Tensor>) {
        *self.lock() = shard;
    }
}
