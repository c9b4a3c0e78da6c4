//! Taking outputs and giving inputs back.

use std::ops::Range;

use crate::{Allocator, Buffer, DType, Error, Result};

/// What a collective needs to know of its group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// This rank.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// Bytes of data in a slot.
    pub(crate) bytes: usize,
}

impl Slot {
    /// Bytes for each of `shares` equal shares of the slot, so that elements in each are aligned.
    pub(crate) fn share(&self, shares: usize) -> usize {
        (self.bytes / shares.max(1)) / super::stream::ALIGN * super::stream::ALIGN
    }

    /// Where in this rank's slot is what it sends to `to`, when a slot has a share for each peer.
    pub(crate) fn peer_share(from: usize, to: usize, share: usize) -> Range<usize> {
        let index = if to > from { to - 1 } else { to };
        index * share..(index + 1) * share
    }
}

/// The bytes of rank `rank` in a concatenation of `counts` elements.
pub(crate) fn range(counts: &[usize], rank: usize, dtype: DType) -> Range<usize> {
    let start = counts[..rank].iter().sum::<usize>() * dtype.size();
    start..start + counts[rank] * dtype.size()
}

/// Takes an output and checks that it is what was asked for.
pub(crate) fn take(memory: &dyn Allocator, dtype: DType, len: usize, rank: usize) -> Result<Buffer> {
    let buffer = memory.take(dtype, len)?;
    if buffer.dtype() != dtype || buffer.len() != len {
        return Err(Error::Argument {
            rank,
            message: format!(
                "the allocator gave a buffer of {} {} where {len} {dtype} were asked for",
                buffer.len(),
                buffer.dtype()
            ),
        });
    }
    Ok(buffer)
}

/// Inputs that are given back as soon as all of their bytes have been read.
pub(crate) struct Inputs<'a> {
    buffers: Vec<Option<Buffer>>,
    /// For each input the round that is the last to read it.
    last: Vec<usize>,
    memory: &'a dyn Allocator,
}

impl<'a> Inputs<'a> {
    /// `last` says for each input the round that is the last to read it.
    pub(crate) fn new(buffers: Vec<Buffer>, last: Vec<usize>, memory: &'a dyn Allocator) -> Self {
        Inputs { buffers: buffers.into_iter().map(Some).collect(), last, memory }
    }

    /// The bytes of an input that is still to be read.
    pub(crate) fn bytes(&self, part: usize) -> &[u8] {
        self.buffers[part].as_ref().map_or(&[], Buffer::bytes)
    }

    /// The dtype of an input that is still to be read.
    pub(crate) fn dtype(&self, part: usize) -> DType {
        self.buffers[part].as_ref().map_or(DType::U8, Buffer::dtype)
    }

    /// Gives back what no later round reads.
    pub(crate) fn end_of(&mut self, round: usize) {
        for (buffer, &last) in self.buffers.iter_mut().zip(&self.last) {
            if last <= round
                && let Some(buffer) = buffer.take()
            {
                self.memory.give(buffer);
            }
        }
    }
}
