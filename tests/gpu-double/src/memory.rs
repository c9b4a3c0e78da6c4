//! Device memory and pinned host memory: allocations by address, frees in the order of streams, copies and fills.
//!
//! A freed allocation is kept for a while, so that a later use gets an error with the allocation's origin. New and
//! freed memory is filled with a byte pattern that reads as NaN.
//!
//! The driver stages a copy from pageable memory, so it reads the memory before the call returns. A copy of more than
//! 64 KiB counts as a wait. A copy from pinned memory reads when its turn comes, and the host may not write to the memory
//! before. A copy to pageable memory makes the host wait. A copy to pinned memory fills it with NaN until its turn comes,
//! which reveals a host that reads too early.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    bytes,
    machine::{Core, Machine, current, machine},
    pool::Block,
    races::{Clock, History, Use},
    report,
    status::{ALREADY_REGISTERED, Fault, INVALID_CONTEXT, NOT_REGISTERED, OUT_OF_MEMORY, Refusal},
    streams::{Access, Operation, Point, Progress, Touch},
};

/// Most freed memory that is kept from being reused, in bytes and in allocations.
const QUARANTINE: (usize, usize) = (64 << 20, 4096);

/// Most bytes of a copy of parameters, such as a shape.
const SMALL: usize = 4 << 10;
/// Most bytes from pageable memory that a driver copies to its own before the call returns. A longer copy may wait for
/// the stream.
const STAGED: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Device memory of `cuMemAlloc`.
    Device(usize),
    /// Device memory of `cuMemAllocAsync`, at an address in the device's pool.
    Pool { device: usize, place: u64 },
    /// Page-locked host memory of the driver.
    Pinned,
    /// Host memory of the program, page-locked by `cuMemHostRegister`.
    Registered,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    /// The function that allocated it: `cuMemAllocAsync` on stream 1.
    made: String,
    /// The function that freed it.
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

    /// Returns whether the function `by` allocated it.
    pub(crate) fn is_of(&self, by: &str) -> bool {
        self.made.contains(&format!("`{by}`"))
    }

    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered)
    }

    /// Returns the operations that used it last.
    pub(crate) fn uses(&self) -> impl Iterator<Item = &Use> {
        self.history.uses()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Allocations {
    by_base: BTreeMap<u64, Allocation>,
    /// Freed memory whose streams have reached the free, with the lengths.
    quarantine: VecDeque<(u64, usize)>,
    quarantined: usize,
}

impl Allocations {
    pub(crate) fn insert(&mut self, base: u64, len: usize, kind: Kind, made: String) {
        self.by_base.insert(base, Allocation { base, len, kind, made, freed: None, history: History::default() });
    }

    /// Returns the allocation that contains `at` or ends there, freed or not.
    fn around(&self, at: u64) -> Option<&Allocation> {
        let (_, found) = self.by_base.range(..=at).next_back()?;
        (at <= found.base + found.len as u64).then_some(found)
    }

    pub(crate) fn find(&self, at: u64) -> Option<&Allocation> {
        self.around(at).filter(|found| found.freed.is_none())
    }

    /// Returns the first address of the memory around an address.
    pub(crate) fn base(&self, at: u64) -> Option<u64> {
        self.around(at).map(|found| found.base)
    }

    /// Checks and records a use, which begins after the operations in `clock`. `verb` and `name` are for the message:
    /// the use of the memory, and the name of a stream.
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

    /// Checks that the host, which knows the operations in `clock` to have ended, may free memory.
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

    /// Marks memory as freed. Later uses are faults. The bytes stay until [`retire`](Self::retire).
    pub(crate) fn mark_freed(&mut self, base: u64, by: String) {
        if let Some(found) = self.by_base.get_mut(&base) {
            found.freed = Some(by);
        }
    }

    /// Forgets memory of the program.
    pub(crate) fn forget(&mut self, base: u64) {
        self.by_base.remove(&base);
    }

    /// Returns the bytes of freed memory that are kept.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.quarantined
    }

    /// Adds freed memory whose streams have reached the free. Returns the oldest memory beyond the limits, with the
    /// lengths, for the caller to release.
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

/// Returns the start and the length in bytes of the allocation that contains an address or ends there.
pub(crate) fn base_of(at: u64) -> Option<(u64, usize)> {
    machine().lock().allocations.find(at).map(|found| (found.base, found.len))
}

impl Machine {
    /// Allocates device memory that reads as NaN, from a stream's pool or for all streams. `by` is the called function.
    pub(crate) fn allocate(&self, len: usize, stream: Option<usize>, by: &str) -> Result<u64, Refusal> {
        if stream.is_none() {
            self.may_synchronize(by)?;
        }
        let mut core = self.lock();
        let stream = stream.map(|stream| core.resolve(stream)).transpose()?;
        let device = match stream {
            Some(stream) => core.streams.get(stream).context,
            None => current().ok_or(Refusal::Status(INVALID_CONTEXT))?,
        };
        let out_of_memory = || Refusal::Status(OUT_OF_MEMORY);
        let account = &mut core.accounts[device];
        let block = match stream {
            Some(_) => Some(account.take(len as u64).ok_or_else(out_of_memory)?),
            None if account.take_directly(len as u64) => None,
            None => return Err(out_of_memory()),
        };
        let base = bytes::allocate(len).ok_or_else(out_of_memory)?;
        report::device_bytes(len as i64);
        let empty = if len == 0 { "empty " } else { "" };
        report::count(&format!("{empty}allocation: {by}"));
        let (Some(stream), Some(Block { place, grown })) = (stream, block) else {
            // SAFETY: the memory is new.
            unsafe { bytes::fill_with_nan(base, len) };
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
        core.push(stream, by, after, fill_operation(base, len), None);
        Ok(base)
    }

    /// Frees device memory when a stream reaches the free, or after all streams have ended.
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
            unsafe { bytes::fill_with_nan(at, len) };
            return Ok(core.retire(at, len)?);
        };
        let after = core.prepare(stream, by)?;
        core.touch(stream, by, Touch { at, access: Access::Write }, "frees")?;
        let name = core.name(stream);
        let len = core.freed(at, format!("`{by}` on {name}"), by)?;
        core.push(stream, by, after, fill_operation(at, len), Some((at, len)));
        Ok(())
    }
}

