//! The coordinator decides which agents take part, when ranks start, and how to react to failures. It has no clock,
//! sockets or threads, so that tests can simulate them.
//!
//! A launch on one host also has a coordinator, with one agent. So all launches follow the same rules.
//!
//! PyTorch's agents agree by compare-and-set on a shared store. One coordinator is simpler, and costs no availability:
//! the host of the store would have to stay up, too.
//!
//! The rules:
//! - All agents are in the same attempt. A new attempt begins only when every agent has reported that no process of the
//!   old one is left, so that ranks of two attempts never meet.
//! - The first reported failure is the cause, since later failures are often its consequences.
//! - If an agent is lost before all agents have stopped, the loss is the cause instead: ranks of a lost host make other
//!   ranks fail, and their reports may come first.

mod assignment;
#[cfg(test)]
mod simulation;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

pub(crate) use assignment::RunConfig;
use assignment::{assign_ranks, select_nodes};

use crate::{
    FailedAttempt, Failure,
    rendezvous::message::{AgentId, Assignment, AttemptResult, FromAgent, NodeInfo, RunResult, ToAgent},
};

/// Number of failed attempts that are kept, so that they fit a message.
const MAX_FAILED_ATTEMPTS: usize = 8;
/// Time for an agent to stop its ranks, beyond their grace period. An agent gives up on unkillable processes after 10
/// s.
const STOP_MARGIN: Duration = Duration::from_secs(30);
/// Upper limit of an attempt number that an agent may report.
const MAX_ATTEMPTS: u32 = 1 << 24;
/// Maximum number of hosts in an error message.
const MAX_NAMED_HOSTS: usize = 20;

/// Reason when an agent stops its ranks without a request.
const LOST_CONTACT: &str = "has stopped its ranks: it had no message from the coordinator for too long";

pub(crate) struct Coordinator {
    config: RunConfig,
    agents: BTreeMap<AgentId, Agent>,
    phase: Phase,
    /// Number of the current or last attempt.
    attempt: Option<u32>,
    /// Number of the next attempt; no coordinator of the run has used it.
    next_attempt: u32,
    /// Restarts used.
    restarts: u32,
    /// Last failed attempts.
    failed_attempts: VecDeque<FailedAttempt>,
    /// Before this time, ranks may still run on a host that timed out.
    earliest_start: Option<Instant>,
    barrier: Barrier,
    out: Vec<(AgentId, ToAgent)>,
}

struct Agent {
    node: NodeInfo,
    state: AgentState,
}

impl Coordinator {
    pub(crate) fn new(config: RunConfig, now: Instant) -> Self {
        let phase = Phase::Gathering { since: now, last_call: LastCall::NotYet };
        Coordinator {
            config,
            agents: BTreeMap::new(),
            phase,
            attempt: None,
            next_attempt: 0,
            restarts: 0,
            failed_attempts: VecDeque::new(),
            earliest_start: None,
            barrier: Barrier::default(),
            out: Vec::new(),
        }
    }

    /// Returns the messages to send, in order.
    pub(crate) fn take_messages(&mut self) -> Vec<(AgentId, ToAgent)> {
        std::mem::take(&mut self.out)
    }

    /// Handles a message of an agent.
    pub(crate) fn receive(&mut self, now: Instant, from: AgentId, message: FromAgent) {
        match message {
            FromAgent::Ping => {}
            FromAgent::Join(node) => self.join(now, from, *node),
            FromAgent::Leave { why } => self.disconnect(now, from, &why),
            FromAgent::Leaving { attempt, why } => {
                if self.is_running(from, attempt) && matches!(self.phase, Phase::Running) {
                    let host = self.agents.get(&from).map(|agent| agent.node.host.clone()).unwrap_or_default();
                    let enough = self.agents.len() > self.config.nnodes.0 as usize;
                    self.stop(now, StopReason::NodeLost(Failure::NodeLost { host, how: why }, enough));
                }
            }
            FromAgent::RankDone { attempt, rank } => {
                if self.is_running(from, attempt) {
                    self.forward_rank_done(from, attempt, rank);
                }
            }
            FromAgent::PmiPut { attempt, entries } => {
                if self.is_running(from, attempt) {
                    self.send_to_running(Some(from), &ToAgent::PmiPut { attempt, entries });
                }
            }
            FromAgent::PmiBarrier { attempt } => {
                if self.is_running(from, attempt) {
                    self.barrier.enter(from);
                    self.update_barrier(now, attempt);
                }
            }
            FromAgent::Failed { attempt, report } => {
                if self.is_running(from, attempt) {
                    self.fail(now, from, Failure::Rank(*report));
                }
            }
            FromAgent::NotStarted { attempt, why } => {
                if self.is_running(from, attempt) {
                    self.not_started(now, from, why);
                }
            }
            FromAgent::AttemptEnded { attempt, result, master_port } => {
                if self.is_running(from, attempt) {
                    self.ended(now, from, result, master_port);
                }
            }
        }
    }

