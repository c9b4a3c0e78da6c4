//! Where a launch is, and where each of its agents.

use std::time::Instant;

use crate::{Failure, rendezvous::message::AgentId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It has no ranks and could start some.
    Ready,
    /// It has ranks.
    Running,
    /// Its ranks have all succeeded.
    Succeeded,
    /// What is left of its ranks can't be ended.
    Stuck,
}

pub(crate) enum Phase {
    /// Agents are waited for.
    Gathering {
        since: Instant,
        last_call: LastCall,
    },
    /// Ranks run.
    Running,
    /// Ranks are being ended.
    Stopping {
        why: Why,
        since: Instant,
    },
    Over,
}

#[derive(Clone, Copy)]
pub(crate) enum LastCall {
    /// There are not enough agents.
    NotYet,
    /// There have been enough since.
    Since(Instant),
    /// Nobody is missing who was there before: no need to wait for more.
    Unneeded,
}

/// Why ranks are being ended.
pub(crate) enum Why {
    /// Something failed; the agent that said so.
    Failed(Failure, AgentId),
    /// An agent is gone; whether enough were left.
    Lost(Failure, bool),
    /// An agent has come.
    Grown(String),
}

impl Why {
    /// A restart.
    pub(crate) fn costs(&self) -> bool {
        matches!(self, Why::Failed(..) | Why::Lost(_, false))
    }

    pub(crate) fn told_by(&self) -> Option<AgentId> {
        if let Why::Failed(_, told_by) = self { Some(*told_by) } else { None }
    }
}
