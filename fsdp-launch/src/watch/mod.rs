//! Watches the ranks: signals and other events, the first failure, and hung ranks.
//!
//! `supervise` turns events into the end of an attempt. Before it asks the ranks to end, it records the state of each:
//! later states would show only the shutdown.

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

/// An event for the supervisor.
pub(crate) enum Event {
    /// A child process ended.
    ChildEnded,
    /// The launcher received a signal to end.
    Interrupted(i32),
    /// A rank's stream was printed to its end.
    OutputEnded,
    /// An event of the ranks' PMI connections.
    Pmi { attempt: u32, event: PmiEvent },
    /// An event of the rendezvous.
    Rendezvous(RendezvousEvent),
}

/// Turns signals into events until dropped.
pub(crate) struct SignalWatch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalWatch {
    pub(crate) fn start(wanted: &[i32], events: Sender<Event>) -> Result<Self> {
        // With SIGXFSZ handled, a log file at the limit of `ulimit -f` is a write error instead of the end of the
        // launcher. Ranks do not inherit the handler.
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
            // Fails only after a panic, which was printed.
            thread.join().ok();
        }
    }
}
