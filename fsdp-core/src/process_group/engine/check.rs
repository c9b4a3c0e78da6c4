//! Checking the arguments of collectives, and announcing them.

use super::{all_to_all, call::Call, output::Slot};
use crate::{
    Buffer, DType, Error, Result,
    process_group::{ExchangePart, GatherPart, ReduceOp, ScatterPart},
};

pub(crate) fn gather(parts: &[GatherPart], slot: Slot) -> Result<Call> {
    let at = At { name: "all_gather", rank: slot.rank };
    for (index, part) in parts.iter().enumerate() {
        at.total(index, "counts", &part.counts, part.input.dtype(), slot)?;
        if part.input.len() != part.counts[slot.rank] {
            return at.refuse(
                index,
                format!(
                    "the input has {} elements but counts[{}] is {}",
                    part.input.len(),
                    slot.rank,
                    part.counts[slot.rank]
                ),
            );
        }
    }
    Ok(Call::new(at.name, "", parts.iter().map(|part| (part.input.dtype(), &part.counts[..]))))
}

pub(crate) fn scatter(parts: &[ScatterPart], op: ReduceOp, slot: Slot) -> Result<Call> {
    let at = At { name: "reduce_scatter", rank: slot.rank };
    for (index, part) in parts.iter().enumerate() {
        let total = at.total(index, "counts", &part.counts, part.input.dtype(), slot)?;
        at.input(index, "counts", &part.input, total)?;
        at.op(index, op, part.input.dtype())?;
    }
    Ok(Call::new(at.name, op, parts.iter().map(|part| (part.input.dtype(), &part.counts[..]))))
}

pub(crate) fn reduce(buffers: &[Buffer], op: ReduceOp, slot: Slot) -> Result<Call> {
    let at = At { name: "all_reduce", rank: slot.rank };
    buffers.iter().enumerate().try_for_each(|(index, buffer)| at.op(index, op, buffer.dtype()))?;
    let lens: Vec<_> = buffers.iter().map(|buffer| [buffer.len()]).collect();
    Ok(Call::new(at.name, op, buffers.iter().zip(&lens).map(|(buffer, len)| (buffer.dtype(), &len[..]))))
}

pub(crate) fn broadcast(buffers: &[Buffer], root: usize, slot: Slot) -> Result<Call> {
    if root >= slot.ranks {
        return Err(Error::Argument {
            rank: slot.rank,
            message: format!("broadcast: root {root} is no rank of a group of {}", slot.ranks),
        });
    }
    let lens: Vec<_> = buffers.iter().map(|buffer| [buffer.len()]).collect();
    let parts = buffers.iter().zip(&lens).map(|(buffer, len)| (buffer.dtype(), &len[..]));
    Ok(Call::new("broadcast", format!("from rank {root}"), parts))
}

pub(crate) fn exchange(parts: &[ExchangePart], slot: Slot) -> Result<Call> {
    let at = At { name: "all_to_all", rank: slot.rank };
    for (index, part) in parts.iter().enumerate() {
        let dtype = part.input.dtype();
        let total = at.total(index, "send_counts", &part.send_counts, dtype, slot)?;
        at.total(index, "recv_counts", &part.recv_counts, dtype, slot)?;
        at.input(index, "send_counts", &part.input, total)?;
        let (sent, received) = (part.send_counts[slot.rank], part.recv_counts[slot.rank]);
        if sent != received {
            let rank = slot.rank;
            return at.refuse(
                index,
                format!(
                    "send_counts[{rank}] is {sent} but recv_counts[{rank}] is {received}: both are what stays here"
                ),
            );
        }
    }
    let mut call = Call::new(at.name, "", parts.iter().map(|part| (part.input.dtype(), &[][..])));
    if slot.ranks > 1 {
        call.row = all_to_all::row(parts, slot);
    }
    Ok(call)
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
    fn total(&self, part: usize, what: &str, counts: &[usize], dtype: DType, slot: Slot) -> Result<usize> {
        if counts.len() != slot.ranks {
            let why =
                format!("{what} has {} entries but the group has {} ranks: give one a rank", counts.len(), slot.ranks);
            return self.refuse(part, why);
        }
        let total = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        match total.filter(|total| total.checked_mul(dtype.size()).is_some_and(|bytes| bytes <= isize::MAX as usize)) {
            Some(total) => Ok(total),
            None => self.refuse(part, format!("{what} {counts:?} add up to more than memory can hold")),
        }
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
