//! Ranks are killed and stopped and launchers are killed at random times. Each run ends with the weights of an
//! undisturbed run and leaves no processes, sockets, shared memory or files.
//!
//! `FSDP_CHAOS_RUNS` sets the number of runs and `FSDP_CHAOS_SEED` the seed. Run 7 of a seed does not depend on the
//! number of runs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fsdp_test_support::leftovers::{Holdings, MARK, Process, processes, wait_until_gone};
use fsdp_test_support::{golden, program};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const RANKS: usize = 3;
/// Each kind of failure comes first in a run with asynchronous saves and in one without.
const RUNS: u64 = 6;
const SEED: u64 = 20_261_121;
const STEPS: u32 = 100;
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);
/// Promised time from the detection of a failure until the run has ended or continues.
const DEADLINE: Duration = Duration::from_secs(15);
/// Limit of a run's duration.
const LIMIT: Duration = Duration::from_secs(120);

/// Serializes the tests: one of them measures durations.
static TURN: Mutex<()> = Mutex::new(());

/// Random numbers for tests: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns a number from 0 to 1.
    fn part(&mut self) -> f64 {
        self.below(1 << 32) as f64 / (1_u64 << 32) as f64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    KillRank,
    StopRank,
    KillLauncher,
}

const KINDS: [Kind; 3] = [Kind::KillRank, Kind::StopRank, Kind::KillLauncher];

/// A failure to inject.
#[derive(Clone, Copy, Debug)]
struct Injection {
    kind: Kind,
    rank: usize,
    /// Time after the previous failure or the start, in durations of an undisturbed run.
    after: f64,
}

/// Returns the failures of run `index` of a seed.
fn injections(seed: u64, index: u64) -> Vec<Injection> {
    let mut random = Random(seed ^ index.wrapping_mul(0xa076_1d64_78bd_642f));
    let first = KINDS[(index % 3) as usize];
    let mut kinds = vec![first];
    if first == Kind::KillLauncher && random.below(2) == 0 {
        kinds.extend([first; 2]);
    } else if random.below(3) == 0 {
        kinds.push(KINDS[random.below(3) as usize]);
    }
    let most = |at: usize| if at == 0 { 1.0 } else { 0.5 };
    let injection =
        |(at, kind)| Injection { kind, rank: random.below(RANKS as u64) as usize, after: random.part() * most(at) };
    kinds.into_iter().enumerate().map(injection).collect()
}

/// A run of `train` under the launcher.
struct Job {
    dir: tempfile::TempDir,
    mark: String,
    async_save: bool,
    steps: u32,
    launcher: Child,
    held: Holdings,
}

impl Job {
    fn start(mark: String, async_save: bool, steps: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        let launcher = Self::launch(dir.path(), &mark, async_save, steps);
        Job { dir, mark, async_save, steps, launcher, held: Holdings::default() }
    }

    fn launch(dir: &Path, mark: &str, async_save: bool, steps: u32) -> Child {
        let model = golden("llama_tiny");
        let log = || File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let mut command = Command::new(program("fsdp-launch"));
        command.args(["--nproc-per-node", &RANKS.to_string(), "--max-restarts=3", "--shutdown-timeout=2"]);
        command.arg(format!("--heartbeat-timeout={}", HEARTBEAT_TIMEOUT.as_secs())).arg(program("train"));
        command.arg("--model").arg(&model).arg("--data").arg(model.join("tokens.bin"));
        command.args(["--init=random", "--seq-len=32", "--batch-size=2", "--lr=1e-3"]);
        command.arg(format!("--steps={steps}"));
        command.args(["--checkpoint-dir=saved", "--save-every=2", "--keep=2", "--resume=auto"]);
        command.args(async_save.then_some("--async-save"));
        command.current_dir(dir).env(MARK, mark).env("TMPDIR", dir.join("tmp"));
        command.stdin(Stdio::null()).stdout(log()).stderr(log()).spawn().unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.launcher.try_wait().unwrap()
    }

    /// Returns the running ranks by number, and records what the run's processes hold.
    fn ranks(&mut self) -> BTreeMap<usize, Process> {
        let processes = processes(&self.mark);
        self.held.add(&processes);
        let launcher = self.launcher.id();
        let ranks = processes.into_iter().filter(|process| process.parent.unsigned_abs() == launcher);
        ranks.filter_map(|process| Some((process.rank?, process))).collect()
    }

