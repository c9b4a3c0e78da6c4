//! Copies to memory that nobody reads soon.

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
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

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
