//! A launcher process of a test with several launchers.

use std::{
    fs,
    mem::ManuallyDrop,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt::set_socket_reuseaddr},
    process::{Pid, Signal, kill_process},
};

use crate::{hear_signals, kill_after_timeout, wait_for};

/// Returns a port that stays reserved by a socket that does not listen.
pub(crate) fn free_port() -> u16 {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    // With SO_REUSEADDR, a listener can bind the port too.
    set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let held = ManuallyDrop::new(TcpListener::from(socket));
    held.local_addr().unwrap().port()
}

/// A launcher whose output goes to a file.
pub(crate) struct Agent {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Agent {
    /// Starts a launcher with `options`, and a script as its ranks.
    pub(crate) fn start(options: &[&str], script: &str) -> Self {
        hear_signals();
        let output = tempfile::NamedTempFile::new().unwrap();
        let file = fs::OpenOptions::new().append(true).open(output.path()).unwrap();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
        command.args(options).args(["/bin/sh", "-c", script]).env_remove("RUST_LOG");
        let child = command.stdout(file.try_clone().unwrap()).stderr(file).stdin(Stdio::null()).spawn().unwrap();
        kill_after_timeout(&child);
        Agent { child, output }
    }

    pub(crate) fn text(&self) -> String {
        fs::read_to_string(self.output.path()).unwrap()
    }

    /// Returns the ranks' lines so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.text().lines().filter(|line| line.starts_with("[rank ")).map(str::to_owned).collect()
    }

    /// Waits until `part` was printed `count` times.
    pub(crate) fn wait_for(&self, part: &str, count: usize) {
        let is_printed = || (self.text().matches(part).count() >= count).then_some(());
        wait_for(is_printed, || format!("{part:?} did not come {count} times: {}", self.text()));
    }

    /// Waits for an attempt, from `first` on, with `world` ranks, and returns its number. The script must run
    /// [`PLACE`]. The number of earlier attempts depends on when hosts join.
    pub(crate) fn attempt_of(&self, world: u32, first: u32) -> u32 {
        let find = || {
            let attempts = self.lines().into_iter().filter_map(|line| {
                let (_, place) = line.split_once(&format!("world {world} attempt "))?;
                place.split(' ').next()?.parse().ok()
            });
            attempts.filter(|&attempt: &u32| attempt >= first).max()
        };
        wait_for(find, || format!("no attempt {first} or later of {world} ranks: {}", self.text()))
    }

    /// Returns the numbers after ` pid ` in the output.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.lines().iter().filter_map(|line| line.split(" pid ").nth(1)?.parse().ok()).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end. Returns the exit code and the output.
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        let (child, output) = (&mut self.child, &self.output);
        let text = || format!("the launcher did not end: {}", fs::read_to_string(output.path()).unwrap());
        let status = wait_for(|| child.try_wait().unwrap(), text);
        (status.code(), self.text())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Prints the attempt.
pub(crate) const PLACE: &str = "echo world $WORLD_SIZE attempt $FSDP_ATTEMPT restart $TORCHELASTIC_RESTART_COUNT";

/// Splits `options` and adds the endpoint.
pub(crate) fn agents_of(options: &str, port: u16) -> Vec<String> {
    let mut all: Vec<String> = options.split(' ').map(str::to_owned).collect();
    all.push(format!("--rdzv-endpoint=localhost:{port}"));
    all
}

/// Starts the launcher that serves the rendezvous.
pub(crate) fn start_first(options: &[String], more: &[&str], script: &str) -> Agent {
    let agent = start(options, more, script);
    let endpoint = options.iter().find_map(|option| option.strip_prefix("--rdzv-endpoint=")).unwrap();
    wait_for(|| TcpStream::connect(endpoint).ok(), || format!("no launcher listens on {endpoint}"));
    agent
}

pub(crate) fn start(options: &[String], more: &[&str], script: &str) -> Agent {
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(more);
    Agent::start(&all, script)
}
