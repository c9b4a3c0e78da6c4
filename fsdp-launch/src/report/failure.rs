//! What became of a rank, and what went wrong.

use std::{fmt, time::SystemTime};

use fsdp_core::heartbeat::Age;
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGKILL;

use crate::report::{
    end::{End, Request},
    log_end::LogEnd,
    shorten::shorten,
    whereabouts::Whereabouts,
};

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
    /// How it ended, or wanted to by `MPI_Abort`; `None` for a process that not even SIGKILL ended in time (it hangs in
    /// the kernel).
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
    /// The error it recorded in its `TORCHELASTIC_ERROR_FILE`, or what it did over PMI.
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
            // A rank may fail by what it told, and end well all the same.
            Failure::Rank(report) => report.end.map_or(1, End::exit_code).max(1),
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