    /// Handles an agent that timed out. It also receives nothing, so it stops its ranks only after its own timeout.
    pub(crate) fn time_out(&mut self, now: Instant, id: AgentId, how: &str) {
        if let (Some(agent), Some(keep_alive)) = (self.agents.get(&id), self.config.keep_alive)
            && agent.state == AgentState::Running
        {
            let by_then = now.checked_add(keep_alive.interval.saturating_add(agent.node.grace));
            self.earliest_start = self.earliest_start.max(by_then);
        }
        self.disconnect(now, id, how);
    }

    /// Handles an agent that disconnected.
    pub(crate) fn disconnect(&mut self, now: Instant, id: AgentId, how: &str) {
        let Some(agent) = self.agents.remove(&id) else { return };
        // An agent without ranks may leave.
        let had_ranks = matches!(agent.state, AgentState::Running | AgentState::Unkillable);
        let lost = Failure::NodeLost { host: agent.node.host, how: how.to_owned() };
        let enough = self.agents.len() >= self.config.nnodes.0 as usize;
        match &mut self.phase {
            Phase::Running if had_ranks => self.stop(now, StopReason::NodeLost(lost, enough)),
            // Failures that other agents reported after the loss were its consequence. A failure that the lost agent
            // itself reported stays the reason.
            Phase::Stopping { why, .. } if had_ranks && why.reporter() != Some(id) => {
                *why = StopReason::NodeLost(lost, enough);
            }
            _ => {}
        }
        self.advance(now);
    }

    /// Handles timeouts.
    pub(crate) fn tick(&mut self, now: Instant) {
        if let Phase::Stopping { since, .. } = self.phase {
            let time = now.saturating_duration_since(since);
            let is_late = |agent: &Agent| {
                agent.state == AgentState::Running && time > agent.node.grace.saturating_add(STOP_MARGIN)
            };
            let late: Vec<AgentId> = self.agents.iter().filter(|(_, it)| is_late(it)).map(|(&id, _)| id).collect();
            for id in late {
                let why = "it did not end its ranks in time, and the others continued without it".to_owned();
                self.out.push((id, ToAgent::Refused { why }));
                self.disconnect(now, id, "did not end its ranks in time");
            }
        }
        self.advance(now);
    }

