//! Watching the ranks while they run: what happens to them and to the launcher, and which rank hangs or fails first.

pub(crate) mod supervise;
mod watchdog;

use std::{
    sync::{Arc, mpsc::Sender},
    thread::{self, JoinHandle},
};

use signal_hook::{
    consts::{SIGCHLD, SIGXFSZ},
    iterator::{Handle, Signals},
};

use crate::{Error, Result, pmi::PmiEvent, rendezvous::RendezvousEvent};

/// Something the supervisor has to look at.
pub(crate) enum Event {
    /// Some child process ended.
    ChildEnded,
    /// The launcher received one of the signals that ask it to end.
    Interrupted(i32),
    /// One of the ranks' streams has been printed to its end.
    OutputEnded,
    /// What ranks of an attempt say over PMI.
    Pmi { attempt: u32, said: PmiEvent },
    /// Something of the other hosts.
    Rendezvous(RendezvousEvent),
}

/// Turns signals into events for as long as it lives.
pub(crate) struct SignalWatch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalWatch {
    pub(crate) fn start(wanted: &[i32], events: Sender<Event>) -> Result<Self> {
        // A log file that has reached the limit of `ulimit -f` is an error, as a full disk is, and no end. What the
        // ranks do is theirs: caught, it is not inherited.
        signal_hook::flag::register(SIGXFSZ, Arc::default()).map_err(Error::system("watch for signals"))?;
        let wanted = wanted.iter().copied().chain([SIGCHLD]);
        let mut signals = Signals::new(wanted).map_err(Error::system("watch for signals"))?;
        let handle = signals.handle();
        let forward = move || {
            for signal in signals.forever() {
                let event = if signal == SIGCHLD { Event::ChildEnded } else { Event::Interrupted(signal) };
                if events.send(event).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("signals".into())
            .spawn(forward)
            .map_err(Error::system("start a thread for signals"))?;
        Ok(SignalWatch { handle, thread: Some(thread) })
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // It only fails by a panic, which has been printed.
            thread.join().ok();
        }
    }
}
