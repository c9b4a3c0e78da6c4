//! Reading inputs, taking outputs, and giving inputs back.
//! Copies to memory that nobody reads soon.

use std::{
    arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128},
    ops::Range,
};

use crate::{Allocator, Buffer, DType, Error, Readable, Result, View};

// ---- from process_group/host/buffers
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

// ---- from process_group/host/copy
/// Outputs of this many bytes or more don't fit the caches anyway.
const LARGE: usize = 4 << 20;

/// So many bytes stay in the first cache while they are copied twice.
const BLOCK: usize = 8 << 10;

/// How to copy to an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    /// Through the caches.
    Cached,
    /// Around the caches. The processor then need not read the memory before it overwrites it, nor throw out what is
    /// still to be read.
    Around,
}

impl Copy {
    /// For outputs of `bytes` bytes in all.
    pub(crate) fn for_output_of(bytes: usize) -> Self {
        if bytes >= LARGE { Copy::Around } else { Copy::Cached }
    }

    /// Copies `from` to `cached`, whom somebody reads soon, and to `to`. All are of the same length.
    pub(crate) fn copy_to_both(self, cached: &mut [u8], to: &mut [u8], from: &[u8]) {
        for ((cached, to), from) in cached.chunks_mut(BLOCK).zip(to.chunks_mut(BLOCK)).zip(from.chunks(BLOCK)) {
            cached.copy_from_slice(from);
            self.begin(to, from);
        }
        self.end();
    }

    /// Copies `from` to `to`, which are of the same length.
    pub(crate) fn copy(self, to: &mut [u8], from: &[u8]) {
        self.begin(to, from);
        self.end();
    }

    fn begin(self, to: &mut [u8], from: &[u8]) {
        match self {
            Copy::Cached => to.copy_from_slice(from),
            Copy::Around => around(to, from),
        }
    }

    /// Makes what was begun visible before anything that follows, to other threads too.
    fn end(self) {
        if self == Copy::Around {
            fence();
        }
    }
}

/// Copies in an order of its own, until the [`fence`].
#[cfg(target_arch = "x86_64")]
fn around(to: &mut [u8], from: &[u8]) {
    const LINE: usize = 64;
    assert_eq!(to.len(), from.len());
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let (to_lines, to_tail) = to.as_chunks_mut::<LINE>();
    let (from_lines, from_tail) = from.as_chunks::<LINE>();
    to_tail.copy_from_slice(from_tail);
    for (to, from) in to_lines.iter_mut().zip(from_lines) {
        let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
        // SAFETY: both lines are four vectors long; `to` is aligned to a line, as every line after the head is; loads
        // need no alignment. SSE2 is part of every x86-64.
        unsafe {
            let line = [0, 1, 2, 3].map(|index| _mm_loadu_si128(from.add(index)));
            for (index, vector) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(index), vector);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: no preconditions. Streaming stores are not ordered with the stores that hand the output to another
    // thread; after the fence they are.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}

#[cfg(not(target_arch = "x86_64"))]
fn around(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied() {
        let from: Vec<u8> = (0..500u32).map(|i| i as u8).collect();
        for start in 0..70 {
            for len in [0, 1, 63, 64, 65, 127, 128, 300] {
                let mut to = vec![0xff; 500];
                Copy::Around.copy(&mut to[start..start + len], &from[7..7 + len]);
                assert_eq!(to[start..start + len], from[7..7 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&byte| byte == 0xff));
            }
        }
    }

    #[test]
    fn both_copies_are_whole() {
        for len in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 70] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            for copy in [Copy::Cached, Copy::Around] {
                let (mut cached, mut to) = (vec![0xff; len], vec![0xff; len]);
                copy.copy_to_both(&mut cached, &mut to, &from);
                assert!(cached == from && to == from, "{copy:?}, {len} bytes");
            }
        }
    }
}
