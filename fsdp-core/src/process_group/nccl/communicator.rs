//! A communicator, from its beginning to its end.
//! The configuration of a communicator.

//! What NCCL answers, as errors.

//! How ranks find each other before there is a communicator: in a store, and over a group that moves the host's memory.

use parking_lot::{Mutex, MutexGuard};
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

use super::super::{
    backend::{PeerMonitor, PeerState},
    call::Call,
    group::ProcessGroup,
    op::Op,
    options::Membership,
};
use crate::{DeviceId, Error, Result, device::cuda::id, store::Store};

/// How long whoever issues gets to stop before a communicator is aborted under its feet: it may be blocked in a launch
/// that only the abort ends. And how long ranks that meet go on when one of them is gone.
const GRACE: Duration = Duration::from_secs(1);
/// How long ranks get at the least to make one: with many of them NCCL takes seconds.
const MEETING: Duration = Duration::from_secs(60);
/// How long ranks wait for each other to let go of a communicator.
const PARTING: Duration = Duration::from_secs(5);

/// One rank's end. NCCL is called by one thread at a time, whoever has the gate; but it is aborted by any.
pub(super) struct Communicator {
    raw: sys::ncclComm_t,
    gate: Mutex<()>,
    /// Why it was given up: the first reason.
    failed: OnceLock<Error>,
    /// It is freed, or about to be.
    is_over: AtomicBool,
    pub(super) device: DeviceId,
    timeout: Duration,
}

// SAFETY: NCCL's communicators belong to no thread, and `gate` keeps calls apart.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Meets the other ranks of a group, which have the same `id`.
    pub(super) fn meet(
        unique: sys::ncclUniqueId,
        group: &Membership,
        compute: &Arc<CudaStream>,
        peer_monitor: Option<&dyn PeerMonitor>,
    ) -> Result<Self> {
        let what = format!("making the NCCL communicator of group \"{}\", rank {}", group.name, group.rank);
        let mut raw = std::ptr::null_mut();
        let mut config = nonblocking();
        // SAFETY: the pointers are to values that live through the call, which copies them.
        let status = unsafe {
            sys::ncclCommInitRankConfig(&raw mut raw, group.size as i32, unique, group.rank as i32, &raw mut config)
        };
        let device = id(compute);
        let communicator = Communicator {
            raw,
            gate: Mutex::new(()),
            failed: OnceLock::new(),
            is_over: AtomicBool::new(raw.is_null()),
            device,
            timeout: group.timeout,
        };
        // Who has met the others may leave, and who fails is about to say why.
        let alarm = Cell::new(None);
        let well = || match peer_monitor.and_then(PeerMonitor::lost_peer) {
            Some((peer, gone)) if alarm.get().get_or_insert_with(Instant::now).elapsed() >= GRACE => {
                let how = match gone {
                    PeerState::Left => "has left",
                    PeerState::Died => "has died",
                    PeerState::Failed(_) => "has failed",
                };
                let cause = format!("rank {peer} {how} meanwhile. The output of rank {peer} says more");
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
        if let Err(error) = met {
            communicator.abort(error.clone());
            return Err(error);
        }
        Ok(communicator)
    }

    /// The error for which it was given up.
    ///
    /// # Errors
    /// That error.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().cloned().map_or(Ok(()), Err)
    }

    fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock()
    }

    /// Makes calls as one, and waits until NCCL has put all of it on its streams.
    pub(super) fn as_one(&self, what: &str, calls: impl FnOnce(sys::ncclComm_t) -> ncclResult_t) -> Result<()> {
        let _gate = self.gate();
        self.check()?;
        // SAFETY: the group is ended below, on this thread.
        let begun = unsafe { sys::ncclGroupStart() };
        let issued = if is_fine(begun) { calls(self.raw) } else { begun };
        // SAFETY: it was begun above. Also after an error, so that this thread is in no group any more.
        let ended = unsafe { sys::ncclGroupEnd() };
        // An abort frees it: what was asked for is void then.
        self.check()?;
        for status in [issued, ended] {
            if !is_fine(status) {
                return Err(refused(self.device, what, status, self.raw));
            }
        }
        self.settle(what, self.timeout, &|| Ok(()))
    }

    /// Waits until NCCL has done what it does in the background.
    fn settle(&self, what: &str, timeout: Duration, well: &dyn Fn() -> Result<()>) -> Result<()> {
        let started = Instant::now();
        // It is a matter of microseconds, but for the first collectives.
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

    /// What it says of its background. Called by who has the gate.
    fn state(&self) -> ncclResult_t {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: it is alive, as whoever has the gate has checked.
        match unsafe { sys::ncclCommGetAsyncError(self.raw, &raw mut state) } {
            ncclResult_t::ncclSuccess => state,
            status => status,
        }
    }

    /// An error that NCCL ran into in the background, unless somebody is using it.
    pub(super) fn trouble(&self, what: &str) -> Option<(ncclResult_t, Error)> {
        let _gate = self.gate.try_lock()?;
        if self.check().is_err() || self.is_over.load(Ordering::Acquire) {
            return None;
        }
        let state = self.state();
        (!is_fine(state)).then(|| (state, refused(self.device, what, state, self.raw)))
    }

    /// Gives it up, for the first reason that there is: what is on its way ends, and nothing more is taken. Only the
    /// first call does anything.
    pub(super) fn abort(&self, why: Error) {
        // Before what is on its way ends: who waits for that asks why.
        let _ = self.failed.set(why);
        let _gate = self.gate.try_lock_for(GRACE);
        if !self.is_over.swap(true, Ordering::AcqRel) {
            // SAFETY: it is alive, and by the flag freed once. Nobody calls NCCL with it any more, but perhaps a thread
            // that is blocked in a launch, as NCCL's documentation has it for aborts.
            let _ = unsafe { sys::ncclCommAbort(self.raw) };
        }
    }

    /// Lets go of it, when all that it was asked for is done: together with the peers, if they do so soon.
    pub(super) fn part(&self) {
        let _gate = self.gate();
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: it is alive, and by the flag freed once, below.
        let mut state = unsafe { sys::ncclCommFinalize(self.raw) };
        let until = Instant::now() + self.timeout.min(PARTING);
        while state == ncclResult_t::ncclInProgress && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
            state = self.state();
        }
        // SAFETY: as above. One that is not finalised would wait for the peers in `ncclCommDestroy`.
        let _ = unsafe {
            match state {
                ncclResult_t::ncclSuccess => sys::ncclCommDestroy(self.raw),
                _ => sys::ncclCommAbort(self.raw),
            }
        };
    }
}

