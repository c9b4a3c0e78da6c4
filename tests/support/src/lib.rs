//! Support for this workspace's tests: builds and runs its programs, and reads the traces and metrics that they write.
//!
//! The crate depends on fsdp-core only, so that the tests of fsdp-core and fsdp-launch do not compile Candle.

pub mod agent;
pub mod combinations;
pub mod conformance;
pub mod heap;
pub mod hub;
pub mod leftovers;
pub mod need;
pub mod ranks;
pub mod simulated;
pub mod tolerance;
pub mod trace;
pub mod trajectory;
pub mod two_jobs;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};

use tracing::subscriber::NoSubscriber;
use trajectory::Trajectory;

/// Returns the workspace's root directory.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."))
}

/// Returns the directory of a model with recorded PyTorch FSDP2 runs, or a file beside it.
pub fn golden(name: &str) -> PathBuf {
    workspace().join("tests/golden").join(name)
}

/// Returns the code blocks in `language` of a Markdown document, without indentation.
///
/// # Panics
/// If the document cannot be read.
pub fn code_blocks(document: &str, language: &str) -> Vec<String> {
    let text = read_text(&workspace().join(document));
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let open = format!("```{language}");
    let blocks = lines.split(|line| **line == *open).skip(1);
    blocks
        .map(|rest| rest.iter().take_while(|line| **line != "```").map(|line| format!("{line}\n")).collect())
        .collect()
}

