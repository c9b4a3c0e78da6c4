//! PMI's key-value space (KVS) of the ranks of one host in one attempt: their entries, and their barriers. A state
//! machine without sockets or threads.

use std::collections::BTreeMap;

use super::protocol::{Command, Response};
use crate::rendezvous::{Assignment, KeyValue};

/// Maximum size of all entries that the ranks of a host put.
const MAX_HOST_BYTES: usize = 16 << 20;
/// Maximum size of the entries in a message to other hosts; the message's limit is more than twice that.
const MAX_MESSAGE_BYTES: usize = 24 << 10;
/// Size of an entry beyond its text.
const ENTRY_OVERHEAD: usize = 8;

/// Events for the launcher or for other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PmiEvent {
    /// Entries of this host's ranks, for the other hosts.
    Put(Vec<KeyValue>),
    /// All ranks of this host are in the barrier.
    Barrier,
    /// The attempt must end because of a rank of this host.
    Failed(PmiFailure),
}

/// A failure over PMI that ends the attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PmiFailure {
    pub(crate) local_rank: usize,
    pub(crate) kind: PmiFailureKind,
    /// Description for the user.
    pub(crate) text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PmiFailureKind {
    /// The rank called MPI_Abort with this exit code. The launcher ends the process.
    Aborted(i32),
    /// The rank sent an invalid message, or does not read.
    Protocol,
    /// The rank disconnected while another one waits for it. It may also fail for a reason of its own.
    Disconnected,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Response(usize, Response),
    Report(PmiEvent),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankState {
    /// Has not sent init.
    New,
    Active,
    InBarrier,
    Finalized,
    /// Disconnected or failed.
    Gone,
}

pub(super) struct Kvs {
    name: String,
    first_rank: usize,
    world_size: usize,
    has_others: bool,
    values: BTreeMap<String, String>,
    /// Entries since the last barrier.
    fresh: Vec<KeyValue>,
    /// Size of all entries of this host.
    bytes: usize,
    ranks: Vec<RankState>,
    /// First failure.
    first_failure: Option<PmiFailure>,
}

impl Kvs {
    /// Creates the KVS for the `ranks` ranks of this host.
    pub(super) fn new(assignment: &Assignment, ranks: usize) -> Self {
        let mapping = mapping(&assignment.ranks_of_hosts).map(|mapping| ("PMI_process_mapping".to_owned(), mapping));
        Kvs {
            name: assignment.pmi_space.clone(),
            first_rank: assignment.first_rank,
            world_size: assignment.world_size,
            has_others: assignment.group_world_size > 1,
            values: mapping.into_iter().collect(),
            fresh: Vec::new(),
            bytes: 0,
            ranks: vec![RankState::New; ranks],
            first_failure: None,
        }
    }

    /// Handles a command of a rank.
    pub(super) fn handle(&mut self, local_rank: usize, command: Command) -> Vec<Action> {
        match self.ranks.get(local_rank) {
            // Commands after an abort are ignored.
            None | Some(RankState::Gone) => return Vec::new(),
            Some(RankState::New) if !matches!(command, Command::Init { .. } | Command::Abort { .. }) => {
                return self.fail(local_rank, "sent a PMI command before init");
            }
            Some(RankState::InBarrier) if !matches!(command, Command::Abort { .. }) => {
                return self.fail(local_rank, "sent a PMI command while in a barrier");
            }
            Some(RankState::Finalized) => return self.fail(local_rank, "sent a PMI command after finalize"),
            Some(RankState::New | RankState::Active | RankState::InBarrier) => {}
        }
        let answer = match command {
            Command::Init { version } => {
                self.set_state(local_rank, RankState::Active);
                Response::Init { is_served: version == 1 }
            }
            Command::GetMaxes => Response::Maxes,
            Command::GetAppnum => Response::Appnum,
            Command::GetMyKvsname => Response::MyKvsname(self.name.clone()),
            Command::GetUniverseSize => Response::UniverseSize(self.world_size),
            Command::Put { kvs, .. } if kvs != self.name => Response::NotPut,
            Command::Put { key, value, .. } => {
                self.bytes += key.len() + value.len() + ENTRY_OVERHEAD;
                if self.bytes > MAX_HOST_BYTES {
                    return self.fail(
                        local_rank,
                        &format!("put more over PMI than the limit of {MAX_HOST_BYTES} bytes for a host"),
                    );
                }
                if self.has_others {
                    self.fresh.push((key.clone(), value.clone()));
                }
                self.values.insert(key, value);
                Response::Put
            }
            Command::Get { kvs, key } => Response::Get(self.values.get(&key).filter(|_| kvs == self.name).cloned()),
            Command::BarrierIn => {
                self.set_state(local_rank, RankState::InBarrier);
                return self.barrier();
            }
            Command::Finalize => {
                self.set_state(local_rank, RankState::Finalized);
                Response::Finalize
            }
            Command::Abort { code, message } => {
                let message = if message.is_empty() { String::new() } else { format!(": {message}") };
                let text = format!("it called MPI_Abort with exit code {code}{message}");
                return self.end(local_rank, PmiFailureKind::Aborted(code), text);
            }
            Command::Unsupported(answer) => Response::Unsupported(answer),
        };
        vec![Action::Response(local_rank, answer)]
    }

    /// Handles the end of a rank's connection.
    pub(super) fn disconnect(&mut self, local_rank: usize) -> Vec<Action> {
        if matches!(self.ranks.get(local_rank), None | Some(RankState::Finalized | RankState::Gone)) {
            return Vec::new();
        }
        self.set_state(local_rank, RankState::Gone);
        self.check_barrier()
    }

    /// Handles an invalid message, or a rank that does not read.
    pub(super) fn fail(&mut self, local_rank: usize, how: &str) -> Vec<Action> {
        if self.ranks.get(local_rank) == Some(&RankState::Gone) {
            return Vec::new();
        }
        self.end(local_rank, PmiFailureKind::Protocol, format!("it {how}"))
    }

    fn end(&mut self, local_rank: usize, kind: PmiFailureKind, text: String) -> Vec<Action> {
        self.set_state(local_rank, RankState::Gone);
        let failure = PmiFailure { local_rank, kind, text };
        self.first_failure.get_or_insert_with(|| failure.clone());
        vec![Action::Report(PmiEvent::Failed(failure))]
    }

    /// Returns the first failure.
    pub(super) fn first_failure(&self) -> Option<PmiFailure> {
        self.first_failure.clone()
    }

    /// Adds entries of another host's ranks.
    pub(super) fn add_remote(&mut self, entries: Vec<KeyValue>) {
        self.values.extend(entries);
    }

    /// Releases the barrier: all ranks of all hosts are in it.
    pub(super) fn release_barrier(&mut self) -> Vec<Action> {
        let mut answers = Vec::new();
        for (local_rank, state) in self.ranks.iter_mut().enumerate() {
            if *state == RankState::InBarrier {
                *state = RankState::Active;
                answers.push(Action::Response(local_rank, Response::BarrierOut));
            }
        }
        answers
    }

    /// Handles a rank that enters the barrier.
    fn barrier(&mut self) -> Vec<Action> {
        if !self.ranks.iter().all(|&state| state == RankState::InBarrier) {
            return self.check_barrier();
        }
        if !self.has_others {
            return self.release_barrier();
        }
        let events = parts(std::mem::take(&mut self.fresh)).into_iter().map(PmiEvent::Put).chain([PmiEvent::Barrier]);
        events.map(Action::Report).collect()
    }

    /// Returns a failure if a rank in the barrier waits for a rank that is gone.
    fn check_barrier(&mut self) -> Vec<Action> {
        let of = |wanted: &[RankState]| self.ranks.iter().position(|state| wanted.contains(state));
        let (Some(waits), Some(gone)) = (of(&[RankState::InBarrier]), of(&[RankState::Gone, RankState::Finalized]))
        else {
            return Vec::new();
        };
        let rank = self.first_rank + waits;
        let text = format!("it left MPI, but rank {rank} waits for it in an MPI barrier");
        vec![Action::Report(PmiEvent::Failed(PmiFailure {
            local_rank: gone,
            kind: PmiFailureKind::Disconnected,
            text,
        }))]
    }

    fn set_state(&mut self, local_rank: usize, state: RankState) {
        if let Some(at) = self.ranks.get_mut(local_rank) {
            *at = state;
        }
    }
}

/// Splits entries into messages of bounded size.
fn parts(entries: Vec<KeyValue>) -> Vec<Vec<KeyValue>> {
    let mut parts: Vec<Vec<KeyValue>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        let bytes = entry.0.len() + entry.1.len() + ENTRY_OVERHEAD;
        match parts.last_mut() {
            Some(part) if bytes <= room => {
                room -= bytes;
                part.push(entry);
            }
            _ => {
                room = MAX_MESSAGE_BYTES.saturating_sub(bytes);
                parts.push(vec![entry]);
            }
        }
    }
    parts
}

