//! `train --offload disk:DIR` and `disk+shards:DIR`: killed runs, and disks that are full or fail.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fsdp_test_support::leftovers::{MARK, Process, processes};
use fsdp_test_support::{files, golden, json_lines, launch_script, program, train};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

const RANKS: usize = 2;

/// Returns the number of runs that one test kills: `FSDP_TESTS_KILLS`, or 2.
fn kills() -> usize {
    std::env::var("FSDP_TESTS_KILLS").map_or(2, |kills| kills.parse().expect("FSDP_TESTS_KILLS is a number"))
}

/// Returns the number of steps, enough for all kills.
fn steps() -> usize {
    100.max(30 * kills())
}

fn flags(more: &str) -> String {
    let model = golden("llama_tiny");
    let (model, data) = (model.display(), model.join("tokens.bin"));
    format!(
        "--model {model} --data {} --init random --seq-len 32 --batch-size 2 --lr 1e-3 --steps {} --save-every 2 \
         --checkpoint-dir saved --resume auto --metrics metrics.jsonl {more}",
        data.display(),
        steps()
    )
}

/// The losses by step, and the tensors of the last checkpoint.
type Outcome = (BTreeMap<u64, u64>, BTreeMap<String, Vec<u8>>);

fn outcome(dir: &Path) -> Outcome {
    let records = json_lines(&dir.join("metrics.jsonl"));
    let loss =
        |record: &serde_json::Value| (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap().to_bits());
    let mut files = files(&dir.join(format!("saved/step-{:08}", steps())));
    files.retain(|name, _| name.ends_with(".safetensors"));
    assert!(!files.is_empty());
    (records.iter().map(loss).collect(), files)
}

/// A run without disk and without failures.
fn undisturbed(more: &str) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    train(RANKS, &flags(more), dir.path()).ok();
    outcome(dir.path())
}

/// A run with state in the directory `disk`, whose ranks ignore SIGXFSZ.
struct Job<'a> {
    dir: &'a Path,
    mark: String,
    launcher: Child,
}

impl<'a> Job<'a> {
    /// `offload` is `disk`, or `disk+shards`.
    fn start(dir: &'a Path, mark: &str, offload: &str, more: &str) -> Self {
        let script = format!("trap '' XFSZ; exec \"$0\" {} --offload {offload}:disk", flags(more));
        fs::create_dir_all(dir.join("disk")).unwrap();
        let log = || File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let mut command = Command::new(program("fsdp-launch"));
        command.arg(format!("--nproc-per-node={RANKS}")).args(["/bin/sh", "-c", &script]).arg(program("train"));
        command.current_dir(dir).env(MARK, mark).stdin(Stdio::null()).stdout(log()).stderr(log());
        Job { dir, mark: mark.into(), launcher: command.spawn().unwrap() }
    }

    /// Waits until a step is saved, and returns the ranks.
    fn after_save(&mut self, step: usize) -> BTreeMap<usize, Process> {
        let started = Instant::now();
        let saved = self.dir.join(format!("saved/step-{step:08}/checkpoint.json"));
        while !saved.exists() {
            assert!(started.elapsed() < Duration::from_secs(120), "{}", self.log());
            sleep(Duration::from_millis(1));
        }
        processes(&self.mark).into_iter().filter_map(|process| Some((process.rank?, process))).collect()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap()
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for process in processes(&self.mark) {
            kill(process.pid);
        }
        self.launcher.kill().ok();
        self.launcher.wait().ok();
    }
}

fn kill(pid: i32) {
    Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL).ok());
}

