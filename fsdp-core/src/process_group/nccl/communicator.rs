//! A NCCL communicator: configuration, rendezvous of its ranks, grouped calls, abort, and errors.

use std::{
    cell::Cell,
    ffi::{CStr, c_char},
    mem::offset_of,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::{
    driver::CudaStream,
    nccl::{
        result,
        sys::{self, ncclResult_t},
    },
};
use parking_lot::{Mutex, MutexGuard};

use super::super::{
    backend::{PeerMonitor, PeerState},
    call::Call,
    group::ProcessGroup,
    op::Op,
    options::Membership,
};
use super::communicators::Handle;
use crate::{DeviceId, Error, Result, device::cuda::id, store::Store};

/// How long an issuing thread gets to stop before a communicator is aborted. The thread may be blocked in a launch that
/// only the abort ends. Also how long a rendezvous continues after a peer is gone.
pub(super) const GRACE: Duration = Duration::from_secs(1);
/// Shortest time limit for creating a communicator, which takes NCCL seconds with many ranks.
const MEETING: Duration = Duration::from_secs(60);
/// How long ranks wait for each other when they destroy a communicator.
const PARTING: Duration = Duration::from_secs(5);

/// One rank's end. One thread at a time calls NCCL, with the lock `gate`; any thread may abort.
pub(super) struct Communicator {
    raw: sys::ncclComm_t,
    gate: Mutex<()>,
    /// The first reason for an abort.
    failed: OnceLock<Error>,
    /// Whether it is freed, or about to be.
    is_over: AtomicBool,
    /// Whether NCCL has freed it.
    is_freed: AtomicBool,
    pub(super) device: DeviceId,
    timeout: Duration,
}

// SAFETY: NCCL's communicators may be used by any thread, and `gate` serializes calls.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Creates the communicator together with the other ranks, which have the same `unique` id.
    pub(super) fn meet(
        unique: sys::ncclUniqueId,
        group: &Membership,
        compute: &Arc<CudaStream>,
        peer_monitor: Option<&dyn PeerMonitor>,
    ) -> Result<Self> {
        let what = format!("making the NCCL communicator of group \"{}\", rank {}", group.name, group.rank);
        let mut raw = std::ptr::null_mut();
        let mut config = nonblocking();
        // SAFETY: the pointers are to values that outlive the call, which copies them.
        let status = unsafe {
            sys::ncclCommInitRankConfig(&raw mut raw, group.size as i32, unique, group.rank as i32, &raw mut config)
        };
        let device = id(compute);
        let communicator = Communicator {
            raw,
            gate: Mutex::new(()),
            failed: OnceLock::new(),
            is_over: AtomicBool::new(raw.is_null()),
            is_freed: AtomicBool::new(raw.is_null()),
            device,
            timeout: group.timeout,
        };
        // A rank that has met the others may leave, and a rank that failed is about to send the reason.
        let alarm = Cell::new(None);
        let well = || match peer_monitor.and_then(PeerMonitor::lost_peer) {
            Some((peer, gone)) if alarm.get().get_or_insert_with(Instant::now).elapsed() >= GRACE => {
                let how = match gone {
                    PeerState::Left => "has left",
                    PeerState::Died => "has died",
                    PeerState::Unreachable(_) => "does not answer",
                    PeerState::Failed(_) => "has failed",
                };
                let cause = format!("rank {peer} {how} meanwhile; see the output of rank {peer}");
                Err(device_error(device, &what, cause))
            }
            Some(_) => {
                alarm.set(alarm.get().or_else(|| Some(Instant::now())));
                Ok(())
            }
            None => Ok(()),
        };
        let met = match status {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => {
                communicator.settle(&what, group.timeout.max(MEETING), &well)
            }
            status => Err(refused(device, &what, status, raw)),
        };
        // Dropping one that has not met its peers aborts it.
        met.map(|()| communicator)
    }

    /// Fails with the reason of the abort, if it was aborted.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().cloned().map_or(Ok(()), Err)
    }

    /// Runs calls as one NCCL group, and waits until NCCL has enqueued them.
    pub(super) fn as_one(&self, what: &str, calls: impl FnOnce(sys::ncclComm_t) -> ncclResult_t) -> Result<()> {
        let _gate = self.gate.lock();
        self.check()?;
        // SAFETY: the group is ended below, on this thread.
        let begun = unsafe { sys::ncclGroupStart() };
        let issued = if is_fine(begun) { calls(self.raw) } else { begun };
        // SAFETY: the group was started above. It is ended also after an error, so that this thread is in no group.
        let ended = unsafe { sys::ncclGroupEnd() };
        // An abort frees the communicator and voids the calls.
        self.check()?;
        for status in [issued, ended] {
            if !is_fine(status) {
                return Err(refused(self.device, what, status, self.raw));
            }
        }
        self.settle(what, self.timeout, &|| Ok(()))
    }

    /// Makes one call that is not a collective, and waits until NCCL has done it. Fails after an abort, which has freed the
    /// communicator.
    pub(super) fn alone(&self, what: &str, call: impl FnOnce(sys::ncclComm_t) -> ncclResult_t) -> Result<()> {
        let _gate = self.gate.lock();
        self.check()?;
        match call(self.raw) {
            status if is_fine(status) => self.settle(what, self.timeout, &|| Ok(())),
            status => Err(refused(self.device, what, status, self.raw)),
        }
    }

    /// Waits until NCCL has finished its work in the background.
    fn settle(&self, what: &str, timeout: Duration, well: &dyn Fn() -> Result<()>) -> Result<()> {
        let started = Instant::now();
        // Takes microseconds, except for the first collectives.
        let mut awake = 100;
        let mut nap = Duration::from_micros(20);
        loop {
            self.check()?;
            match self.state() {
                ncclResult_t::ncclSuccess => return Ok(()),
                ncclResult_t::ncclInProgress => well()?,
                status => return Err(refused(self.device, what, status, self.raw)),
            }
            let waited = started.elapsed();
            if waited >= timeout {
                let cause = format!(
                    "NCCL did not get ready within {:.1} s: not all ranks came, or they can't reach each other. \
                     NCCL_DEBUG=INFO says what it tries, NCCL_SOCKET_IFNAME chooses the network, and FSDP_TIMEOUT_S \
                     how long ranks wait",
                    waited.as_secs_f64()
                );
                return Err(device_error(self.device, what, cause));
            }
            if awake > 0 {
                awake -= 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (nap * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// Returns NCCL's asynchronous state. The caller holds the gate.
    fn state(&self) -> ncclResult_t {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: it is alive, as the holder of the gate has checked.
        match unsafe { sys::ncclCommGetAsyncError(self.raw, &raw mut state) } {
            ncclResult_t::ncclSuccess => state,
            status => status,
        }
    }

    /// Returns an asynchronous error of NCCL, unless another thread uses the communicator.
    pub(super) fn trouble(&self, what: &str) -> Option<(ncclResult_t, Error)> {
        let _gate = self.gate.try_lock()?;
        if self.check().is_err() || self.is_over.load(Ordering::Acquire) {
            return None;
        }
        let state = self.state();
        (!is_fine(state)).then(|| (state, refused(self.device, what, state, self.raw)))
    }

    /// Sets the reason of an abort, unless there is one. Everything that comes later fails with it.
    pub(super) fn set_failed(&self, why: &Error) {
        let _ = self.failed.set(why.clone());
    }

    /// Waits until no thread calls NCCL, or until a time.
    pub(super) fn gate_until(&self, until: Instant) -> Option<MutexGuard<'_, ()>> {
        self.gate.try_lock_until(until)
    }

    /// Returns NCCL's communicator, which the caller frees. Only the first call does.
    pub(super) fn take_handle(&self) -> Option<Handle> {
        (!self.is_over.swap(true, Ordering::AcqRel)).then_some(Handle(self.raw))
    }

    /// Aborts the communicator alone: pending collectives end, and later ones fail. Only the first call has an effect.
    pub(super) fn abort(&self, why: &Error) {
        self.set_failed(why);
        let _gate = self.gate_until(Instant::now() + GRACE);
        self.free();
    }

    fn free(&self) {
        if let Some(Handle(raw)) = self.take_handle() {
            // SAFETY: it is alive, and freed once. At most a thread that is blocked in a launch still uses it, which
            // NCCL's documentation allows for aborts.
            let _ = unsafe { sys::ncclCommAbort(raw) };
            self.set_freed();
        }
    }

    /// Records that NCCL has freed it.
    pub(super) fn set_freed(&self) {
        self.is_freed.store(true, Ordering::Release);
    }

    /// Returns whether NCCL has freed it.
    pub(super) fn is_freed(&self) -> bool {
        self.is_freed.load(Ordering::Acquire)
    }

    /// Destroys the communicator once its collectives are done, together with the peers if they do so soon.
    pub(super) fn part(&self) {
        let _gate = self.gate.lock();
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: it is alive, and the flag ensures that it is freed once, below.
        let mut state = unsafe { sys::ncclCommFinalize(self.raw) };
        let until = Instant::now() + self.timeout.min(PARTING);
        while state == ncclResult_t::ncclInProgress && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
            state = self.state();
        }
        // SAFETY: as above. Destroying one that is not finalized would wait for the peers.
        let _ = unsafe {
            match state {
                ncclResult_t::ncclSuccess => sys::ncclCommDestroy(self.raw),
                _ => sys::ncclCommAbort(self.raw),
            }
        };
        self.set_freed();
    }
}

impl Drop for Communicator {
    /// Aborts a communicator that was not destroyed.
    fn drop(&mut self) {
        self.free();
    }
}

/// Returns whether a call succeeded or is in progress.
pub(super) fn is_fine(status: ncclResult_t) -> bool {
    matches!(status, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// Magic number of a valid configuration.
const MAGIC: u32 = 0xcafe_beef;
/// NCCL 2.18.0, encoded as in nccl.h. Libraries use the fields of this version and choose the others, so that it suits
/// all later libraries.
const VERSION: u32 = 21_800;
/// nccl.h's `NCCL_CONFIG_UNDEF_INT`: the library chooses.
const UNDEFINED: i32 = i32::MIN;

/// Returns nccl.h's `NCCL_CONFIG_INITIALIZER` with `blocking = 0`.
fn nonblocking() -> sys::ncclConfig_t {
    // SAFETY: it consists of numbers and pointers, for which zeros are valid.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    // Up to the last field of this version, with its padding.
    config.size = offset_of!(sys::ncclConfig_t, splitShare) + 8;
    config.magic = MAGIC;
    config.version = VERSION;
    config.blocking = 0;
    config.cgaClusterSize = UNDEFINED;
    config.minCTAs = UNDEFINED;
    config.maxCTAs = UNDEFINED;
    config.netName = std::ptr::null();
    config.splitShare = UNDEFINED;
    config
}

/// Converts a C string.
///
/// # Safety
/// The pointer is null, or to a string that ends with a zero.
unsafe fn text(of: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: as the caller guarantees.
    let text = (!of.is_null()).then(|| unsafe { CStr::from_ptr(of) }.to_string_lossy().trim().to_string())?;
    (!text.is_empty()).then_some(text)
}

/// Returns the error of a failed call. `communicator` may be null.
pub(super) fn refused(device: DeviceId, what: &str, status: ncclResult_t, communicator: sys::ncclComm_t) -> Error {
    // SAFETY: NCCL's texts are static strings.
    let meaning = unsafe { text(sys::ncclGetErrorString(status)) }.unwrap_or_else(|| format!("{status:?}"));
    // SAFETY: as above; the communicator is alive or null.
    let last = unsafe { text(sys::ncclGetLastError(communicator)) };
    let last = last.map(|last| format!(" ({last})")).unwrap_or_default();
    device_error(device, what, format!("NCCL says: {meaning}{last}. {}", way_out(status)))
}

/// Returns an error of the device with a cause.
pub(super) fn device_error(device: DeviceId, what: &str, cause: String) -> Error {
    Error::Device { device, what: what.into(), cause }
}

fn way_out(status: ncclResult_t) -> &'static str {
    match status {
        ncclResult_t::ncclInvalidUsage => {
            "Each rank needs a device of its own: see CUDA_VISIBLE_DEVICES and LOCAL_RANK. NCCL_DEBUG=WARN says more"
        }
        ncclResult_t::ncclSystemError => {
            "The network or the shared memory of the host failed it: NCCL_DEBUG=INFO says which, NCCL_SOCKET_IFNAME \
             chooses another network, and containers may need more shared memory (--shm-size)"
        }
        ncclResult_t::ncclRemoteError => "A peer or the way to it is gone: the output of the other ranks says more",
        _ => "NCCL_DEBUG=INFO says more",
    }
}

/// Key of an id in a store of its own.
const ID: &str = "NCCL's id";

/// Returns the id of a new communicator, which the first rank creates and passes to the others in a store. The id has
/// the first rank's address, so that this is all NCCL needs across hosts.
pub(super) fn unique_id(
    store: &dyn Store,
    host: &ProcessGroup,
    compute: &Arc<CudaStream>,
) -> Result<sys::ncclUniqueId> {
    if host.rank() == 0 {
        let refuse = |error: result::NcclError| {
            refused(id(compute), "making the id of a communicator", error.0, std::ptr::null_mut())
        };
        let unique = result::get_uniqueid().map_err(refuse)?;
        store.set(ID, &unique.internal.map(|byte| byte as u8))?;
        return Ok(unique);
    }
    let bytes = store.get(ID, host.membership().timeout)?;
    let internal = bytes.first_chunk::<128>().ok_or_else(|| Error::Internal {
        rank: host.rank(),
        what: format!("received {} bytes as the id of a communicator", bytes.len()),
    })?;
    Ok(sys::ncclUniqueId { internal: internal.map(|byte| byte as c_char) })
}

/// Waits until all ranks have finished a step, so that none leaves or fails while others are still in it.
pub(super) fn all_are_here(host: &ProcessGroup) -> Result<()> {
    let call = Call::without_parts("meet", "NCCL");
    host.run_uncounted(&call, |backend, collective| backend.run(collective, Op::Barrier).map(drop))
}
