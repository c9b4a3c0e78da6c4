//! Processes that ranks started and that left their process groups by `setsid`. They end with the ranks.
//!
//! The environment variable [`LAUNCH_ID`] identifies them. Signals to a rank's process group do not reach them, and the
//! launcher would otherwise leave processes that hold ports, GPUs and memory.

use std::{
    fs, io,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::report::process::{ProcessInfo, ProcessState};

/// Time for killed processes to disappear.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time of an exec, during which a process has an empty environment.
const EXEC_TIMEOUT: Duration = Duration::from_millis(100);

/// Variable with a unique id of the launch, which all descendants of a rank inherit.
pub(crate) const LAUNCH_ID: &str = "FSDP_LAUNCH_ID";

/// Kills the orphans of launch `id`. The launcher is a subreaper, so orphans are its children. `own` lists its other
/// children.
pub(crate) fn kill(id: &str, own: &[Pid]) {
    let (mark, until) = (format!("{LAUNCH_ID}={id}"), Instant::now() + KILL_TIMEOUT);
    // Start of the time without orphans.
    let mut quiet: Option<Instant> = None;
    loop {
        let (mut orphans, mut is_executing) = (Vec::new(), false);
        for pid in children().into_iter().filter(|pid| !own.contains(pid)) {
            match is_of(pid, &mark) {
                Some(true) => orphans.push(pid),
                Some(false) => {}
                None => is_executing = true,
            }
        }
        if orphans.is_empty() {
            // Scan twice: the list of children may miss some while others end.
            let is_second = quiet.is_some();
            let since = *quiet.get_or_insert_with(Instant::now);
            if is_second && !(is_executing && since.elapsed() < EXEC_TIMEOUT) {
                return;
            }
            sleep(Duration::from_millis(1));
            continue;
        }
        quiet = None;
        for &pid in &orphans {
            tracing::debug!(pid = pid.as_raw_pid(), "killing what a rank left behind");
            // The process may have ended.
            kill_process(pid, Signal::KILL).ok();
        }
        // Children of an orphan become ours only once it is gone, which may take a while: the kernel first frees its
        // memory.
        for pid in orphans {
            while matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None)) {
                if Instant::now() > until {
                    return;
                }
                sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Reaps orphans that have ended. `own` lists children that have other waiters.
pub(crate) fn reap(own: &[Pid]) {
    for pid in children() {
        if !own.contains(&pid) {
            waitpid(Some(pid), WaitOptions::NOHANG).ok();
        }
    }
}

/// Returns the children of all threads of this process.
fn children() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    texts
        .flat_map(|text| text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect::<Vec<_>>())
        .collect()
}

/// Returns whether a process belongs to the launch; `None` during an exec.
fn is_of(pid: Pid, mark: &str) -> Option<bool> {
    let pid = pid.as_raw_pid().unsigned_abs();
    let is_alive = || ProcessInfo::of(pid).is_some_and(|process| process.state != ProcessState::Ended);
    has_mark(fs::read(format!("/proc/{pid}/environ")), is_alive, mark)
}

/// The environment is empty during an exec.
fn has_mark(environment: io::Result<Vec<u8>>, is_alive: impl FnOnce() -> bool, mark: &str) -> Option<bool> {
    match environment {
        Ok(empty) if empty.is_empty() && is_alive() => None,
        Ok(environment) => Some(environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())),
        // The process is gone, or another user's.
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_in_exec_is_checked_again() {
        let look = |environment: io::Result<&[u8]>, is_alive| {
            has_mark(environment.map(<[u8]>::to_vec), || is_alive, "FSDP_LAUNCH_ID=1")
        };
        assert_eq!(look(Ok(b"A=b\0FSDP_LAUNCH_ID=1\0"), true), Some(true));
        assert_eq!(look(Ok(b"A=b\0FSDP_LAUNCH_ID=12\0"), true), Some(false));
        assert_eq!(look(Ok(b""), true), None);
        assert_eq!(look(Ok(b""), false), Some(false));
        assert_eq!(look(Err(io::ErrorKind::PermissionDenied.into()), true), Some(false));
    }
}