    /// Returns whether all ranks have made a step and none of them is in `old`.
    fn has_resumed(&self, old: &[i32]) -> bool {
        let mut command = Command::new(program("fsdp-launch"));
        let output = command.args(["status", "--json"]).env("TMPDIR", self.dir.path().join("tmp")).output().unwrap();
        let runs: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let launcher = Value::from(self.launcher.id());
        let Some(run) = runs.iter().find(|run| run["launcher_pid"] == launcher) else { return false };
        let ranks = run["ranks"].as_array().unwrap();
        let is_new = |rank: &Value| !old.iter().any(|&pid| rank["pid"] == pid) && !rank["told"]["step"].is_null();
        ranks.len() == RANKS && ranks.iter().all(is_new)
    }

    /// Returns the contents of all files of the checkpoints.
    fn checkpoints(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let root = self.dir.path().join("saved");
        let mut files = BTreeMap::new();
        for step in fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()) {
            for file in fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path()) {
                files.insert(file.strip_prefix(&root).unwrap().to_owned(), fs::read(&file).unwrap());
            }
        }
        files
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // After a failed test, some processes may still run.
        self.launcher.kill().ok();
        self.launcher.wait().ok();
        for process in processes(&self.mark) {
            kill(process.pid, Signal::KILL);
        }
    }
}

/// Sends a signal. Returns false if the process is gone.
fn kill(pid: i32, signal: Signal) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Observations of all runs.
#[derive(Debug, Default)]
struct Seen {
    injections: BTreeMap<Kind, u32>,
    /// Failures after the end of their run.
    too_late: u32,
    /// Time from the detection of a failure until all ranks have made a step, or the run has ended.
    until_resumed: Vec<(Duration, Kind)>,
    until_gone: Duration,
}

impl Seen {
    fn longest(&self, kind: Kind) -> Duration {
        self.until_resumed.iter().filter(|(_, of)| *of == kind).map(|(time, _)| *time).max().unwrap_or_default()
    }
}

/// A failure from which the run has not yet recovered.
struct Pending {
    kind: Kind,
    /// Earliest time of detection.
    detected: Instant,
    /// Process ids of the ranks at the time.
    old: Vec<i32>,
}

/// Runs a job to its end. Returns its duration and the number of injected failures.
fn disturbed(
    job: &mut Job,
    injections: &[Injection],
    undisturbed: Duration,
    seen: &mut Seen,
) -> Result<(Duration, usize), String> {
    let planned = injections.len();
    let start = Instant::now();
    let mut next_at = start;
    let mut injections = injections.iter();
    let mut next = injections.next();
    next_at += next.map_or(Duration::ZERO, |injection| undisturbed.mul_f64(injection.after));
    let mut pending: Option<Pending> = None;
    let (mut looked, mut status_looked) = (start, start);
    let ended = loop {
        if let Some(status) = job.ended() {
            break status;
        }
        if let Some(injection) = next.filter(|_| Instant::now() >= next_at) {
            let ranks = job.ranks();
            let old = ranks.values().map(|process| process.pid).collect();
            let mut detected = Instant::now();
            let is_injected = match injection.kind {
                Kind::KillLauncher => {
                    let is_there = job.ended().is_none();
                    if is_there {
                        job.launcher.kill().unwrap();
                        job.launcher.wait().unwrap();
                        // A service manager would restart it.
                        job.launcher = Job::launch(job.dir.path(), &job.mark, job.async_save, job.steps);
                    }
                    is_there
                }
                // Retried until the rank runs.
                Kind::KillRank => ranks.get(&injection.rank).is_some_and(|rank| kill(rank.pid, Signal::KILL)),
                Kind::StopRank => {
                    detected += HEARTBEAT_TIMEOUT;
                    ranks.get(&injection.rank).is_some_and(|rank| kill(rank.pid, Signal::STOP))
                }
            };
            if is_injected {
                *seen.injections.entry(injection.kind).or_default() += 1;
                pending = Some(Pending { kind: injection.kind, detected, old });
                next = injections.next();
                next_at =
                    Instant::now() + next.map_or(Duration::ZERO, |injection| undisturbed.mul_f64(injection.after));
            }
        }
        if looked.elapsed() > Duration::from_millis(50) {
            job.ranks();
            looked = Instant::now();
        }
        if status_looked.elapsed() > Duration::from_millis(50) {
            if pending.as_ref().is_some_and(|pending| job.has_resumed(&pending.old)) {
                let pending = pending.take().unwrap();
                seen.until_resumed.push((pending.detected.elapsed(), pending.kind));
            }
            status_looked = Instant::now();
        }
        if start.elapsed() > LIMIT {
            let ranks: Vec<String> = processes(&job.mark).iter().map(|process| format!("{process:?}")).collect();
            return Err(format!("did not end within {LIMIT:?}:\n  {}", ranks.join("\n  ")));
        }
        sleep(Duration::from_millis(2));
    };
    if let Some(pending) = pending {
        seen.until_resumed.push((pending.detected.elapsed(), pending.kind));
    }
    let took = start.elapsed();
    let missed = next.into_iter().chain(injections).count();
    seen.too_late += missed as u32;
    if !ended.success() {
        return Err(format!("ended with {ended}"));
    }
    let gone = wait_until_gone(&job.mark, &job.held, &job.dir.path().join("tmp"))?;
    seen.until_gone = seen.until_gone.max(gone);
    Ok((took, planned - missed))
}

