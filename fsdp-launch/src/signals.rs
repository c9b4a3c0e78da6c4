//! What wakes the launcher: signals, the end of the ranks' output, and what other hosts' launchers say.

use std::{
    fs,
    str::FromStr,
    sync::{Arc, mpsc::Sender},
    thread::{self, JoinHandle},
};

use signal_hook::{
    consts::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ},
    iterator::{Handle, Signals},
};

use crate::{Error, Result, rendezvous::News};

/// The signals that can be asked for in `--signals-to-handle`.
const KNOWN: [(&str, i32); 9] = [
    ("SIGTERM", SIGTERM),
    ("SIGINT", SIGINT),
    ("SIGHUP", SIGHUP),
    ("SIGQUIT", SIGQUIT),
    ("SIGUSR1", SIGUSR1),
    ("SIGUSR2", SIGUSR2),
    ("SIGALRM", SIGALRM),
    ("SIGTSTP", SIGTSTP),
    ("SIGXCPU", SIGXCPU),
];

/// The value of `--signals-to-handle`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalList(pub Vec<i32>);

impl FromStr for SignalList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |name: &str| {
            let known = KNOWN.iter().find(|(known, _)| *known == name || known.strip_prefix("SIG") == Some(name));
            known.map(|(_, number)| *number).ok_or_else(|| {
                let names = KNOWN.map(|(name, _)| name).join(", ");
                format!("{name:?} can't be handled; expected names with commas between them, of {names}")
            })
        };
        text.split(',').map(|name| number(name.trim())).collect::<std::result::Result<_, _>>().map(SignalList)
    }
}

/// The signals that end a launch unless others are named: those that mean "end" by custom, less the ones that whoever started us wants ignored.
pub(crate) fn default_signals() -> Vec<i32> {
    let ignored = ignored_signals();
    [SIGTERM, SIGINT, SIGHUP, SIGQUIT].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

/// Something the supervisor has to look at.
pub(crate) enum Event {
    /// Some child process ended.
    ChildEnded,
    /// The launcher received one of the signals that ask it to end.
    Interrupted(i32),
    /// One of the ranks' streams has been printed to its end.
    OutputEnded,
    /// Something of the other hosts.
    News(News),
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

/// The signals that whoever started us wants ignored, bit n - 1 for signal n: `nohup` ignores SIGHUP, a shell SIGINT for what runs in the background.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
