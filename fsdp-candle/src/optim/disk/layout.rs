//! Places of moments in a file: blocks, each with the same elements of all moments.
//!
//! A step reads and writes a block at a time. Small tensors share a block, and large tensors span several blocks.

use std::ops::Range;

use fsdp_core::DType;

use crate::disk::{ALIGN, LEAST_BLOCK};
use crate::kernels::STATE_BLOCK;
use crate::optim::moment_kind::PartKind;

/// Alignment of tensors in a block: a cache line, which every element type divides.
const PART_ALIGN: usize = 64;

/// A block of the file.
#[derive(Debug)]
pub(super) struct Block {
    /// Bytes in the file, both ends multiples of [`ALIGN`].
    pub(super) bytes: Range<u64>,
    /// Bytes of the pieces' shards in memory, if those are in a file, too.
    pub(super) beside: usize,
    /// Elements of states, in the order of the states.
    pub(super) pieces: Vec<Piece>,
}

impl Block {
    /// Returns the number of bytes in the file.
    pub(super) fn len(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }
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

/// A state to place.
#[derive(Clone, Copy, Debug)]
pub(super) struct State<'a> {
    pub(super) elements: usize,
    /// The state's tensors.
    pub(super) kinds: &'a [PartKind],
    /// Dtype of the shard, if it is in a file, too.
    pub(super) shard: Option<DType>,
}

impl State<'_> {
    /// Returns the unit of a piece: elements that begin with a block of the state's tensors and a page of the shard.
    fn group(&self) -> usize {
        self.shard.map_or(STATE_BLOCK, |dtype| STATE_BLOCK.max(ALIGN / dtype.size()))
    }

    /// Returns the bytes of a piece of the shard in a block of memory.
    fn beside(&self, elements: usize) -> usize {
        self.shard.map_or(0, |dtype| (elements * dtype.size()).next_multiple_of(ALIGN))
    }

    /// Returns how many elements from one on fit into `room` bytes.
    fn fitting(&self, from: usize, room: usize) -> usize {
        let own = |kind: &PartKind, count: usize| kind.bytes(count).next_multiple_of(PART_ALIGN);
        let bytes = |count: usize| self.kinds.iter().map(|kind| own(kind, count)).sum::<usize>() + self.beside(count);
        let (rest, group) = (self.elements - from, self.group());
        if bytes(rest) <= room {
            return rest;
        }
        // Each tensor may lose some bytes to alignment.
        let of_group: usize = self.kinds.iter().map(|kind| kind.bytes(group)).sum::<usize>() + self.beside(group);
        room.saturating_sub(self.kinds.len() * PART_ALIGN) / of_group * group
    }
}

/// Places states in blocks. A block and the shards of its pieces take at most `most` bytes of memory. Every piece
/// starts at a multiple of [`STATE_BLOCK`] elements, and of the elements in a page of a shard in a file.
pub(super) fn blocks<'a>(states: impl IntoIterator<Item = State<'a>>, most: usize) -> Vec<Block> {
    let most = most.max(LEAST_BLOCK) / ALIGN * ALIGN;
    let mut blocks = vec![];
    let (mut start, mut pieces, mut used, mut beside) = (0, vec![], 0, 0);
    let mut finish = |pieces: &mut Vec<Piece>, used: &mut usize, beside: &mut usize| {
        let end = start + used.next_multiple_of(ALIGN) as u64;
        blocks.push(Block { bytes: start..end, beside: *beside, pieces: std::mem::take(pieces) });
        (start, *used, *beside) = (end, 0, 0);
    };
    for (index, state) in states.into_iter().enumerate() {
        let mut from = 0;
        while from < state.elements && !state.kinds.is_empty() {
            let count = state.fitting(from, most - used - beside);
            if count == 0 {
                finish(&mut pieces, &mut used, &mut beside);
                continue;
            }
            let place = |kind: &PartKind| {
                let part = used..used + kind.bytes(count);
                used = part.end.next_multiple_of(PART_ALIGN);
                part
            };
            let parts = state.kinds.iter().map(place).collect();
            beside += state.beside(count);
            pieces.push(Piece { state: index, elements: from..from + count, parts });
            from += count;
        }
    }
    if !pieces.is_empty() {
        finish(&mut pieces, &mut used, &mut beside);
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: PartKind = PartKind { dtype: DType::F32, per: 1 };
    const CODES: PartKind = PartKind { dtype: DType::U8, per: 1 };
    const SCALES: PartKind = PartKind { dtype: DType::F32, per: STATE_BLOCK };

    /// Checks that every element has one place, and that no two places overlap. Returns the number of blocks.
    fn checked(states: &[(usize, &[PartKind])], most: usize, shard: Option<DType>) -> usize {
        let state = |&(elements, kinds)| State { elements, kinds, shard };
        let blocks = blocks(states.iter().map(state), most);
        let mut next = vec![0; states.len()];
        let mut end = 0;
        for block in &blocks {
            assert!(block.bytes.start == end && block.bytes.end % ALIGN as u64 == 0, "{block:?}");
            end = block.bytes.end;
            let bytes = (block.bytes.end - block.bytes.start) as usize;
            assert!(bytes > 0 && bytes + block.beside <= most.max(LEAST_BLOCK));
            let (mut free, mut beside) = (0, 0);
            for Piece { state, elements, parts } in &block.pieces {
                assert!(elements.start == next[*state] && elements.start % STATE_BLOCK == 0 && !elements.is_empty());
                next[*state] = elements.end;
                if let Some(shard) = shard {
                    assert_eq!(elements.start * shard.size() % ALIGN, 0);
                    beside += (elements.len() * shard.size()).next_multiple_of(ALIGN);
                }
                assert_eq!(parts.len(), states[*state].1.len());
                for (part, kind) in parts.iter().zip(states[*state].1) {
                    assert!(part.start >= free && part.start % PART_ALIGN == 0 && part.end <= bytes);
                    assert_eq!(part.len(), elements.len().div_ceil(kind.per) * kind.dtype.size());
                    free = part.end;
                }
            }
            assert_eq!(block.beside, beside);
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
        assert_eq!(checked(&[], 1 << 20, None), 0);
        assert_eq!(checked(&[(0, adam), (5, &[])], 1 << 20, None), 0);
        assert_eq!(checked(&[(1, adam), (3, adam), (0, adam), (257, adam), (1, eight_bits)], 1 << 20, None), 1);
        for shard in [None, Some(DType::F32), Some(DType::BF16), Some(DType::F64)] {
            for elements in [1, 255, 256, 257, 4095, 4096, 100_003] {
                for most in [0, LEAST_BLOCK, 40_000, 1 << 16] {
                    let states = [(7, adam), (elements, adam), (elements, eight_bits), (3, &[F32]), (elements, &[])];
                    checked(&states, most, shard);
                }
            }
        }
        // Blocks are nearly full.
        assert_eq!(checked(&[(1 << 20, adam)], 1 << 20, None), 9);
        assert_eq!(checked(&[(1 << 20, adam)], 1 << 20, Some(DType::F32)), 13);
    }
}
