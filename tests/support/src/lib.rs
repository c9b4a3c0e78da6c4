//! Support for this workspace's tests: builds and runs its programs, and reads the traces and metrics that they write.
//!
//! The crate depends on fsdp-core only, so that the tests of fsdp-core and fsdp-launch do not compile Candle.

pub mod combinations;
pub mod conformance;
pub mod leftovers;
pub mod tolerance;
pub mod trace;
pub mod trajectory;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns the workspace's root directory.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."))
}

/// Returns the directory of a model with recorded PyTorch FSDP2 runs, or a file beside it.
pub fn golden(name: &str) -> PathBuf {
    workspace().join("tests/golden").join(name)
}

/// Returns the `train` flags that repeat a recorded run of 20 steps, except `--batch-size`.
///
/// All ranks together take four sequences a step, or six if the model has no `tokens.bin` of its own.
pub fn golden_flags(name: &str) -> Vec<String> {
    golden_flags_of(name, 20)
}

/// Returns [`golden_flags`] for another number of steps.
pub fn golden_flags_of(name: &str, steps: usize) -> Vec<String> {
    let model = golden(name).display().to_string();
    let own = golden(name).join("tokens.bin");
    let tokens = if own.exists() { own } else { golden("tokens.bin") };
    let settings = "--seq-len 32 --lr 1e-3 --weight-decay 0.1 --clip-grad-norm 1.0 \
        --lr-schedule constant --warmup-steps 0";
    let mut flags = vec!["--data".to_string(), tokens.display().to_string(), "--model".into(), model];
    flags.extend(settings.split(' ').map(String::from));
    flags.extend(["--steps".into(), steps.to_string()]);
    if name == "bert_tiny" {
        // `MASK` of tests/golden/record.py.
        flags.extend(["--mask-token", "131"].map(String::from));
    }
    flags
}

/// Returns the path of one of the workspace's programs, built in release mode on the first call.
///
/// `FSDP_TESTS_PROGRAMS` names a directory with programs that are already built.
///
/// # Panics
/// If the build fails.
pub fn program(name: &str) -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        if let Some(built) = std::env::var_os("FSDP_TESTS_PROGRAMS") {
            return built.into();
        }
        // Test binaries are in <target>/<profile>/deps. The programs go into the same target directory.
        let here = std::env::current_exe().unwrap_or_default();
        let target = here.ancestors().nth(3).unwrap_or(Path::new("target"));
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        // Cargo sets variables about this crate for its tests. With other values the build script of ring would run
        // again, and its dependents would be recompiled.
        let of_this_crate = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this_crate)) {
            cargo.env_remove(name);
        }
        let status = cargo
            // The same packages and features as `cargo test --workspace`, so that nothing is compiled twice. Cargo
            // builds the programs because their packages have integration tests.
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

/// A finished process and its output.
#[derive(Debug)]
pub struct Run {
    /// The exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Wall-clock time from start to exit.
    pub elapsed: Duration,
}

impl Run {
    /// Asserts that the run succeeded and returns it.
    ///
    /// # Panics
    /// If it failed, with its output.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// Asserts that the run failed and returns its standard error.
    ///
    /// # Panics
    /// If it succeeded.
    pub fn failed(self) -> String {
        assert!(self.code.is_some_and(|code| code != 0), "{self:?}");
        self.stderr
    }

    /// Asserts that each of `ranks` ranks failed with a message that contains all of `parts`, and returns standard
    /// error.
    ///
    /// The launcher ends the other ranks soon after the first failure. A rank that it ended may have no message, but
    /// one rank must have one.
    ///
    /// # Panics
    /// If the run succeeded, or a rank panicked or failed with another message.
    pub fn refused(self, ranks: usize, parts: &[&str]) -> String {
        let text = self.failed();
        assert!(!text.contains("panicked"), "{text}");
        let mut messages = 0;
        for rank in 0..ranks {
            // Each line of a message has the prefix.
            let prefix = format!("[rank {rank}]");
            let lines = text.lines().filter(|line| line.starts_with(&prefix)).collect::<Vec<_>>().join("\n");
            if lines.is_empty() && text.contains(&format!("rank {rank}: ended by SIGTERM")) {
                continue;
            }
            assert!(parts.iter().all(|part| lines.contains(part)), "{prefix}: {parts:?} not in\n{text}");
            messages += 1;
        }
        assert!(messages > 0, "no rank has a message:\n{text}");
        text
    }
}

/// Runs `fsdp-launch --nproc-per-node=RANKS PROGRAM ARGS...` in `dir`.
///
/// # Panics
/// If it cannot be started or does not end within two minutes.
pub fn launch(ranks: usize, program_name: &str, args: &[&str], dir: &Path) -> Run {
    let mut command = Command::new(program("fsdp-launch"));
    command.arg(format!("--nproc-per-node={ranks}")).arg(program(program_name)).args(args).current_dir(dir);
    run(command, Duration::from_secs(120))
}

/// Runs a command to its end and captures its output.
///
/// # Panics
/// If it cannot be started or does not end within `limit`.
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
