//! The places in a memory pool: the smallest free block that is large enough, and a new segment of the device's memory
//! where there is none.

use std::collections::BTreeMap;

/// What places are multiples of, in bytes.
const GRAIN: u64 = 512;

/// Segments of a device's memory, and what of them is free. Freed blocks become one with those beside them. It does not
/// ask which stream a block was freed on: a program has one that computes.
#[derive(Debug)]
pub(crate) struct Arena {
    /// What segments are multiples of, in bytes.
    segment: u64,
    /// Lengths by where they begin. Between two is a gap, so that no block reaches from one into the next.
    segments: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    next: u64,
}

fn size(len: u64) -> u64 {
    len.max(1).next_multiple_of(GRAIN)
}

impl Arena {
    /// One without memory.
    pub(crate) fn new(segment: u64) -> Self {
        Arena { segment, segments: BTreeMap::new(), free: BTreeMap::new(), next: 0 }
    }

    /// Bytes of the device's memory that it has.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.values().sum()
    }

    /// A place for so many bytes, and whether the device had to give more memory for it.
    pub(crate) fn take(&mut self, len: u64) -> (u64, bool) {
        let size = size(len);
        let best = self.free.iter().filter(|(_, free)| **free >= size).min_by_key(|(at, free)| (**free, **at));
        let (at, free, grown) = match best {
            Some((&at, &free)) => (at, free, false),
            None => {
                let (at, len) = (self.next, size.next_multiple_of(self.segment));
                self.next += len + self.segment;
                self.segments.insert(at, len);
                (at, len, true)
            }
        };
        self.free.remove(&at);
        if free > size {
            self.free.insert(at + size, free - size);
        }
        (at, grown)
    }

    /// Takes the place of so many bytes back.
    pub(crate) fn give(&mut self, mut at: u64, len: u64) {
        let mut len = size(len);
        if let Some(behind) = self.free.remove(&(at + len)) {
            len += behind;
        }
        if let Some((&before, &free)) = self.free.range(..at).next_back()
            && before + free == at
        {
            (at, len) = (before, free + len);
        }
        self.free.insert(at, len);
    }

    /// Gives segments back that nobody uses, as long as more than `keep` bytes stay.
    pub(crate) fn trim(&mut self, keep: u64) {
        let mut reserved = self.reserved();
        let free = &mut self.free;
        self.segments.retain(|at, len| {
            let goes = reserved > keep && free.get(at) == Some(len);
            if goes {
                free.remove(at);
                reserved -= *len;
            }
            !goes
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 2 << 20;

    #[test]
    fn what_is_given_is_taken_again_and_the_smallest_that_fits_goes_first() {
        let mut arena = Arena::new(SEGMENT);
        let places: Vec<_> = [3000, 1000, 2000, 500].map(|len| arena.take(len)).into();
        assert_eq!(places, [(0, true), (3072, false), (4096, false), (6144, false)]);
        arena.give(0, 3000);
        arena.give(4096, 2000);
        assert_eq!(arena.take(1800), (4096, false));
        assert_eq!(arena.take(3000), (0, false));
        assert_eq!(arena.reserved(), SEGMENT);
    }

    #[test]
    fn free_neighbours_are_one() {
        let mut arena = Arena::new(SEGMENT);
        let quarter = SEGMENT / 4;
        for (at, grown) in [(0, true), (1, false), (2, false), (3, false)] {
            assert_eq!(arena.take(quarter), (at * quarter, grown));
        }
        [0, 2, 1, 3].into_iter().for_each(|at| arena.give(at * quarter, quarter));
        assert_eq!(arena.take(SEGMENT), (0, false));
    }

    #[test]
    fn a_block_does_not_reach_from_one_segment_into_the_next() {
        let mut arena = Arena::new(SEGMENT);
        let (one, two) = (arena.take(SEGMENT).0, arena.take(SEGMENT).0);
        arena.give(one, SEGMENT);
        arena.give(two, SEGMENT);
        assert!(arena.take(2 * SEGMENT).1);
        assert_eq!(arena.reserved(), 4 * SEGMENT);
    }

    #[test]
    fn segments_go_back_where_nobody_uses_them() {
        let mut arena = Arena::new(SEGMENT);
        let (one, two) = (arena.take(10).0, arena.take(SEGMENT).0);
        arena.give(two, SEGMENT);
        arena.trim(2 * SEGMENT);
        assert_eq!(arena.reserved(), 2 * SEGMENT);
        arena.trim(0);
        assert_eq!(arena.reserved(), SEGMENT, "the first is in use");
        arena.give(one, 10);
        arena.trim(0);
        assert_eq!(arena.reserved(), 0);
        assert!(arena.take(10).1);
    }
}
