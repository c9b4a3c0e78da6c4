//! Memory of `ncclMemAlloc`, and its registrations with a communicator.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    INVALID_ARGUMENT, SUCCESS, Status,
    communicator::{Communicator, communicators},
    transfer::Memory,
};
use crate::{
    machine::machine,
    report,
    status::{Fault, Refusal},
};

/// `ncclUnhandledCudaError`.
const CUDA_ERROR: Status = 1;

pub(super) fn allocate(len: usize) -> Result<u64, Status> {
    match machine().allocate(len, None, "ncclMemAlloc") {
        Ok(at) => Ok(at),
        Err(Refusal::Status(_)) => Err(CUDA_ERROR),
        Err(Refusal::Fault(Fault(message))) => report::fault(message),
    }
}

pub(super) fn free(at: u64) -> Status {
    if at == 0 {
        return SUCCESS;
    }
    let is_own =
        machine().lock().allocations.find(at).is_some_and(|found| found.base == at && found.is_of("ncclMemAlloc"));
    if !is_own {
        report::fault(format!(
            "`ncclMemFree` frees {at:#x}, which is not memory of `ncclMemAlloc`, or is free already"
        ));
    }
    if communicators().iter().any(|communicator| communicator.registrations.overlap(at, 1)) {
        report::fault(format!("`ncclMemFree` frees {at:#x}, which is registered with a communicator"));
    }
    match machine().free_unused(at, "ncclMemFree") {
        Ok(()) => SUCCESS,
        Err(Refusal::Status(_)) => CUDA_ERROR,
        Err(Refusal::Fault(Fault(message))) => report::fault(message),
    }
}

/// The registered memory of a communicator: address and length by handle.
#[derive(Default)]
pub(super) struct Registrations(Mutex<BTreeMap<u64, (u64, usize)>>);

impl Registrations {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn overlap(&self, at: u64, len: usize) -> bool {
        self.all().values().any(|&(start, own)| at < start + own as u64 && start < at + len as u64)
    }

    /// Returns whether memory is registered; `None` for no memory.
    fn hold(&self, memory: Memory) -> Option<bool> {
        let (at, len) = memory?;
        let is_in = |&(start, own): &(u64, usize)| start <= at && at + len as u64 <= start + own as u64;
        Some(self.all().values().any(is_in))
    }

    /// Returns whether a call reads and writes registered memory. One that does only one of them is a fault.
    pub(super) fn serve(&self, name: &str, read: Memory, written: Memory) -> bool {
        let used: Vec<bool> = [self.hold(read), self.hold(written)].into_iter().flatten().collect();
        if used.windows(2).any(|pair| pair[0] != pair[1]) {
            report::fault(format!(
                "`{name}` uses registered and other memory: NCCL needs both or none to be registered"
            ));
        }
        used.first() == Some(&true)
    }

    pub(super) fn must_be_empty(&self, by: &str) {
        let left = self.all().len();
        if left > 0 {
            report::fault(format!("`{by}` of a communicator with {left} registrations: deregister its memory first"));
        }
    }

    pub(super) fn clear(&self) {
        self.all().clear();
    }
}

impl Communicator {
    /// Registers memory of `ncclMemAlloc`, and returns a handle. `None` if the communicator is not ready.
    pub(super) fn register(&self, at: u64, len: usize) -> Option<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(0x7265_0000);
        if !self.is_ready() {
            return None;
        }
        let is_own = |found: &crate::memory::Allocation| {
            found.is_of("ncclMemAlloc") && at + len as u64 <= found.base + found.len as u64
        };
        if !machine().lock().allocations.find(at).is_some_and(is_own) {
            report::fault(format!(
                "`ncclCommRegister` of {len} bytes at {at:#x}, which `ncclMemAlloc` did not allocate"
            ));
        }
        report::count("registration: ncclCommRegister");
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        self.registrations.all().insert(handle, (at, len));
        Some(handle)
    }

    pub(super) fn deregister(&self, handle: u64) -> Status {
        let Some(_) = self.registrations.all().remove(&handle) else { return INVALID_ARGUMENT };
        report::count("deregistration: ncclCommDeregister");
        SUCCESS
    }
}
