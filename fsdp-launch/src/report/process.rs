//! What the kernel says of a process.

use std::{fmt, fs};

use serde::{Deserialize, Serialize};

/// What a process does, as far as the kernel knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessState {
    /// It computes, or waits for a core.
    Running,
    /// It waits for something.
    Sleeping,
    /// It waits for a device or a file system, and no signal reaches it.
    InKernel,
    /// It was stopped, by SIGSTOP or its kin.
    Stopped,
    /// A debugger has stopped it.
    Traced,
    /// It has ended.
    Ended,
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProcessState::Running => "running",
            ProcessState::Sleeping => "sleeping",
            ProcessState::InKernel => "in the kernel",
            ProcessState::Stopped => "stopped",
            ProcessState::Traced => "traced",
            ProcessState::Ended => "ended",
        })
    }
}

/// A process at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessInfo {
    /// Its id.
    pub pid: u32,
    /// When it was started, in the kernel's ticks: field 22 of `/proc/PID/stat`.
    pub started: u64,
    /// What its main thread does.
    pub state: ProcessState,
    /// Bytes of memory that it holds.
    pub resident_bytes: u64,
    /// The kernel's function that its main thread waits in, where that may be known.
    pub wait_channel: Option<String>,
}

impl ProcessInfo {
    /// A process that there is, or that its parent has not yet waited for.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let channel = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        Self::parse(pid, &stat, &channel)
    }

    fn parse(pid: u32, stat: &str, channel: &str) -> Option<Self> {
        // The second field is the name in parentheses, which may hold anything.
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let state = match *fields.first()? {
            "R" => ProcessState::Running,
            "D" => ProcessState::InKernel,
            "T" => ProcessState::Stopped,
            "t" => ProcessState::Traced,
            "Z" | "X" | "x" => ProcessState::Ended,
            _ => ProcessState::Sleeping,
        };
        let has_channel = !matches!(channel.trim(), "" | "0");
        Some(ProcessInfo {
            pid,
            started: number(22)?,
            state,
            resident_bytes: number(24)? * rustix::param::page_size() as u64,
            wait_channel: has_channel.then(|| channel.trim().chars().filter(|c| !c.is_control()).take(64).collect()),
        })
    }

    /// The process with this id, if it is the one that was started then.
    pub(crate) fn started_at(pid: u32, started: u64) -> Option<Self> {
        Self::of(pid).filter(|process| process.started == started && process.state != ProcessState::Ended)
    }
}

impl fmt::Display for ProcessInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.state)?;
        match &self.wait_channel {
            Some(channel) if self.state != ProcessState::Running => write!(f, " in {channel}"),
            _ => Ok(()),
        }
    }
}

/// Whether somebody else has good reason to hold a process still: a debugger, or the kernel that writes its core dump.
pub(crate) fn is_held(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).is_some_and(|value| value.trim() != "0");
    of("TracerPid:") || of("CoreDumping:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found() {
        let us = ProcessInfo::of(std::process::id()).unwrap();
        assert!(us.resident_bytes > 100 << 10 && us.state != ProcessState::Ended, "{us:?}");
        assert!(ProcessInfo::started_at(us.pid, us.started).is_some());
        assert!(ProcessInfo::started_at(us.pid, us.started + 1).is_none());
        assert!(ProcessInfo::of(u32::MAX).is_none() && !is_held(u32::MAX));
    }

    #[test]
    fn a_name_may_hold_anything() {
        let rest = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20 3";
        let parse = |stat: &str, channel| ProcessInfo::parse(7, stat, channel);
        let process = parse(&format!("7 (a) S (b) T {rest}"), "do_wait\n").unwrap();
        assert_eq!((process.started, process.state), (777, ProcessState::Stopped));
        assert_eq!(process.to_string(), "stopped in do_wait");
        assert_eq!(parse(&format!("7 (a) R {rest}"), "0").unwrap().to_string(), "running");
        for broken in ["", "7", "7 (a)", "7 (a) R 1 2"] {
            assert_eq!(parse(broken, ""), None, "{broken}");
        }
    }
}
