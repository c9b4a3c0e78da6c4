//! The signals upon which a launch ends: `--signals-to-handle`.

use std::{fs, str::FromStr};

use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXCPU};

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

/// The signals that end a launch unless others are named: those that mean "end" by custom, less the ones that whoever
/// started us wants ignored.
pub(crate) fn default_signals() -> Vec<i32> {
    let ignored = ignored_signals();
    [SIGTERM, SIGINT, SIGHUP, SIGQUIT].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

/// The signals that whoever started us wants ignored, bit n - 1 for signal n: `nohup` ignores SIGHUP, a shell SIGINT
/// for what runs in the background.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
