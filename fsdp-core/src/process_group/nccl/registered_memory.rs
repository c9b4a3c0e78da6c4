//! Memory of `ncclMemAlloc`, registered with a communicator, for the all-gathers and reduce-scatters that ask for it
//! ([`ProcessGroup::with_registered_memory`](crate::ProcessGroup::with_registered_memory)).
//!
//! NCCL can read and write registered memory without copies through buffers of its own, and by NVLink SHARP. All ranks must
//! pass registered memory then, and all at the same offset. So collectives use one segment from its start, in the order of
//! the engine's stream. A larger collective gets a larger segment, and the old one is freed when its last use has ended.
//!
//! The functions are looked up by name: a program must start with libraries that lack them.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use cudarc::{
    driver::{CudaEvent, CudaStream, sys::CUdeviceptr},
    nccl::sys::{self, ncclComm_t, ncclResult_t},
};
use libloading::os::unix::Library;

use super::communicator::{Communicator, is_fine, refused};
use crate::{
    Error, Result,
    device::cuda::{failed, id, return_unused_memory},
};

/// The first version with these functions, 2.19.0, encoded as in nccl.h.
const FIRST_VERSION: c_int = 21_900;
/// Sizes of segments are multiples of this: the granularity of device memory.
const GRANULARITY: usize = 2 << 20;
/// How long to wait for the device and for an abort before memory is freed.
const DEADLINE: Duration = Duration::from_secs(10);

/// NCCL's functions for its own memory.
struct Functions {
    allocate: unsafe extern "C" fn(*mut *mut c_void, usize) -> ncclResult_t,
    free: unsafe extern "C" fn(*mut c_void) -> ncclResult_t,
    register: unsafe extern "C" fn(ncclComm_t, *mut c_void, usize, *mut *mut c_void) -> ncclResult_t,
    deregister: unsafe extern "C" fn(ncclComm_t, *mut c_void) -> ncclResult_t,
}

impl Functions {
    /// Returns the functions of the loaded library, or the reason why it has none.
    fn get() -> Result<&'static Functions, String> {
        static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
        FUNCTIONS.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        let mut version = 0;
        // SAFETY: it writes a number.
        let status = unsafe { sys::ncclGetVersion(&raw mut version) };
        if !is_fine(status) {
            return Err(format!("NCCL does not tell its version: {status:?}"));
        }
        has_functions(version)?;
        let library = Library::this();
        // SAFETY: the functions have these types in all versions from the first one on.
        unsafe {
            Ok(Functions {
                allocate: function(&library, "ncclMemAlloc")?,
                free: function(&library, "ncclMemFree")?,
                register: function(&library, "ncclCommRegister")?,
                deregister: function(&library, "ncclCommDeregister")?,
            })
        }
    }
}

/// Returns a function of the program's libraries, which stay loaded.
///
/// # Safety
/// It has this type.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: as the caller guarantees.
    let found = unsafe { library.get::<F>(name) };
    found.map(|function| *function).map_err(|_| format!("the NCCL library has no function {name}"))
}

fn has_functions(version: c_int) -> Result<(), String> {
    if version >= FIRST_VERSION {
        return Ok(());
    }
    // Up to 2.8, versions have a digit less.
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    let [major, minor, patch] = [version / major, version % major / 100, version % 100];
    Err(format!("NCCL {major}.{minor}.{patch} has no registered memory: install 2.19 or newer"))
}

/// Returns the reason why the loaded NCCL has no registered memory, if it has none.
pub(super) fn support() -> Result<(), String> {
    Functions::get().map(drop)
}

/// The registered memory of a communicator.
pub(super) struct RegisteredMemory {
    communicator: Arc<Communicator>,
    compute: Arc<CudaStream>,
    /// The last one is used. Older ones may still be in use on the device.
    segments: Vec<Segment>,
}

/// Memory of `ncclMemAlloc`.
struct Segment {
    address: CUdeviceptr,
    bytes: usize,
    /// NCCL's handle of the registration.
    registration: *mut c_void,
    /// Recorded after its last use.
    last_use: Option<CudaEvent>,
}

// SAFETY: the handle is only passed to NCCL, and any thread may do that.
unsafe impl Send for Segment {}

impl RegisteredMemory {
    pub(super) fn new(communicator: Arc<Communicator>, compute: Arc<CudaStream>) -> Self {
        RegisteredMemory { communicator, compute, segments: vec![] }
    }