/// Returns source code without the white space and the trailing commas by which rustfmt may change it.
pub fn without_layout(source: &str) -> String {
    let mut text: String = source.split_whitespace().collect();
    for close in [")", "]", "}"] {
        text = text.replace(&format!(",{close}"), close);
    }
    text
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

/// Returns the `--flag value` pairs without the flags in `given`. `--sft` and `--dpo` also remove `--data`.
pub fn not_given(pairs: &[String], given: &[&str]) -> Vec<String> {
    let is_given = |flag: &str| {
        given.contains(&flag) || flag == "--data" && ["--sft", "--dpo"].iter().any(|own| given.contains(own))
    };
    pairs.chunks(2).filter(|pair| !is_given(&pair[0])).flatten().cloned().collect()
}

/// Copies a recorded model's configuration, weights and tokens into a new directory.
///
/// # Panics
/// If a file cannot be copied.
pub fn copy_golden(name: &str, to: &Path) {
    let copied = fs::create_dir_all(to).and_then(|()| {
        let own = golden(name).join("tokens.bin");
        let tokens = if own.exists() { own } else { golden("tokens.bin") };
        fs::copy(golden(name).join("config.json"), to.join("config.json"))?;
        fs::copy(golden(name).join("model.safetensors"), to.join("model.safetensors"))?;
        fs::copy(tokens, to.join("tokens.bin"))
    });
    assert!(copied.is_ok(), "{name} to {}: {copied:?}", to.display());
}

/// Returns the names in a directory, sorted; none if the directory is missing.
pub fn file_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the names and contents of the files in a directory.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let content = |name: &String| fs::read(dir.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    file_names(dir).into_iter().map(|name| (name.clone(), content(&name))).collect()
}

/// Replaces text in a file.
///
/// # Panics
/// If the text is not in the file, or the file cannot be read or written.
pub fn edit_file(path: &Path, from: &str, to: &str) {
    let text = read_text(path);
    assert!(text.contains(from), "{from:?} is not in {}", path.display());
    let written = fs::write(path, text.replace(from, to));
    assert!(written.is_ok(), "{}: {written:?}", path.display());
}

/// Reads a text file.
///
/// # Panics
/// If it cannot be read.
pub fn read_text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads a file with a JSON value on each line, such as `train --metrics` writes.
///
/// # Panics
/// If it cannot be read or a line is not JSON.
pub fn json_lines(path: &Path) -> Vec<serde_json::Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    read_text(path).lines().map(parse).collect()
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
            let has_message = parts.iter().all(|part| lines.contains(part));
            // On a busy host, it may have printed how it starts, and no message yet.
            if !has_message && text.contains(&format!("rank {rank}: ended by SIGTERM")) {
                continue;
            }
            assert!(has_message, "{prefix}: {parts:?} not in\n{text}");
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

/// Runs a shell script as each of `ranks` ranks. `$0` is the path of `train`.
///
/// # Panics
/// As [`launch`].
pub fn launch_script(ranks: usize, script: &str, dir: &Path) -> Run {
    let mut command = Command::new(program("fsdp-launch"));
    command.arg(format!("--nproc-per-node={ranks}")).args(["/bin/sh", "-c", script]).arg(program("train"));
    command.current_dir(dir);
    run(command, Duration::from_secs(120))
}

/// Runs `train` on `ranks` ranks. Whitespace separates its flags.
///
/// # Panics
/// As [`launch`].
pub fn train(ranks: usize, flags: &str, dir: &Path) -> Run {
    launch(ranks, "train", &flags.split_whitespace().collect::<Vec<_>>(), dir)
}

/// Appends `flags` to `--flag value` pairs. A flag in `flags` replaces its pair.
pub fn merge_flags(defaults: &str, flags: &str) -> String {
    let given: Vec<&str> = flags.split_whitespace().collect();
    let defaults: Vec<String> = defaults.split_whitespace().map(String::from).collect();
    let kept = not_given(&defaults, &given);
    kept.iter().map(String::as_str).chain(given).collect::<Vec<_>>().join(" ")
}

/// Runs `train` as a recorded run did. Flags in `flags` replace the recorded ones.
///
/// The ranks share the recorded sequences of a step, and metrics are in `metrics.jsonl`, unless `flags` says otherwise.
///
/// # Panics
/// As [`launch`].
pub fn train_golden(name: &str, ranks: usize, flags: &str, dir: &Path) -> Run {
    let sequences = if golden(name).join("tokens.bin").exists() { 4 } else { 6 };
    let given: Vec<&str> = flags.split_whitespace().collect();
    let mut defaults = golden_flags(name);
    defaults.extend(["--batch-size".into(), (sequences / ranks).to_string()]);
    defaults.extend(["--metrics", "metrics.jsonl"].map(String::from));
    let kept = not_given(&defaults, &given);
    let args: Vec<&str> = kept.iter().map(String::as_str).chain(given).collect();
    launch(ranks, "train", &args, dir)
}

/// Runs [`train_golden`] and returns its losses and gradient norms.
///
/// # Panics
/// As [`launch`], or if the run fails.
pub fn golden_trajectory(name: &str, ranks: usize, flags: &str, dir: &Path) -> Trajectory {
    train_golden(name, ranks, flags, dir).ok();
    Trajectory::of_metrics(&dir.join("metrics.jsonl"))
}

/// Converts a checkpoint to `fsdp` or `torch-dcp` files of three ranks, or to `hf`. More flags may follow the format.
///
/// # Panics
/// If the conversion fails.
pub fn convert(from: &Path, to: &Path, format: &str, dir: &Path) {
    let mut convert = Command::new(program("fsdp-ckpt"));
    convert.arg("convert").args([from, to]).arg("--to").args(format.split_whitespace()).current_dir(dir);
    if !format.starts_with("hf") {
        convert.args(["--world-size", "3"]);
    }
    run(convert, Duration::from_secs(120)).ok();
}

/// Runs `f`, and calls `on_event` with each `tracing` event of this thread and the values of the event's fields.
pub fn observed<T>(
    on_event: impl Fn(&tracing::Metadata<'_>, String) + Send + Sync + 'static,
    f: impl FnOnce() -> T,
) -> T {
    // While a process has only one subscriber, threads without it disable events for all threads.
    static SECOND: LazyLock<tracing::Dispatch> = LazyLock::new(|| tracing::Dispatch::new(NoSubscriber::default()));
    LazyLock::force(&SECOND);
    tracing::subscriber::with_default(Events(on_event), f)
}

/// A subscriber to events only.
struct Events<F>(F);

impl<F: Fn(&tracing::Metadata<'_>, String) + 'static> tracing::Subscriber for Events<F> {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut values: Vec<String> = vec![];
        event.record(&mut |_: &tracing::field::Field, value: &dyn Debug| values.push(format!("{value:?}")));
        (self.0)(event.metadata(), values.join(" "));
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
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
