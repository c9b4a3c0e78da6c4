//! Where ranks were when something went wrong: what their boards and the kernel say of them.

use std::fmt;

use fsdp_core::heartbeat::{Collective, Progress, Snapshot};
use serde::{Deserialize, Serialize};

use crate::report::process::{ProcessInfo, ProcessState};

/// No heartbeat for so many seconds is worth a word.
const LATE: f64 = 2.0;

/// Where a rank was at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Whereabouts {
    /// What the rank told of itself; nothing where its program does not use `fsdp-core`.
    pub told: Snapshot,
    /// The process that told it, else the rank's own; `None` if it has ended.
    pub process: Option<ProcessInfo>,
}

impl Whereabouts {
    /// Of the rank whose process is `pid`.
    pub(crate) fn of(pid: u32, told: Snapshot) -> Self {
        let process = match (told.pid, told.pid_started) {
            (Some(pid), Some(started)) => ProcessInfo::started_at(pid, started),
            _ => ProcessInfo::of(pid).filter(|process| process.state != ProcessState::Ended),
        };
        Whereabouts { told, process }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.state == ProcessState::Stopped)
    }

    /// A collective of its has timed out.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.told.collectives.iter().any(|collective| collective.progress == Progress::TimedOut)
    }

    /// What the rank does, without what the kernel says.
    pub(crate) fn doing(&self) -> String {
        let mut parts = Vec::new();
        if let Some(doing) = &self.told.doing {
            parts.push(format!("{} for {}{}", doing.what, doing.age, torn(doing.torn)));
        }
        parts.extend(self.collectives().map(of_collective));
        if parts.is_empty() {
            parts.push(if self.told.pid.is_some() { "outside of any collective" } else { "tells nothing" }.into());
        }
        parts.join(", ")
    }

    /// Those that the rank is in; else those that failed; else the last one.
    fn collectives(&self) -> impl Iterator<Item = &Collective> {
        let all = &self.told.collectives;
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

impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(step) = &self.told.step {
            write!(f, "step {}, ", step.number)?;
        }
        write!(f, "{}; ", self.doing())?;
        match &self.process {
            Some(process) => write!(f, "{process}")?,
            None => f.write_str("has ended")?,
        }
        match self.told.beat {
            Some(age) if self.process.is_some() && f64::from(age) > LATE => write!(f, ", no heartbeat for {age}"),
            _ => Ok(()),
        }
    }
}

/// Who came to a collective and who did not.
struct Arrival<'a> {
    collective: &'a Collective,
    arrived: Vec<usize>,
    missing: Vec<usize>,
    /// Ranks of the group that did not arrive and are of other hosts.
    elsewhere: Vec<usize>,
}

/// The collectives that some of these ranks wait in, or that timed out, and that others have not reached.
fn arrivals<'a>(ranks: &[(usize, &'a Whereabouts)]) -> Vec<Arrival<'a>> {
    let mut arrivals: Vec<Arrival<'a>> = Vec::new();
    let waits = |it: &&Collective| matches!(it.progress, Progress::Running | Progress::TimedOut);
    for collective in ranks.iter().flat_map(|(_, at)| &at.told.collectives).filter(waits) {
        let is_same = |other: &Collective| other.group == collective.group && other.sequence == collective.sequence;
        if arrivals.iter().any(|arrival| is_same(arrival.collective)) {
            continue;
        }
        let members: Vec<(usize, &Collective)> = ranks
            .iter()
            .filter_map(|(rank, at)| Some((*rank, at.told.collectives.iter().find(|it| it.group == collective.group)?)))
            .collect();
        // One that comes too late finds the collective failed: those who waited know better.
        let given_up: Vec<usize> =
            members.iter().filter(|(_, it)| is_same(it)).flat_map(|(_, it)| it.missing.iter().copied()).collect();
        let (arrived, missing): (Vec<_>, Vec<_>) =
            members.iter().partition(|(_, it)| it.sequence >= collective.sequence && !given_up.contains(&it.rank));
        let numbers = |of: Vec<(usize, &Collective)>| of.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
        let is_here = |rank: &usize| members.iter().any(|(_, it)| it.rank == *rank);
        let mut elsewhere: Vec<usize> = given_up.iter().copied().filter(|rank| !is_here(rank)).collect();
        elsewhere.sort_unstable();
        elsewhere.dedup();
        let arrival = Arrival { collective, arrived: numbers(arrived), missing: numbers(missing), elsewhere };
        if !arrival.missing.is_empty() || !arrival.elsewhere.is_empty() {
            arrivals.push(arrival);
        }
    }
    arrivals
}

