//! Process states, from `/proc`.

use std::{fmt, fs};

use serde::{Deserialize, Serialize};

/// State of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessState {
    /// Running, or ready to run.
    Running,
    /// Waiting.
    Sleeping,
    /// In an uninterruptible wait: no signal reaches it.
    InKernel,
    /// Stopped, for example by SIGSTOP.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// Ended.
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

/// State of a process at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessInfo {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks: field 22 of `/proc/PID/stat`.
    pub started: u64,
    /// State of the main thread.
    pub state: ProcessState,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Kernel function that the main thread waits in, if readable.
    pub wait_channel: Option<String>,
}

impl ProcessInfo {
    /// Reads a process, which may be a zombie.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let channel = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        Self::parse(pid, &stat, &channel)
    }

    fn parse(pid: u32, stat: &str, channel: &str) -> Option<Self> {
        // The second field is the name in parentheses, which may contain any character.
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

    /// Returns the process if it has this start time and has not ended.
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

/// Returns whether a debugger, or the kernel during a core dump, holds the process.
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
    fn reads_this_process() {
        let us = ProcessInfo::of(std::process::id()).unwrap();
        assert!(us.resident_bytes > 100 << 10 && us.state != ProcessState::Ended, "{us:?}");
        assert!(ProcessInfo::started_at(us.pid, us.started).is_some());
        assert!(ProcessInfo::started_at(us.pid, us.started + 1).is_none());
        assert!(ProcessInfo::of(u32::MAX).is_none() && !is_held(u32::MAX));
    }

    #[test]
    fn parses_any_process_name() {
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
