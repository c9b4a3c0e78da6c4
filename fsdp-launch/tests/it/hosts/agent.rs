//! A launcher that works with others, watched from outside.

use std::{
    fs,
    mem::ManuallyDrop,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt::set_socket_reuseaddr},
    process::{Pid, Signal, kill_process},
};

use crate::{TIMEOUT, hear_signals};

/// A port that nobody but who names it gets for as long as this program runs: a socket that does not listen holds it.
pub(crate) fn free_port() -> u16 {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    // As listeners have it, so that one may bind it too.
    set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Never closed.
    let held = ManuallyDrop::new(TcpListener::from(socket));
    held.local_addr().unwrap().port()
}

/// One launcher, whose output goes to a file.
pub(crate) struct Agent {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Agent {
    /// With `options`, and a script for its ranks.
    pub(crate) fn start(options: &[&str], script: &str) -> Self {
        hear_signals();
        let output = tempfile::NamedTempFile::new().unwrap();
        let file = fs::OpenOptions::new().append(true).open(output.path()).unwrap();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("fsdp-launch"));
        command.args(options).args(["/bin/sh", "-c", script]).env_remove("RUST_LOG");
        let child = command.stdout(file.try_clone().unwrap()).stderr(file).stdin(Stdio::null()).spawn().unwrap();
        let launcher = Pid::from_child(&child);
        std::thread::spawn(move || {
            sleep(TIMEOUT);
            kill_process(launcher, Signal::KILL).ok();
        });
        Agent { child, output }
    }

    pub(crate) fn text(&self) -> String {
        fs::read_to_string(self.output.path()).unwrap()
    }

    /// What the ranks printed so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.text().lines().filter(|line| line.starts_with("[rank ")).map(str::to_owned).collect()
    }

    /// Waits until the launcher and its ranks have printed `part` so often.
    pub(crate) fn wait_for(&self, part: &str, count: usize) {
        let start = Instant::now();
        while self.text().matches(part).count() < count {
            assert!(start.elapsed() < TIMEOUT, "{part:?} did not come {count} times: {}", self.text());
            sleep(Duration::from_millis(5));
        }
    }

    /// Waits until its ranks are in an attempt with `world` ranks, not before attempt `first`, as a script with
    /// [`PLACE`] prints it; which attempt that is. How many attempts come before depends on when hosts come.
    pub(crate) fn attempt_of(&self, world: u32, first: u32) -> u32 {
        let mut found = None;
        let start = Instant::now();
        while found.is_none() {
            let attempts = self.lines().into_iter().filter_map(|line| {
                let (_, place) = line.split_once(&format!("world {world} attempt "))?;
                place.split(' ').next()?.parse().ok()
            });
            found = attempts.filter(|&attempt: &u32| attempt >= first).max();
            assert!(start.elapsed() < TIMEOUT, "no attempt {first} or later of {world} ranks: {}", self.text());
            sleep(Duration::from_millis(5));
        }
        found.unwrap()
    }

    /// The numbers behind `pid ` in what was printed.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.lines().iter().filter_map(|line| line.split(" pid ").nth(1)?.parse().ok()).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The exit code, and all that was printed.
    pub(crate) fn finish(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < TIMEOUT, "the launcher did not end: {}", self.text());
            sleep(Duration::from_millis(5));
        };
        (status.code(), self.text())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Prints which attempt this is.
pub(crate) const PLACE: &str = "echo world $WORLD_SIZE attempt $FSDP_ATTEMPT restart $TORCHELASTIC_RESTART_COUNT";

/// `options` for all agents, as one text; the endpoint is added.
pub(crate) fn agents_of(options: &str, port: u16) -> Vec<String> {
    let mut all: Vec<String> = options.split(' ').map(str::to_owned).collect();
    all.push(format!("--rdzv-endpoint=localhost:{port}"));
    all
}

/// Starts the one that holds the rendezvous.
pub(crate) fn start_first(options: &[String], more: &[&str], script: &str) -> Agent {
    let agent = start(options, more, script);
    let endpoint = options.iter().find_map(|option| option.strip_prefix("--rdzv-endpoint=")).unwrap();
    let began = Instant::now();
    while TcpStream::connect(endpoint).is_err() {
        assert!(began.elapsed() < TIMEOUT, "nobody listens at {endpoint}");
        sleep(Duration::from_millis(2));
    }
    agent
}

pub(crate) fn start(options: &[String], more: &[&str], script: &str) -> Agent {
    let mut all: Vec<&str> = options.iter().map(String::as_str).collect();
    all.extend(more);
    Agent::start(&all, script)
}