/// Reads a number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: expected a number")))
}

#[test]
fn disturbed_runs_have_the_same_weights_and_leave_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (runs, seed) = (setting("FSDP_CHAOS_RUNS", RUNS), setting("FSDP_CHAOS_SEED", SEED));
    let mark = |index: &str| format!("chaos-{}-{seed}-{index}", std::process::id());
    // Builds the programs before anything is timed.
    program("fsdp-launch");
    let started = Instant::now();
    let [(want, blocking), (of_async, in_background)] = [false, true].map(|async_save| {
        let mut job = Job::start(mark(&format!("undisturbed-{async_save}")), async_save, STEPS);
        let (took, _) = disturbed(&mut job, &[], Duration::ZERO, &mut Seen::default())
            .unwrap_or_else(|error| panic!("the undisturbed run {error}\n{}", job.log()));
        let (sockets, segments) = job.held.seen();
        assert!(sockets > 0 && segments > RANKS, "{sockets} sockets and {segments} segments were seen");
        (job.checkpoints(), took)
    });
    assert!(of_async == want, "{:?} and {:?}", of_async.keys(), want.keys());
    let steps: Vec<_> = want.keys().filter(|file| file.ends_with("checkpoint.json")).collect();
    assert_eq!(steps.len(), 2, "{:?}", want.keys());
    // The disk's speed varies: runs without failures update the duration.
    let mut undisturbed = [blocking, in_background];

    let mut seen = Seen::default();
    let mut failures = Vec::new();
    for index in 0..runs {
        let injections = injections(seed, index);
        let way = (index % 2) as usize;
        let mut job = Job::start(mark(&index.to_string()), way == 1, STEPS);
        let mut outcome = disturbed(&mut job, &injections, undisturbed[way], &mut seen).map(|(took, injections)| {
            if injections == 0 {
                undisturbed[way] = took;
            }
        });
        if outcome.is_ok() {
            let got = job.checkpoints();
            let differs = |file: &&PathBuf| got.get(*file) != want.get(*file);
            let different: Vec<_> = got.keys().chain(want.keys()).filter(differs).collect();
            if !different.is_empty() {
                outcome = Err(format!("has other checkpoints than the undisturbed run: {different:?}"));
            }
        }
        if let Err(error) = outcome {
            println!("run {index}, {injections:?} {error}\n{}", job.log());
            failures.push(index);
        }
    }
    println!(
        "{runs} chaos runs of seed {seed} in {:.1?}, undisturbed ones take {undisturbed:.1?}: {:?}, {} came too late; \
         nothing remained after at most {:.1?}; resumed or ended after at most {:.1?}, {:.1?} and {:.1?}",
        started.elapsed(),
        seen.injections,
        seen.too_late,
        seen.until_gone,
        seen.longest(Kind::KillRank),
        seen.longest(Kind::StopRank),
        seen.longest(Kind::KillLauncher),
    );
    assert!(failures.is_empty(), "runs {failures:?} of seed {seed} failed");
    // One or two seconds are usual.
    let longest = KINDS.map(|kind| seen.longest(kind)).into_iter().max().unwrap();
    assert!(longest < DEADLINE, "{longest:?} from detection until the run went on, in seed {seed}");
}

#[test]
fn a_killed_launcher_leaves_nothing_even_if_processes_are_stopped() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (index, (stop_launcher, stop_ranks)) in [(true, false), (false, true), (true, true)].into_iter().enumerate() {
        let mark = format!("chaos-{}-stopped-{index}", std::process::id());
        let mut job = Job::start(mark, false, 1_000_000);
        let start = Instant::now();
        while !job.has_resumed(&[]) {
            assert!(job.ended().is_none() && start.elapsed() < LIMIT, "{}", job.log());
            sleep(Duration::from_millis(10));
        }
        let ranks = job.ranks();
        assert_eq!(ranks.len(), RANKS);
        if stop_ranks {
            assert!(ranks.values().all(|rank| kill(rank.pid, Signal::STOP)));
        }
        if stop_launcher {
            assert!(kill(job.launcher.id() as i32, Signal::STOP));
        }
        job.launcher.kill().unwrap();
        job.launcher.wait().unwrap();
        let gone = wait_until_gone(&job.mark, &job.held, &job.dir.path().join("tmp"));
        assert!(gone.is_ok(), "launcher stopped: {stop_launcher}, ranks stopped: {stop_ranks}: {}", gone.unwrap_err());
    }
}
