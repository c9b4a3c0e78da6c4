//! The full values of a parameter: the memory of the tensor that layers hold, while its unit is unsharded.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use fsdp_core::{Allocator, Buffer};
use parking_lot::Mutex;

use super::unsharded_memory::{FullBuffer, ParamAllocator, PostForwardShard, UnshardMemory};
use crate::storage::{copy_range_out, swap, take, to_buffer, to_storage};

/// The full values of a parameter.
pub(crate) struct FullValues {
    /// The full tensor, with its graph. It has memory only while unsharded.
    pub(crate) tensor: Tensor,
    allocator: Arc<ParamAllocator>,
    state: Mutex<State>,
}

struct State {
    sharded: ShardedState,
    /// The buffer that the parameter keeps for its full values (`set_keep_unsharded_storage`), while it is not in use.
    kept_buffer: Option<Buffer>,
}

/// Where a parameter's values are: PyTorch's `ShardedState`.
enum ShardedState {
    /// Only the shard exists.
    Sharded,
    /// Forward kept a part of the full values ([`ReshardAfterForward::To`](crate::ReshardAfterForward::To)).
    ShardedPostForward(PostForwardShard),
    /// The full tensor has memory.
    Unsharded {
        /// Whether the memory is the parameter's kept buffer.
        is_kept: bool,
        /// Number of elements that the memory has room for.
        room: usize,
    },
}

impl FullValues {
    /// Takes the memory out of a full tensor.
    pub(super) fn new(tensor: Tensor, allocator: Arc<ParamAllocator>) -> Result<Self> {
        take(&tensor)?;
        let state = State { sharded: ShardedState::Sharded, kept_buffer: None };
        Ok(FullValues { tensor, allocator, state: Mutex::new(state) })
    }

    /// Returns whether the full tensor has memory.
    pub(super) fn is_unsharded(&self) -> bool {
        matches!(self.state.lock().sharded, ShardedState::Unsharded { .. })
    }

    fn set_state(&self, sharded: ShardedState) -> ShardedState {
        std::mem::replace(&mut self.state.lock().sharded, sharded)
    }

    /// Gives the full tensor its memory.
    pub(super) fn set(&self, full: FullBuffer) -> Result<()> {
        let FullBuffer { buffer, is_kept } = full;
        let room = buffer.room();
        swap(&self.tensor, to_storage(buffer)?)?;
        self.set_state(ShardedState::Unsharded { is_kept, room });
        Ok(())
    }

    /// Frees the full values, or the part that forward kept.
    pub(super) fn reshard(&self, memory: &UnshardMemory) -> Result<()> {
        match self.set_state(ShardedState::Sharded) {
            ShardedState::Sharded => {}
            ShardedState::ShardedPostForward(part) => self.allocator.pool.give(part.buffer),
            ShardedState::Unsharded { is_kept, room } => {
                if let Some(buffer) = to_buffer(take(&self.tensor)?)? {
                    // SAFETY: it is the memory that `set` put there. Only this type replaces the tensor's storage.
                    let buffer = unsafe { buffer.with_room(room) };
                    self.free(FullBuffer { buffer, is_kept }, memory);
                }
            }
        }
        Ok(())
    }

    /// Frees the full values except for the elements of `chunk`, which stay for backward.
    pub(super) fn reshard_to(&self, chunk: Range<usize>, ranks: usize, memory: &UnshardMemory) -> Result<()> {
        if !self.is_unsharded() {
            return Ok(());
        }
        let mut buffer = self.allocator.take(chunk.len())?;
        copy_range_out(&self.tensor, chunk, &mut buffer)?;
        self.reshard(memory)?;
        self.set_state(ShardedState::ShardedPostForward(PostForwardShard { buffer, ranks }));
        Ok(())
    }

    /// Takes the part that forward kept, if there is one.
    pub(super) fn take_post_forward_shard(&self) -> Option<PostForwardShard> {
        let sharded = &mut self.state.lock().sharded;
        match std::mem::replace(sharded, ShardedState::Sharded) {
            ShardedState::ShardedPostForward(part) => Some(part),
            other => {
                *sharded = other;
                None
            }
        }
    }

    /// Returns memory to the allocator, or to the parameter that keeps it.
    pub(super) fn free(&self, full: FullBuffer, memory: &UnshardMemory) {
        match full {
            FullBuffer { buffer, is_kept: false } => memory.allocator.give(buffer),
            FullBuffer { buffer, is_kept: true } if memory.keep => self.state.lock().kept_buffer = Some(buffer),
            // The setting changed meanwhile.
            FullBuffer { buffer, is_kept: true } => drop(buffer),
        }
    }

    /// Takes the kept buffer, for an all-gather to fill. The first call allocates it.
    pub(super) fn take_kept_buffer(&self) -> Result<Buffer> {
        let kept = self.state.lock().kept_buffer.take();
        kept.map_or_else(|| self.allocator.take_unpooled(), Ok)
    }

    /// Frees the kept buffer, unless it is in use.
    pub(super) fn drop_kept_buffer(&self) {
        self.state.lock().kept_buffer = None;
    }
}
