//! The operations of a group with their arguments, argument checks, and announcements.
//!
//! Collectives take lists of parts, so that the parameters of one FSDP unit move in one collective.

use std::sync::Arc;

use super::{call::Call, options::Membership};
use crate::{Allocator, Buffer, DType, DeviceId, Error, Readable, ReduceOp, Result};

/// One tensor of an all-gather.
pub struct GatherPart {
    /// The elements of this rank: `counts[rank]` of them.
    pub input: Arc<dyn Readable>,
    /// Number of elements of each rank. The output is their concatenation in rank order.
    pub counts: Vec<usize>,
}

/// One tensor of a reduce-scatter.
pub struct ScatterPart {
    /// The elements of this rank: for each rank `r`, in order, `counts[r]` elements.
    pub input: Buffer,
    /// Number of elements that each rank receives.
    pub counts: Vec<usize>,
}

/// One tensor of an all-to-all.
pub struct ExchangePart {
    /// For each rank `r`, in order, the `send_counts[r]` elements to send to it.
    pub input: Buffer,
    /// Number of elements to send to each rank.
    pub send_counts: Vec<usize>,
    /// Number of elements to receive from each rank.
    pub recv_counts: Vec<usize>,
}

/// Messages of different lengths that one rank receives from all ranks, or sends to them. Messages are bytes in host
/// memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// To gather: this rank's message. To scatter: the concatenation of all messages on the root, nothing elsewhere.
    pub input: Vec<u8>,
    /// Length of each rank's message on the root, nothing elsewhere.
    pub counts: Vec<usize>,
    /// Length of this rank's message.
    pub own: usize,
    /// A length that no message exceeds, the same on all ranks.
    pub longest: usize,
    /// The rank that receives all messages, or sends them.
    pub root: usize,
}

