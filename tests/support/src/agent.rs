//! A process that runs during a test.

use std::fs;
use std::mem::ManuallyDrop;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;

/// Much longer than a test takes, even with PyTorch on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// Returns a port that stays reserved by a socket that does not listen.
///
/// # Panics
/// If the system has none.
pub fn free_port() -> u16 {
    let reserve = || {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // With SO_REUSEADDR, a listener can bind the port too.
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
        ManuallyDrop::new(TcpListener::from(socket)).local_addr()
    };
    reserve().unwrap_or_else(|error| panic!("no port: {error}")).port()
}

/// A launcher whose output goes to a file. Dropping it kills the launcher.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    output: NamedTempFile,
}

impl Agent {
    /// Starts a launcher.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(mut command: Command) -> Self {
        let mut start = || {
            let output = NamedTempFile::new()?;
            let file = fs::OpenOptions::new().append(true).open(output.path())?;
            let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn()?;
            Ok::<_, std::io::Error>(Agent { child, output })
        };
        start().unwrap_or_else(|error| panic!("a launcher can't be started: {error}"))
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output so far.
    pub fn text(&self) -> String {
        crate::read_text(self.output.path())
    }

    /// Returns the ranks' lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.text().lines().filter(|line| line.starts_with("[rank ")).map(str::to_owned).collect()
    }

    /// Returns the numbers after ` pid ` in the ranks' lines.
    pub fn pids(&self) -> Vec<i32> {
        self.lines().iter().filter_map(|line| line.split(" pid ").nth(1)?.parse().ok()).collect()
    }

    /// Polls until there is a value.
    ///
    /// # Panics
    /// After ten minutes, with `what` and the output.
    pub fn poll<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(value) = poll() {
                return value;
            }
            assert!(began.elapsed() < LIMIT, "{what}:\n{}", self.text());
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the output contains `part` `count` times.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn wait_for(&self, part: &str, count: usize) {
        let is_there = || (self.text().matches(part).count() >= count).then_some(());
        self.poll(&format!("{part:?} was not printed {count} times"), is_there);
    }

    /// Returns whether the launcher has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// If the launcher has ended.
    pub fn signal(&self, signal: Signal) {
        let sent = kill_process(Pid::from_child(&self.child), signal);
        assert!(sent.is_ok(), "{sent:?}: {}", self.text());
    }

    /// Kills the launcher.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the end. Returns the exit code and the output.
    ///
    /// # Panics
    /// If the launcher does not end.
    pub fn finish(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        while !self.has_ended() {
            assert!(began.elapsed() < LIMIT, "the launcher did not end:\n{}", self.text());
            sleep(Duration::from_millis(5));
        }
        (self.child.wait().ok().and_then(|status| status.code()), self.text())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}
