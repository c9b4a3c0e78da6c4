//! How a process ended, and what it had been asked before.

use std::fmt;

use serde::{Deserialize, Serialize};
use signal_hook::low_level::signal_name;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// By itself, with this exit code.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

impl End {
    /// Exit code 0.
    pub fn is_success(self) -> bool {
        self == End::Exited(0)
    }

    /// As a shell reports it: the exit code, or 128 + the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            End::Exited(code) => low_byte(code),
            End::Signaled(signal) => low_byte(128 + signal),
        }
    }
}

/// All that the system passes on of an exit code.
fn low_byte(code: i32) -> u8 {
    code.to_le_bytes()[0]
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            End::Exited(code) => write!(f, "exit code {code}"),
            End::Signaled(signal) => f.write_str(&name_of(signal)),
        }
    }
}

/// As people call it.
pub(crate) fn name_of(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// What the launcher did to end a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Request {
    /// Sent SIGTERM.
    Terminate,
    /// Sent SIGKILL.
    Kill,
}