/// A collective to run, with its buffers. [`crate::ProcessGroup`] documents each in the method of the same name, and
/// has checked all counts, dtypes and ranks.
#[non_exhaustive]
pub enum Op {
    /// [`crate::ProcessGroup::all_gather`].
    AllGather {
        /// Tensors to gather.
        parts: Vec<GatherPart>,
        /// Allocator of the outputs.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::reduce_scatter`].
    ReduceScatter {
        /// Tensors to reduce.
        parts: Vec<ScatterPart>,
        /// Reduction.
        op: ReduceOp,
        /// Allocator of the outputs, which the inputs are given back to.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::all_reduce`].
    AllReduce {
        /// Tensors to reduce in place.
        buffers: Vec<Buffer>,
        /// Reduction.
        op: ReduceOp,
    },
    /// [`crate::ProcessGroup::broadcast`].
    Broadcast {
        /// Tensors to send, or to overwrite.
        buffers: Vec<Buffer>,
        /// The sending rank.
        root: usize,
    },
    /// [`crate::ProcessGroup::all_to_all`].
    AllToAll {
        /// Tensors to exchange.
        parts: Vec<ExchangePart>,
        /// Allocator of the outputs, which the inputs are given back to.
        memory: Arc<dyn Allocator>,
    },
    /// [`crate::ProcessGroup::gather_bytes_to`]. The output is the concatenation of the messages on the root, and empty
    /// elsewhere.
    Gather(Messages),
    /// [`crate::ProcessGroup::scatter_bytes`]. The output is this rank's message.
    Scatter(Messages),
    /// [`crate::ProcessGroup::barrier`].
    Barrier,
}

impl Op {
    /// Returns the device of all its memory, as the group has checked; the host if it has no buffers.
    pub fn device(&self) -> DeviceId {
        match self {
            Op::AllGather { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::ReduceScatter { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::AllReduce { buffers, .. } | Op::Broadcast { buffers, .. } => buffers.first().map(Buffer::device),
            Op::AllToAll { parts, .. } => parts.first().map(|part| part.input.device()),
            Op::Gather(_) | Op::Scatter(_) | Op::Barrier => None,
        }
        .unwrap_or(DeviceId::Host)
    }
}

pub(super) fn gather(parts: &[GatherPart], group: &Membership, device: DeviceId) -> Result<Call> {
    let at = At { name: "all_gather", rank: group.rank };
    at.device(parts.iter().map(|part| part.input.device()), device)?;
    for (index, part) in parts.iter().enumerate() {
        at.total(index, "counts", &part.counts, part.input.dtype(), group)?;
        if part.input.len() != part.counts[group.rank] {
            let (len, count) = (part.input.len(), part.counts[group.rank]);
            return at.refuse(index, format!("the input has {len} elements but counts[{}] is {count}", group.rank));
        }
    }
    Ok(Call::new(at.name, "", parts.iter().map(|part| (part.input.dtype(), &part.counts[..]))))
}

pub(super) fn scatter(parts: &[ScatterPart], op: ReduceOp, group: &Membership, device: DeviceId) -> Result<Call> {
    let at = At { name: "reduce_scatter", rank: group.rank };
    at.device(parts.iter().map(|part| part.input.device()), device)?;
    for (index, part) in parts.iter().enumerate() {
        let total = at.total(index, "counts", &part.counts, part.input.dtype(), group)?;
        at.input(index, "counts", &part.input, total)?;
        at.op(index, op, part.input.dtype())?;
    }
    Ok(Call::new(at.name, op, parts.iter().map(|part| (part.input.dtype(), &part.counts[..]))))
}

pub(super) fn reduce(buffers: &[Buffer], op: ReduceOp, group: &Membership, device: DeviceId) -> Result<Call> {
    let at = At { name: "all_reduce", rank: group.rank };
    at.device(buffers.iter().map(Buffer::device), device)?;
    for (index, buffer) in buffers.iter().enumerate() {
        at.op(index, op, buffer.dtype())?;
    }
    Ok(Call::new(at.name, op, buffers.iter().map(|buffer| (buffer.dtype(), [buffer.len()]))))
}

pub(super) fn broadcast(buffers: &[Buffer], root: usize, group: &Membership, device: DeviceId) -> Result<Call> {
    if root >= group.size {
        let message = format!("broadcast: root {root} is not a rank of a group of {}", group.size);
        return Err(Error::Argument { rank: group.rank, message });
    }
    let at = At { name: "broadcast", rank: group.rank };
    at.device(buffers.iter().map(Buffer::device), device)?;
    let parts = buffers.iter().map(|buffer| (buffer.dtype(), [buffer.len()]));
    Ok(Call::new(at.name, format_args!("from rank {root}"), parts))
}

pub(super) fn exchange(parts: &[ExchangePart], group: &Membership, device: DeviceId) -> Result<Call> {
    let at = At { name: "all_to_all", rank: group.rank };
    at.device(parts.iter().map(|part| part.input.device()), device)?;
    for (index, part) in parts.iter().enumerate() {
        let dtype = part.input.dtype();
        let total = at.total(index, "send_counts", &part.send_counts, dtype, group)?;
        at.total(index, "recv_counts", &part.recv_counts, dtype, group)?;
        at.input(index, "send_counts", &part.input, total)?;
        let (sent, received) = (part.send_counts[group.rank], part.recv_counts[group.rank]);
        if sent != received {
            let rank = group.rank;
            let why = format!("send_counts[{rank}] is {sent} but recv_counts[{rank}] is {received}: make them equal");
            return at.refuse(index, why);
        }
    }
    let call = Call::new(at.name, "", parts.iter().map(|part| (part.input.dtype(), [])));
    Ok(if group.size > 1 { call.with_row(parts, group) } else { call })
}

/// Checks messages from all ranks to one (`gather`) or from one rank to all (`scatter`).
pub(super) fn messages(name: &'static str, messages: &Messages, group: &Membership) -> Result<Call> {
    let Messages { input, counts, own, longest, root } = messages;
    let at = At { name, rank: group.rank };
    if *root >= group.size {
        let message = format!("{name}: root {root} is not a rank of a group of {}", group.size);
        return Err(Error::Argument { rank: group.rank, message });
    }
    let is_root = group.rank == *root;
    let total = if is_root { at.total(0, "counts", counts, DType::U8, group)? } else { 0 };
    if own > longest || is_root && (counts[*root] != *own || counts.iter().any(|count| count > longest)) {
        return at
            .refuse(0, format!("the lengths {counts:?}, and {own} of this rank, do not fit the longest, {longest}"));
    }
    let expected = if name == "gather" { *own } else { total };
    if input.len() != expected {
        return at.refuse(0, format!("the input has {} bytes, expected {expected}", input.len()));
    }
    Ok(Call::without_parts(name, &format!("root {root}, at most {longest} bytes")))
}

/// The collective and rank whose arguments are checked, for messages.
struct At {
    name: &'static str,
    rank: usize,
}

impl At {
    fn refuse<T>(&self, part: usize, why: String) -> Result<T> {
        Err(Error::Argument { rank: self.rank, message: format!("{}: part {part}: {why}", self.name) })
    }

    /// Returns the sum of the counts, of which there must be one for each rank.
    fn total(&self, part: usize, what: &str, counts: &[usize], dtype: DType, group: &Membership) -> Result<usize> {
        if counts.len() != group.size {
            let why = format!("{what} has {} entries, expected {}, one for each rank", counts.len(), group.size);
            return self.refuse(part, why);
        }
        let total = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        match total.filter(|total| total.checked_mul(dtype.size()).is_some_and(|bytes| bytes <= isize::MAX as usize)) {
            Some(total) => Ok(total),
            None => self.refuse(part, format!("{what} {counts:?} add up to more elements than memory can hold")),
        }
    }

    /// Checks that all memory is the host's, or that all is the group's device's.
    fn device(&self, parts: impl Iterator<Item = DeviceId>, group: DeviceId) -> Result<()> {
        let mut first = None;
        for (part, device) in parts.enumerate() {
            if device != group && device != DeviceId::Host {
                let moved = match group {
                    DeviceId::Host => "host memory".to_string(),
                    device => format!("memory of the host and {device}"),
                };
                return self.refuse(part, format!("it is in the memory of {device}, but the group moves {moved}"));
            }
            let first = *first.get_or_insert(device);
            if device != first {
                let why = format!("it is in the memory of {device}, but part 0 is in the memory of {first}");
                return self.refuse(part, why);
            }
        }
        Ok(())
    }

    fn input(&self, part: usize, what: &str, input: &Buffer, total: usize) -> Result<()> {
        if input.len() == total {
            return Ok(());
        }
        self.refuse(part, format!("the input has {} elements but {what} add up to {total}", input.len()))
    }

    fn op(&self, part: usize, op: ReduceOp, dtype: DType) -> Result<()> {
        if op == ReduceOp::Avg && !dtype.is_float() {
            let why = format!("the average of {dtype} is not defined: use sum, or a floating point type");
            return self.refuse(part, why);
        }
        Ok(())
    }
}