impl Core {
    /// Checks that the host has waited for all uses of the memory that starts at `at`.
    pub(crate) fn may_free(&self, at: u64, by: &str) -> Result<(), Fault> {
        self.allocations.idle(at, &self.known(), by, &|stream| self.name(stream))
    }

    /// Accounts for a free, and returns the length.
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

fn fill_operation(at: u64, len: usize) -> Box<dyn FnMut() -> Progress + Send> {
    Box::new(move || {
        // SAFETY: the memory is not released before this has run, and the order of streams gives it to this operation.
        unsafe { bytes::fill_with_nan(at, len) };
        Progress::Done
    })
}

impl Core {
    /// Returns the pinned memory that contains an address.
    pub(crate) fn pinned(&self, at: u64) -> Option<&Allocation> {
        self.allocations.find(at).filter(|found| found.is_pinned() && at < found.base + found.len as u64)
    }

    /// Returns whether every operation that uses the memory has run.
    pub(crate) fn at_rest(&self, memory: &Allocation) -> bool {
        memory.uses().all(|one| self.streams.reached(Point { stream: one.stream, number: one.number }))
    }
}

impl Machine {
    pub(crate) fn allocate_pinned(&self, len: usize, by: &str) -> Result<u64, Refusal> {
        self.may_synchronize(by)?;
        let base = bytes::allocate(len).ok_or(Refusal::Status(OUT_OF_MEMORY))?;
        // SAFETY: the memory is new.
        unsafe { bytes::fill_with_nan(base, len) };
        report::pinned_bytes(len as i64);
        report::count(&format!("allocation: {by}"));
        self.lock().allocations.insert(base, len, Kind::Pinned, format!("`{by}`"));
        Ok(base)
    }

    /// Frees pinned memory, or memory of NCCL. The host must have waited for all uses, because CUDA does not guarantee
    /// that the driver waits.
    pub(crate) fn free_unused(&self, at: u64, by: &str) -> Result<(), Refusal> {
        if at == 0 {
            return Ok(());
        }
        self.may_synchronize(by)?;
        let mut core = self.lock();
        core.may_free(at, by)?;
        let len = core.freed(at, format!("`{by}`"), by)?;
        // SAFETY: it is unused, as was just checked.
        unsafe { bytes::fill_with_nan(at, len) };
        Ok(core.retire(at, len)?)
    }

    pub(crate) fn register(&self, at: u64, len: usize, by: &str) -> Result<(), Refusal> {
        self.may_synchronize(by)?;
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
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "host to device",
            Self::DeviceToHost => "device to host",
            Self::DeviceToDevice => "device to device",
        }
    }
}

