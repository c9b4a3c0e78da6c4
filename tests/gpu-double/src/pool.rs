//! How much of a device's memory is in use, and what its default pool holds.

use crate::arena::Arena;

/// As `CUmemPool_attribute` counts the bytes of a pool.
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

/// A device's memory. Allocations and frees count when they are asked for, so that the numbers are the same with every
/// schedule.
#[derive(Debug)]
pub(crate) struct Account {
    total: u64,
    /// Bytes that `cuMemAlloc` gave.
    direct: u64,
    arena: Arena,
    pub(crate) used: Level,
    pub(crate) reserved: Level,
    /// What the pool keeps at synchronisations even if nobody uses it.
    pub(crate) threshold: u64,
}

/// A piece of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) place: u64,
    /// Whether the pool had to grow for it.
    pub(crate) grown: bool,
}

impl Account {
    /// So many bytes, which a pool takes in segments.
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

    /// What the pool has, which is less than its segments where memory runs out: a driver moves pages from one segment
    /// to another then.
    fn reserve(&mut self) {
        self.reserved.set(self.arena.reserved().min(self.total - self.direct));
    }

    /// Takes memory from the pool, or is out of it.
    pub(crate) fn take(&mut self, len: u64) -> Option<Piece> {
        if !self.has(len) {
            return None;
        }
        let (place, grown) = self.arena.take(len);
        self.used.set(self.used.current + len);
        self.reserve();
        Some(Piece { place, grown })
    }

    /// Memory goes back to the pool.
    pub(crate) fn give(&mut self, place: u64, len: u64) {
        self.arena.give(place, len);
        self.used.current -= len;
    }

    /// Takes memory that is not the pool's. Tells whether there was any; a pool gives up what nobody uses before memory
    /// runs out.
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

    /// The pool gives back what is beyond `keep`, as far as it is not in use.
    pub(crate) fn trim(&mut self, keep: u64) {
        self.arena.trim(keep);
        self.reserve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_pool_grows_only_where_nothing_is_free() {
        let mut account = Account::new(100 * MIB, 2 * MIB);
        let piece = account.take(3 * MIB).unwrap();
        account.give(piece.place, 3 * MIB);
        assert_eq!((piece.grown, account.take(2 * MIB).unwrap().grown), (true, false));
        account.trim(0);
        assert!(account.take(4 * MIB).unwrap().grown);
    }

    #[test]
    fn memory_runs_out() {
        let mut account = Account::new(100 * MIB, 2 * MIB);
        let piece = account.take(80 * MIB).unwrap();
        account.give(piece.place, 80 * MIB);
        assert!(account.take_directly(90 * MIB), "the pool gives up what nobody uses");
        assert_eq!(account.reserved.current, 10 * MIB);
        assert_eq!(account.take(11 * MIB), None);
        assert!(account.take(10 * MIB).is_some());
        assert_eq!(account.free(), 0);
    }
}
