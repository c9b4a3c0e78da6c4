//! What the integration tests share: the workspace's programs, built, runs of them, and their traces.

pub mod near;
mod paths;
pub mod remains;
pub mod trace;
pub mod trajectory;
pub mod ways;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use paths::{golden, golden_flags, golden_flags_of, workspace};

/// The path of one of the workspace's programs, built in release mode. `FSDP_TESTS_PROGRAMS` names a directory where
/// they lie already, built as a test of devices needs them.
///
/// # Panics
/// When the build fails.
pub fn program(name: &str) -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        if let Some(built) = std::env::var_os("FSDP_TESTS_PROGRAMS") {
            return built.into();
        }
        // A test binary lies in <target>/<profile>/deps; wherever the target directory is, the programs go there too.
        let here = std::env::current_exe().unwrap_or_default();
        let target = here.ancestors().nth(3).unwrap_or(Path::new("target"));
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        // What cargo tells this test of its crate. The build script of ring runs again when that changes, and much is
        // compiled after it, twice a test.
        let of_this_crate = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this_crate)) {
            cargo.env_remove(name);
        }
        let status = cargo
            // What `cargo test --workspace` builds, with the same features: there nothing is compiled once more. (The
            // programs are built because their packages have tests that run them.)
            .args(["test", "--release", "--workspace", "--no-run"])
            .arg("--target-dir")
            .arg(target)
            .current_dir(workspace())
            .stdout(Stdio::null())
            .status();
        assert!(matches!(status, Ok(status) if status.success()), "can't build the programs: {status:?}");
        target.join("release")
    });
    dir.join(name)
}

/// What came of a run.
#[derive(Debug)]
pub struct Run {
    /// The exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it took.
    pub elapsed: Duration,
}

impl Run {
    /// The run, if it ended well.
    ///
    /// # Panics
    /// When it did not, with all that it printed.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// Standard error of a run that failed because each of its `ranks` ranks was refused, in words that have all of
    /// `parts`. The launcher ends the others soon after the first has failed: a rank that it has ended before it said
    /// anything need not be heard, as long as one was.
    ///
    /// # Panics
    /// When it did not fail, when one of them panicked, or has said something else.
    pub fn refused(self, ranks: usize, parts: &[&str]) -> String {
        let text = self.failed();
        assert!(!text.contains("panicked"), "{text}");
        let mut heard = 0;
        for rank in 0..ranks {
            // Further lines of one error have the prefix too.
            let prefix = format!("[rank {rank}]");
            let lines = text.lines().filter(|line| line.starts_with(&prefix)).collect::<Vec<_>>().join("\n");
            if lines.is_empty() && text.contains(&format!("rank {rank}: ended by SIGTERM")) {
                continue;
            }
            assert!(parts.iter().all(|part| lines.contains(part)), "{prefix}: {parts:?} not in\n{text}");
            heard += 1;
        }
        assert!(heard > 0, "no rank was heard:\n{text}");
        text
    }

    /// Standard error of a run that failed.
    ///
    /// # Panics
    /// When it did not fail.
    pub fn failed(self) -> String {
        assert!(self.code.is_some_and(|code| code != 0), "{self:?}");
        self.stderr
    }
}

/// Runs `fsdp-launch --nproc-per-node ranks program args`, in `dir`.
///
/// # Panics
/// When it can't be started, or does not end within two minutes.
pub fn launch(ranks: usize, program_name: &str, args: &[&str], dir: &Path) -> Run {
    let mut command = Command::new(program("fsdp-launch"));
    command.arg(format!("--nproc-per-node={ranks}")).arg(program(program_name)).args(args).current_dir(dir);
    run(command, Duration::from_secs(120))
}

/// Runs a command with a limit on its time.
///
/// # Panics
/// When it can't be started, or does not end in time.
pub fn run(mut command: Command, limit: Duration) -> Run {
    let start = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => panic!("{command:?}: {error}"),
    };
    let id = child.id().to_string();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output: Output = match receiver.recv_timeout(limit) {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => panic!("{command:?}: {error}"),
        Err(_) => {
            let _ = Command::new("kill").arg(&id).status();
            panic!("{command:?} did not end within {limit:?}")
        }
    };
    Run {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        elapsed: start.elapsed(),
    }
}
