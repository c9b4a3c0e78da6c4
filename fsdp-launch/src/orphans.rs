//! What ranks started and what then left their process groups (`setsid`): it ends with them too.
//!
//! It is known by a variable in the environment of each rank, which names the launch.

use std::{
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// How long what was killed may take to be gone.
const LIMIT: Duration = Duration::from_secs(2);

/// The variable that tells what a rank has started from what anybody else has: the launch, by an id that no other has, whatever host, container or user
/// it is of.
pub(crate) const MARK: &str = "FSDP_LAUNCH_ID";

/// Kills the orphans of ranks of launch `id` that have ended. They are this process's children, because it is the subreaper of its descendants.
pub(crate) fn end(id: &str) {
    let (mark, until) = (format!("{MARK}={id}"), Instant::now() + LIMIT);
    loop {
        let orphans: Vec<Pid> = children().into_iter().filter(|pid| has_mark(*pid, &mark)).collect();
        if orphans.is_empty() {
            return;
        }
        for &pid in &orphans {
            tracing::debug!(pid = pid.as_raw_pid(), "killing what a rank left behind");
            // Where it has ended meanwhile there is nothing to kill.
            kill_process(pid, Signal::KILL).ok();
        }
        // What they had started is ours when they are gone, not before, which may take a while: memory has to be given back.
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

/// Reaps orphans that have ended by themselves. Of `own`, the launcher's other children, somebody else wants to know how they ended.
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

fn has_mark(pid: Pid, mark: &str) -> bool {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap_or_default();
    environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())
}
