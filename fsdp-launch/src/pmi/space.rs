//! The ranks of one host in one attempt, as PMI sees them: what they have put, and who waits. A state machine without
//! sockets or threads.

use std::collections::BTreeMap;

use super::command::{Answer, Command};
use crate::rendezvous::{Entry, Place};

/// Bytes of all that the ranks of a host may put.
const MOST_BYTES: usize = 16 << 20;
/// Bytes of the entries of a message to other hosts, which has room for more than twice that.
const PART: usize = 24 << 10;
/// What an entry takes beside its text.
const AROUND: usize = 8;

/// What the launcher has to know, or others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// For the other hosts: what the ranks of this one have put.
    Put(Vec<Entry>),
    /// For the other hosts: all ranks of this one wait.
    Barrier,
    /// The attempt can't go on because of this rank of the host.
    Failed(Trouble),
}

/// What a rank did over PMI that ends the attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) local_rank: usize,
    pub(crate) kind: Kind,
    /// In words.
    pub(crate) text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It wants the attempt to end with this exit code, and does not end by itself.
    Aborted(i32),
    /// It can't be understood.
    Broken,
    /// It is gone while another waits for it, which may have a reason of its own.
    Gone,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Answer(usize, Answer),
    Say(Said),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seat {
    /// It has not said anything.
    Silent,
    Speaks,
    /// In a barrier.
    Waits,
    /// It needs nothing more.
    Finalized,
    /// Its connection is closed, or it has failed.
    Gone,
}

pub(super) struct Space {
    name: String,
    first_rank: usize,
    world_size: usize,
    has_others: bool,
    values: BTreeMap<String, String>,
    /// What was put here since the last barrier.
    fresh: Vec<Entry>,
    /// Of all that was put here.
    bytes: usize,
    seats: Vec<Seat>,
    /// The first thing that a rank said that ends the attempt.
    trouble: Option<Trouble>,
}

impl Space {
    /// Of the `ranks` ranks of this host in `place`.
    pub(super) fn new(place: &Place, ranks: usize) -> Self {
        let mapping = mapping(&place.ranks_of_hosts).map(|mapping| ("PMI_process_mapping".to_owned(), mapping));
        Space {
            name: place.pmi_space.clone(),
            first_rank: place.first_rank,
            world_size: place.world_size,
            has_others: place.group_world_size > 1,
            values: mapping.into_iter().collect(),
            fresh: Vec::new(),
            bytes: 0,
            seats: vec![Seat::Silent; ranks],
            trouble: None,
        }
    }

    /// Takes in what a rank says.
    pub(super) fn hear(&mut self, local_rank: usize, command: Command) -> Vec<Action> {
        match self.seats.get(local_rank) {
            // What follows an abort does not count.
            None | Some(Seat::Gone) => return Vec::new(),
            Some(Seat::Silent) if !matches!(command, Command::Init { .. } | Command::Abort { .. }) => {
                return self.fail(local_rank, "spoke PMI before it said init");
            }
            Some(Seat::Waits) if !matches!(command, Command::Abort { .. }) => {
                return self.fail(local_rank, "spoke PMI while it waits in a barrier");
            }
            Some(Seat::Finalized) => return self.fail(local_rank, "spoke PMI after it said finalize"),
            Some(Seat::Silent | Seat::Speaks | Seat::Waits) => {}
        }
        let answer = match command {
            Command::Init { version } => {
                self.sit(local_rank, Seat::Speaks);
                Answer::Init { is_served: version == 1 }
            }
            Command::GetMaxes => Answer::Maxes,
            Command::GetAppnum => Answer::Appnum,
            Command::GetMyKvsname => Answer::MyKvsname(self.name.clone()),
            Command::GetUniverseSize => Answer::UniverseSize(self.world_size),
            Command::Put { space, .. } if space != self.name => Answer::NotPut,
            Command::Put { key, value, .. } => {
                self.bytes += key.len() + value.len() + AROUND;
                if self.bytes > MOST_BYTES {
                    return self.fail(local_rank, &format!("put more over PMI than the {MOST_BYTES} bytes of a host"));
                }
                if self.has_others {
                    self.fresh.push((key.clone(), value.clone()));
                }
                self.values.insert(key, value);
                Answer::Put
            }
            Command::Get { space, key } => Answer::Get(self.values.get(&key).filter(|_| space == self.name).cloned()),
            Command::BarrierIn => {
                self.sit(local_rank, Seat::Waits);
                return self.barrier();
            }
            Command::Finalize => {
                self.sit(local_rank, Seat::Finalized);
                Answer::Finalize
            }
            Command::Abort { code, message } => {
                let message = if message.is_empty() { String::new() } else { format!(": {message}") };
                let text = format!("it called MPI_Abort with exit code {code}{message}");
                return self.end(local_rank, Kind::Aborted(code), text);
            }
            Command::Unserved(answer) => Answer::Unserved(answer),
        };
        vec![Action::Answer(local_rank, answer)]
    }

