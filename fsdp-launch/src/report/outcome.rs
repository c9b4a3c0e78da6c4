//! How a launch ended, and its summary.

use std::{fmt, path::PathBuf, time::Duration};

use signal_hook::consts::{SIGKILL, SIGTERM};

use crate::report::{
    rank::{ExitStatus, FailedAttempt, Failure, RankReport, StopRequest, name_of},
    rank_snapshot::{RankSnapshot, describe},
};

/// Why a launch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Every rank exited with code 0.
    Succeeded,
    /// A failure ended the launch.
    Failed(Failure),
    /// The launcher received this signal.
    Interrupted(i32),
}

/// How a launch ended. It displays as the summary for the user.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// Why the launch ended.
    pub cause: Cause,
    /// Reports of this host's ranks in the last attempt, in rank order.
    pub ranks: Vec<RankReport>,
    /// Time that ranks had between the request to end and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Failed attempts before the last, in order; only the latest few.
    pub failed_attempts: Vec<FailedAttempt>,
    /// Restarts used.
    pub restarts: u32,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// Directory of the run's log files, if any.
    pub log_dir: Option<PathBuf>,
}

impl Outcome {
    /// Returns whether every rank exited with code 0.
    pub fn succeeded(&self) -> bool {
        self.cause == Cause::Succeeded
    }

    /// Returns the launcher's exit code: 0, the code of the first failed rank, or 128 + the signal that the launcher
    /// received.
    pub fn exit_code(&self) -> u8 {
        match &self.cause {
            Cause::Succeeded => 0,
            Cause::Failed(failure) => failure.exit_code(),
            Cause::Interrupted(signal) => ExitStatus::Signaled(*signal).exit_code(),
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
        let mut outcomes: Vec<(String, Vec<String>)> = Vec::new();
        for report in self.ranks.iter().filter(|report| Some(report.rank) != first) {
            let (ending, rank) = (self.ending(report), report.rank.to_string());
            match outcomes.iter_mut().find(|(of_others, _)| *of_others == ending) {
                Some((_, ranks)) => ranks.push(rank),
                None => outcomes.push((ending, vec![rank])),
            }
        }
        for (ending, ranks) in outcomes {
            write!(f, "\n  {} {}: {ending}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "))?;
        }
        let failure = if let Cause::Failed(failure) = &self.cause { Some(failure) } else { None };
        for line in describe_hang(&self.ranks, failure) {
            write!(f, "\n  {line}")?;
        }
        self.write_attempts(f)?;
        self.log_dir.as_ref().map_or(Ok(()), |dir| write!(f, "\n  logs: {}", dir.display()))
    }
}

/// Describes the state of all ranks, if a rank hung or a collective timed out.
pub(crate) fn describe_hang(ranks: &[RankReport], failure: Option<&Failure>) -> Vec<String> {
    let all: Vec<(usize, &RankSnapshot)> =
        ranks.iter().filter_map(|report| Some((report.rank, report.snapshot.as_deref()?))).collect();
    let elsewhere = if let Some(Failure::Rank(report)) = failure { Some(report) } else { None };
    let has_hung = ranks
        .iter()
        .chain(elsewhere)
        .any(|report| report.silent_for.is_some() || report.snapshot.as_ref().is_some_and(|at| at.has_timed_out()));
    if has_hung { describe(&all) } else { Vec::new() }
}

