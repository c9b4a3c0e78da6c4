//! How a launch ended, and how to say it.

use std::{
    fmt,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use fsdp_core::heartbeat::Age;
use serde::{Deserialize, Serialize};
use signal_hook::{
    consts::{SIGKILL, SIGTERM},
    low_level::signal_name,
};

use crate::{
    log_end::LogEnd,
    whereabouts::{Whereabouts, lines},
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// By itself, with this exit code.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

impl End {
    /// Exit code 0.
    pub fn is_success(self) -> bool {
        self == End::Exited(0)
    }

    /// As a shell reports it: the exit code, or 128 + the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            End::Exited(code) => low_byte(code),
            End::Signaled(signal) => low_byte(128 + signal),
        }
    }
}

/// All that the system passes on of an exit code.
fn low_byte(code: i32) -> u8 {
    code.to_le_bytes()[0]
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            End::Exited(code) => write!(f, "exit code {code}"),
            End::Signaled(signal) => f.write_str(&name_of(signal)),
        }
    }
}

pub(crate) fn name_of(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// What the launcher did to end a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Request {
    /// Sent SIGTERM.
    Terminate,
    /// Sent SIGKILL.
    Kill,
}

/// What became of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// The host it ran on.
    pub host: String,
    /// Its process id.
    pub pid: i32,
    /// How it ended; `None` for a process that not even SIGKILL ended in time (it hangs in the kernel).
    pub end: Option<End>,
    /// When it ended.
    pub ended_at: Option<SystemTime>,
    /// How long after its start.
    pub after: Option<Age>,
    /// The last thing the launcher did to make it end, before it ended; `None` if it ended by itself.
    pub request: Option<Request>,
    /// How long its heart had stood still, if it was ended because of that.
    pub silent_for: Option<Age>,
    /// Where it was when the first rank of its host failed, or when the ranks were asked to end for another reason.
    pub whereabouts: Option<Box<Whereabouts>>,
    /// The error it recorded in its `TORCHELASTIC_ERROR_FILE`.
    pub message: Option<String>,
    /// The end of its stderr, if it failed and its stderr goes to a file only.
    pub stderr: Option<LogEnd>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Failure {
    /// This rank failed, before all others.
    Rank(RankReport),
    /// A host is gone with its ranks.
    NodeLost {
        /// The host.
        host: String,
        /// How it went.
        how: String,
    },
    /// A host could not start its ranks.
    NotStarted {
        /// The host.
        host: String,
        /// Why not.
        why: String,
    },
    /// The hosts did not come together.
    Meeting {
        /// Why not, and the way out.
        why: String,
    },
}

impl Failure {
    /// What the launcher should exit with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Rank(report) => report.end.map_or(1, End::exit_code),
            Failure::NodeLost { .. } | Failure::NotStarted { .. } | Failure::Meeting { .. } => 1,
        }
    }

    /// The same with no more than the start of what the rank said, and without where it was.
    pub(crate) fn shortened(mut self) -> Self {
        match &mut self {
            Failure::Rank(report) => {
                report.whereabouts = None;
                report.stderr = None;
                report.message.iter_mut().for_each(|message| shorten(message, SHORT));
            }
            Failure::NodeLost { how: text, .. }
            | Failure::NotStarted { why: text, .. }
            | Failure::Meeting { why: text } => shorten(text, SHORT),
        }
        self
    }
}

/// Bytes of a message that are kept of an attempt before the last.
const SHORT: usize = 300;

/// Cuts `text` to about `most` bytes.
pub(crate) fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str(" ...");
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Rank(report) => write!(f, "{}", report.as_first()),
            Failure::NodeLost { host, how } => write!(f, "node {host} {how}"),
            Failure::NotStarted { host, why } => write!(f, "node {host}: {why}"),
            Failure::Meeting { why } => f.write_str(why),
        }
    }
}

/// What went wrong in an attempt that was followed by another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Setback {
    /// The attempt, counted from 0.
    pub attempt: u32,
    /// What went wrong first.
    pub failure: Failure,
}

/// Why a launch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Every rank ended with exit code 0.
    Succeeded,
    /// This went wrong.
    Failed(Failure),
    /// The launcher received this signal.
    Interrupted(i32),
}