    /// Returns whether all agents were sent the result.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    fn is_running(&self, id: AgentId, attempt: u32) -> bool {
        let is_running = self.agents.get(&id).is_some_and(|agent| agent.state == AgentState::Running);
        is_running && self.attempt == Some(attempt)
    }

    fn join(&mut self, now: Instant, id: AgentId, node: NodeInfo) {
        if self.agents.contains_key(&id) {
            return;
        }
        if let Some(why) = self.refusal(&node) {
            self.out.push((id, ToAgent::Refused { why }));
            return;
        }
        self.next_attempt = self.next_attempt.max(node.attempts.min(MAX_ATTEMPTS));
        // The restarts that an earlier coordinator counted. Once this coordinator has started an attempt, it counts
        // itself.
        if self.attempt.is_none() {
            self.restarts = self.restarts.max(node.restarts);
        }
        let host = node.host.clone();
        self.agents.insert(id, Agent { node, state: AgentState::Ready });
        let finishing = self.agents.values().any(|agent| agent.state == AgentState::Succeeded);
        let running = self.agents.values().filter(|agent| agent.state != AgentState::Ready).count();
        if matches!(self.phase, Phase::Running) && running < self.config.nnodes.1 as usize && !finishing {
            self.stop(now, StopReason::NodeJoined(host));
        }
        if !matches!(self.phase, Phase::Stopping { .. }) {
            self.out.push((id, ToAgent::Waiting { there: self.hosts(), nnodes: self.config.nnodes }));
        }
        self.advance(now);
    }

    fn refusal(&self, node: &NodeInfo) -> Option<String> {
        if matches!(self.phase, Phase::Over) {
            return Some("the run is over".into());
        }
        self.config.refusal(node, self.agents.values().map(|agent| &agent.node))
    }

    /// Sends a message to all running agents except `without`.
    fn send_to_running(&mut self, without: Option<AgentId>, message: &ToAgent) {
        let is_meant = |(id, agent): &(&AgentId, &Agent)| agent.state == AgentState::Running && Some(**id) != without;
        self.out.extend(self.agents.iter().filter(is_meant).map(|(&id, _)| (id, message.clone())));
    }

    /// Completes the PMI barrier, or fails if an agent's ranks have ended.
    fn update_barrier(&mut self, now: Instant, attempt: u32) {
        match self.barrier.status(self.agents.iter().map(|(&id, agent)| (id, agent.state))) {
            BarrierStatus::Waiting => {}
            BarrierStatus::Complete => {
                self.barrier.clear();
                self.send_to_running(None, &ToAgent::PmiBarrierDone { attempt });
            }
            BarrierStatus::Broken(id) => {
                let how = "has ended its ranks while those of other hosts wait for them in a barrier of MPI".to_owned();
                let host = self.agents.get(&id).map(|agent| agent.node.host.clone()).unwrap_or_default();
                self.fail(now, id, Failure::NodeLost { host, how });
            }
        }
    }

    /// Forwards the exit of a rank to agents of the same machine, whose ranks may wait for it to join.
    fn forward_rank_done(&mut self, from: AgentId, attempt: u32, rank: usize) {
        let machine = self.agents.get(&from).map(|agent| agent.node.machine.clone());
        let is_meant = |id: AgentId, agent: &Agent| {
            id != from && agent.state == AgentState::Running && Some(&agent.node.machine) == machine.as_ref()
        };
        let others = self.agents.iter().filter(|&(&id, agent)| is_meant(id, agent));
        self.out.extend(others.map(|(&id, _)| (id, ToAgent::RankDone { attempt, rank })));
    }

    fn fail(&mut self, now: Instant, from: AgentId, failure: Failure) {
        if matches!(self.phase, Phase::Running) {
            self.stop(now, StopReason::Failed(failure, from));
        }
    }

    /// Handles an agent that could not start its ranks. A retry would fail too, so the agent leaves. It costs a
    /// restart: otherwise a supervisor that restarts the launcher could loop forever.
    fn not_started(&mut self, now: Instant, from: AgentId, why: String) {
        let Some(agent) = self.agents.remove(&from) else { return };
        let failure = Failure::NotStarted { host: agent.node.host, why };
        self.out.push((from, ToAgent::End(Box::new(self.run_result(Some(failure.clone()))))));
        self.fail(now, from, failure);
        self.advance(now);
    }

    fn ended(&mut self, now: Instant, from: AgentId, result: AttemptResult, master_port: u16) {
        let is_running = matches!(self.phase, Phase::Running);
        let state = match &result {
            AttemptResult::Succeeded if is_running => AgentState::Succeeded,
            AttemptResult::Failed { may_restart: false, .. } | AttemptResult::Stopped { may_restart: false } => {
                AgentState::Unkillable
            }
            _ => AgentState::Ready,
        };
        let Some(agent) = self.agents.get_mut(&from) else { return };
        agent.state = state;
        agent.node.master_port = master_port;
        let host = agent.node.host.clone();
        match result {
            AttemptResult::Succeeded => self.update_barrier(now, self.attempt.unwrap_or_default()),
            AttemptResult::Stopped { .. } => self.fail(now, from, Failure::NodeLost { host, how: LOST_CONTACT.into() }),
            AttemptResult::Failed { report, .. } => {
                self.fail(now, from, Failure::Rank((*report).clone()));
                // The agent may have found an earlier failure since.
                if let Phase::Stopping { why: StopReason::Failed(failure, reporter), .. } = &mut self.phase
                    && *reporter == from
                {
                    *failure = Failure::Rank(*report);
                }
            }
        }
        self.advance(now);
    }

    fn stop(&mut self, now: Instant, why: StopReason) {
        let text = match &why {
            StopReason::Failed(failure, _) | StopReason::NodeLost(failure, _) => failure.to_string(),
            StopReason::NodeJoined(host) => format!("{host} has joined"),
        };
        let attempt = self.attempt.unwrap_or_default();
        for (&id, agent) in &mut self.agents {
            match agent.state {
                // They start again with the others.
                AgentState::Succeeded => agent.state = AgentState::Ready,
                AgentState::Running => {}
                AgentState::Ready | AgentState::Unkillable => continue,
            }
            self.out.push((id, ToAgent::Stop { attempt, why: text.clone(), costs: why.costs() }));
        }
        self.phase = Phase::Stopping { why, since: now };
    }

    /// Advances as far as possible without another message.
    fn advance(&mut self, now: Instant) {
        let states = || self.agents.values().map(|agent| agent.state);
        match self.phase {
            Phase::Over => {}
            Phase::Running => {
                // Agents that joined late are Ready.
                if states().all(|state| matches!(state, AgentState::Succeeded | AgentState::Ready)) {
                    self.end(None);
                }
            }
            Phase::Stopping { .. } => {
                if states().all(|state| state != AgentState::Running) {
                    self.finish_stopping(now);
                }
            }
            Phase::Gathering { since, last_call } => self.gather(now, since, last_call),
        }
    }

    /// Handles the end of all ranks.
    fn finish_stopping(&mut self, now: Instant) {
        let Phase::Stopping { why, .. } = std::mem::replace(&mut self.phase, Phase::Over) else { return };
        let may_restart = self.restarts < self.config.max_restarts;
        if let Some(stuck) = self.agents.values().find(|agent| agent.state == AgentState::Unkillable) {
            let failure = match why {
                StopReason::Failed(failure, _) | StopReason::NodeLost(failure, _) => failure,
                StopReason::NodeJoined(_) => Failure::NodeLost {
                    host: stuck.node.host.clone(),
                    how: "can't start again: not even SIGKILL ended its ranks".into(),
                },
            };
            return self.end(Some(failure));
        }
        let last_call = match why {
            // Enough agents are left to continue without the lost one.
            StopReason::NodeLost(_, true) => LastCall::Since(now),
            StopReason::Failed(failure, _) | StopReason::NodeLost(failure, false) if !may_restart => {
                return self.end(Some(failure));
            }
            StopReason::Failed(failure, _) => {
                self.count_restart(failure);
                LastCall::NotNeeded
            }
            StopReason::NodeLost(failure, false) => {
                self.count_restart(failure);
                LastCall::NotYet
            }
            StopReason::NodeJoined(_) => LastCall::Since(now),
        };
        self.phase = Phase::Gathering { since: now, last_call };
        self.advance(now);
    }

    /// Counts a restart.
    fn count_restart(&mut self, failure: Failure) {
        self.restarts += 1;
        let attempt = self.attempt.unwrap_or_default();
        self.failed_attempts.push_back(FailedAttempt { attempt, failure: failure.shortened() });
        if self.failed_attempts.len() > MAX_FAILED_ATTEMPTS {
            self.failed_attempts.pop_front();
        }
    }

    fn gather(&mut self, now: Instant, since: Instant, last_call: LastCall) {
        let (min, max) = (self.config.nnodes.0 as usize, self.config.nnodes.1 as usize);
        let there = self.agents.len();
        let last_call = match last_call {
            _ if there < min => LastCall::NotYet,
            LastCall::NotYet => LastCall::Since(now),
            last_call => last_call,
        };
        self.phase = Phase::Gathering { since, last_call };
        let is_time = match last_call {
            LastCall::NotYet => false,
            LastCall::NotNeeded => true,
            LastCall::Since(at) => now.saturating_duration_since(at) >= self.config.last_call_timeout,
        };
        if self.earliest_start.is_some_and(|moment| now < moment) {
            return;
        }
        if there >= max || is_time {
            self.start();
        } else if there < min && now.saturating_duration_since(since) >= self.config.join_timeout {
            let why = format!(
                "only {there} of at least {min} nodes ({}) joined within {:?}. Check the other hosts' launchers, and \
                 that all have the same --rdzv-endpoint; --rdzv-conf join_timeout=SECONDS waits longer",
                self.hosts(),
                self.config.join_timeout
            );
            self.end(Some(Failure::Rendezvous { why }));
        }
    }

    /// Lists the hosts, for messages.
    fn hosts(&self) -> String {
        let names: Vec<&str> =
            self.agents.values().take(MAX_NAMED_HOSTS).map(|agent| agent.node.host.as_str()).collect();
        let more = self.agents.len() - names.len();
        let names = names.join(", ");
        if more == 0 { names } else { format!("{names} and {more} more") }
    }

    fn start(&mut self) {
        let there = self.agents.iter().map(|(&id, agent)| (id, &agent.node));
        let select_nodes = select_nodes(there, self.config.nnodes.1 as usize);
        let nodes: Vec<&NodeInfo> = select_nodes.iter().map(|(_, node)| *node).collect();
        let assign_ranks = assign_ranks(&nodes, &self.config, self.next_attempt, self.restarts);
        let starts: Vec<(AgentId, Assignment)> = select_nodes.iter().map(|(id, _)| *id).zip(assign_ranks).collect();
        if starts.is_empty() {
            return;
        }
        for (id, assignment) in starts {
            if let Some(agent) = self.agents.get_mut(&id) {
                agent.state = AgentState::Running;
            }
            self.out.push((id, ToAgent::Start(assignment)));
        }
        self.attempt = Some(self.next_attempt);
        self.barrier.clear();
        self.next_attempt += 1;
        self.phase = Phase::Running;
    }

    fn run_result(&self, failure: Option<Failure>) -> RunResult {
        RunResult { failure, failed_attempts: self.failed_attempts.iter().cloned().collect(), restarts: self.restarts }
    }

    fn end(&mut self, failure: Option<Failure>) {
        let run_result = Box::new(self.run_result(failure));
        self.out.extend(self.agents.keys().map(|&id| (id, ToAgent::End(run_result.clone()))));
        self.phase = Phase::Over;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentState {
    /// Has no ranks, and can start some.
    Ready,
    Running,
    /// All ranks have succeeded.
    Succeeded,
    /// Some processes of its ranks cannot be killed.
    Unkillable,
}

pub(crate) enum Phase {
    /// Waiting for agents.
    Gathering {
        since: Instant,
        last_call: LastCall,
    },
    Running,
    /// Ranks are being stopped.
    Stopping {
        why: StopReason,
        since: Instant,
    },
    Over,
}

#[derive(Clone, Copy)]
pub(crate) enum LastCall {
    /// There are too few agents.
    NotYet,
    /// Time since there are enough agents.
    Since(Instant),
    /// All agents of the last attempt are there: do not wait for more.
    NotNeeded,
}

/// Reason for stopping the ranks.
pub(crate) enum StopReason {
    /// A failure, and the agent that reported it.
    Failed(Failure, AgentId),
    /// An agent was lost, and whether enough agents are left.
    NodeLost(Failure, bool),
    /// An agent has joined.
    NodeJoined(String),
}

impl StopReason {
    /// Returns whether the reason costs a restart.
    pub(crate) fn costs(&self) -> bool {
        matches!(self, StopReason::Failed(..) | StopReason::NodeLost(_, false))
    }

    pub(crate) fn reporter(&self) -> Option<AgentId> {
        if let StopReason::Failed(_, reporter) = self { Some(*reporter) } else { None }
    }
}

/// The agents whose ranks are in the barrier.
#[derive(Default)]
pub(crate) struct Barrier(BTreeSet<AgentId>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BarrierStatus {
    Waiting,
    Complete,
    /// The ranks of this agent have ended.
    Broken(AgentId),
}

impl Barrier {
    pub(crate) fn enter(&mut self, id: AgentId) {
        self.0.insert(id);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the status, given the states of all agents.
    pub(crate) fn status(&self, mut agents: impl Iterator<Item = (AgentId, AgentState)> + Clone) -> BarrierStatus {
        let waits = |(id, state)| state == AgentState::Running && self.0.contains(&id);
        if !agents.clone().any(waits) {
            return BarrierStatus::Waiting;
        }
        match agents.clone().find(|&(_, state)| state == AgentState::Succeeded) {
            Some((id, _)) => BarrierStatus::Broken(id),
            None if agents.all(|(id, state)| state != AgentState::Running || waits((id, state))) => {
                BarrierStatus::Complete
            }
            None => BarrierStatus::Waiting,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_completes_when_all_running_agents_wait() {
        let mut barrier = Barrier::default();
        let wait = |barrier: &Barrier, states: [AgentState; 3]| barrier.status((0..).zip(states));
        let running = [AgentState::Running, AgentState::Running, AgentState::Ready];
        assert_eq!(wait(&barrier, [AgentState::Succeeded; 3]), BarrierStatus::Waiting);
        barrier.enter(1);
        assert_eq!(wait(&barrier, running), BarrierStatus::Waiting);
        assert_eq!(
            wait(&barrier, [AgentState::Succeeded, AgentState::Running, AgentState::Ready]),
            BarrierStatus::Broken(0)
        );
        // An agent in the barrier whose ranks have ended does not wait.
        assert_eq!(
            wait(&barrier, [AgentState::Running, AgentState::Succeeded, AgentState::Ready]),
            BarrierStatus::Waiting
        );
        barrier.enter(0);
        assert_eq!(wait(&barrier, running), BarrierStatus::Complete);
        barrier.clear();
        assert_eq!(wait(&barrier, running), BarrierStatus::Waiting);
    }
}