/// Returns the step of the newest checkpoint, whose files pass their checksums.
fn newest_checkpoint(dir: &Path) -> usize {
    let names = fs::read_dir(dir.join("saved")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let name = names.filter(|name| name.starts_with("step-")).max().unwrap();
    let verified =
        Command::new(program("fsdp-ckpt")).arg("verify").arg(dir.join("saved").join(&name)).output().unwrap();
    assert!(verified.status.success(), "{name}: {verified:?}");
    name["step-".len()..].parse().unwrap()
}

fn assert_empty(disk: &Path) {
    assert_eq!(fs::read_dir(disk).unwrap().count(), 0);
}

#[test]
fn killed_runs_resume_with_the_losses_of_a_run_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut newest = 2;
    for number in 0..kills() {
        let (mark, offload) =
            (format!("offload-disk-{}-{number}", std::process::id()), ["disk", "disk+shards"][number % 2]);
        let mut job = Job::start(dir.path(), &mark, offload, "");
        let ranks = job.after_save(newest + 2);
        assert_empty(&dir.path().join("disk"));
        // At another moment of a step or a save each time.
        sleep(Duration::from_millis(number as u64 * 37 % 100));
        ranks.values().for_each(|rank| kill(rank.pid));
        assert!(!job.launcher.wait().unwrap().success());
        assert_empty(&dir.path().join("disk"));
        // No checkpoint is lost: the next run begins at the newest.
        let saved = newest_checkpoint(dir.path());
        assert!(saved >= newest + 2, "kill {number}: step {saved} after {newest}");
        newest = saved;
    }
    let mut job = Job::start(dir.path(), &format!("offload-disk-{}", std::process::id()), "disk+shards", "");
    assert!(job.launcher.wait().unwrap().success(), "{}", job.log());
    let log = job.log();
    assert!(log.contains("resumed from") && log.contains("optimizer state on disk: "), "{log}");
    assert_empty(&dir.path().join("disk"));
    assert!(outcome(dir.path()) == undisturbed(""));
}

/// The limit of a file's size makes writes to a rank's state fail, as a full disk does. Returns the log of the run, or
/// `None` if the limit came while a checkpoint was saved, whose files it applies to as well.
fn fails_by_a_limit(dir: &Path, mark: &str, offload: &str, more: &str) -> Option<String> {
    let mut job = Job::start(dir, mark, offload, more);
    let ranks = job.after_save(6);
    let limit = Rlimit { current: Some(4096), maximum: Some(4096) };
    prlimit(Pid::from_raw(ranks[&1].pid), Resource::Fsize, limit).unwrap();
    assert!(!job.launcher.wait().unwrap().success());
    assert_empty(&dir.join("disk"));
    Some(job.log()).filter(|log| !log.contains("can't save saved/step-"))
}

fn fails_and_resumes(name: &str, offload: &str, more: &str) {
    let mark = |number| format!("offload-{name}-{}-{number}", std::process::id());
    let tries = (0..20).find_map(|number| {
        let dir = tempfile::tempdir().unwrap();
        let log = fails_by_a_limit(dir.path(), &mark(number), offload, more)?;
        Some((dir, log))
    });
    let (dir, log) = tries.expect("20 limits came during saves");
    let line = log.lines().find(|line| line.contains(" failed: rank 1, state on disk in disk: "));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    for part in [
        "can't write it: File too large (os error 27): a file of this process may have at most ",
        "Raise the limit with `ulimit -f unlimited`. The state is incomplete: resume from a checkpoint.",
        "use another directory. The newest good checkpoint is saved/step-0000",
    ] {
        assert!(line.contains(part), "{line}");
    }
    let mut job = Job::start(dir.path(), &mark(20), offload, more);
    assert!(job.launcher.wait().unwrap().success(), "{}", job.log());
    drop(job);
    assert!(outcome(dir.path()) == undisturbed(more));
}

#[test]
fn a_failed_write_ends_the_run_which_resumes_from_its_checkpoint() {
    fails_and_resumes("limit", "disk", "");
}

#[test]
fn a_failed_write_of_a_shard_does_so_too() {
    // SGD without momentum has no other state.
    fails_and_resumes("shards", "disk+shards", "--optimizer sgd --momentum 0");
}

#[test]
fn a_failed_write_in_backward_does_so_too() {
    fails_and_resumes("in-backward", "disk+shards", "--optimizer-in-backward unclipped");
}

#[test]
fn a_file_that_cannot_be_allocated_ends_the_run_before_its_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny");
    let script = format!(
        "trap '' XFSZ; ulimit -f 8; exec \"$0\" --model {} --data {} --init random --steps 1 --offload disk:.",
        model.display(),
        model.join("tokens.bin").display()
    );
    // Several ranks share memory, whose size the limit also applies to.
    let run = launch_script(1, &script, dir.path());
    let parts = [
        "--offload: rank ",
        ", state on disk in .: it needs ",
        " bytes: File too large",
        "Raise the limit with `ulimit -f unlimited`, or use more ranks",
    ];
    run.refused(1, &parts);
    assert!(!dir.path().join("metrics.jsonl").exists());
}