/// How a launch ended. It prints as the summary for the user.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Why.
    pub cause: Cause,
    /// Every rank of this host, in order; of the last attempt.
    pub ranks: Vec<RankReport>,
    /// How long the ranks had to end by themselves.
    pub shutdown_timeout: Duration,
    /// What went wrong in attempts before the last, in order; no more than the last few.
    pub setbacks: Vec<Setback>,
    /// How many restarts were used.
    pub restarts: u32,
    /// How many were allowed.
    pub max_restarts: u32,
    /// The directory of the run's log files, if there are any.
    pub log_dir: Option<PathBuf>,
}

impl Outcome {
    /// Every rank ended with exit code 0.
    pub fn succeeded(&self) -> bool {
        self.cause == Cause::Succeeded
    }

    /// What the launcher should exit with: 0, what the first failed rank ended with, or 128 + the signal that the launcher received.
    pub fn exit_code(&self) -> u8 {
        match &self.cause {
            Cause::Succeeded => 0,
            Cause::Failed(failure) => failure.exit_code(),
            Cause::Interrupted(signal) => End::Signaled(*signal).exit_code(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = match &self.cause {
            Cause::Succeeded => {
                write!(f, "all ranks succeeded")?;
                return self.write_attempts(f);
            }
            Cause::Interrupted(signal) => {
                write!(f, "stopped by {}", name_of(*signal))?;
                None
            }
            Cause::Failed(failure) => {
                write!(f, "{failure}")?;
                if let Failure::Rank(report) = failure { Some(report.rank) } else { None }
            }
        };
        let mut fates: Vec<(String, Vec<String>)> = Vec::new();
        for report in self.ranks.iter().filter(|report| Some(report.rank) != first) {
            let (fate, rank) = (self.fate(report), report.rank.to_string());
            match fates.iter_mut().find(|(of_others, _)| *of_others == fate) {
                Some((_, ranks)) => ranks.push(rank),
                None => fates.push((fate, vec![rank])),
            }
        }
        for (fate, ranks) in fates {
            write!(f, "\n  {} {}: {fate}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "))?;
        }
        let failure = if let Cause::Failed(failure) = &self.cause { Some(failure) } else { None };
        for line in stuck(&self.ranks, failure) {
            write!(f, "\n  {line}")?;
        }
        self.write_attempts(f)?;
        self.log_dir.as_ref().map_or(Ok(()), |dir| write!(f, "\n  logs: {}", dir.display()))
    }
}

/// Where all ranks of a host were, if one of them, or the one that failed on another host, hung or waited in vain; else nothing.
pub(crate) fn stuck(ranks: &[RankReport], failure: Option<&Failure>) -> Vec<String> {
    let all: Vec<(usize, &Whereabouts)> =
        ranks.iter().filter_map(|report| Some((report.rank, report.whereabouts.as_deref()?))).collect();
    let elsewhere = if let Some(Failure::Rank(report)) = failure { Some(report) } else { None };
    let is_stuck = ranks
        .iter()
        .chain(elsewhere)
        .any(|report| report.silent_for.is_some() || report.whereabouts.as_ref().is_some_and(|at| at.has_timed_out()));
    if is_stuck { lines(&all) } else { Vec::new() }
}

/// Says how the rank that failed first did.
pub(crate) struct First<'a>(&'a RankReport);

impl RankReport {
    /// What other hosts are told: no more of where it was than fits a message, whatever a rank wrote on its board.
    pub(crate) fn for_others(mut self) -> Self {
        if let Some(at) = &mut self.whereabouts {
            at.told.collectives.truncate(4);
        }
        self
    }

    pub(crate) fn as_first(&self) -> First<'_> {
        First(self)
    }
}

impl fmt::Display for First<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        write!(f, "rank {} (pid {} on {}) failed first, ", report.rank, report.pid, report.host)?;
        match report.end {
            _ if report.silent_for.is_some() => {
                let silent = report.silent_for.unwrap_or_default();
                let state = report.whereabouts.as_ref().and_then(|at| at.process.as_ref());
                let state = state.map_or_else(String::new, |process| format!(" ({process})"));
                write!(f, "it hung: no heartbeat for {silent}{state}")?;
            }
            Some(end @ End::Exited(_)) => write!(f, "with {end}")?,
            Some(end @ End::Signaled(SIGKILL)) => {
                write!(f, "killed by {end}: from outside, often because the host ran out of memory (see `dmesg`)")?;
            }
            Some(end) => write!(f, "killed by {end}")?,
            None => write!(f, "and did not end")?,
        }
        if let Some(message) = &report.message {
            write!(f, "\n  it recorded: {}", message.trim_end().replace('\n', "\n    "))?;
        }
        if let Some(at) = report.ended_at {
            write!(f, "\n  at {}", humantime::format_rfc3339_seconds(at))?;
            report.after.map_or(Ok(()), |after| write!(f, ", {after} after its start"))?;
        }
        report.stderr.as_ref().map_or(Ok(()), |end| write!(f, "\n  {end}"))
    }
}

