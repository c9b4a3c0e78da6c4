//! `fsdp-launch status`: this user's runs on this host, and the state of their ranks.

use std::{
    fmt,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fsdp_core::heartbeat::{self, Age};
use serde::Serialize;

use crate::{
    Error, Result,
    job::{JobFile, RankFile, RunInfo},
    report::{process::ProcessState, rank_snapshot::RankSnapshot},
};

/// Arguments of `fsdp-launch status`.
#[derive(clap::Args, Clone, Debug)]
pub struct StatusArgs {
    /// Show only runs whose id begins with this
    #[arg(value_name = "RUN")]
    pub run: Option<String>,

    /// Print a JSON array with all details
    #[arg(long)]
    pub json: bool,
}

/// State of a run.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RunStatus {
    /// The run.
    #[serde(flatten)]
    pub run: RunInfo,
    /// Pid of this host's launcher.
    pub launcher_pid: u32,
    /// Time since the attempt, or the wait, began.
    pub age: Age,
    /// Ranks of this host.
    pub ranks: Vec<RankStatus>,
}

/// State of a rank.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RankStatus {
    /// The rank.
    pub rank: usize,
    /// Pid of the process that the launcher started. It may be a script around the program.
    pub pid: u32,
    /// Activity of the rank.
    #[serde(flatten)]
    pub snapshot: RankSnapshot,
}

/// Returns this user's runs on this host, oldest first. With `run`, returns runs with this id, or else runs whose id
/// begins with it.
///
/// # Errors
/// [`Error::NoRun`] when there is no such run.
pub fn status(run: Option<&str>) -> Result<Vec<RunStatus>> {
    status_in(&std::env::temp_dir(), run)
}

fn status_in(temp: &Path, run: Option<&str>) -> Result<Vec<RunStatus>> {
    let mut jobs =
        JobFile::running(temp).map_err(Error::system("look for runs in the directory for temporary files"))?;
    if let Some(run) = run {
        let mut known: Vec<String> = jobs.iter().map(|job| job.run.run_id.clone()).collect();
        known.sort();
        known.dedup();
        let is_exact = jobs.iter().any(|job| job.run.run_id == run);
        jobs.retain(|job| if is_exact { job.run.run_id == run } else { job.run.run_id.starts_with(run) });
        if jobs.is_empty() {
            return Err(Error::NoRun(match known.as_slice() {
                [] => format!("no run {run:?}: this user has no running launch on this host"),
                known => format!("no run {run:?}: there are {}", known.join(", ")),
            }));
        }
    }
    if jobs.is_empty() {
        let why = "this user has no running launch on this host (TMPDIR must be the same as the launcher's)";
        return Err(Error::NoRun(why.into()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(jobs.into_iter().map(|job| of_run(job, now)).collect())
}

fn of_run(job: JobFile, now: Duration) -> RunStatus {
    RunStatus {
        age: Age(now.saturating_sub(Duration::from_secs(job.since))),
        run: job.run,
        launcher_pid: job.launcher.pid,
        ranks: job.ranks.iter().map(of_rank).collect(),
    }
}

fn of_rank(rank: &RankFile) -> RankStatus {
    // If the launcher has ended meanwhile, its status pages are gone.
    let status = rank.status_page.as_ref().and_then(|path| heartbeat::read(path).ok()).unwrap_or_default();
    let own = rank.process.find();
    let mut snapshot = RankSnapshot::of(rank.process.pid, status);
    if own.is_none() || snapshot.process.is_none() {
        snapshot.process = own;
    }
    RankStatus { rank: rank.rank, pid: rank.process.pid, snapshot }
}

impl fmt::Display for RunStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = &self.run;
        let shown = |text: &str| text.chars().map(|c| if c.is_control() { '?' } else { c }).collect::<String>();
        let command: Vec<String> = std::iter::once(&run.program).chain(&run.args).map(|word| shown(word)).collect();
        writeln!(f, "run {}: {}", shown(&run.run_id), command.join(" "))?;
        let before = if run.waiting.is_some() { "before " } else { "" };
        write!(f, "  launcher pid {}, {before}attempt {} for {}", self.launcher_pid, run.attempt, self.age)?;
        write!(f, ", restarts used: {} of at most {}", run.restarts, run.max_restarts)?;
        if let Some(waiting) = &run.waiting {
            return write!(f, "\n  {}", shown(waiting));
        }
        if run.hosts > 1 {
            write!(f, ", {} ranks on {} hosts, here:", run.world_size, run.hosts)?;
        }
        let head = ["rank", "pid", "state", "memory", "step", "heartbeat", "what it does"].map(String::from);
        let rows: Vec<[String; 7]> = std::iter::once(head).chain(self.ranks.iter().map(row)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..6).map(width).collect();
        for row in &rows {
            write!(f, "\n ")?;
            for (cell, &width) in row.iter().zip(&widths) {
                write!(f, " {cell:<width$} ")?;
            }
            write!(f, " {}", row[6])?;
        }
        Ok(())
    }
}

fn row(rank: &RankStatus) -> [String; 7] {
    let (status, process) = (&rank.snapshot.status, &rank.snapshot.process);
    let unknown = || "-".to_owned();
    [
        rank.rank.to_string(),
        rank.pid.to_string(),
        process.as_ref().map_or(ProcessState::Ended, |process| process.state).to_string(),
        process.as_ref().map_or_else(unknown, |process| size(process.resident_bytes)),
        status.step.as_ref().map_or_else(unknown, |step| step.number.to_string()),
        status.beat.map_or_else(unknown, |age| format!("{age} ago")),
        rank.snapshot.activity(),
    ]
}

/// Formats a number of bytes for people.
fn size(bytes: u64) -> String {
    match bytes >> 20 {
        mib @ 0..1024 => format!("{mib} MiB"),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
