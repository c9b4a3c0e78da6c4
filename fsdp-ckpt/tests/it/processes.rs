//! Ranks as processes: the test program starts itself for each rank, to run a role.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use fsdp_core::process_group::{Options, shm};
use fsdp_core::{ProcessGroup, RankEnv};

use crate::{async_save, disk_full, kills};

/// Nothing takes this long unless it hangs.
const HANG: Duration = Duration::from_secs(100);

/// Runs a role in a rank's process; without a role, does nothing.
#[test]
fn run_as_a_rank() {
    let Ok(role) = std::env::var("FSDP_TEST_ROLE") else { return };
    let root = std::env::var("FSDP_TEST_DIR").unwrap();
    let options = Options::default().with_timeout(Duration::from_secs(30));
    let group: ProcessGroup = shm::connect(&RankEnv::from_env().unwrap(), options).unwrap();
    match role.as_str() {
        "saves_repeatedly" => kills::saves_repeatedly(group, Path::new(&root)),
        "dies_while_saving" => async_save::dies_while_saving(group, Path::new(&root)),
        "saves_too_much" => disk_full::saves_too_much(&group, Path::new(&root)),
        other => panic!("no role {other}"),
    }
}

/// A job of several ranks. Dropping it kills them.
pub(crate) struct Job(Vec<Child>);

impl Job {
    /// Starts `ranks` processes after the shell code `shell`, such as `ulimit -f 1`.
    pub(crate) fn start(role: &str, root: &Path, ranks: usize, shell: &str) -> Self {
        // Jobs of other processes have other run ids.
        static PORT: AtomicU16 = AtomicU16::new(20_000);
        let port = PORT.fetch_add(1, Ordering::Relaxed).to_string();
        let start = |rank: usize| {
            Command::new("sh")
                .args(["-c", &format!("{shell}\nexec \"$0\" \"$@\"")])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "processes::run_as_a_rank", "--nocapture", "--test-threads=1"])
                .env("FSDP_TEST_ROLE", role)
                .env("FSDP_TEST_DIR", root)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("MASTER_PORT", &port)
                .env("TORCHELASTIC_RUN_ID", format!("ckpt test {}", std::process::id()))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        Job((0..ranks).map(start).collect())
    }

    /// Returns rank 0's stdout.
    pub(crate) fn lines(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0[0].stdout.take().unwrap())
    }

    /// Kills every rank.
    pub(crate) fn kill(&mut self) {
        self.0.iter_mut().for_each(|child| child.kill().unwrap());
        for child in &mut self.0 {
            child.wait().unwrap();
        }
    }

    /// Returns what each rank printed after "says: ", or how it ended.
    pub(crate) fn outcomes(mut self) -> Vec<String> {
        let started = Instant::now();
        let said = |child: &mut Child| {
            let status = wait(child, started);
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            match text.lines().find_map(|line| line.split_once("says: ")) {
                Some((_, said)) => said.to_string(),
                None => format!("{}: {text}", status.map_or("hung".into(), |status| status.to_string())),
            }
        };
        self.0.iter_mut().map(said).collect()
    }
}

/// Waits for a process; `None` if it hangs.
fn wait(child: &mut Child, started: Instant) -> Option<ExitStatus> {
    while started.elapsed() < HANG {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    None
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the number at the end of the next line with `word`; `None` at the end of the output.
pub(crate) fn next_number(lines: &mut impl BufRead, word: &str) -> Option<usize> {
    for line in lines.lines() {
        if let Some((_, rest)) = line.unwrap().split_once(word) {
            return Some(rest.trim().parse().unwrap());
        }
    }
    None
}