/// A copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: usize,
    pub(crate) direction: Direction,
}

impl Core {
    /// Checks that an allocation is long enough.
    fn holds(&self, at: u64, len: usize, by: &str) -> Result<(), Fault> {
        match self.allocations.find(at) {
            Some(found) if at + len as u64 > found.base + found.len as u64 => {
                Err(Fault(format!("`{by}` of {len} bytes at {at:#x} goes beyond the end of {}", found.describe())))
            }
            _ => Ok(()),
        }
    }
}

impl Machine {
    /// Copies on a stream. `by` is the called function.
    ///
    /// Host memory is valid: the source to read, and the destination to write.
    pub(crate) unsafe fn copy(&self, copy: Copy, stream: usize, by: &str) -> Result<(), Refusal> {
        let Copy { to, from, len, direction } = copy;
        if direction == Direction::HostToDevice && len > 0 && self.lock().pinned(from).is_none() {
            self.pageable(len, by)?;
        }
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        if len == 0 {
            return Ok(());
        }
        report::count_many(&format!("copy bytes: {}", direction.name()), len as u64);
        let mut touches = Vec::new();
        let staged = direction == Direction::HostToDevice && core.pinned(from).is_none();
        if !staged {
            core.holds(from, len, by)?;
            touches.push(Touch { at: from, access: Access::Read });
        }
        let blocks = direction == Direction::DeviceToHost && core.pinned(to).is_none();
        if !blocks {
            core.holds(to, len, by)?;
            touches.push(Touch { at: to, access: Access::Write });
        }
        if let Some(memory) = core.pinned(to).filter(|_| direction == Direction::DeviceToHost)
            && core.at_rest(memory)
        {
            // SAFETY: the bytes are in this memory, and no operation uses it now.
            unsafe { bytes::fill_with_nan(to, len) };
        }
        // SAFETY: ensured by the caller.
        let bytes = staged.then(|| unsafe { bytes::read(from, len) });
        let by_the_host = direction == Direction::HostToDevice && core.pinned(from).is_some_and(|at| core.at_rest(at));
        // SAFETY: ensured by the caller.
        let sum = by_the_host.then(|| unsafe { bytes::checksum(from, len) });
        let run = Box::new(move || {
            // SAFETY: pinned memory is not freed while a copy reads it.
            let now = sum.map(|_| unsafe { bytes::checksum(from, len) });
            assert_eq!(now, sum, "the host wrote to pinned memory before a copy to the device had read it");
            let from = bytes.as_ref().map_or(from, |bytes| bytes.as_ptr() as u64);
            // SAFETY: both are in memory that was checked, and the order of streams keeps it until this has run. The
            // caller waits for writes to its pageable memory.
            unsafe { bytes::copy(to, from, len) };
            Progress::Done
        });
        let point = core.enqueue(stream, Operation { name: by.into(), touches, run })?;
        let clock = core.streams.get(stream).clock.clone();
        drop(core);
        if !blocks {
            return Ok(());
        }
        let asked = format!("{by} to pageable memory");
        report::count(&format!("host synchronisation: {asked}"));
        self.wait_for(&[point], &clock, &asked)
    }

    /// Counts a copy from pageable memory, which counts as a wait of the host if it is longer than a driver stages.
    fn pageable(&self, len: usize, by: &str) -> Result<(), Fault> {
        let size = if len > SMALL { "more than 4 KiB" } else { "at most 4 KiB" };
        report::count(&format!("pageable copy: {by} of {size}"));
        if len <= STAGED {
            return Ok(());
        }
        let asked = format!("{by} from pageable memory");
        report::count(&format!("host synchronisation: {asked}"));
        self.may_synchronize(&asked)
    }

    /// Fills device memory with a byte, on a stream.
    pub(crate) fn fill(&self, at: u64, byte: u8, len: usize, stream: usize, by: &str) -> Result<(), Refusal> {
        let mut core = self.lock();
        let stream = core.resolve(stream)?;
        if len == 0 {
            return Ok(());
        }
        core.holds(at, len, by)?;
        let run = Box::new(move || {
            // SAFETY: it is in memory that was checked, and the order of streams keeps it until this has run.
            unsafe { bytes::fill(at, byte, len) };
            Progress::Done
        });
        let touches = vec![Touch { at, access: Access::Write }];
        core.enqueue(stream, Operation { name: by.into(), touches, run })?;
        Ok(())
    }
}
