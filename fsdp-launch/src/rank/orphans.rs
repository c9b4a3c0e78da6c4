//! What ranks started and what then left their process groups (`setsid`): it ends with them too.
//!
//! It is known by a variable in the environment of each rank, which names the launch.

use std::{
    fs, io,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::report::process::{ProcessInfo, ProcessState};

/// How long what was killed may take to be gone.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a process may take to execute a program: its environment is empty meanwhile.
const EXEC_TIMEOUT: Duration = Duration::from_millis(100);

/// The variable that tells what a rank has started from what anybody else has: the launch, by an id that no other has,
/// whatever host, container or user it is of.
pub(crate) const LAUNCH_ID: &str = "FSDP_LAUNCH_ID";

/// Kills the orphans of ranks of launch `id` that have ended. They are this process's children, because it is the
/// subreaper of its descendants; of `own`, its other children, none is looked at.
pub(crate) fn kill(id: &str, own: &[Pid]) {
    let (mark, until) = (format!("{LAUNCH_ID}={id}"), Instant::now() + KILL_TIMEOUT);
    // Since when nothing was found.
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
            // Looked at twice: the list of children may lack some while others end.
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
            // Where it has ended meanwhile there is nothing to kill.
            kill_process(pid, Signal::KILL).ok();
        }
        // What they had started is ours when they are gone, not before, which may take a while: memory has to be given
        // back.
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

/// Reaps orphans that have ended by themselves. Of `own`, the launcher's other children, somebody else wants to know
/// how they ended.
pub(crate) fn reap(own: &[Pid]) {
    for pid in children() {
        if !own.contains(&pid) {
            waitpid(Some(pid), WaitOptions::NOHANG).ok();
        }
    }
}

/// The children of all threads of this process.
fn children() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    texts
        .flat_map(|text| text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect::<Vec<_>>())
        .collect()
}

/// Whether a process has the mark; nothing where that can't be known yet.
fn is_of(pid: Pid, mark: &str) -> Option<bool> {
    let pid = pid.as_raw_pid().unsigned_abs();
    let is_alive = || ProcessInfo::of(pid).is_some_and(|process| process.state != ProcessState::Ended);
    has_mark(fs::read(format!("/proc/{pid}/environ")), is_alive, mark)
}

/// A process that is executing a program has no environment for a moment.
fn has_mark(environment: io::Result<Vec<u8>>, is_alive: impl FnOnce() -> bool, mark: &str) -> Option<bool> {
    match environment {
        Ok(empty) if empty.is_empty() && is_alive() => None,
        Ok(environment) => Some(environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())),
        // It is gone, or another user's.
        Err(_) => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_executes_a_program_is_looked_at_again() {
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
