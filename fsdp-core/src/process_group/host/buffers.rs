//! Reading inputs, taking outputs, and giving inputs back.

use std::ops::Range;

use crate::{Allocator, Buffer, DType, Error, Readable, Result, View};

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

/// Passes the bytes `range` of an input of an all-gather to `f`. `part` is its position, for messages.
pub(crate) fn read(
    input: &dyn Readable,
    range: Range<usize>,
    part: usize,
    rank: usize,
    mut f: impl FnMut(&[u8]),
) -> Result<()> {
    let mut is_read = false;
    let outcome = input.view(&mut |view| {
        // The group has refused the memory of other devices.
        #[cfg_attr(not(feature = "cuda"), allow(irrefutable_let_patterns))]
        if let View::Host(bytes) = view
            && let Some(bytes) = bytes.get(range.clone())
        {
            f(bytes);
            is_read = true;
        }
    });
    let why = match outcome {
        Ok(()) if is_read => return Ok(()),
        Ok(()) => "it holds fewer bytes than it said".to_string(),
        Err(why) => why,
    };
    Err(Error::Argument { rank, message: format!("all_gather: part {part}: the input can't be read: {why}") })
}

/// Inputs that are given back as soon as all of their bytes have been read.
pub(crate) struct Inputs<'a> {
    buffers: Vec<Option<Buffer>>,
    /// For each input the round that is the last to read it.
    last: Vec<usize>,
    memory: &'a dyn Allocator,
    rank: usize,
}

impl<'a> Inputs<'a> {
    /// `last` says for each input the round that is the last to read it.
    pub(crate) fn new(buffers: Vec<Buffer>, last: Vec<usize>, memory: &'a dyn Allocator, rank: usize) -> Self {
        Inputs { buffers: buffers.into_iter().map(Some).collect(), last, memory, rank }
    }

    /// An input that is still to be read.
    pub(crate) fn get(&self, part: usize) -> Result<&Buffer> {
        self.buffers[part].as_ref().ok_or_else(|| Error::Internal {
            rank: self.rank,
            what: format!("part {part} of a collective was to be read after it had been given back"),
        })
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
