//! What memory there is, by address: device memory and pinned memory of the host. A freed allocation is kept for a
//! while, so that who uses it later is told whose it was.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    clock::Clock,
    operation::Access,
    race::{History, Use},
    status::Fault,
};

/// So much freed memory is kept from being given out again, in bytes and in allocations.
const QUARANTINE: (usize, usize) = (64 << 20, 4096);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc`, on a device.
    Device(usize),
    /// Of `cuMemAllocAsync`, from a place in a device's pool.
    Pool { device: usize, place: u64 },
    /// Of the host, page-locked.
    Pinned,
    /// Of the host, and page-locked by `cuMemHostRegister`: not ours to free.
    Registered,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    /// Who made it: `cuMemAllocAsync` on stream 1.
    made: String,
    /// Who freed it.
    freed: Option<String>,
    history: History,
}

impl Allocation {
    pub(crate) fn describe(&self) -> String {
        let kind = match self.kind {
            Kind::Device(_) | Kind::Pool { .. } => "device",
            Kind::Pinned | Kind::Registered => "pinned host",
        };
        format!("{} bytes of {kind} memory at {:#x}, allocated by {}", self.len, self.base, self.made)
    }

    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered)
    }

    /// Operations that used it last.
    pub(crate) fn uses(&self) -> impl Iterator<Item = &Use> {
        self.history.uses()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Allocations {
    by_base: BTreeMap<u64, Allocation>,
    /// Freed memory whose streams are done with it, with the lengths.
    quarantine: VecDeque<(u64, usize)>,
    quarantined: usize,
}

impl Allocations {
    pub(crate) fn insert(&mut self, base: u64, len: usize, kind: Kind, made: String) {
        self.by_base.insert(base, Allocation { base, len, kind, made, freed: None, history: History::default() });
    }

    /// The allocation that `at` is in or at the end of, freed or not.
    fn around(&self, at: u64) -> Option<&Allocation> {
        let (_, found) = self.by_base.range(..=at).next_back()?;
        (at <= found.base + found.len as u64).then_some(found)
    }

    pub(crate) fn find(&self, at: u64) -> Option<&Allocation> {
        self.around(at).filter(|found| found.freed.is_none())
    }

    /// Notes a use, which its stream begins when `clock` is behind it. `verb` and `name` are for the message: what the
    /// operation does to the memory, and how a stream is called.
    pub(crate) fn touch(
        &mut self,
        at: u64,
        one: Use,
        clock: &Clock,
        verb: &str,
        name: &dyn Fn(usize) -> String,
    ) -> Result<(), Fault> {
        let (what, stream) = (&one.what, name(one.stream));
        let Some(base) = self.around(at).map(|found| found.base) else {
            return Err(Fault(format!(
                "`{what}` on {stream} {verb} {at:#x}, where no memory is: it was never allocated, or freed long ago"
            )));
        };
        let found = self.by_base.get_mut(&base).expect("it was found by this key");
        if let Some(freed) = &found.freed {
            let memory = found.describe();
            return Err(Fault(format!("use after free: `{what}` on {stream} {verb} {memory}, and freed by {freed}")));
        }
        if let Some(before) = found.history.conflict(clock, one.access) {
            let (did, earlier) = (past(before.access), name(before.stream));
            return Err(Fault(format!(
                "race on {}: `{what}` on {stream} {verb} it, `{}` on {earlier} {did} it before, and {stream} does \
                 not wait for that. Missing: an event recorded on {earlier} after `{}`, and a wait of {stream} for \
                 the event",
                found.describe(),
                before.what,
                before.what,
            )));
        }
        found.history.record(one);
        Ok(())
    }

    /// Whether the host, which knows that all is done that `clock` covers, may free memory or take it back.
    pub(crate) fn idle(&self, base: u64, clock: &Clock, by: &str, name: &dyn Fn(usize) -> String) -> Result<(), Fault> {
        let Some(found) = self.by_base.get(&base) else {
            return Err(Fault(format!("`{by}` frees {base:#x}, where no memory begins")));
        };
        let memory = found.describe();
        if let Some(freed) = &found.freed {
            return Err(Fault(format!("use after free: `{by}` frees {memory}, and freed by {freed}")));
        }
        match found.history.conflict(clock, Access::Write) {
            None => Ok(()),
            Some(before) => Err(Fault(format!(
                "freed too early: `{by}` frees {memory}, and the host has not waited for `{}` on {}, which uses it",
                before.what,
                name(before.stream),
            ))),
        }
    }

    /// From now on a use is one after the free. The bytes stay until [`retire`](Self::retire).
    pub(crate) fn mark_freed(&mut self, base: u64, by: String) {
        if let Some(found) = self.by_base.get_mut(&base) {
            found.freed = Some(by);
        }
    }

    /// Forgets memory that is not ours to keep.
    pub(crate) fn forget(&mut self, base: u64) {
        self.by_base.remove(&base);
    }

    /// Bytes of freed memory that are kept.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.quarantined
    }

    /// The streams are done with freed memory. Hands out what has been kept long enough, with the lengths: it is the
    /// caller's to release.
    pub(crate) fn retire(&mut self, base: u64, len: usize) -> Vec<(u64, usize)> {
        self.quarantine.push_back((base, len));
        self.quarantined += len;
        let mut old = Vec::new();
        while self.quarantined > QUARANTINE.0 || self.quarantine.len() > QUARANTINE.1 {
            let Some((base, len)) = self.quarantine.pop_front() else { break };
            self.quarantined -= len;
            self.by_base.remove(&base);
            old.push((base, len));
        }
        old
    }
}

fn past(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "wrote",
    }
}
