//! Who used an allocation, and what a new use of it does not wait for.

use std::sync::Arc;

use crate::{clock::Clock, operation::Access};

/// An operation that used an allocation.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub(crate) stream: usize,
    /// Which operation of its stream.
    pub(crate) number: u64,
    /// Its name.
    pub(crate) what: Arc<str>,
    pub(crate) access: Access,
}

/// What later uses of an allocation have to come after. Reads are kept since the last write, the last one of each stream:
/// a stream's earlier operations come before its later ones.
#[derive(Debug, Default)]
pub(crate) struct History {
    write: Option<Use>,
    reads: Vec<Use>,
}

impl History {
    /// A use that does not come before `clock`, and must: a read comes after the last write, a write after the reads too.
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
