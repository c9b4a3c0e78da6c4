//! How much of a device's memory is in use, and what its default pool holds.

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
    pub(crate) used: Level,
    pub(crate) reserved: Level,
    /// What the pool keeps at synchronisations even if nobody uses it.
    pub(crate) threshold: u64,
}

impl Account {
    pub(crate) fn new(total: u64) -> Self {
        Self { total, direct: 0, used: Level::default(), reserved: Level::default(), threshold: 0 }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn free(&self) -> u64 {
        self.total.saturating_sub(self.direct + self.reserved.current)
    }

    /// Takes memory, or is out of it.
    pub(crate) fn take(&mut self, from_pool: bool, len: u64) -> bool {
        if self.direct + self.used.current + len > self.total {
            return false;
        }
        if from_pool {
            self.used.set(self.used.current + len);
            self.reserved.set(self.reserved.current.max(self.used.current));
        } else {
            self.direct += len;
        }
        // A pool gives up what nobody uses before memory runs out.
        self.reserved.current = self.reserved.current.min(self.total - self.direct);
        true
    }

    pub(crate) fn give(&mut self, from_pool: bool, len: u64) {
        if from_pool {
            self.used.current -= len;
        } else {
            self.direct -= len;
        }
    }

    /// The pool gives back what is beyond `keep`, as far as it is not in use.
    pub(crate) fn trim(&mut self, keep: u64) {
        self.reserved.current = self.used.current.max(self.reserved.current.min(keep));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_keeps_its_threshold() {
        let mut account = Account::new(1000);
        assert!(account.take(true, 600) && account.take(false, 100));
        account.give(true, 600);
        assert_eq!((account.used, account.reserved.current), (Level { current: 0, high: 600 }, 600));
        assert_eq!(account.free(), 300);
        account.trim(200);
        assert_eq!((account.reserved, account.free()), (Level { current: 200, high: 600 }, 700));
    }

    #[test]
    fn memory_runs_out() {
        let mut account = Account::new(1000);
        assert!(account.take(true, 800));
        account.give(true, 800);
        assert!(account.take(false, 900), "the pool gives up what nobody uses");
        assert_eq!(account.reserved.current, 100);
        assert!(!account.take(true, 101));
        assert!(account.take(true, 100));
        assert_eq!(account.free(), 0);
    }
}
