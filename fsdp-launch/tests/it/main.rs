//! Tests of the `fsdp-launch` command with shell scripts as ranks.
#![allow(clippy::unwrap_used, missing_docs)]

mod deploy;
mod docs;
mod ending;
mod environment;
mod heartbeats;
mod hosts;
mod logs;
mod options;
mod output;
mod pmi;
mod program;
mod restarts;
mod status;
mod strangers;

use std::{
    ffi::OsStr,
    fmt::Display,
    fs,
    io::{BufRead, BufReader, Lines, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Once, atomic::AtomicBool},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// A limit that only a hang exceeds.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Handles signals that this process ignores, as a background job does, so that child processes start with the default
/// action.
fn hear_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            // Other signals keep their default: Ctrl-C ends the tests.
            if ignored & (1 << (signal - 1)) != 0 {
                signal_hook::flag::register(signal, Arc::<AtomicBool>::default()).unwrap();
            }
        }
    });
}

/// Returns `fsdp-launch` with `args` and a time limit.
fn launcher(args: &[&str]) -> assert_cmd::Command {
    hear_signals();
    let mut command = assert_cmd::Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
    command.timeout(TIMEOUT).args(args);
    let build = ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"];
    for name in ["RUST_LOG", "RAYON_NUM_THREADS", "OMP_NUM_THREADS", "GLIBC_TUNABLES"].into_iter().chain(build) {
        command.env_remove(name);
    }
    command
}

/// Returns a launch of `ranks` ranks of a shell script.
fn ranks(ranks: usize, script: &str) -> assert_cmd::Command {
    launcher(&["--nproc-per-node", &ranks.to_string(), "/bin/sh", "-c", script])
}

/// Runs a command. Returns exit code, stdout and stderr.
fn finish(command: &mut assert_cmd::Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Removes the lines with the time of a failure.
fn without_times(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with("at 20")).map(|line| format!("{line}\n")).collect()
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// Writes an executable from another process: a child that another test forks meanwhile would inherit an open file, and
/// the kernel does not execute files that are open for writing.
fn executable(path: PathBuf, content: impl AsRef<[u8]>) -> PathBuf {
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(&path).stdin(Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    writer.stdin.take().unwrap().write_all(content.as_ref()).unwrap();
    assert!(writer.wait().unwrap().success());
    path
}

/// A launcher that is observed while it runs.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        Running::of(assert_cmd::cargo::cargo_bin!("fsdp-launch"), args)
    }

    fn of(program: impl AsRef<OsStr>, args: &[&str]) -> Self {
        hear_signals();
        let mut child = Command::new(program).args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        kill_after_timeout(&child);
        Running { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("the launcher ended").unwrap()
    }

    /// Reads `count` lines, and returns the number at the end of each.
    fn pids(&mut self, count: usize) -> Vec<i32> {
        (0..count).map(|_| self.line().rsplit(' ').next().unwrap().parse().unwrap()).collect()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(mut self) -> ExitStatus {
        wait_for(|| self.child.try_wait().unwrap(), || "the launcher did not end")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Returns whether a process runs. A zombie does not count, because in a container it may never be reaped.
fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with(['Z', 'X']))
}

fn assert_gone(pids: &[i32]) {
    for pid in pids {
        assert!(!is_alive(*pid), "process {pid} is still there");
    }
}

fn assert_gone_soon(pids: &[i32]) {
    wait_until("processes are still there", || !pids.iter().any(|&pid| is_alive(pid)));
}

/// Polls until there is a value. After the time limit, fails with the message of `what`.
fn wait_for<T, W: Display>(mut poll: impl FnMut() -> Option<T>, what: impl Fn() -> W) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(start.elapsed() < TIMEOUT, "{}", what());
        sleep(Duration::from_millis(5));
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(|| done().then_some(()), || what);
}

/// Kills a launcher that exceeds the time limit, which also ends the reading of its output.
fn kill_after_timeout(launcher: &Child) {
    let launcher = Pid::from_child(launcher);
    std::thread::spawn(move || {
        sleep(TIMEOUT);
        kill_process(launcher, Signal::KILL).ok();
    });
}