impl Outcome {
    fn write_attempts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.max_restarts == 0 {
            return Ok(());
        }
        write!(f, "\n  restarts used: {} of at most {}", self.restarts, self.max_restarts)?;
        for FailedAttempt { attempt, failure } in &self.failed_attempts {
            write!(f, "\n  attempt {attempt}: {}", failure.to_string().replace('\n', "\n  "))?;
        }
        Ok(())
    }

    fn ending(&self, report: &RankReport) -> String {
        match (report.exit_status, report.request) {
            (None, _) => "did not end even after SIGKILL".into(),
            (Some(end), None) if end.is_success() => "had succeeded".into(),
            (Some(ExitStatus::Exited(code)), None) => format!("failed too, with exit code {code}"),
            (Some(end), None) => format!("failed too, killed by {end}"),
            (Some(ExitStatus::Signaled(SIGTERM)), Some(StopRequest::Terminate)) => "ended by SIGTERM".into(),
            (Some(ExitStatus::Exited(code)), Some(StopRequest::Terminate)) => format!("asked to end, exit code {code}"),
            // The kernel or another process killed the rank before it could end: the launcher sent only SIGTERM.
            (Some(end @ ExitStatus::Signaled(SIGKILL)), Some(StopRequest::Terminate)) => {
                format!("failed too, killed by {end}, which its launcher did not send")
            }
            (Some(end), Some(StopRequest::Terminate)) => format!("asked to end, killed by {end}"),
            (Some(_), Some(StopRequest::Kill)) if report.snapshot.as_ref().is_some_and(|at| at.is_stopped()) => {
                "killed by SIGKILL: it was stopped, and could not be asked to end".into()
            }
            (Some(_), Some(StopRequest::Kill)) => {
                format!("killed by SIGKILL, still running {:?} after it was asked to end", self.shutdown_timeout)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use fsdp_core::heartbeat::Age;

    use super::*;
    use crate::LogEnd;

    #[test]
    fn the_summary_covers_every_rank() {
        let report = |rank, end, request| RankReport {
            rank,
            host: "h".into(),
            pid: 100,
            exit_status: end,
            ended_at: None,
            after: None,
            request,
            silent_for: None,
            snapshot: None,
            message: None,
            stderr: None,
        };
        let mut first = report(1, Some(ExitStatus::Signaled(11)), None);
        first.message = Some("out of\ndata".into());
        first.ended_at = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(86_399));
        first.after = Some(Age(Duration::from_secs(4330)));
        first.stderr =
            Some(LogEnd { file: "logs/stderr.log".into(), lines: vec!["Traceback".into(), "ValueError".into()] });
        let mut outcome = Outcome {
            cause: Cause::Failed(Failure::Rank(first.clone())),
            ranks: vec![
                report(0, Some(ExitStatus::Signaled(15)), Some(StopRequest::Terminate)),
                first,
                report(2, Some(ExitStatus::Exited(0)), None),
                report(3, Some(ExitStatus::Signaled(15)), Some(StopRequest::Terminate)),
                report(4, None, Some(StopRequest::Kill)),
                report(5, Some(ExitStatus::Signaled(9)), Some(StopRequest::Terminate)),
            ],
            shutdown_timeout: Duration::from_secs(5),
            failed_attempts: Vec::new(),
            restarts: 0,
            max_restarts: 0,
            log_dir: None,
        };
        assert_eq!(outcome.exit_code(), 139);
        assert_eq!(
            outcome.to_string(),
            "rank 1 (pid 100 on h) failed first, killed by SIGSEGV\n  it recorded: out of\n    data\n  at \
            1970-01-01T23:59:59Z, 1 h 12 min after its \
             start\n  logs/stderr.log ends with:\n    Traceback\n    ValueError\n  ranks 0, 3: ended by SIGTERM\n  \
             rank 2: had succeeded\n  rank 4: did not end even after SIGKILL\n  \
             rank 5: failed too, killed by SIGKILL, which its launcher did not send"
        );
        let failure = Failure::Rank(report(2, Some(ExitStatus::Exited(7)), None));
        outcome.failed_attempts = vec![FailedAttempt { attempt: 0, failure }];
        (outcome.restarts, outcome.max_restarts) = (1, 3);
        let message =
            "\n  restarts used: 1 of at most 3\n  attempt 0: rank 2 (pid 100 on h) failed first, with exit code 7";
        assert!(outcome.to_string().ends_with(message), "{outcome}");
        outcome.cause = Cause::Succeeded;
        assert_eq!(outcome.to_string(), format!("all ranks succeeded{message}"));
        outcome.cause = Cause::Interrupted(2);
        assert_eq!(outcome.exit_code(), 130);
        assert!(outcome.to_string().starts_with("stopped by SIGINT\n"), "{outcome}");
    }
}
