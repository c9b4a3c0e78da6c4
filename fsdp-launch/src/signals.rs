//! What wakes the supervisor: signals, and the end of the ranks' output.

use std::{
    fs,
    sync::mpsc::Sender,
    thread::{self, JoinHandle},
};

use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM},
    iterator::{Handle, Signals},
};

use crate::{Error, Result};

/// Something the supervisor has to look at.
pub(crate) enum Event {
    /// Some child process ended.
    ChildEnded,
    /// The launcher was asked to end: SIGINT, SIGTERM or SIGHUP.
    Interrupted(i32),
    /// One of the ranks' streams has been printed to its end.
    OutputEnded,
}

/// Turns signals into events for as long as it lives.
pub(crate) struct SignalWatch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalWatch {
    pub(crate) fn start(events: Sender<Event>) -> Result<Self> {
        let ignored = ignored_signals();
        let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let mut signals = Signals::new(wanted.chain([SIGCHLD])).map_err(Error::system("watch for signals"))?;
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

/// The signals that whoever started us wants ignored, bit n - 1 for signal n: `nohup` ignores SIGHUP, a shell SIGINT for what runs in the background.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
