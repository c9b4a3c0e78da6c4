//! State of ranks at a failure or for `status`, from their status pages and `/proc`.

use std::fmt;

use fsdp_core::heartbeat::{Collective, Progress, Snapshot};
use serde::{Deserialize, Serialize};

use crate::report::process::{ProcessInfo, ProcessState};

/// Seconds without heartbeat that are reported.
const LATE: f64 = 2.0;

/// State of a rank at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankSnapshot {
    /// Status page of the rank; empty if its program does not use `fsdp-core`.
    #[serde(rename = "told")]
    pub status: Snapshot,
    /// The process that writes the status page, or else the rank's process; `None` if it has ended.
    pub process: Option<ProcessInfo>,
}

impl RankSnapshot {
    /// Reads the state of the rank with process `pid`.
    pub(crate) fn of(pid: u32, status: Snapshot) -> Self {
        let process = match (status.pid, status.pid_started) {
            (Some(pid), Some(started)) => ProcessInfo::started_at(pid, started),
            _ => ProcessInfo::of(pid).filter(|process| process.state != ProcessState::Ended),
        };
        RankSnapshot { status, process }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.state == ProcessState::Stopped)
    }

    /// Returns whether a collective of the rank has timed out.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.status.collectives.iter().any(|collective| collective.progress == Progress::TimedOut)
    }

    /// Describes the rank's activity, without its process.
    pub(crate) fn activity(&self) -> String {
        let mut parts = Vec::new();
        if let Some(doing) = &self.status.doing {
            parts.push(format!("{} for {}{}", doing.what, doing.age, torn(doing.torn)));
        }
        parts.extend(self.collectives().map(of_collective));
        if parts.is_empty() {
            parts.push(if self.status.pid.is_some() { "outside of any collective" } else { "no status page" }.into());
        }
        parts.join(", ")
    }

    /// Returns the current collectives, or else the failed ones, or else the last one.
    fn collectives(&self) -> impl Iterator<Item = &Collective> {
        let all = &self.status.collectives;
        let with = |wanted: &[Progress]| all.iter().filter(|it| wanted.contains(&it.progress)).collect::<Vec<_>>();
        let mut found = with(&[Progress::Running]);
        if found.is_empty() {
            found = with(&[Progress::TimedOut, Progress::Failed]);
        }
        if found.is_empty() {
            found.extend(all.iter().min_by_key(|it| it.age));
        }
        found.into_iter()
    }
}

fn torn(torn: bool) -> &'static str {
    if torn { " (stopped while it wrote this)" } else { "" }
}

fn of_collective(it: &Collective) -> String {
    let name = format!("{} (collective {} of \"{}\")", it.name, it.sequence, it.group);
    let age = it.age;
    let told = match it.progress {
        Progress::Running => format!("waits in {name} for {age}"),
        Progress::Done => format!("last in {name}, done {age} ago"),
        Progress::TimedOut => format!("{name} timed out {age} ago"),
        Progress::Failed => format!("{name} failed {age} ago"),
    };
    told + torn(it.torn)
}

impl fmt::Display for RankSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(step) = &self.status.step {
            write!(f, "step {}, ", step.number)?;
        }
        write!(f, "{}; ", self.activity())?;
        match &self.process {
            Some(process) => write!(f, "{process}")?,
            None => f.write_str("has ended")?,
        }
        match self.status.beat {
            Some(age) if self.process.is_some() && f64::from(age) > LATE => write!(f, ", no heartbeat for {age}"),
            _ => Ok(()),
        }
    }
}

/// A collective that some ranks have not reached.
struct IncompleteCollective<'a> {
    collective: &'a Collective,
    arrived: Vec<usize>,
    missing: Vec<usize>,
    /// Missing ranks of other hosts.
    missing_elsewhere: Vec<usize>,
}

/// Returns the collectives that some of these ranks wait in, or that timed out, and that other ranks have not reached.
fn incomplete_collectives<'a>(ranks: &[(usize, &'a RankSnapshot)]) -> Vec<IncompleteCollective<'a>> {
    let mut incomplete_collectives: Vec<IncompleteCollective<'a>> = Vec::new();
    let waits = |it: &&Collective| matches!(it.progress, Progress::Running | Progress::TimedOut);
    for collective in ranks.iter().flat_map(|(_, at)| &at.status.collectives).filter(waits) {
        let is_same = |other: &Collective| other.group == collective.group && other.sequence == collective.sequence;
        if incomplete_collectives.iter().any(|incomplete| is_same(incomplete.collective)) {
            continue;
        }
        let members: Vec<(usize, &Collective)> = ranks
            .iter()
            .filter_map(|(rank, at)| {
                Some((*rank, at.status.collectives.iter().find(|it| it.group == collective.group)?))
            })
            .collect();
        // A rank that arrives after a timeout finds the collective failed; the waiting ranks recorded it as missing.
        let given_up: Vec<usize> =
            members.iter().filter(|(_, it)| is_same(it)).flat_map(|(_, it)| it.missing.iter().copied()).collect();
        let (arrived, missing): (Vec<_>, Vec<_>) =
            members.iter().partition(|(_, it)| it.sequence >= collective.sequence && !given_up.contains(&it.rank));
        let numbers = |of: Vec<(usize, &Collective)>| of.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
        let is_here = |rank: &usize| members.iter().any(|(_, it)| it.rank == *rank);
        let mut missing_elsewhere: Vec<usize> = given_up.iter().copied().filter(|rank| !is_here(rank)).collect();
        missing_elsewhere.sort_unstable();
        missing_elsewhere.dedup();
        let incomplete = IncompleteCollective {
            collective,
            arrived: numbers(arrived),
            missing: numbers(missing),
            missing_elsewhere,
        };
        if !incomplete.missing.is_empty() || !incomplete.missing_elsewhere.is_empty() {
            incomplete_collectives.push(incomplete);
        }
    }
    incomplete_collectives
}

