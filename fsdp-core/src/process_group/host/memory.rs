//! Inputs and outputs of backends in host memory, and copies that bypass the caches.

use std::{
    arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128},
    ops::Range,
};

use crate::{Allocator, Buffer, DType, Error, Readable, Result, View};

/// Returns the byte range of rank `rank` in a concatenation of `counts` elements.
pub(crate) fn range(counts: &[usize], rank: usize, dtype: DType) -> Range<usize> {
    let start = counts[..rank].iter().sum::<usize>() * dtype.size();
    start..start + counts[rank] * dtype.size()
}

/// Allocates an output and checks its dtype and length.
fn take(memory: &dyn Allocator, dtype: DType, len: usize, rank: usize) -> Result<Buffer> {
    let buffer = memory.take(dtype, len)?;
    if buffer.dtype() != dtype || buffer.len() != len {
        let got = format!("a buffer of {} {}", buffer.len(), buffer.dtype());
        return Err(Error::Argument { rank, message: format!("the allocator gave {got}, expected {len} {dtype}") });
    }
    Ok(buffer)
}

/// Allocates outputs with these dtypes and lengths.
pub(crate) fn take_all(
    memory: &dyn Allocator,
    outputs: impl Iterator<Item = (DType, usize)>,
    rank: usize,
) -> Result<Vec<Buffer>> {
    outputs.map(|(dtype, len)| take(memory, dtype, len, rank)).collect()
}

/// Passes a byte range of an all-gather's input to `f`. `part` is the input's position, for messages.
pub(crate) fn read(
    input: &dyn Readable,
    range: Range<usize>,
    part: usize,
    rank: usize,
    mut f: impl FnMut(&[u8]),
) -> Result<()> {
    let mut is_read = false;
    let outcome = input.view(&mut |view| {
        // The group has rejected memory of other devices.
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
        Ok(()) => "it has fewer bytes than its length says".to_string(),
        Err(why) => why,
    };
    Err(Error::Argument { rank, message: format!("all_gather: part {part}: cannot read the input: {why}") })
}

/// Inputs that are given back once all of their bytes have been read.
pub(crate) struct Inputs<'a> {
    buffers: Vec<Option<Buffer>>,
    /// The last step that reads each input.
    last: Vec<usize>,
    memory: &'a dyn Allocator,
    rank: usize,
}

impl<'a> Inputs<'a> {
    /// `last` has the last step that reads each input.
    pub(crate) fn new(buffers: Vec<Buffer>, last: Vec<usize>, memory: &'a dyn Allocator, rank: usize) -> Self {
        Inputs { buffers: buffers.into_iter().map(Some).collect(), last, memory, rank }
    }

    /// Returns an input that has not been given back.
    pub(crate) fn get(&self, part: usize) -> Result<&Buffer> {
        self.buffers[part].as_ref().ok_or_else(|| Error::Internal {
            rank: self.rank,
            what: format!("part {part} of a collective was read after it had been given back"),
        })
    }

    /// Gives back the inputs that no step after `step` reads.
    pub(crate) fn finish_step(&mut self, step: usize) {
        for (buffer, &last) in self.buffers.iter_mut().zip(&self.last) {
            if last <= step
                && let Some(buffer) = buffer.take()
            {
                self.memory.give(buffer);
            }
        }
    }
}

/// Outputs from this size on do not fit the caches.
const LARGE: usize = 4 << 20;

/// Number of bytes that stay in the first-level cache while they are copied twice.
const BLOCK: usize = 8 << 10;

/// Number of bytes that the C library copies by vector instructions. More it copies by `rep movsb`, which is several
/// times slower on some processors, depending on the distance of the addresses.
const PIECE: usize = 2 << 10;

/// Copies `from` to `to`, which has the same length.
pub(crate) fn copy_cached(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len());
    for (to, from) in to.chunks_mut(PIECE).zip(from.chunks(PIECE)) {
        to.copy_from_slice(from);
    }
}

/// How to copy to an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copy {
    /// By ordinary stores.
    Cached,
    /// By non-temporal stores, which do not read the memory first and do not evict data from the caches.
    NonTemporal,
}

impl Copy {
    /// Chooses the copy for outputs of `bytes` bytes in all.
    pub(crate) fn for_output_of(bytes: usize) -> Self {
        if bytes >= LARGE { Copy::NonTemporal } else { Copy::Cached }
    }

    /// Copies `from` to `cached`, which is read soon, and to `to`. All have the same length.
    pub(crate) fn copy_to_both(self, cached: &mut [u8], to: &mut [u8], from: &[u8]) {
        for ((cached, to), from) in cached.chunks_mut(BLOCK).zip(to.chunks_mut(BLOCK)).zip(from.chunks(BLOCK)) {
            copy_cached(cached, from);
            self.begin(to, from);
        }
        self.end();
    }

    /// Copies `from` to `to`, which has the same length.
    pub(crate) fn copy(self, to: &mut [u8], from: &[u8]) {
        self.begin(to, from);
        self.end();
    }

    fn begin(self, to: &mut [u8], from: &[u8]) {
        match self {
            Copy::Cached => copy_cached(to, from),
            Copy::NonTemporal => copy_non_temporal(to, from),
        }
    }

    /// Makes the copied bytes visible to other threads before anything that follows.
    fn end(self) {
        if self == Copy::NonTemporal {
            fence();
        }
    }
}

/// Copies in an order of its own, until the [`fence`].
#[cfg(target_arch = "x86_64")]
fn copy_non_temporal(to: &mut [u8], from: &[u8]) {
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
            let load = |index| _mm_loadu_si128(from.add(index));
            let line = (load(0), load(1), load(2), load(3));
            _mm_stream_si128(to, line.0);
            _mm_stream_si128(to.add(1), line.1);
            _mm_stream_si128(to.add(2), line.2);
            _mm_stream_si128(to.add(3), line.3);
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
fn copy_non_temporal(to: &mut [u8], from: &[u8]) {
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
                Copy::NonTemporal.copy(&mut to[start..start + len], &from[7..7 + len]);
                assert_eq!(to[start..start + len], from[7..7 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&byte| byte == 0xff));
            }
        }
    }

    #[test]
    fn both_copies_are_whole() {
        for len in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 70] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            for copy in [Copy::Cached, Copy::NonTemporal] {
                let (mut cached, mut to) = (vec![0xff; len], vec![0xff; len]);
                copy.copy_to_both(&mut cached, &mut to, &from);
                assert!(cached == from && to == from, "{copy:?}, {len} bytes");
            }
        }
    }
}