    /// Takes in that the connection of a rank is closed.
    pub(super) fn part(&mut self, local_rank: usize) -> Vec<Action> {
        if matches!(self.seats.get(local_rank), None | Some(Seat::Finalized | Seat::Gone)) {
            return Vec::new();
        }
        self.sit(local_rank, Seat::Gone);
        self.waits_in_vain()
    }

    /// A rank can't be understood, or does not listen.
    pub(super) fn fail(&mut self, local_rank: usize, how: &str) -> Vec<Action> {
        if self.seats.get(local_rank) == Some(&Seat::Gone) {
            return Vec::new();
        }
        self.end(local_rank, Kind::Broken, format!("it {how}"))
    }

    fn end(&mut self, local_rank: usize, kind: Kind, text: String) -> Vec<Action> {
        self.sit(local_rank, Seat::Gone);
        let trouble = Trouble { local_rank, kind, text };
        self.trouble.get_or_insert_with(|| trouble.clone());
        vec![Action::Say(Said::Failed(trouble))]
    }

    /// The first thing that a rank said that ends the attempt.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.trouble.clone()
    }

    /// Takes in what the ranks of another host have put.
    pub(super) fn hear_put(&mut self, entries: Vec<Entry>) {
        self.values.extend(entries);
    }

    /// All ranks of all hosts wait: they wait no more.
    pub(super) fn go_on(&mut self) -> Vec<Action> {
        let mut answers = Vec::new();
        for (local_rank, seat) in self.seats.iter_mut().enumerate() {
            if *seat == Seat::Waits {
                *seat = Seat::Speaks;
                answers.push(Action::Answer(local_rank, Answer::BarrierOut));
            }
        }
        answers
    }

    /// A rank has come to wait.
    fn barrier(&mut self) -> Vec<Action> {
        if !self.seats.iter().all(|&seat| seat == Seat::Waits) {
            return self.waits_in_vain();
        }
        if !self.has_others {
            return self.go_on();
        }
        let said = parts(std::mem::take(&mut self.fresh)).into_iter().map(Said::Put).chain([Said::Barrier]);
        said.map(Action::Say).collect()
    }

    /// An error if a rank waits for one that does not come any more.
    fn waits_in_vain(&mut self) -> Vec<Action> {
        let of = |wanted: &[Seat]| self.seats.iter().position(|seat| wanted.contains(seat));
        let (Some(waits), Some(gone)) = (of(&[Seat::Waits]), of(&[Seat::Gone, Seat::Finalized])) else {
            return Vec::new();
        };
        let rank = self.first_rank + waits;
        let text = format!("it takes part in MPI no more, and rank {rank} waits for it in a barrier of MPI");
        vec![Action::Say(Said::Failed(Trouble { local_rank: gone, kind: Kind::Gone, text }))]
    }

    fn sit(&mut self, local_rank: usize, seat: Seat) {
        if let Some(at) = self.seats.get_mut(local_rank) {
            *at = seat;
        }
    }
}

