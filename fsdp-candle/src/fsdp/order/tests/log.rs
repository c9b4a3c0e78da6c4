//! The collectives that simulated ranks issue and wait for. Collectives of one hop run in the order in which they are
//! issued, as those of one process group do.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::fsdp::reduction::{Hop, InFlight};

/// A collective: its kind, its unit, and the positions of its parameters.
pub(super) type Collective = (&'static str, usize, BTreeSet<usize>);

/// The collectives that one rank issued and waited for.
#[derive(Default)]
pub(super) struct Log {
    pub(super) queues: BTreeMap<Hop, Vec<Collective>>,
    /// Steps in program order: whether a collective is issued or waited for, its hop, and its position there.
    pub(super) steps: Vec<(bool, Hop, usize)>,
    /// Number of pending reduce-scatters.
    pub(super) reducing: usize,
}

impl Log {
    pub(super) fn issue(&mut self, queue: Hop, collective: Collective) -> (Hop, usize) {
        let issued = self.queues.entry(queue).or_default();
        self.reducing += usize::from(collective.0 == "reduce");
        issued.push(collective);
        let at = (queue, issued.len() - 1);
        self.steps.push((true, at.0, at.1));
        at
    }

    pub(super) fn wait(&mut self, at: (Hop, usize)) {
        self.reducing -= usize::from(self.queues[&at.0][at.1].0 == "reduce");
        self.steps.push((false, at.0, at.1));
    }
}

/// A pending reduction.
pub(super) struct Reducing {
    pub(super) log: Rc<RefCell<Log>>,
    pub(super) at: (Hop, usize),
    pub(super) unit: usize,
    pub(super) params: BTreeSet<usize>,
    pub(super) replicated: bool,
    pub(super) partial: bool,
}

impl InFlight for Reducing {
    fn hop(&self) -> Hop {
        self.at.0
    }

    fn advance(self) -> candle_core::Result<Option<Self>> {
        self.log.borrow_mut().wait(self.at);
        let next = match self.hop() {
            Hop::Shards if self.replicated => Hop::Replicas,
            Hop::Shards | Hop::Replicas if self.partial => Hop::TensorParallel,
            _ => return Ok(None),
        };
        let at = self.log.borrow_mut().issue(next, ("all-reduce", self.unit, self.params.clone()));
        Ok(Some(Reducing { at, ..self }))
    }

    fn discard(self) {}
}

/// Runs the ranks against each other. A collective is done when all ranks have issued it and all earlier collectives of
/// its hop.
pub(super) fn assert_no_rank_waits_for_ever(logs: &[Rc<RefCell<Log>>]) {
    let mut at = vec![0; logs.len()];
    let mut issued: Vec<BTreeMap<Hop, usize>> = vec![BTreeMap::new(); logs.len()];
    loop {
        let mut moved = false;
        for rank in 0..logs.len() {
            while let Some(&(issues, queue, position)) = logs[rank].borrow().steps.get(at[rank]) {
                if issues {
                    issued[rank].insert(queue, position + 1);
                } else if issued.iter().any(|of| of.get(&queue).copied().unwrap_or(0) <= position) {
                    break;
                }
                at[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (rank, log) in logs.iter().enumerate() {
        let log = log.borrow();
        assert!(at[rank] == log.steps.len(), "rank {rank} waits for ever at {:?}", log.steps[at[rank]]);
    }
}

pub(super) fn assert_alike(logs: &[Rc<RefCell<Log>>]) {
    for other in &logs[1..] {
        assert_eq!(logs[0].borrow().queues, other.borrow().queues);
    }
    assert_no_rank_waits_for_ever(logs);
}
