//! Races: the uses of an allocation, and the uses that a new use does not wait for. A vector clock is the set of
//! operations that come before a point in time.

use std::sync::Arc;

use crate::streams::Access;

/// A vector clock: for each stream, by its index, the number of its operations that come before a point in time.
/// Missing streams have 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// Returns whether operation `number` of stream `stream` comes before.
    pub(crate) fn covers(&self, stream: usize, number: u64) -> bool {
        self.0.get(stream).copied().unwrap_or(0) >= number
    }

    /// Adds the operations that come before `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, other) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*other);
        }
    }

    /// Adds operation `number` of `stream`, and all earlier ones on that stream.
    pub(crate) fn advance(&mut self, stream: usize, number: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(number);
    }
}

/// An operation that used an allocation.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub(crate) stream: usize,
    /// Number of the operation on its stream.
    pub(crate) number: u64,
    /// Name of the operation.
    pub(crate) what: Arc<str>,
    pub(crate) access: Access,
}

/// The uses that later uses of an allocation must wait for. Since the last write, the last read of each stream is kept,
/// because a stream's operations are in order.
#[derive(Debug, Default)]
pub(crate) struct History {
    write: Option<Use>,
    reads: Vec<Use>,
}

impl History {
    /// Returns a use that must come before, but is not in `clock`. A read must come after the last write, and a write
    /// also after the reads.
    pub(crate) fn conflict(&self, clock: &Clock, access: Access) -> Option<&Use> {
        let reads = if access == Access::Write { self.reads.as_slice() } else { &[] };
        reads.iter().chain(&self.write).find(|one| !clock.covers(one.stream, one.number))
    }

    pub(crate) fn record(&mut self, one: Use) {
        match one.access {
            Access::Write => {
                self.reads.clear();
                self.write = Some(one);
            }
            Access::Read => {
                self.reads.retain(|read| read.stream != one.stream);
                self.reads.push(one);
            }
        }
    }

    pub(crate) fn uses(&self) -> impl Iterator<Item = &Use> {
        self.reads.iter().chain(&self.write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_covers_what_it_joined() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.advance(0, 3);
        b.advance(2, 1);
        assert!(a.covers(0, 3) && !a.covers(0, 4) && !a.covers(2, 1));
        assert!(a.covers(7, 0), "nothing comes before everything");
        b.join(&a);
        assert!(b.covers(0, 3) && b.covers(2, 1) && !b.covers(2, 2));
        assert!(!a.covers(2, 1), "a join is one way");
    }

    #[test]
    fn a_clock_never_goes_back() {
        let mut clock = Clock::default();
        clock.advance(1, 5);
        clock.advance(1, 2);
        clock.join(&Clock::default());
        assert!(clock.covers(1, 5));
    }

    fn one(stream: usize, number: u64, access: Access) -> Use {
        Use { stream, number, what: "kernel".into(), access }
    }

    fn clock(of: &[(usize, u64)]) -> Clock {
        let mut clock = Clock::default();
        of.iter().for_each(|&(stream, number)| clock.advance(stream, number));
        clock
    }

    #[test]
    fn reads_come_after_the_last_write() {
        let mut history = History::default();
        history.record(one(0, 1, Access::Write));
        assert!(history.conflict(&clock(&[(0, 1)]), Access::Read).is_none());
        assert_eq!(history.conflict(&clock(&[(1, 9)]), Access::Read).unwrap().stream, 0);
    }

    #[test]
    fn writes_come_after_all_reads_since_the_last_write() {
        let mut history = History::default();
        history.record(one(0, 1, Access::Write));
        history.record(one(1, 1, Access::Read));
        history.record(one(2, 4, Access::Read));
        assert_eq!(history.conflict(&clock(&[(0, 1), (1, 1)]), Access::Write).unwrap().stream, 2);
        assert!(history.conflict(&clock(&[(0, 1), (1, 1)]), Access::Read).is_none(), "reads beside reads");
        assert!(history.conflict(&clock(&[(0, 1), (1, 1), (2, 4)]), Access::Write).is_none());
        history.record(one(0, 2, Access::Write));
        assert_eq!(history.uses().count(), 1, "what is before a write need not be kept");
    }
}