/// Messages of a bounded size.
fn parts(entries: Vec<Entry>) -> Vec<Vec<Entry>> {
    let mut parts: Vec<Vec<Entry>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        let bytes = entry.0.len() + entry.1.len() + AROUND;
        match parts.last_mut() {
            Some(part) if bytes <= room => {
                room -= bytes;
                part.push(entry);
            }
            _ => {
                room = PART.saturating_sub(bytes);
                parts.push(vec![entry]);
            }
        }
    }
    parts
}

/// Which ranks are on which host, in MPICH's words: blocks of the first host, the number of hosts, and the ranks of
/// each. Nothing where that is longer than a value may be: MPICH then asks for the hosts' names.
fn mapping(ranks_of_hosts: &[(usize, usize)]) -> Option<String> {
    let mut first = 0;
    let blocks = ranks_of_hosts.iter().map(|&(hosts, ranks)| {
        let block = format!(",({first},{hosts},{ranks})");
        first += hosts;
        block
    });
    let mapping = format!("(vector{})", blocks.collect::<String>());
    (mapping.len() <= super::command::MAX_VALUE_LEN).then_some(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with two of its ranks here.
    fn space(hosts: usize) -> Space {
        let place = Place {
            pmi_space: "kvs_3".into(),
            group_world_size: hosts,
            first_rank: 4,
            world_size: 2 * hosts,
            ranks_of_hosts: vec![(hosts, 2)],
            ..Place::alone("run", 2, 1)
        };
        let mut space = Space::new(&place, 2);
        for rank in 0..2 {
            assert_eq!(space.hear(rank, Command::Init { version: 1 }), answers(rank, Answer::Init { is_served: true }));
        }
        space
    }

    fn answers(rank: usize, answer: Answer) -> Vec<Action> {
        vec![Action::Answer(rank, answer)]
    }

    fn put(key: &str, value: &str) -> Command {
        Command::Put { space: "kvs_3".into(), key: key.into(), value: value.into() }
    }

    fn get(key: &str) -> Command {
        Command::Get { space: "kvs_3".into(), key: key.into() }
    }

    fn trouble(actions: Vec<Action>) -> Trouble {
        match actions.as_slice() {
            [Action::Say(Said::Failed(trouble))] => trouble.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_ranks_of_one_host_meet_by_themselves() {
        let mut space = space(1);
        assert_eq!(space.hear(0, put("a", "1")), answers(0, Answer::Put));
        assert_eq!(space.hear(0, Command::BarrierIn), []);
        let out = [0, 1].map(|rank| Action::Answer(rank, Answer::BarrierOut));
        assert_eq!(space.hear(1, Command::BarrierIn), out);
        assert_eq!(space.hear(1, get("a")), answers(1, Answer::Get(Some("1".into()))));
        assert_eq!(space.hear(1, get("b")), answers(1, Answer::Get(None)));
        assert_eq!(space.hear(1, get("PMI_process_mapping")), answers(1, Answer::Get(Some("(vector,(0,1,2))".into()))));
        assert_eq!(space.hear(1, Command::GetMyKvsname), answers(1, Answer::MyKvsname("kvs_3".into())));
        // A rank that knows the space of another attempt.
        let old = Command::Put { space: "kvs_2".into(), key: "a".into(), value: "2".into() };
        assert_eq!(space.hear(1, old), answers(1, Answer::NotPut));
        let old = Command::Get { space: "kvs_2".into(), key: "a".into() };
        assert_eq!(space.hear(1, old), answers(1, Answer::Get(None)));
        for rank in [0, 1] {
            assert_eq!(space.hear(rank, Command::Finalize), answers(rank, Answer::Finalize));
            assert_eq!(space.part(rank), []);
        }
    }

    #[test]
    fn other_hosts_are_told_what_was_put_before_they_are_told_who_waits() {
        let mut space = space(2);
        assert_eq!(space.hear(1, put("a", "1")), answers(1, Answer::Put));
        assert_eq!(space.hear(1, Command::BarrierIn), []);
        let said = [Said::Put(vec![("a".into(), "1".into())]), Said::Barrier].map(Action::Say);
        assert_eq!(space.hear(0, Command::BarrierIn), said);
        space.hear_put(vec![("b".into(), "2".into())]);
        assert_eq!(space.go_on(), [0, 1].map(|rank| Action::Answer(rank, Answer::BarrierOut)));
        assert_eq!(space.hear(0, get("b")), answers(0, Answer::Get(Some("2".into()))));
        // Nothing is told twice.
        assert_eq!(space.hear(0, Command::BarrierIn), []);
        assert_eq!(space.hear(1, Command::BarrierIn), [Action::Say(Said::Barrier)]);
    }

    #[test]
    fn much_that_was_put_takes_several_messages() {
        let entries: Vec<Entry> = (0..100).map(|index| (index.to_string(), "v".repeat(4096))).collect();
        let parts = parts(entries.clone());
        assert_eq!(parts.concat(), entries);
        for part in &parts {
            assert!(serde_json::to_vec(part).unwrap().len() < 2 * PART);
        }
        assert_eq!(parts.len(), 20);
    }

    #[test]
    fn what_a_rank_does_wrong_is_told_once() {
        let mut space = space(1);
        let told = trouble(space.hear(1, Command::Abort { code: 13, message: "abort".into() }));
        assert_eq!(
            (told.local_rank, told.kind, told.text.as_str()),
            (1, Kind::Aborted(13), "it called MPI_Abort with exit code 13: abort")
        );
        assert_eq!(space.hear(1, Command::BarrierIn), []);
        assert_eq!(space.part(1), []);

        let mut silent = Space::new(&Place::alone("run", 2, 1), 2);
        assert!(trouble(silent.hear(0, Command::GetMaxes)).text.contains("before it said init"));
        let mut space = self::space(1);
        space.hear(0, Command::BarrierIn);
        assert!(trouble(space.hear(0, Command::GetMaxes)).text.contains("waits in a barrier"));
        let mut space = self::space(1);
        space.hear(0, Command::Finalize);
        assert!(trouble(space.hear(0, Command::GetMaxes)).text.contains("after it said finalize"));
        let mut space = self::space(1);
        let much = loop {
            match space.hear(0, put("key", &"v".repeat(4096))).as_slice() {
                [Action::Answer(0, Answer::Put)] => {}
                [Action::Say(Said::Failed(trouble))] => break trouble.text.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert!(much.contains("than the 16777216 bytes of a host"), "{much}");
    }

    #[test]
    fn nobody_waits_for_a_rank_that_is_gone() {
        // In whatever order.
        let mut space = space(2);
        assert_eq!(space.part(1), []);
        let told = trouble(space.hear(0, Command::BarrierIn));
        assert!(
            told.local_rank == 1 && told.kind == Kind::Gone && told.text.contains("rank 4 waits for it"),
            "{told:?}"
        );
        let mut space = self::space(2);
        assert_eq!(space.hear(0, Command::BarrierIn), []);
        assert_eq!(trouble(space.part(1)).local_rank, 1);
        // One that never spoke is nobody's peer, until somebody waits for it.
        let mut silent = Space::new(&Place::alone("run", 2, 1), 2);
        assert_eq!((silent.part(0), silent.part(1)), (vec![], vec![]));
    }

    #[test]
    fn hosts_are_told_in_blocks() {
        assert_eq!(mapping(&[(2, 8)]).unwrap(), "(vector,(0,2,8))");
        assert_eq!(mapping(&[(1, 2), (3, 1), (1, 4)]).unwrap(), "(vector,(0,1,2),(1,3,1),(4,1,4))");
        assert_eq!(mapping(&[(1, 2); 1000]), None);
    }
}
