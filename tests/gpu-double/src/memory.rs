//! Memory of the device: allocations and frees in the order of streams, poison, and what of it is where.

use crate::{
    allocation::Kind,
    bytes, context,
    machine::{Core, Machine, machine},
    operation::{Access, Progress, Touch},
    pool::Piece,
    report,
    status::{Fault, INVALID_CONTEXT, OUT_OF_MEMORY, Refusal},
};

/// The allocation that an address is in, or at the end of: where it begins, and its length in bytes.
pub(crate) fn base_of(at: u64) -> Option<(u64, usize)> {
    machine().lock().allocations.find(at).map(|found| (found.base, found.len))
}

impl Machine {
    /// Device memory with poison in it: from a stream's pool and for that stream, or for everyone. `by` is the function
    /// that was called.
    pub(crate) fn allocate(&self, len: usize, stream: Option<usize>, by: &str) -> Result<u64, Refusal> {
        let mut core = self.lock();
        let stream = stream.map(|stream| core.resolve(stream)).transpose()?;
        let device = match stream {
            Some(stream) => core.streams.get(stream).context,
            None => context::current().ok_or(Refusal::Status(INVALID_CONTEXT))?,
        };
        let out_of_memory = || Refusal::Status(OUT_OF_MEMORY);
        let account = &mut core.accounts[device];
        let piece = match stream {
            Some(_) => Some(account.take(len as u64).ok_or_else(out_of_memory)?),
            None if account.take_directly(len as u64) => None,
            None => return Err(out_of_memory()),
        };
        let base = bytes::allocate(len).ok_or_else(out_of_memory)?;
        report::device_bytes(len as i64);
        let empty = if len == 0 { "empty " } else { "" };
        report::count(&format!("{empty}allocation: {by}"));
        let (Some(stream), Some(Piece { place, grown })) = (stream, piece) else {
            // SAFETY: it is new.
            unsafe { bytes::poison(base, len) };
            core.allocations.insert(base, len, Kind::Device(device), format!("`{by}`"));
            return Ok(base);
        };
        if grown {
            report::count(&format!("growth of the pool: {by}"));
        }
        let after = core.prepare(stream, by)?;
        let made = format!("`{by}` on {}", core.name(stream));
        core.allocations.insert(base, len, Kind::Pool { device, place }, made);
        core.touch(stream, by, Touch { at: base, access: Access::Write }, "allocates")?;
        core.push(stream, by, after, poisoning(base, len), None);
        Ok(base)
    }

    /// Frees device memory, when a stream comes to it or when all streams have ended.
    pub(crate) fn free(&self, at: u64, stream: Option<usize>, by: &str) -> Result<(), Refusal> {
        if at == 0 {
            return Ok(());
        }
        if stream.is_none() {
            self.synchronize_context(by)?;
        }
        let mut core = self.lock();
        let stream = stream.map(|stream| core.resolve(stream)).transpose()?;
        let Some(stream) = stream else {
            core.may_free(at, by)?;
            let len = core.freed(at, format!("`{by}`"), by)?;
            // SAFETY: all streams have ended, and none may use it from now on.
            unsafe { bytes::poison(at, len) };
            return Ok(core.retire(at, len)?);
        };
        let after = core.prepare(stream, by)?;
        core.touch(stream, by, Touch { at, access: Access::Write }, "frees")?;
        let name = core.name(stream);
        let len = core.freed(at, format!("`{by}` on {name}"), by)?;
        core.push(stream, by, after, poisoning(at, len), Some((at, len)));
        Ok(())
    }
}

impl Core {
    /// Whether the host has waited for all uses of memory that begins at `at`.
    pub(crate) fn may_free(&self, at: u64, by: &str) -> Result<(), Fault> {
        self.allocations.idle(at, &self.known(), by, &|stream| self.name(stream))
    }

    /// Accounts for a free. The length is what comes back.
    pub(crate) fn freed(&mut self, at: u64, whom: String, by: &str) -> Result<usize, Fault> {
        let found = self.allocations.find(at).filter(|found| found.base == at);
        let Some((len, kind)) = found.map(|found| (found.len, found.kind)) else {
            return Err(Fault(format!("`{by}` frees {at:#x}, where no memory begins")));
        };
        match kind {
            Kind::Device(device) => {
                self.accounts[device].give_directly(len as u64);
                report::device_bytes(-(len as i64));
            }
            Kind::Pool { device, place } => {
                self.accounts[device].give(place, len as u64);
                report::device_bytes(-(len as i64));
            }
            Kind::Pinned => report::pinned_bytes(-(len as i64)),
            Kind::Registered => {
                return Err(Fault(format!("`{by}` frees {at:#x}, which this library did not allocate")));
            }
        }
        self.allocations.mark_freed(at, whom);
        report::count(&format!("free: {by}"));
        Ok(len)
    }
}

fn poisoning(at: u64, len: usize) -> Box<dyn FnMut() -> Progress + Send> {
    Box::new(move || {
        // SAFETY: the memory is not released before this has run, and the order of streams gives it to this operation.
        unsafe { bytes::poison(at, len) };
        Progress::Done
    })
}
