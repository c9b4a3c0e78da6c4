//! Ranks as processes: a test program runs itself again for each rank, with the name of a role.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The environment variable with a rank's role.
pub const ROLE: &str = "FSDP_TEST_ROLE";

/// A limit that only a hang exceeds.
const HANG: Duration = Duration::from_secs(240);

/// Returns a new port for each job of this process. Other processes have other run ids.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the command of a rank: the test `entry` of this program, in a role.
///
/// # Panics
/// If this program's path is unknown.
pub fn command(entry: &str, role: &str, (rank, size): (usize, usize), port: u16) -> Command {
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("this program's path: {error}"));
    let mut command = Command::new(program);
    command.args(["--exact", entry, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string()).env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", format!("test {}", std::process::id()));
    command
}

/// Processes of a job. Dropping it kills them.
#[derive(Debug)]
pub struct Job(pub Vec<Child>);

impl Job {
    /// Starts the processes with captured output.
    ///
    /// # Panics
    /// If one cannot be started.
    pub fn start(commands: impl IntoIterator<Item = Command>) -> Self {
        let start = |mut command: Command| match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => panic!("{command:?}: {error}"),
        };
        Job(commands.into_iter().map(start).collect())
    }

    /// Returns the text that each rank printed after "says: ", or its exit status and output if it failed.
    pub fn outcomes(mut self) -> Vec<String> {
        let started = Instant::now();
        self.0.iter_mut().map(|child| outcome(child, started)).collect()
    }

    /// Kills all processes.
    pub fn kill(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}

fn outcome(child: &mut Child, started: Instant) -> String {
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if started.elapsed() < HANG => sleep(Duration::from_millis(5)),
            other => return format!("it hung: {other:?}"),
        }
    };
    let mut output = Vec::new();
    let pipes: [Option<Box<dyn Read>>; 2] =
        [child.stdout.take().map(|pipe| Box::new(pipe) as _), child.stderr.take().map(|pipe| Box::new(pipe) as _)];
    for mut pipe in pipes.into_iter().flatten() {
        let _ = pipe.read_to_end(&mut output);
    }
    let text = String::from_utf8_lossy(&output);
    match text.lines().find_map(|line| line.split_once("says: ")) {
        Some((_, said)) if status.success() => said.to_string(),
        _ => format!("{status}: {text}"),
    }
}
