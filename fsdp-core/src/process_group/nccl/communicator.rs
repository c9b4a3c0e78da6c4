//! A communicator, from its beginning to its end.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::{
    driver::CudaStream,
    nccl::sys::{self, ncclResult_t},
};

use super::{
    super::{lookout::Lookout, membership::Membership},
    config,
    failure::{device_error, refused},
};
use crate::{DeviceId, Error, Result, device::cuda::id};

/// How long whoever issues gets to stop before a communicator is aborted under its feet: it may be blocked in a launch
/// that only the abort ends.
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
        lookout: Option<&dyn Lookout>,
    ) -> Result<Self> {
        let what = format!("making the NCCL communicator of group \"{}\", rank {}", group.name, group.rank);
        let mut raw = std::ptr::null_mut();
        let mut config = config::nonblocking();
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
        let well = || match lookout.and_then(Lookout::gone) {
            None => Ok(()),
            Some((peer, _)) => {
                Err(device_error(device, &what, format!("rank {peer} is gone, and its output says why")))
            }
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
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
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
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(1));
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
        let _gate = match self.gate.try_lock() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(gate)) => gate.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
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
        let until = Instant::now() + GRACE;
        let _gate = loop {
            match self.gate.try_lock() {
                Ok(gate) => break Some(gate),
                Err(TryLockError::Poisoned(gate)) => break Some(gate.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
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

/// Calls of a communicator that does not block may still be in progress.
pub(super) fn is_fine(status: ncclResult_t) -> bool {
    matches!(status, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}
