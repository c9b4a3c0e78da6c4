//! Pinned memory of the host: copies read and write it when their turn comes, not when they are queued.

use crate::{
    allocation::{Allocation, Kind},
    bytes,
    machine::{Core, Machine},
    queue::Point,
    report,
    status::{ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY, Refusal},
};

impl Core {
    /// The pinned memory that an address is in.
    pub(crate) fn pinned(&self, at: u64) -> Option<&Allocation> {
        self.allocations.find(at).filter(|found| found.is_pinned() && at < found.base + found.len as u64)
    }

    /// Whether every operation has run that uses memory.
    pub(crate) fn at_rest(&self, memory: &Allocation) -> bool {
        memory.uses().all(|one| self.streams.reached(Point { stream: one.stream, number: one.number }))
    }
}

impl Machine {
    pub(crate) fn allocate_pinned(&self, len: usize, by: &str) -> Result<u64, Refusal> {
        let base = bytes::allocate(len).ok_or(Refusal::Status(OUT_OF_MEMORY))?;
        // SAFETY: it is new.
        unsafe { bytes::poison(base, len) };
        report::pinned_bytes(len as i64);
        report::count(&format!("allocation: {by}"));
        self.lock().allocations.insert(base, len, Kind::Pinned, format!("`{by}`"));
        Ok(base)
    }

    /// The host must have waited for all uses. The driver may wait by itself, but does not promise it.
    pub(crate) fn free_pinned(&self, at: u64, by: &str) -> Result<(), Refusal> {
        if at == 0 {
            return Ok(());
        }
        let mut core = self.lock();
        core.may_free(at, by)?;
        let len = core.freed(at, format!("`{by}`"), by)?;
        // SAFETY: nobody uses it, as was just looked at.
        unsafe { bytes::poison(at, len) };
        Ok(core.retire(at, len)?)
    }

    pub(crate) fn register(&self, at: u64, len: usize, by: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        if core.pinned(at).is_some() {
            return Err(Refusal::Status(ALREADY_REGISTERED));
        }
        core.allocations.insert(at, len, Kind::Registered, format!("`{by}`"));
        report::pinned_bytes(len as i64);
        report::count(&format!("allocation: {by}"));
        Ok(())
    }

    pub(crate) fn unregister(&self, at: u64, by: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        let found = core.allocations.find(at).filter(|found| found.base == at && found.kind == Kind::Registered);
        let len = found.map(|found| found.len).ok_or(Refusal::Status(NOT_REGISTERED))?;
        core.may_free(at, by)?;
        core.allocations.forget(at);
        report::pinned_bytes(-(len as i64));
        report::count(&format!("free: {by}"));
        Ok(())
    }
}