impl Drop for Communicator {
    /// One that was not let go of is given up.
    fn drop(&mut self) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            // SAFETY: it is alive, by the flag, and nobody else has it any more.
            let _ = unsafe { sys::ncclCommAbort(self.raw) };
        }
    }
}

/// Calls of a communicator that does not block may still be in progress.
pub(super) fn is_fine(status: ncclResult_t) -> bool {
    matches!(status, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// What a valid configuration begins with.
const MAGIC: u32 = 0xcafe_beef;
/// NCCL 2.18.0, as nccl.h spells versions. A library takes the fields that this version had and chooses the rest, so
/// that this is right for every library since.
const VERSION: u32 = 21_800;
/// "Choose it": nccl.h's `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: i32 = i32::MIN;

/// That of a communicator whose calls never block: nccl.h's `NCCL_CONFIG_INITIALIZER`, and `blocking = 0`.
fn nonblocking() -> sys::ncclConfig_t {
    // SAFETY: it is made of numbers and pointers, for which zeros are valid.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    // Up to the last field that is known to this version, and the padding behind it.
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

/// The text of a C function.
///
/// # Safety
/// It is null, or ends in a zero.
unsafe fn text(of: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: as the caller guarantees.
    let text = (!of.is_null()).then(|| unsafe { CStr::from_ptr(of) }.to_string_lossy().trim().to_string())?;
    (!text.is_empty()).then_some(text)
}

/// The error of a call that was refused. `communicator` may be null.
pub(super) fn refused(device: DeviceId, what: &str, status: ncclResult_t, communicator: sys::ncclComm_t) -> Error {
    // SAFETY: NCCL's texts are strings of its own that stay.
    let meaning = unsafe { text(sys::ncclGetErrorString(status)) }.unwrap_or_else(|| format!("{status:?}"));
    // SAFETY: as above; the communicator is alive or null.
    let last = unsafe { text(sys::ncclGetLastError(communicator)) };
    let last = last.map(|last| format!(" ({last})")).unwrap_or_default();
    device_error(device, what, format!("NCCL says: {meaning}{last}. {}", way_out(status)))
}

/// An error of the device with a cause in words.
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

/// The key of an id in a store of its own.
const ID: &str = "NCCL's id";

/// The id of a new communicator, which the first rank makes. It tells the others where to find that rank, so how it
/// reaches them is all that NCCL asks of a `store` for several hosts.
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
        what: format!("the id of a communicator came as {} bytes", bytes.len()),
    })?;
    Ok(sys::ncclUniqueId { internal: internal.map(|byte| byte as c_char) })
}

/// Waits until all ranks have made theirs of something, so that none leaves or fails while others are still at it.
pub(super) fn all_are_here(host: &ProcessGroup) -> Result<()> {
    let call = Call::new("meet", "NCCL", std::iter::empty());
    host.run_uncounted(call, |backend, collective| backend.run(collective, Op::Barrier).map(drop))
}
