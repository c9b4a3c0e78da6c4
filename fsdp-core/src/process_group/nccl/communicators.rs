//! The communicators of a world and of the groups split from it, and how one of them is aborted.
//!
//! NCCL frees device memory when it aborts a communicator, and CUDA then waits for the device. A kernel of another
//! communicator, which waits for a peer that is gone, would block that wait for ever. So an abort that does not end soon
//! is followed by an abort of all others, as one NCCL group. If that does not end either, the device can't be used any
//! more, and neither can threads that wait for it: the process ends, so that its launcher can end the other ranks.
//!
//! PyTorch aborts all at once. Here groups are independent, as on hosts: a mistake in one does not fail the others.

use std::{
    io::Write,
    sync::{Arc, Weak, mpsc},
    time::{Duration, Instant},
};

use cudarc::nccl::sys;
use parking_lot::Mutex;

use super::{
    super::{backend::PeerMonitor, collective::Failure},
    communicator::{Communicator, GRACE},
};
use crate::{Error, error_file::record_error};

/// How long the abort of a communicator may take before the others are aborted.
const ALONE: Duration = Duration::from_secs(1);
/// How long NCCL may take to abort the others.
const DEADLINE: Duration = Duration::from_secs(5);
/// Exit code of a process whose communicators can't be aborted: that of SIGABRT in a shell, as for PyTorch's watchdog.
const EXIT_CODE: i32 = 134;

/// A communicator, and how its group's peers learn of a failure.
struct Member {
    communicator: Weak<Communicator>,
    peer_monitor: Option<Arc<dyn PeerMonitor>>,
}

/// The communicators of one rank.
#[derive(Default)]
pub(super) struct Communicators(Mutex<Vec<Member>>);

impl Communicators {
    /// Adds a communicator, which stays until it is dropped.
    pub(super) fn add(&self, communicator: &Arc<Communicator>, peer_monitor: Option<Arc<dyn PeerMonitor>>) {
        let mut members = self.0.lock();
        members.retain(|member| member.communicator.strong_count() > 0);
        members.push(Member { communicator: Arc::downgrade(communicator), peer_monitor });
    }

    /// Returns whether the rank has none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().iter().all(|member| member.communicator.strong_count() == 0)
    }

    /// Aborts one, and all others if its abort does not end: pending collectives end, and later ones fail with this
    /// error. The peers in the groups of these learn the reason. Does not return if NCCL can't end them: the process
    /// then ends.
    pub(super) fn abort(&self, one: &Arc<Communicator>, why: &Error) {
        let is_it = |communicator: &Arc<Communicator>| Arc::ptr_eq(communicator, one);
        let begun = Abort::begin(self.fail(why, is_it));
        if begun.ends_within(ALONE) {
            return;
        }
        tracing::warn!("NCCL does not end a communicator, so all of this rank are aborted: {why}");
        let others = Abort::begin(self.fail(why, |communicator| !is_it(communicator)));
        let until = Instant::now() + DEADLINE;
        for abort in [others, begun] {
            if !abort.ends_within(until.saturating_duration_since(Instant::now())) {
                leave(why);
            }
        }
    }

    /// Marks the chosen communicators as failed, tells their peers, and returns them.
    fn fail(&self, why: &Error, is_chosen: impl Fn(&Arc<Communicator>) -> bool) -> Vec<Arc<Communicator>> {
        // Without the lock afterwards: the last reference to a communicator aborts it.
        let alive = |member: &Member| Some((member.communicator.upgrade()?, member.peer_monitor.clone()));
        let members: Vec<_> = self.0.lock().iter().filter_map(alive).collect();
        let chosen = members.into_iter().filter(|(communicator, _)| is_chosen(communicator));
        let fail = |(communicator, peer_monitor): (Arc<Communicator>, Option<Arc<dyn PeerMonitor>>)| {
            // Set before pending collectives end, because waiting threads ask for the reason.
            communicator.set_failed(why);
            if let Some(peer_monitor) = peer_monitor {
                peer_monitor.fail(&Failure::of(why));
            }
            communicator
        };
        chosen.map(fail).collect()
    }
}

/// A communicator that only one thread frees.
pub(super) struct Handle(pub(super) sys::ncclComm_t);

// SAFETY: NCCL's communicators may be used by any thread.
unsafe impl Send for Handle {}

/// An abort of communicators as one NCCL group, by a thread of its own.
struct Abort(mpsc::Receiver<()>);

impl Abort {
    /// Starts to abort communicators. Another thread's calls get some time to end.
    fn begin(communicators: Vec<Arc<Communicator>>) -> Self {
        let until = Instant::now() + GRACE;
        let _gates: Vec<_> = communicators.iter().map(|communicator| communicator.gate_until(until)).collect();
        // Others may be aborting the rest.
        let take = |communicator: Arc<Communicator>| Some((communicator.take_handle()?, communicator));
        let (handles, communicators): (Vec<_>, Vec<_>) = communicators.iter().cloned().filter_map(take).unzip();
        let (ended, ends) = mpsc::channel();
        let abort = move || {
            // SAFETY: they are alive, and nothing else frees them. At most a thread that is blocked in a launch still
            // uses one, which NCCL's documentation allows for aborts. The group is ended on this thread.
            unsafe {
                let _ = sys::ncclGroupStart();
                for Handle(communicator) in handles {
                    let _ = sys::ncclCommAbort(communicator);
                }
                let _ = sys::ncclGroupEnd();
            }
            communicators.iter().for_each(|communicator| communicator.set_freed());
            let _ = ended.send(());
        };
        if let Err(error) = std::thread::Builder::new().name("nccl abort".into()).spawn(abort) {
            tracing::error!("can't start a thread that aborts NCCL: {error}");
        }
        Abort(ends)
    }

    /// Waits until NCCL is done, or for a time. Without a thread, it is not done.
    fn ends_within(&self, time: Duration) -> bool {
        self.0.recv_timeout(time).is_ok()
    }
}

/// Ends the process. Exit handlers would wait for the device.
fn leave(why: &Error) -> ! {
    let seconds = (ALONE + DEADLINE).as_secs();
    let text = format!("{why}. NCCL could not end its work on the device within {seconds} s, so this rank ends now");
    record_error(&text);
    // Also for programs without a log.
    let _ = writeln!(std::io::stderr(), "Error: {text}");
    // SAFETY: it takes a number, and does not return.
    unsafe { libc::_exit(EXIT_CODE) }
}
