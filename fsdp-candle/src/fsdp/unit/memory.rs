//! The memory of a parameter's full values, which comes and goes.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Result, Tensor};
use fsdp_core::{Allocator, Buffer};

use super::room::Room;
use crate::storage::{copy_range_out, swap, take, to_buffer, to_storage};

/// The memory of a full parameter.
pub(super) struct Full {
    pub(super) buffer: Buffer,
    /// Whether it is the parameter's own, rather than an allocator's.
    pub(super) own: bool,
}

/// A part of a full parameter, kept between forward and backward to gather over fewer ranks.
pub(super) struct Part {
    pub(super) buffer: Buffer,
    /// How many neighbouring ranks hold all parts.
    pub(super) ranks: usize,
}

/// Where the memory of a unit's full parameters comes from and goes to.
pub(super) struct Memory {
    pub(super) allocator: Arc<dyn Allocator>,
    /// Whether parameters have buffers of their own, whose addresses never change.
    pub(super) keep: bool,
}

/// The full values of one parameter.
pub(crate) struct Values {
    /// The full shape, with memory only while unsharded: layers hold it, or a tensor that shares its memory.
    full: Tensor,
    room: Arc<Room>,
    state: Mutex<State>,
}

struct State {
    presence: Presence,
    /// The parameter's own buffer while it is not installed, if it has one: always the same memory.
    own: Option<Buffer>,
}

enum Presence {
    Sharded,
    PartlyKept(Part),
    Unsharded {
        /// Whether the buffer that is installed is the parameter's own.
        own: bool,
    },
}

impl Values {
    /// Takes the memory away that the tensor was born with.
    pub(super) fn new(full: Tensor, room: Arc<Room>) -> Result<Self> {
        take(&full)?;
        Ok(Values { full, room, state: Mutex::new(State { presence: Presence::Sharded, own: None }) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn replace(&self, presence: Presence) -> Presence {
        std::mem::replace(&mut self.state().presence, presence)
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.full
    }

    pub(super) fn are_there(&self) -> bool {
        matches!(self.state().presence, Presence::Unsharded { .. })
    }

    /// Gives the full tensor its memory.
    pub(super) fn install(&self, full: Full) -> Result<()> {
        swap(&self.full, to_storage(full.buffer)?)?;
        self.replace(Presence::Unsharded { own: full.own });
        Ok(())
    }

    /// Takes the full tensor's memory away, and the part that was kept of it, as far as they are there.
    pub(super) fn reshard(&self, memory: &Memory) -> Result<()> {
        match self.replace(Presence::Sharded) {
            Presence::Sharded => {}
            Presence::PartlyKept(part) => self.room.give(part.buffer),
            Presence::Unsharded { own } => {
                if let Some(buffer) = to_buffer(take(&self.full)?)? {
                    self.put_away(Full { buffer, own }, memory);
                }
            }
        }
        Ok(())
    }

    /// Takes the full tensor's memory away but for the elements of a chunk, which wait for backward.
    pub(super) fn reshard_to(&self, chunk: Range<usize>, ranks: usize, memory: &Memory) -> Result<()> {
        if !self.are_there() {
            return Ok(());
        }
        let mut buffer = self.room.take(chunk.len())?;
        copy_range_out(&self.full, chunk, &mut buffer)?;
        self.reshard(memory)?;
        self.replace(Presence::PartlyKept(Part { buffer, ranks }));
        Ok(())
    }

    /// The part that forward kept, if it did.
    pub(super) fn take_part(&self) -> Option<Part> {
        let mut state = self.state();
        match std::mem::replace(&mut state.presence, Presence::Sharded) {
            Presence::PartlyKept(part) => Some(part),
            other => {
                state.presence = other;
                None
            }
        }
    }

    /// Stores the memory of a full parameter where it belongs.
    pub(super) fn put_away(&self, full: Full, memory: &Memory) {
        match full {
            Full { buffer, own: false } => memory.allocator.give(buffer),
            Full { buffer, own: true } if memory.keep => self.state().own = Some(buffer),
            // The setting was taken back meanwhile.
            Full { buffer, own: true } => drop(buffer),
        }
    }

    /// The parameter's own buffer, for a gather to fill. The first call makes it.
    pub(super) fn take_own(&self) -> Result<Buffer> {
        let own = self.state().own.take();
        own.map_or_else(|| self.room.take_unpooled(), Ok)
    }

    /// Frees the parameter's own buffer, unless it is in use.
    pub(super) fn release_own(&self) {
        self.state().own = None;
    }
}
