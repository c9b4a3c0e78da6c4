//! Device memory and pinned host memory: allocations by address, frees in the order of streams, copies and fills.
//!
//! A freed allocation is kept for a while, so that a later use gets an error with the allocation's origin. New and freed
//! memory is filled with a byte pattern that reads as NaN.
//!
//! A copy from pageable memory reads it before the call returns, because the driver stages it. A copy from pinned memory
//! reads when its turn comes. A copy to pageable memory makes the host wait. A copy to pinned memory fills it with NaN
//! until its turn comes, which reveals a host that reads too early.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    bytes,
    machine::{Core, Machine, current, machine},
    pool::Piece,
    races::{Clock, History, Use},
    report,
    status::{ALREADY_REGISTERED, Fault, INVALID_CONTEXT, NOT_REGISTERED, OUT_OF_MEMORY, Refusal},
    streams::{Access, Operation, Point, Progress, Touch},
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
            None => current().ok_or(Refusal::Status(INVALID_CONTEXT))?,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    HostToHost,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "host to device",
            Self::DeviceToHost => "device to host",
            Self::DeviceToDevice => "device to device",
            Self::HostToHost => "host to host",
        }
    }

    fn reads_host(self) -> bool {
        matches!(self, Self::HostToDevice | Self::HostToHost)
    }

    fn writes_host(self) -> bool {
        matches!(self, Self::DeviceToHost | Self::HostToHost)
    }
}

/// What to copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: usize,
    pub(crate) direction: Direction,
    /// The call returns when it is done.
    pub(crate) waits: bool,
}

impl Core {
    /// Memory that is known is long enough.
    fn holds(&self, at: u64, len: usize, by: &str) -> Result<(), Fault> {
        match self.allocations.find(at) {
            Some(found) if at + len as u64 > found.base + found.len as u64 => {
                Err(Fault(format!("`{by}` of {len} bytes at {at:#x} goes beyond the end of {}", found.describe())))
            }
            _ => Ok(()),
        }
    }

    /// Where an address is, for calls that do not say it.
    pub(crate) fn direction(&self, to: u64, from: u64) -> Direction {
        let on_host = |at: u64| self.allocations.find(at).is_none_or(|found| found.is_pinned());
        match (on_host(from), on_host(to)) {
            (true, false) => Direction::HostToDevice,
            (false, true) => Direction::DeviceToHost,
            (false, false) => Direction::DeviceToDevice,
            (true, true) => Direction::HostToHost,
        }
    }
}

impl Machine {
    /// Copies, by a stream. `by` is the function that was called.
    ///
    /// # Safety
    /// Host memory that is named is memory: to read it from, and the caller's to write it to.
    pub(crate) unsafe fn copy(&self, copy: Copy, stream: usize, by: &str) -> Result<(), Refusal> {
        let Copy { to, from, len, direction, waits } = copy;
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        if len == 0 {
            return Ok(());
        }
        report::count_many(&format!("copy bytes: {}", direction.name()), len as u64);
        let mut touches = Vec::new();
        let staged = direction.reads_host() && core.pinned(from).is_none();
        if !staged {
            core.holds(from, len, by)?;
            touches.push(Touch { at: from, access: Access::Read });
        }
        let blocks = direction.writes_host() && core.pinned(to).is_none();
        if !blocks {
            core.holds(to, len, by)?;
            touches.push(Touch { at: to, access: Access::Write });
        }
        if let Some(memory) = core.pinned(to).filter(|_| direction.writes_host())
            && core.at_rest(memory)
        {
            // SAFETY: the bytes are in this memory, and no operation uses it now.
            unsafe { bytes::poison(to, len) };
        }
        // SAFETY: the caller's promise.
        let bytes = staged.then(|| unsafe { bytes::read(from, len) });
        let run = Box::new(move || {
            let from = bytes.as_ref().map_or(from, |bytes| bytes.as_ptr() as u64);
            // SAFETY: both lie in memory that was looked up; the order of streams keeps it until this has run. Pageable
            // memory that is written is the caller's, who waits.
            unsafe { bytes::copy(to, from, len) };
            Progress::Done
        });
        let point = core.enqueue(stream, Operation { name: by.into(), touches, run })?;
        let clock = core.streams.get(stream).clock.clone();
        drop(core);
        if !blocks && !waits {
            return Ok(());
        }
        let pageable = if waits { "" } else { " to pageable memory" };
        let asked = format!("{by}{pageable}");
        report::count(&format!("host synchronisation: {asked}"));
        self.wait_for(&[point], &clock, &asked)
    }

    /// Fills device memory with `count` times `pattern`, by a stream.
    pub(crate) fn fill(&self, at: u64, pattern: Vec<u8>, count: usize, stream: usize, by: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        if count == 0 {
            return Ok(());
        }
        core.holds(at, count * pattern.len(), by)?;
        let run = Box::new(move || {
            // SAFETY: it lies in memory that was looked up; the order of streams keeps it until this has run.
            unsafe { bytes::fill(at, &pattern, count) };
            Progress::Done
        });
        let touches = vec![Touch { at, access: Access::Write }];
        core.enqueue(stream, Operation { name: by.into(), touches, run })?;
        Ok(())
    }
}
