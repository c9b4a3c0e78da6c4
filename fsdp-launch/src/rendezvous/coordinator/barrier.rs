//! The barriers of PMI, in which the ranks of all agents wait for each other.

use std::collections::BTreeSet;

use crate::rendezvous::{coordinator::phase::State, message::AgentId};

/// The agents of an attempt whose ranks wait.
#[derive(Default)]
pub(crate) struct Barrier(BTreeSet<AgentId>);

/// What becomes of those that wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    GoesOn,
    Ends,
    /// The ranks of this agent have ended.
    IsInVain(AgentId),
}

impl Barrier {
    pub(crate) fn enter(&mut self, id: AgentId) {
        self.0.insert(id);
    }

    /// Nobody waits.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// With `agents` in these states.
    pub(crate) fn wait(&self, mut agents: impl Iterator<Item = (AgentId, State)> + Clone) -> Wait {
        let waits = |(id, state)| state == State::Running && self.0.contains(&id);
        if !agents.clone().any(waits) {
            return Wait::GoesOn;
        }
        match agents.clone().find(|&(_, state)| state == State::Succeeded) {
            Some((id, _)) => Wait::IsInVain(id),
            None if agents.all(|(id, state)| state != State::Running || waits((id, state))) => Wait::Ends,
            None => Wait::GoesOn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_ends_when_all_that_run_wait() {
        let mut barrier = Barrier::default();
        let wait = |barrier: &Barrier, states: [State; 3]| barrier.wait((0..).zip(states));
        let running = [State::Running, State::Running, State::Ready];
        assert_eq!(wait(&barrier, [State::Succeeded; 3]), Wait::GoesOn);
        barrier.enter(1);
        assert_eq!(wait(&barrier, running), Wait::GoesOn);
        assert_eq!(wait(&barrier, [State::Succeeded, State::Running, State::Ready]), Wait::IsInVain(0));
        // Who waited has ended as well, by itself: nobody waits.
        assert_eq!(wait(&barrier, [State::Running, State::Succeeded, State::Ready]), Wait::GoesOn);
        barrier.enter(0);
        assert_eq!(wait(&barrier, running), Wait::Ends);
        barrier.clear();
        assert_eq!(wait(&barrier, running), Wait::GoesOn);
    }
}