impl fmt::Display for IncompleteCollective<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let it = self.collective;
        let ranks = |ranks: &[usize]| {
            let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(", "))
        };
        write!(f, "{} (collective {} of \"{}\", {} ranks): ", it.name, it.sequence, it.group, it.size)?;
        write!(f, "{} arrived", ranks(&self.arrived))?;
        if !self.missing.is_empty() {
            write!(f, "; {} did not", ranks(&self.missing))?;
        }
        match (self.missing.is_empty(), self.missing_elsewhere.is_empty()) {
            (_, true) => Ok(()),
            (true, false) => write!(f, "; {} of the group did not", ranks(&self.missing_elsewhere)),
            (false, false) => write!(f, "; nor did {} of the group", ranks(&self.missing_elsewhere)),
        }
    }
}

/// Describes hung ranks: one line for each rank, and for each incomplete collective.
pub(crate) fn describe(ranks: &[(usize, &RankSnapshot)]) -> Vec<String> {
    let where_they_were = ranks.iter().map(|(rank, at)| format!("state of rank {rank}: {at}"));
    where_they_were.chain(incomplete_collectives(ranks).iter().map(IncompleteCollective::to_string)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Parses a snapshot from partial JSON.
    fn told(json: serde_json::Value) -> Snapshot {
        let mut whole = serde_json::to_value(Snapshot::default()).unwrap();
        whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    fn collective(group: &str, rank: usize, sequence: u64, progress: &str, missing: &[usize]) -> serde_json::Value {
        serde_json::json!({"group": group, "rank": rank, "size": 3, "name": "all_gather", "sequence": sequence,
            "progress": progress, "age": 1.5, "missing": missing, "torn": false})
    }

    fn at(status: Snapshot) -> RankSnapshot {
        RankSnapshot { status, process: None }
    }

    #[test]
    fn reports_arrived_and_missing_ranks() {
        let rank = |collectives: &[serde_json::Value]| at(told(serde_json::json!({"collectives": collectives})));
        let ranks = [
            rank(&[collective("world", 0, 5, "running", &[]), collective("half", 0, 9, "done", &[])]),
            rank(&[collective("world", 1, 4, "done", &[])]),
            rank(&[collective("world", 2, 5, "running", &[]), collective("half", 1, 9, "running", &[])]),
        ];
        let numbered: Vec<(usize, &RankSnapshot)> = ranks.iter().enumerate().collect();
        let lines = describe(&numbered);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!(lines[3], "all_gather (collective 5 of \"world\", 3 ranks): ranks 0, 2 arrived; rank 1 did not");

        // Rank 1 arrives after the timeout; rank 2 is on another host.
        let ranks = [
            rank(&[collective("world", 0, 5, "timed_out", &[1, 2])]),
            rank(&[collective("world", 1, 5, "failed", &[])]),
        ];
        let numbered: Vec<(usize, &RankSnapshot)> = ranks.iter().enumerate().collect();
        let incomplete_collectives = incomplete_collectives(&numbered);
        assert_eq!(incomplete_collectives.len(), 1);
        assert!(
            incomplete_collectives[0]
                .to_string()
                .ends_with("rank 0 arrived; rank 1 did not; nor did rank 2 of the group")
        );
        assert!(ranks[0].has_timed_out() && !ranks[1].has_timed_out());

        // All ranks of this host arrived.
        let ranks = [
            rank(&[collective("world", 0, 5, "timed_out", &[2])]),
            rank(&[collective("world", 1, 5, "timed_out", &[2])]),
        ];
        let numbered: Vec<(usize, &RankSnapshot)> = ranks.iter().enumerate().collect();
        let text = self::incomplete_collectives(&numbered)[0].to_string();
        assert!(text.ends_with("ranks 0, 1 arrived; rank 2 of the group did not"), "{text}");
    }

    #[test]
    fn formats_a_snapshot() {
        assert_eq!(at(Snapshot::default()).to_string(), "no status page; has ended");
        let mut rank = at(told(serde_json::json!({
            "pid": 1, "beat": 15.25, "step": {"number": 41, "age": 20.0, "torn": false},
            "doing": {"what": "forward layers.3", "age": 15.0, "torn": true},
            "collectives": [collective("world", 0, 5, "done", &[]), collective("half", 0, 9, "running", &[])]})));
        let waits = "waits in all_gather (collective 9 of \"half\") for 1.5 s";
        let doing = "step 41, forward layers.3 for 15.0 s (stopped while it wrote this)";
        assert_eq!(rank.to_string(), format!("{doing}, {waits}; has ended"));
        let process = ProcessInfo {
            pid: 1,
            started: 1,
            state: ProcessState::Stopped,
            resident_bytes: 1,
            wait_channel: Some("do_signal_stop".into()),
        };
        rank.process = Some(process);
        let told = rank.to_string();
        assert!(told.ends_with(&format!("{waits}; stopped in do_signal_stop, no heartbeat for 15.2 s")), "{told}");
        rank.status.collectives.pop();
        rank.status.doing = None;
        rank.status.beat = rank.status.beat.map(|_| fsdp_core::heartbeat::Age(Duration::ZERO));
        let last = "step 41, last in all_gather (collective 5 of \"world\"), done 1.5 s ago; stopped in do_signal_stop";
        assert_eq!(rank.to_string(), last);
    }
}
