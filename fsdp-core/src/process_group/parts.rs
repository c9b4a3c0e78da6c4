//! What collectives move: lists of parts, so that the parameters of one FSDP unit move in one collective.

use std::sync::Arc;

use crate::{Allocator, Buffer, DeviceId, Readable, ReduceOp};

/// One tensor of an all-gather.
pub struct GatherPart {
    /// What this rank contributes: `counts[rank]` elements.
    pub input: Arc<dyn Readable>,
    /// How many elements each rank contributes. The output is their concatenation in rank order.
    pub counts: Vec<usize>,
}

/// One tensor of a reduce-scatter.
pub struct ScatterPart {
    /// What this rank contributes for every rank: the concatenation, in rank order, of `counts[r]` elements for each
    /// rank `r`.
    pub input: Buffer,
    /// How many elements each rank receives.
    pub counts: Vec<usize>,
}

/// One tensor of an all-to-all.
pub struct ExchangePart {
    /// The concatenation, in rank order, of `send_counts[r]` elements for each rank `r`.
    pub input: Buffer,
    /// How many elements go to each rank.
    pub send_counts: Vec<usize>,
    /// How many elements come from each rank.
    pub recv_counts: Vec<usize>,
}

/// A collective to be run, with all that it owns. [`crate::ProcessGroup`]'s method of the same name says what it does;
/// the group has checked every count, dtype and rank in it.
#[non_exhaustive]
pub enum Op {
    /// [`crate::ProcessGroup::all_gather`].
    AllGather {
        /// What is gathered.
        parts: Vec<GatherPart>,
        /// Where outputs come from.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::reduce_scatter`].
    ReduceScatter {
        /// What is reduced.
        parts: Vec<ScatterPart>,
        /// How.
        op: ReduceOp,
        /// Where outputs come from and inputs go.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::all_reduce`].
    AllReduce {
        /// What is reduced, in place.
        buffers: Vec<Buffer>,
        /// How.
        op: ReduceOp,
    },
    /// [`crate::ProcessGroup::broadcast`].
    Broadcast {
        /// What is sent, or overwritten.
        buffers: Vec<Buffer>,
        /// The rank that sends.
        root: usize,
    },
    /// [`crate::ProcessGroup::all_to_all`].
    AllToAll {
        /// What is exchanged.
        parts: Vec<ExchangePart>,
        /// Where outputs come from and inputs go.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::barrier`].
    Barrier,
}

impl Op {
    /// Where its memory is: all of it is on one device, as the group has checked. The host, where there is none.
    pub fn device(&self) -> DeviceId {
        match self {
            Op::AllGather { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::ReduceScatter { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::AllReduce { buffers, .. } | Op::Broadcast { buffers, .. } => buffers.first().map(Buffer::device),
            Op::AllToAll { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::Barrier => None,
        }
        .unwrap_or(DeviceId::Host)
    }
}
