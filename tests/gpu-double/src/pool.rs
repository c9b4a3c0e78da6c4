//! The default memory pool of a device, and the accounts of the device's memory.

use std::collections::BTreeMap;

/// Granularity of addresses in a pool, in bytes.
const GRAIN: u64 = 512;

/// Segments of a device's memory, and their free blocks. A block is the smallest free one that is large enough, or the
/// start of a new segment. Adjacent free blocks are merged. The stream of a free does not matter, because a program has
/// one compute stream.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Granularity of segments, in bytes.
    segment: u64,
    /// Lengths by start. A gap between two segments keeps blocks from spanning both.
    segments: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    next: u64,
}

fn size(len: u64) -> u64 {
    len.max(1).next_multiple_of(GRAIN)
}

impl Arena {
    /// Returns an arena without memory.
    pub(crate) fn new(segment: u64) -> Self {
        Arena { segment, segments: BTreeMap::new(), free: BTreeMap::new(), next: 0 }
    }

    /// Returns the bytes of the device's memory in all segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.values().sum()
    }

    /// Returns the address of a block of `len` bytes, and whether a new segment was needed.
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

    /// Frees a block of `len` bytes.
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

    /// Releases unused segments while more than `keep` bytes remain.
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

/// Current and highest number of bytes, as in `CUmemPool_attribute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) current: u64,
    pub(crate) high: u64,
}

impl Level {
    fn set(&mut self, current: u64) {
        self.current = current;
        self.high = self.high.max(current);
    }
}

/// The account of a device's memory. Allocations and frees count when they are called, so that the numbers do not
/// depend on the schedule.
#[derive(Debug)]
pub(crate) struct Account {
    total: u64,
    /// Bytes allocated by `cuMemAlloc`.
    direct: u64,
    arena: Arena,
    pub(crate) used: Level,
    pub(crate) reserved: Level,
    /// Bytes that the pool keeps at synchronisations even if they are unused.
    pub(crate) threshold: u64,
}

/// A block of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) place: u64,
    /// Whether the pool had to grow.
    pub(crate) grown: bool,
}

impl Account {
    /// Returns an account of `total` bytes, which the pool takes in segments.
    pub(crate) fn new(total: u64, segment: u64) -> Self {
        let (used, reserved) = Default::default();
        Self { total, direct: 0, arena: Arena::new(segment), used, reserved, threshold: 0 }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn free(&self) -> u64 {
        self.total.saturating_sub(self.direct + self.reserved.current)
    }

    fn has(&self, len: u64) -> bool {
        self.direct + self.used.current + len <= self.total
    }

    /// Updates the pool's bytes, which are fewer than its segments' if memory is short: a driver then moves pages
    /// between segments.
    fn reserve(&mut self) {
        self.reserved.set(self.arena.reserved().min(self.total - self.direct));
    }

    /// Allocates from the pool, or returns `None` if memory is short.
    pub(crate) fn take(&mut self, len: u64) -> Option<Block> {
        if !self.has(len) {
            return None;
        }
        let (place, grown) = self.arena.take(len);
        self.used.set(self.used.current + len);
        self.reserve();
        Some(Block { place, grown })
    }

    /// Frees memory to the pool.
    pub(crate) fn give(&mut self, place: u64, len: u64) {
        self.arena.give(place, len);
        self.used.current -= len;
    }

    /// Allocates memory outside of the pool, and returns whether there was enough. A pool releases unused memory before
    /// memory runs out.
    pub(crate) fn take_directly(&mut self, len: u64) -> bool {
        let has = self.has(len);
        if has {
            self.direct += len;
            self.reserve();
        }
        has
    }

    pub(crate) fn give_directly(&mut self, len: u64) {
        self.direct -= len;
    }

    /// Releases the pool's unused memory beyond `keep` bytes.
    pub(crate) fn trim(&mut self, keep: u64) {
        self.arena.trim(keep);
        self.reserve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 2 << 20;

    #[test]
    fn takes_the_smallest_free_block_that_fits() {
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
    fn merges_adjacent_free_blocks() {
        let mut arena = Arena::new(SEGMENT);
        let quarter = SEGMENT / 4;
        for (at, grown) in [(0, true), (1, false), (2, false), (3, false)] {
            assert_eq!(arena.take(quarter), (at * quarter, grown));
        }
        [0, 2, 1, 3].into_iter().for_each(|at| arena.give(at * quarter, quarter));
        assert_eq!(arena.take(SEGMENT), (0, false));
    }

    #[test]
    fn blocks_do_not_span_segments() {
        let mut arena = Arena::new(SEGMENT);
        let (one, two) = (arena.take(SEGMENT).0, arena.take(SEGMENT).0);
        arena.give(one, SEGMENT);
        arena.give(two, SEGMENT);
        assert!(arena.take(2 * SEGMENT).1);
        assert_eq!(arena.reserved(), 4 * SEGMENT);
    }

    #[test]
    fn trim_releases_unused_segments() {
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

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_pool_keeps_its_threshold() {
        let mut account = Account::new(100 * MIB, 2 * MIB);
        let (one, two) = (account.take(40 * MIB).unwrap(), account.take(20 * MIB).unwrap());
        assert!(account.take_directly(10 * MIB));
        account.give(one.place, 40 * MIB);
        account.give(two.place, 20 * MIB);
        assert_eq!(account.used, Level { current: 0, high: 60 * MIB });
        assert_eq!((account.reserved.current, account.free()), (60 * MIB, 30 * MIB));
        account.trim(20 * MIB);
        assert_eq!((account.reserved, account.free()), (Level { current: 20 * MIB, high: 60 * MIB }, 70 * MIB));
    }

    #[test]
    fn a_pool_grows_only_without_a_free_block() {
        let mut account = Account::new(100 * MIB, 2 * MIB);
        let block = account.take(3 * MIB).unwrap();
        account.give(block.place, 3 * MIB);
        assert_eq!((block.grown, account.take(2 * MIB).unwrap().grown), (true, false));
        account.trim(0);
        assert!(account.take(4 * MIB).unwrap().grown);
    }

    #[test]
    fn memory_runs_out() {
        let mut account = Account::new(100 * MIB, 2 * MIB);
        let block = account.take(80 * MIB).unwrap();
        account.give(block.place, 80 * MIB);
        assert!(account.take_directly(90 * MIB), "the pool gives up what nobody uses");
        assert_eq!(account.reserved.current, 10 * MIB);
        assert_eq!(account.take(11 * MIB), None);
        assert!(account.take(10 * MIB).is_some());
        assert_eq!(account.free(), 0);
    }
}