/// Formats `PMI_process_mapping`: blocks of (first host, number of hosts, ranks of each). Returns `None` if the value
/// would be too long; MPICH then compares host names.
fn mapping(ranks_of_hosts: &[(usize, usize)]) -> Option<String> {
    let mut first = 0;
    let blocks = ranks_of_hosts.iter().map(|&(hosts, ranks)| {
        let block = format!(",({first},{hosts},{ranks})");
        first += hosts;
        block
    });
    let mapping = format!("(vector{})", blocks.collect::<String>());
    (mapping.len() <= super::protocol::MAX_VALUE_LEN).then_some(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the KVS of a host with two ranks.
    fn kvs(hosts: usize) -> Kvs {
        let assignment = Assignment {
            pmi_space: "kvs_3".into(),
            group_world_size: hosts,
            first_rank: 4,
            world_size: 2 * hosts,
            ranks_of_hosts: vec![(hosts, 2)],
            ..Assignment::single_node("run", 2, 1)
        };
        let mut kvs = Kvs::new(&assignment, 2);
        for rank in 0..2 {
            assert_eq!(
                kvs.handle(rank, Command::Init { version: 1 }),
                answers(rank, Response::Init { is_served: true })
            );
        }
        kvs
    }

    fn answers(rank: usize, answer: Response) -> Vec<Action> {
        vec![Action::Response(rank, answer)]
    }

    fn put(key: &str, value: &str) -> Command {
        Command::Put { kvs: "kvs_3".into(), key: key.into(), value: value.into() }
    }

    fn get(key: &str) -> Command {
        Command::Get { kvs: "kvs_3".into(), key: key.into() }
    }

    fn failure_of(actions: Vec<Action>) -> PmiFailure {
        match actions.as_slice() {
            [Action::Report(PmiEvent::Failed(failure_of))] => failure_of.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_host_needs_no_other() {
        let mut kvs = kvs(1);
        assert_eq!(kvs.handle(0, put("a", "1")), answers(0, Response::Put));
        assert_eq!(kvs.handle(0, Command::BarrierIn), []);
        let out = [0, 1].map(|rank| Action::Response(rank, Response::BarrierOut));
        assert_eq!(kvs.handle(1, Command::BarrierIn), out);
        assert_eq!(kvs.handle(1, get("a")), answers(1, Response::Get(Some("1".into()))));
        assert_eq!(kvs.handle(1, get("b")), answers(1, Response::Get(None)));
        assert_eq!(
            kvs.handle(1, get("PMI_process_mapping")),
            answers(1, Response::Get(Some("(vector,(0,1,2))".into())))
        );
        assert_eq!(kvs.handle(1, Command::GetMyKvsname), answers(1, Response::MyKvsname("kvs_3".into())));
        // The name of another attempt's KVS.
        let old = Command::Put { kvs: "kvs_2".into(), key: "a".into(), value: "2".into() };
        assert_eq!(kvs.handle(1, old), answers(1, Response::NotPut));
        let old = Command::Get { kvs: "kvs_2".into(), key: "a".into() };
        assert_eq!(kvs.handle(1, old), answers(1, Response::Get(None)));
        for rank in [0, 1] {
            assert_eq!(kvs.handle(rank, Command::Finalize), answers(rank, Response::Finalize));
            assert_eq!(kvs.disconnect(rank), []);
        }
    }

    #[test]
    fn entries_are_sent_before_the_barrier() {
        let mut kvs = kvs(2);
        assert_eq!(kvs.handle(1, put("a", "1")), answers(1, Response::Put));
        assert_eq!(kvs.handle(1, Command::BarrierIn), []);
        let events = [PmiEvent::Put(vec![("a".into(), "1".into())]), PmiEvent::Barrier].map(Action::Report);
        assert_eq!(kvs.handle(0, Command::BarrierIn), events);
        kvs.add_remote(vec![("b".into(), "2".into())]);
        assert_eq!(kvs.release_barrier(), [0, 1].map(|rank| Action::Response(rank, Response::BarrierOut)));
        assert_eq!(kvs.handle(0, get("b")), answers(0, Response::Get(Some("2".into()))));
        // Entries are sent once.
        assert_eq!(kvs.handle(0, Command::BarrierIn), []);
        assert_eq!(kvs.handle(1, Command::BarrierIn), [Action::Report(PmiEvent::Barrier)]);
    }

    #[test]
    fn many_entries_take_several_messages() {
        let entries: Vec<KeyValue> = (0..100).map(|index| (index.to_string(), "v".repeat(4096))).collect();
        let parts = parts(entries.clone());
        assert_eq!(parts.concat(), entries);
        for part in &parts {
            assert!(serde_json::to_vec(part).unwrap().len() < 2 * MAX_MESSAGE_BYTES);
        }
        assert_eq!(parts.len(), 20);
    }

    #[test]
    fn failures_are_reported_once() {
        let mut kvs = kvs(1);
        let failure = failure_of(kvs.handle(1, Command::Abort { code: 13, message: "abort".into() }));
        assert_eq!(
            (failure.local_rank, failure.kind, failure.text.as_str()),
            (1, PmiFailureKind::Aborted(13), "it called MPI_Abort with exit code 13: abort")
        );
        assert_eq!(kvs.handle(1, Command::BarrierIn), []);
        assert_eq!(kvs.disconnect(1), []);

        let mut silent = Kvs::new(&Assignment::single_node("run", 2, 1), 2);
        assert!(failure_of(silent.handle(0, Command::GetMaxes)).text.contains("before init"));
        let mut kvs = self::kvs(1);
        kvs.handle(0, Command::BarrierIn);
        assert!(failure_of(kvs.handle(0, Command::GetMaxes)).text.contains("while in a barrier"));
        let mut kvs = self::kvs(1);
        kvs.handle(0, Command::Finalize);
        assert!(failure_of(kvs.handle(0, Command::GetMaxes)).text.contains("after finalize"));
        let mut kvs = self::kvs(1);
        let much = loop {
            match kvs.handle(0, put("key", &"v".repeat(4096))).as_slice() {
                [Action::Response(0, Response::Put)] => {}
                [Action::Report(PmiEvent::Failed(failure_of))] => break failure_of.text.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert!(much.contains("limit of 16777216 bytes"), "{much}");
    }

    #[test]
    fn a_disconnected_rank_breaks_the_barrier() {
        // The order does not matter.
        let mut kvs = kvs(2);
        assert_eq!(kvs.disconnect(1), []);
        let failure = failure_of(kvs.handle(0, Command::BarrierIn));
        assert!(
            failure.local_rank == 1
                && failure.kind == PmiFailureKind::Disconnected
                && failure.text.contains("rank 4 waits for it"),
            "{failure:?}"
        );
        let mut kvs = self::kvs(2);
        assert_eq!(kvs.handle(0, Command::BarrierIn), []);
        assert_eq!(failure_of(kvs.disconnect(1)).local_rank, 1);
        // A rank that never used PMI is not missed unless a rank waits for it.
        let mut silent = Kvs::new(&Assignment::single_node("run", 2, 1), 2);
        assert_eq!((silent.disconnect(0), silent.disconnect(1)), (vec![], vec![]));
    }

    #[test]
    fn formats_the_process_mapping() {
        assert_eq!(mapping(&[(2, 8)]).unwrap(), "(vector,(0,2,8))");
        assert_eq!(mapping(&[(1, 2), (3, 1), (1, 4)]).unwrap(), "(vector,(0,1,2),(1,3,1),(4,1,4))");
        assert_eq!(mapping(&[(1, 2); 1000]), None);
    }
}