impl Outcome {
    fn write_attempts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.max_restarts == 0 {
            return Ok(());
        }
        write!(f, "\n  restarts used: {} of at most {}", self.restarts, self.max_restarts)?;
        for Setback { attempt, failure } in &self.setbacks {
            write!(f, "\n  attempt {attempt}: {}", failure.to_string().replace('\n', "\n  "))?;
        }
        Ok(())
    }

    fn fate(&self, report: &RankReport) -> String {
        match (report.end, report.request) {
            (None, _) => "did not end even after SIGKILL".into(),
            (Some(end), None) if end.is_success() => "had succeeded".into(),
            (Some(End::Exited(code)), None) => format!("failed too, with exit code {code}"),
            (Some(end), None) => format!("failed too, killed by {end}"),
            (Some(End::Signaled(SIGTERM)), Some(Request::Terminate)) => "ended by SIGTERM".into(),
            (Some(End::Exited(code)), Some(Request::Terminate)) => format!("asked to end, exit code {code}"),
            (Some(end), Some(Request::Terminate)) => format!("asked to end, killed by {end}"),
            (Some(_), Some(Request::Kill)) if report.whereabouts.as_ref().is_some_and(|at| at.is_stopped()) => {
                "killed by SIGKILL: it was stopped, and could not be asked to end".into()
            }
            (Some(_), Some(Request::Kill)) => {
                format!("killed by SIGKILL, still running {:?} after it was asked to end", self.shutdown_timeout)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_tells_every_fate() {
        let report = |rank, end, request| RankReport {
            rank,
            host: "h".into(),
            pid: 100,
            end,
            ended_at: None,
            after: None,
            request,
            silent_for: None,
            whereabouts: None,
            message: None,
            stderr: None,
        };
        let mut first = report(1, Some(End::Signaled(11)), None);
        first.message = Some("out of\ndata".into());
        first.ended_at = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(86_399));
        first.after = Some(Age(Duration::from_secs(4330)));
        first.stderr =
            Some(LogEnd { file: "logs/stderr.log".into(), lines: vec!["Traceback".into(), "ValueError".into()] });
        let mut outcome = Outcome {
            cause: Cause::Failed(Failure::Rank(first.clone())),
            ranks: vec![
                report(0, Some(End::Signaled(15)), Some(Request::Terminate)),
                first,
                report(2, Some(End::Exited(0)), None),
                report(3, Some(End::Signaled(15)), Some(Request::Terminate)),
                report(4, None, Some(Request::Kill)),
            ],
            shutdown_timeout: Duration::from_secs(5),
            setbacks: Vec::new(),
            restarts: 0,
            max_restarts: 0,
            log_dir: None,
        };
        assert_eq!(outcome.exit_code(), 139);
        assert_eq!(
            outcome.to_string(),
            "rank 1 (pid 100 on h) failed first, killed by SIGSEGV\n  it recorded: out of\n    data\n  at 1970-01-01T23:59:59Z, 1 h 12 min after its \
             start\n  logs/stderr.log ends with:\n    Traceback\n    ValueError\n  ranks 0, 3: ended by SIGTERM\n  \
             rank 2: had succeeded\n  rank 4: did not end even after SIGKILL"
        );
        let failure = Failure::Rank(report(2, Some(End::Exited(7)), None));
        outcome.setbacks = vec![Setback { attempt: 0, failure }];
        (outcome.restarts, outcome.max_restarts) = (1, 3);
        let told =
            "\n  restarts used: 1 of at most 3\n  attempt 0: rank 2 (pid 100 on h) failed first, with exit code 7";
        assert!(outcome.to_string().ends_with(told), "{outcome}");
        outcome.cause = Cause::Succeeded;
        assert_eq!(outcome.to_string(), format!("all ranks succeeded{told}"));
        outcome.cause = Cause::Interrupted(2);
        assert_eq!(outcome.exit_code(), 130);
        assert!(outcome.to_string().starts_with("stopped by SIGINT\n"), "{outcome}");
    }
}