    /// Returns memory of at least `bytes` bytes. It may be in use by earlier work of the engine's stream.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Range<CUdeviceptr>> {
        let functions = Functions::get().map_err(|cause| self.error("allocating registered memory", &cause))?;
        self.free_old(functions);
        if self.segments.last().is_none_or(|last| last.bytes < bytes) {
            let segment = self.allocate(functions, bytes.next_multiple_of(GRANULARITY))?;
            self.segments.push(segment);
        }
        let last = self.segments.last().map_or(0..0, |last| last.address..last.address + last.bytes as CUdeviceptr);
        Ok(last)
    }

    /// Records that work up to this event uses the memory that was taken last.
    pub(super) fn used_until(&mut self, end: CudaEvent) {
        if let Some(last) = self.segments.last_mut() {
            last.last_use = Some(end);
        }
    }

    fn error(&self, what: &str, cause: &dyn std::fmt::Display) -> Error {
        failed(&self.compute, what, cause)
    }

    fn allocate(&self, functions: &Functions, bytes: usize) -> Result<Segment> {
        tracing::debug!(bytes, "new registered memory");
        let mut address = std::ptr::null_mut();
        // The driver's pool holds memory that is free.
        return_unused_memory(&self.compute)?;
        // SAFETY: it writes an address.
        let status = unsafe { (functions.allocate)(&raw mut address, bytes) };
        if !is_fine(status) {
            let what = format!("allocating {bytes} bytes of registered memory");
            return Err(refused(id(&self.compute), &what, status, std::ptr::null_mut()));
        }
        let mut segment =
            Segment { address: address as CUdeviceptr, bytes, registration: std::ptr::null_mut(), last_use: None };
        let what = format!("registering {bytes} bytes with NCCL");
        let registered = self.communicator.alone(&what, |communicator| {
            // SAFETY: the communicator is alive, and the memory has this length.
            unsafe { (functions.register)(communicator, address, bytes, &raw mut segment.registration) }
        });
        if let Err(error) = registered {
            segment.free(functions);
            return Err(error);
        }
        Ok(segment)
    }

    /// Frees segments that a larger one has replaced, and that the device does not use any more.
    fn free_old(&mut self, functions: &Functions) {
        let current = self.segments.pop();
        let is_idle = |segment: &Segment| segment.last_use.as_ref().is_none_or(|end| end.try_is_complete() == Ok(true));
        let (idle, used): (Vec<_>, Vec<_>) = self.segments.drain(..).partition(is_idle);
        idle.into_iter().for_each(|segment| self.release(functions, segment));
        self.segments = used;
        self.segments.extend(current);
    }

    /// Deregisters a segment, unless its communicator was aborted, and frees it.
    fn release(&self, functions: &Functions, segment: Segment) {
        if !segment.registration.is_null() {
            // Fails after an abort, by which NCCL has freed what belongs to the communicator.
            let _ = self.communicator.alone("deregistering memory", |communicator| {
                // SAFETY: the communicator is alive and has this registration.
                unsafe { (functions.deregister)(communicator, segment.registration) }
            });
        }
        segment.free(functions);
    }

    /// Frees all memory, once neither the device nor an abort uses it. Call it when no collective is pending, and before
    /// the communicator is destroyed.
    pub(super) fn free(&mut self) {
        let Ok(functions) = Functions::get() else { return };
        if self.segments.is_empty() || self.compute.context().bind_to_thread().is_err() {
            return;
        }
        let until = Instant::now() + DEADLINE;
        for segment in std::mem::take(&mut self.segments) {
            let is_used = || {
                let is_in_abort = self.communicator.check().is_err() && !self.communicator.is_freed();
                is_in_abort || segment.last_use.as_ref().is_some_and(|end| end.try_is_complete() == Ok(false))
            };
            while is_used() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            match is_used() {
                false => self.release(functions, segment),
                true => {
                    tracing::warn!(bytes = segment.bytes, "the device still uses registered memory: it is not freed")
                }
            }
        }
    }
}

impl Segment {
    fn free(self, functions: &Functions) {
        // SAFETY: NCCL allocated it, nothing uses it, and it is freed once.
        let status = unsafe { (functions.free)(self.address as *mut c_void) };
        if !is_fine(status) {
            tracing::warn!(?status, bytes = self.bytes, "NCCL did not free its memory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_named() {
        assert_eq!(has_functions(21_903), Ok(()));
        assert_eq!(has_functions(23_007), Ok(()));
        let why = "NCCL 2.18.5 has no registered memory: install 2.19 or newer";
        assert_eq!(has_functions(21_805), Err(why.into()));
        assert!(has_functions(2_708).unwrap_err().starts_with("NCCL 2.7.8 has"));
    }
}
