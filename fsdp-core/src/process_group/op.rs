//! What collectives move: lists of parts, so that the parameters of one FSDP unit move in one collective.
//! Checking the arguments of collectives, and announcing them.

use std::sync::Arc;

use super::{call::Call, options::Membership};
use crate::{Allocator, Buffer, DType, DeviceId, Error, Readable, ReduceOp, Result};

// ---- from process_group/parts
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

// ---- from process_group/check
pub(super) fn gather(parts: &[GatherPart], group: &Membership, device: DeviceId) -> Result<Call> {
    let at = At { name: "all_gather", rank: group.rank };
    at.device(parts.iter().map(|part| part.input.device()), device)?;
    for (index, part) in parts.iter().enumerate() {
        at.total(index, "counts", &part.counts, part.input.dtype(), group)?;
        if part.input.len() != part.counts[group.rank] {
            return at.refuse(
                index,
                format!(
                    "the input has {} elements but counts[{}] is {}",
                    part.input.len(),
                    group.rank,
                    part.counts[group.rank]
                ),
            );
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
    let lens: Vec<_> = buffers.iter().map(|buffer| [buffer.len()]).collect();
    Ok(Call::new(at.name, op, buffers.iter().zip(&lens).map(|(buffer, len)| (buffer.dtype(), &len[..]))))
}

pub(super) fn broadcast(buffers: &[Buffer], root: usize, group: &Membership, device: DeviceId) -> Result<Call> {
    if root >= group.size {
        return Err(Error::Argument {
            rank: group.rank,
            message: format!("broadcast: root {root} is no rank of a group of {}", group.size),
        });
    }
    let at = At { name: "broadcast", rank: group.rank };
    at.device(buffers.iter().map(Buffer::device), device)?;
    let lens: Vec<_> = buffers.iter().map(|buffer| [buffer.len()]).collect();
    let parts = buffers.iter().zip(&lens).map(|(buffer, len)| (buffer.dtype(), &len[..]));
    Ok(Call::new(at.name, format!("from rank {root}"), parts))
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
            return at.refuse(
                index,
                format!(
                    "send_counts[{rank}] is {sent} but recv_counts[{rank}] is {received}: both are what stays here"
                ),
            );
        }
    }
    let call = Call::new(at.name, "", parts.iter().map(|part| (part.input.dtype(), &[][..])));
    Ok(if group.size > 1 { call.with_row(parts, group) } else { call })
}

/// Where an argument is.
struct At {
    name: &'static str,
    rank: usize,
}

impl At {
    fn refuse<T>(&self, part: usize, why: String) -> Result<T> {
        Err(Error::Argument { rank: self.rank, message: format!("{}: part {part}: {why}", self.name) })
    }

    /// The sum of counts for every rank.
    fn total(&self, part: usize, what: &str, counts: &[usize], dtype: DType, group: &Membership) -> Result<usize> {
        if counts.len() != group.size {
            let why =
                format!("{what} has {} entries but the group has {} ranks: give one a rank", counts.len(), group.size);
            return self.refuse(part, why);
        }
        let total = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        match total.filter(|total| total.checked_mul(dtype.size()).is_some_and(|bytes| bytes <= isize::MAX as usize)) {
            Some(total) => Ok(total),
            None => self.refuse(part, format!("{what} {counts:?} add up to more than memory can hold")),
        }
    }

    /// All memory of a collective is the host's, or all is that of the group's device.
    fn device(&self, parts: impl Iterator<Item = DeviceId>, group: DeviceId) -> Result<()> {
        let mut first = None;
        for (part, device) in parts.enumerate() {
            if device != group && device != DeviceId::Host {
                let moved = match group {
                    DeviceId::Host => "that of the host".to_string(),
                    device => format!("that of {device} and the host"),
                };
                return self.refuse(part, format!("it is in the memory of {device}, but the group moves {moved}"));
            }
            let first = *first.get_or_insert(device);
            if device != first {
                let why = format!("it is in the memory of {device}, but part 0 is in that of {first}: use one of them");
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
            return self
                .refuse(part, format!("the average of {dtype} is no {dtype}: use sum, or a floating point type"));
        }
        Ok(())
    }
}
