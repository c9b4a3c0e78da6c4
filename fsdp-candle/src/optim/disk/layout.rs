//! Places of moments in a file: blocks, each with the same elements of all moments.
//!
//! A step reads and writes a block at a time. Small tensors share a block, and large tensors span several blocks.

use std::ops::Range;

use fsdp_core::DType;

use crate::disk::{ALIGN, LEAST_BLOCK};
use crate::kernels::STATE_BLOCK;

/// Alignment of tensors in a block: a cache line, which every element type divides.
const PART_ALIGN: usize = 64;

/// A tensor of a state: one value for each element, or for each [`STATE_BLOCK`] elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartKind {
    pub(crate) dtype: DType,
    /// Number of elements for each value.
    pub(crate) per: usize,
}

impl PartKind {
    fn bytes(self, elements: usize) -> usize {
        elements.div_ceil(self.per) * self.dtype.size()
    }
}

/// A block of the file.
#[derive(Debug)]
pub(super) struct Block {
    /// Bytes in the file, both ends multiples of [`ALIGN`].
    pub(super) bytes: Range<u64>,
    /// Elements of states, in the order of the states.
    pub(super) pieces: Vec<Piece>,
}

/// Elements of one state in a block.
#[derive(Debug)]
pub(super) struct Piece {
    /// Index of the state.
    pub(super) state: usize,
    pub(super) elements: Range<usize>,
    /// Bytes of each of the state's tensors in the block, in order and disjoint.
    pub(super) parts: Vec<Range<usize>>,
}

/// Places states in blocks of at most `most` bytes. A state has a number of elements and tensors. Every piece starts at
/// a multiple of [`STATE_BLOCK`] elements.
pub(super) fn blocks<'a>(states: impl IntoIterator<Item = (usize, &'a [PartKind])>, most: usize) -> Vec<Block> {
    let most = most.max(LEAST_BLOCK) / ALIGN * ALIGN;
    let mut blocks = vec![];
    let (mut start, mut pieces, mut used) = (0, vec![], 0);
    let mut finish = |pieces: &mut Vec<Piece>, used: &mut usize| {
        let end = start + used.next_multiple_of(ALIGN) as u64;
        blocks.push(Block { bytes: start..end, pieces: std::mem::take(pieces) });
        (start, *used) = (end, 0);
    };
    for (state, (elements, kinds)) in states.into_iter().enumerate() {
        let mut from = 0;
        while from < elements && !kinds.is_empty() {
            let count = fitting(elements - from, kinds, most - used);
            if count == 0 {
                finish(&mut pieces, &mut used);
                continue;
            }
            let place = |kind: &PartKind| {
                let part = used..used + kind.bytes(count);
                used = part.end.next_multiple_of(PART_ALIGN);
                part
            };
            let parts = kinds.iter().map(place).collect();
            pieces.push(Piece { state, elements: from..from + count, parts });
            from += count;
        }
    }
    if !pieces.is_empty() {
        finish(&mut pieces, &mut used);
    }
    blocks
}

/// Returns how many of `elements` elements fit into `room` bytes.
fn fitting(elements: usize, kinds: &[PartKind], room: usize) -> usize {
    let bytes = |count: usize| kinds.iter().map(|kind| kind.bytes(count).next_multiple_of(PART_ALIGN)).sum::<usize>();
    if bytes(elements) <= room {
        return elements;
    }
    // Each tensor may lose some bytes to alignment.
    let group: usize = kinds.iter().map(|kind| kind.bytes(STATE_BLOCK)).sum();
    room.saturating_sub(kinds.len() * PART_ALIGN) / group * STATE_BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: PartKind = PartKind { dtype: DType::F32, per: 1 };
    const CODES: PartKind = PartKind { dtype: DType::U8, per: 1 };
    const SCALES: PartKind = PartKind { dtype: DType::F32, per: STATE_BLOCK };

    /// Checks that every element has one place, and that no two places overlap. Returns the number of blocks.
    fn checked(states: &[(usize, &[PartKind])], most: usize) -> usize {
        let blocks = blocks(states.iter().copied(), most);
        let mut next = vec![0; states.len()];
        let mut end = 0;
        for block in &blocks {
            assert!(block.bytes.start == end && block.bytes.end % ALIGN as u64 == 0, "{block:?}");
            end = block.bytes.end;
            let bytes = (block.bytes.end - block.bytes.start) as usize;
            assert!(bytes > 0 && bytes <= most.max(LEAST_BLOCK));
            let mut free = 0;
            for Piece { state, elements, parts } in &block.pieces {
                assert!(elements.start == next[*state] && elements.start % STATE_BLOCK == 0 && !elements.is_empty());
                next[*state] = elements.end;
                assert_eq!(parts.len(), states[*state].1.len());
                for (part, kind) in parts.iter().zip(states[*state].1) {
                    assert!(part.start >= free && part.start % PART_ALIGN == 0 && part.end <= bytes);
                    assert_eq!(part.len(), elements.len().div_ceil(kind.per) * kind.dtype.size());
                    free = part.end;
                }
            }
        }
        for ((elements, kinds), placed) in states.iter().zip(next) {
            assert_eq!(placed, if kinds.is_empty() { 0 } else { *elements });
        }
        blocks.len()
    }

    #[test]
    fn every_element_has_one_place() {
        let adam = &[F32, F32][..];
        let eight_bits = &[CODES, SCALES, CODES, SCALES][..];
        assert_eq!(checked(&[], 1 << 20), 0);
        assert_eq!(checked(&[(0, adam), (5, &[])], 1 << 20), 0);
        assert_eq!(checked(&[(1, adam), (3, adam), (0, adam), (257, adam), (1, eight_bits)], 1 << 20), 1);
        for elements in [1, 255, 256, 257, 4095, 4096, 100_003] {
            for most in [0, LEAST_BLOCK, 40_000, 1 << 16] {
                checked(&[(7, adam), (elements, adam), (elements, eight_bits), (3, &[F32]), (elements, &[])], most);
            }
        }
        // Blocks are nearly full.
        assert_eq!(checked(&[(1 << 20, adam)], 1 << 20), 9);
    }
}