impl fmt::Display for Arrival<'_> {
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
        match (self.missing.is_empty(), self.elsewhere.is_empty()) {
            (_, true) => Ok(()),
            (true, false) => write!(f, "; {} of the group did not", ranks(&self.elsewhere)),
            (false, false) => write!(f, "; nor did {} of the group", ranks(&self.elsewhere)),
        }
    }
}

/// What there is to say of ranks that got stuck, a line each and one for each collective that not all have come to.
pub(crate) fn lines(ranks: &[(usize, &Whereabouts)]) -> Vec<String> {
    let where_they_were = ranks.iter().map(|(rank, at)| format!("rank {rank} was here: {at}"));
    where_they_were.chain(arrivals(ranks).iter().map(Arrival::to_string)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// As a board would say it.
    fn told(json: serde_json::Value) -> Snapshot {
        let mut whole = serde_json::to_value(Snapshot::default()).unwrap();
        whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    fn collective(group: &str, rank: usize, sequence: u64, progress: &str, missing: &[usize]) -> serde_json::Value {
        serde_json::json!({"group": group, "rank": rank, "size": 3, "name": "all_gather", "sequence": sequence,
            "progress": progress, "age": 1.5, "missing": missing, "torn": false})
    }

    fn at(told: Snapshot) -> Whereabouts {
        Whereabouts { told, process: None }
    }

    #[test]
    fn who_arrived_and_who_did_not() {
        let rank = |collectives: &[serde_json::Value]| at(told(serde_json::json!({"collectives": collectives})));
        let ranks = [
            rank(&[collective("world", 0, 5, "running", &[]), collective("half", 0, 9, "done", &[])]),
            rank(&[collective("world", 1, 4, "done", &[])]),
            rank(&[collective("world", 2, 5, "running", &[]), collective("half", 1, 9, "running", &[])]),
        ];
        let numbered: Vec<(usize, &Whereabouts)> = ranks.iter().enumerate().collect();
        let lines = lines(&numbered);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!(lines[3], "all_gather (collective 5 of \"world\", 3 ranks): ranks 0, 2 arrived; rank 1 did not");

        // One came after it was given up, one is of another host.
        let ranks = [
            rank(&[collective("world", 0, 5, "timed_out", &[1, 2])]),
            rank(&[collective("world", 1, 5, "failed", &[])]),
        ];
        let numbered: Vec<(usize, &Whereabouts)> = ranks.iter().enumerate().collect();
        let arrivals = arrivals(&numbered);
        assert_eq!(arrivals.len(), 1);
        assert!(arrivals[0].to_string().ends_with("rank 0 arrived; rank 1 did not; nor did rank 2 of the group"));
        assert!(ranks[0].has_timed_out() && !ranks[1].has_timed_out());

        // All of this host came.
        let ranks = [
            rank(&[collective("world", 0, 5, "timed_out", &[2])]),
            rank(&[collective("world", 1, 5, "timed_out", &[2])]),
        ];
        let numbered: Vec<(usize, &Whereabouts)> = ranks.iter().enumerate().collect();
        let text = self::arrivals(&numbered)[0].to_string();
        assert!(text.ends_with("ranks 0, 1 arrived; rank 2 of the group did not"), "{text}");
    }

    #[test]
    fn a_line_says_what_is_known() {
        assert_eq!(at(Snapshot::default()).to_string(), "tells nothing; has ended");
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
        rank.told.collectives.pop();
        rank.told.doing = None;
        rank.told.beat = rank.told.beat.map(|_| fsdp_core::heartbeat::Age(Duration::ZERO));
        let last = "step 41, last in all_gather (collective 5 of \"world\"), done 1.5 s ago; stopped in do_signal_stop";
        assert_eq!(rank.to_string(), last);
    }
}
