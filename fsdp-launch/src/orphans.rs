//! What ranks started and what then left their process groups (`setsid`): it ends with them too.
//!
//! It is known by the variable that tells each rank where its board is, which names the launcher.

use std::{
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_core::heartbeat;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// How long what was killed may take to be gone.
const LIMIT: Duration = Duration::from_secs(2);

/// How an environment variable of all ranks of this launcher begins, and of what they start.
pub(crate) fn mark() -> String {
    format!("{}=/proc/{}/", heartbeat::VARIABLE, std::process::id())
}

/// Kills the orphans of ranks that have ended. They are this process's children, because it is the subreaper of its descendants.
pub(crate) fn end() {
    let (mark, until) = (mark(), Instant::now() + LIMIT);
    loop {
        let orphans: Vec<Pid> = children().into_iter().filter(|pid| has_mark(*pid, &mark)).collect();
        if orphans.is_empty() || Instant::now() > until {
            return;
        }
        for pid in orphans {
            tracing::debug!(pid = pid.as_raw_pid(), "killing what a rank left behind");
            // Where it has ended meanwhile there is nothing to kill.
            kill_process(pid, Signal::KILL).ok();
            waitpid(Some(pid), WaitOptions::NOHANG).ok();
        }
        // What they had started is ours now.
        sleep(Duration::from_millis(2));
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
    environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(mark.as_bytes()))
}
