//! Copies and fills.
//!
//! A copy from pageable memory reads it before the call returns, as the driver stages it; one from pinned memory reads
//! when its turn comes. A copy to pageable memory makes the host wait. One to pinned memory leaves poison there until its
//! turn comes, for who reads too early.

use crate::{
    bytes,
    machine::{Core, Machine},
    operation::{Access, Operation, Progress, Touch},
    report,
    status::{Fault, Refusal},
};

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

    fn from_host(self) -> bool {
        matches!(self, Self::HostToDevice | Self::HostToHost)
    }

    fn to_host(self) -> bool {
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
        let staged = direction.from_host() && core.pinned(from).is_none();
        if !staged {
            core.holds(from, len, by)?;
            touches.push(Touch { at: from, access: Access::Read });
        }
        let blocks = direction.to_host() && core.pinned(to).is_none();
        if !blocks {
            core.holds(to, len, by)?;
            touches.push(Touch { at: to, access: Access::Write });
        }
        if let Some(memory) = core.pinned(to).filter(|_| direction.to_host())
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
