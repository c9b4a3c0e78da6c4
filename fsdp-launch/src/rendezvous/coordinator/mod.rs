//! Who takes part, when ranks start, and what follows from a failure: decided in one place for all agents, without a
//! clock, a socket or a thread of its own.
//!
//! A launch on one host has a coordinator too, with one agent; so there is one set of rules.

mod assignment;
#[cfg(test)]
mod simulation;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

pub(crate) use assignment::Rules;
use assignment::{chosen, places};

use crate::{
    Failure, Setback,
    rendezvous::message::{AgentId, Ended, FromAgent, Member, Place, ToAgent, Verdict},
};

/// How much of the past is kept: it has to fit a message.
const KEPT: usize = 8;
/// Beyond their grace, how long an agent's ranks may take to end: the agent gives up on what SIGKILL does not end after
/// 10 s.
const ENDING: Duration = Duration::from_secs(30);
/// More attempts than any launch makes.
const MOST_ATTEMPTS: u32 = 1 << 24;
/// How many hosts a message names.
const NAMED: usize = 20;

/// Why an agent ends its ranks though nobody asked for it.
const LOST_TOUCH: &str = "has ended its ranks: it had heard nothing of the rendezvous for too long";

pub(crate) struct Coordinator {
    rules: Rules,
    agents: BTreeMap<AgentId, Agent>,
    phase: Phase,
    /// The number of the attempt that runs, or ran last.
    attempt: Option<u32>,
    /// No attempt has had this number, or a higher one, under any coordinator of the run.
    next_attempt: u32,
    /// How often something went wrong that cost a restart.
    restarts: u32,
    /// The last of what went wrong.
    setbacks: VecDeque<Setback>,
    /// Until then ranks may still run on a host that nothing is heard of.
    not_before: Option<Instant>,
    barrier: Barrier,
    out: Vec<(AgentId, ToAgent)>,
}

struct Agent {
    member: Member,
    state: State,
}

impl Coordinator {
    pub(crate) fn new(rules: Rules, now: Instant) -> Self {
        let phase = Phase::Gathering { since: now, last_call: LastCall::NotYet };
        Coordinator {
            rules,
            agents: BTreeMap::new(),
            phase,
            attempt: None,
            next_attempt: 0,
            restarts: 0,
            setbacks: VecDeque::new(),
            not_before: None,
            barrier: Barrier::default(),
            out: Vec::new(),
        }
    }

    /// What to tell whom, in this order.
    pub(crate) fn take_messages(&mut self) -> Vec<(AgentId, ToAgent)> {
        std::mem::take(&mut self.out)
    }

    /// Takes in what an agent says.
    pub(crate) fn hear(&mut self, now: Instant, from: AgentId, message: FromAgent) {
        match message {
            FromAgent::Ping => {}
            FromAgent::Join(member) => self.join(now, from, *member),
            FromAgent::Leave { why } => self.lose(now, from, &why),
            FromAgent::Leaving { attempt, why } => {
                if self.is_running(from, attempt) && matches!(self.phase, Phase::Running) {
                    let host = self.agents.get(&from).map(|agent| agent.member.host.clone()).unwrap_or_default();
                    let enough = self.agents.len() > self.rules.nnodes.0 as usize;
                    self.stop(now, Why::Lost(Failure::NodeLost { host, how: why }, enough));
                }
            }
            FromAgent::RankDone { attempt, rank } => {
                if self.is_running(from, attempt) {
                    self.pass_on(from, attempt, rank);
                }
            }
            FromAgent::PmiPut { attempt, entries } => {
                if self.is_running(from, attempt) {
                    self.tell_running(Some(from), &ToAgent::PmiPut { attempt, entries });
                }
            }
            FromAgent::PmiBarrier { attempt } => {
                if self.is_running(from, attempt) {
                    self.barrier.enter(from);
                    self.look_at_barrier(now, attempt);
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
            FromAgent::Ended { attempt, result, master_port } => {
                if self.is_running(from, attempt) {
                    self.ended(now, from, result, master_port);
                }
            }
        }
    }

    /// Takes in that nothing is heard of an agent any more. It hears nothing either, and ends its ranks, in its own
    /// time.
    pub(crate) fn fall_silent(&mut self, now: Instant, id: AgentId, how: &str) {
        if let (Some(agent), Some(keep_alive)) = (self.agents.get(&id), self.rules.keep_alive)
            && agent.state == State::Running
        {
            let by_then = now.checked_add(keep_alive.interval.saturating_add(agent.member.grace));
            self.not_before = self.not_before.max(by_then);
        }
        self.lose(now, id, how);
    }

    /// Takes in that an agent is gone.
    pub(crate) fn lose(&mut self, now: Instant, id: AgentId, how: &str) {
        let Some(agent) = self.agents.remove(&id) else { return };
        // One that has done its part may go.
        let had_ranks = matches!(agent.state, State::Running | State::Stuck);
        let lost = Failure::NodeLost { host: agent.member.host, how: how.to_owned() };
        let enough = self.agents.len() >= self.rules.nnodes.0 as usize;
        match &mut self.phase {
            Phase::Running if had_ranks => self.stop(now, Why::Lost(lost, enough)),
            // What others said after it went was an echo. (If it was itself what failed, that stands.)
            Phase::Stopping { why, .. } if had_ranks && why.told_by() != Some(id) => {
                *why = Why::Lost(lost, enough);
            }
            _ => {}
        }
        self.go_on(now);
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if let Phase::Stopping { since, .. } = self.phase {
            let time = now.saturating_duration_since(since);
            let is_late =
                |agent: &Agent| agent.state == State::Running && time > agent.member.grace.saturating_add(ENDING);
            let late: Vec<AgentId> = self.agents.iter().filter(|(_, it)| is_late(it)).map(|(&id, _)| id).collect();
            for id in late {
                let why = "it did not end its ranks in time, and the others went on without it".to_owned();
                self.out.push((id, ToAgent::Refused { why }));
                self.lose(now, id, "did not end its ranks in time");
            }
        }
        self.go_on(now);
    }

    /// Everybody has been told that all is over.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    fn is_running(&self, id: AgentId, attempt: u32) -> bool {
        let is_running = self.agents.get(&id).is_some_and(|agent| agent.state == State::Running);
        is_running && self.attempt == Some(attempt)
    }

    fn join(&mut self, now: Instant, id: AgentId, member: Member) {
        if self.agents.contains_key(&id) {
            return;
        }
        if let Some(why) = self.refusal(&member) {
            self.out.push((id, ToAgent::Refused { why }));
            return;
        }
        self.next_attempt = self.next_attempt.max(member.attempts.min(MOST_ATTEMPTS));
        // What a coordinator before this one counted. This one has counted by itself since its first attempt, the going
        // of this agent too.
        if self.attempt.is_none() {
            self.restarts = self.restarts.max(member.restarts);
        }
        let host = member.host.clone();
        self.agents.insert(id, Agent { member, state: State::Ready });
        let finishing = self.agents.values().any(|agent| agent.state == State::Succeeded);
        let running = self.agents.values().filter(|agent| agent.state != State::Ready).count();
        if matches!(self.phase, Phase::Running) && running < self.rules.nnodes.1 as usize && !finishing {
            self.stop(now, Why::Grown(host));
        }
        if !matches!(self.phase, Phase::Stopping { .. }) {
            self.out.push((id, ToAgent::Waiting { there: self.hosts(), nnodes: self.rules.nnodes }));
        }
        self.go_on(now);
    }

    fn refusal(&self, member: &Member) -> Option<String> {
        if matches!(self.phase, Phase::Over) {
            return Some("the run is over".into());
        }
        self.rules.refusal(member, self.agents.values().map(|agent| &agent.member))
    }

    /// Tells the agents that have ranks, without one of them.
    fn tell_running(&mut self, without: Option<AgentId>, message: &ToAgent) {
        let is_meant = |(id, agent): &(&AgentId, &Agent)| agent.state == State::Running && Some(**id) != without;
        self.out.extend(self.agents.iter().filter(is_meant).map(|(&id, _)| (id, message.clone())));
    }

    /// Does what follows from who waits in a barrier of PMI, and who does not come.
    fn look_at_barrier(&mut self, now: Instant, attempt: u32) {
        match self.barrier.wait(self.agents.iter().map(|(&id, agent)| (id, agent.state))) {
            Wait::GoesOn => {}
            Wait::Ends => {
                self.barrier.clear();
                self.tell_running(None, &ToAgent::PmiGoOn { attempt });
            }
            Wait::IsInVain(id) => {
                let how = "has ended its ranks while those of other hosts wait for them in a barrier of MPI".to_owned();
                let host = self.agents.get(&id).map(|agent| agent.member.host.clone()).unwrap_or_default();
                self.fail(now, id, Failure::NodeLost { host, how });
            }
        }
    }

    /// Tells those whose ranks may wait for this one.
    fn pass_on(&mut self, from: AgentId, attempt: u32, rank: usize) {
        let machine = self.agents.get(&from).map(|agent| agent.member.machine.clone());
        let is_meant = |id: AgentId, agent: &Agent| {
            id != from && agent.state == State::Running && Some(&agent.member.machine) == machine.as_ref()
        };
        let others = self.agents.iter().filter(|&(&id, agent)| is_meant(id, agent));
        self.out.extend(others.map(|(&id, _)| (id, ToAgent::RankDone { attempt, rank })));
    }

    fn fail(&mut self, now: Instant, from: AgentId, failure: Failure) {
        if matches!(self.phase, Phase::Running) {
            self.stop(now, Why::Failed(failure, from));
        }
    }

    /// An agent could not start its ranks. It would not next time either, so it goes; that it goes is no reason to be
    /// spared a restart, because whatever starts its launcher may do so again and again.
    fn not_started(&mut self, now: Instant, from: AgentId, why: String) {
        let Some(agent) = self.agents.remove(&from) else { return };
        let failure = Failure::NotStarted { host: agent.member.host, why };
        self.out.push((from, ToAgent::End(Box::new(self.verdict(Some(failure.clone()))))));
        self.fail(now, from, failure);
        self.go_on(now);
    }

    fn ended(&mut self, now: Instant, from: AgentId, result: Ended, master_port: u16) {
        let is_running = matches!(self.phase, Phase::Running);
        let state = match &result {
            Ended::Succeeded if is_running => State::Succeeded,
            Ended::Failed { may_restart: false, .. } | Ended::Stopped { may_restart: false } => State::Stuck,
            _ => State::Ready,
        };
        let Some(agent) = self.agents.get_mut(&from) else { return };
        agent.state = state;
        agent.member.master_port = master_port;
        let host = agent.member.host.clone();
        match result {
            Ended::Succeeded => self.look_at_barrier(now, self.attempt.unwrap_or_default()),
            Ended::Stopped { .. } => self.fail(now, from, Failure::NodeLost { host, how: LOST_TOUCH.into() }),
            Ended::Failed { report, .. } => {
                self.fail(now, from, Failure::Rank((*report).clone()));
                // It may have found out since which of its ranks was the first.
                if let Phase::Stopping { why: Why::Failed(failure, told_by), .. } = &mut self.phase
                    && *told_by == from
                {
                    *failure = Failure::Rank(*report);
                }
            }
        }
        self.go_on(now);
    }

    fn stop(&mut self, now: Instant, why: Why) {
        let text = match &why {
            Why::Failed(failure, _) | Why::Lost(failure, _) => failure.to_string(),
            Why::Grown(host) => format!("{host} has joined"),
        };
        let attempt = self.attempt.unwrap_or_default();
        for (&id, agent) in &mut self.agents {
            match agent.state {
                // They start again with the others.
                State::Succeeded => agent.state = State::Ready,
                State::Running => {}
                State::Ready | State::Stuck => continue,
            }
            self.out.push((id, ToAgent::Stop { attempt, why: text.clone(), costs: why.costs() }));
        }
        self.phase = Phase::Stopping { why, since: now };
    }

    /// Goes as far as it can without hearing more.
    fn go_on(&mut self, now: Instant) {
        let states = || self.agents.values().map(|agent| agent.state);
        match self.phase {
            Phase::Over => {}
            Phase::Running => {
                // Agents that came too late are Ready.
                if states().all(|state| matches!(state, State::Succeeded | State::Ready)) {
                    self.end(None);
                }
            }
            Phase::Stopping { .. } => {
                if states().all(|state| state != State::Running) {
                    self.stopped(now);
                }
            }
            Phase::Gathering { since, last_call } => self.gather(now, since, last_call),
        }
    }

    /// All ranks have been ended.
    fn stopped(&mut self, now: Instant) {
        let Phase::Stopping { why, .. } = std::mem::replace(&mut self.phase, Phase::Over) else { return };
        let may_restart = self.restarts < self.rules.max_restarts;
        if let Some(stuck) = self.agents.values().find(|agent| agent.state == State::Stuck) {
            let failure = match why {
                Why::Failed(failure, _) | Why::Lost(failure, _) => failure,
                Why::Grown(_) => Failure::NodeLost {
                    host: stuck.member.host.clone(),
                    how: "can't start again: not even SIGKILL ended its ranks".into(),
                },
            };
            return self.end(Some(failure));
        }
        let last_call = match why {
            // Who is left goes on; nobody has to come back.
            Why::Lost(_, true) => LastCall::Since(now),
            Why::Failed(failure, _) | Why::Lost(failure, false) if !may_restart => return self.end(Some(failure)),
            Why::Failed(failure, _) => {
                self.set_back(failure);
                LastCall::Unneeded
            }
            Why::Lost(failure, false) => {
                self.set_back(failure);
                LastCall::NotYet
            }
            Why::Grown(_) => LastCall::Since(now),
        };
        self.phase = Phase::Gathering { since: now, last_call };
        self.go_on(now);
    }

    /// Notes what costs a restart.
    fn set_back(&mut self, failure: Failure) {
        self.restarts += 1;
        let attempt = self.attempt.unwrap_or_default();
        self.setbacks.push_back(Setback { attempt, failure: failure.shortened() });
        if self.setbacks.len() > KEPT {
            self.setbacks.pop_front();
        }
    }

    fn gather(&mut self, now: Instant, since: Instant, last_call: LastCall) {
        let (min, max) = (self.rules.nnodes.0 as usize, self.rules.nnodes.1 as usize);
        let there = self.agents.len();
        let last_call = match last_call {
            _ if there < min => LastCall::NotYet,
            LastCall::NotYet => LastCall::Since(now),
            last_call => last_call,
        };
        self.phase = Phase::Gathering { since, last_call };
        let is_time = match last_call {
            LastCall::NotYet => false,
            LastCall::Unneeded => true,
            LastCall::Since(at) => now.saturating_duration_since(at) >= self.rules.last_call_timeout,
        };
        if self.not_before.is_some_and(|moment| now < moment) {
            return;
        }
        if there >= max || is_time {
            self.start();
        } else if there < min && now.saturating_duration_since(since) >= self.rules.join_timeout {
            let why = format!(
                "only {there} of at least {min} nodes ({}) came within {:?}. See what the others' launchers say, and \
                 that they have the same --rdzv-endpoint; --rdzv-conf join_timeout=SECONDS waits longer",
                self.hosts(),
                self.rules.join_timeout
            );
            self.end(Some(Failure::Meeting { why }));
        }
    }

    /// Who is there, in a few words.
    fn hosts(&self) -> String {
        let names: Vec<&str> = self.agents.values().take(NAMED).map(|agent| agent.member.host.as_str()).collect();
        let more = self.agents.len() - names.len();
        let names = names.join(", ");
        if more == 0 { names } else { format!("{names} and {more} more") }
    }

    fn start(&mut self) {
        let there = self.agents.iter().map(|(&id, agent)| (id, &agent.member));
        let chosen = chosen(there, self.rules.nnodes.1 as usize);
        let members: Vec<&Member> = chosen.iter().map(|(_, member)| *member).collect();
        let places = places(&members, &self.rules, self.next_attempt, self.restarts);
        let starts: Vec<(AgentId, Place)> = chosen.iter().map(|(id, _)| *id).zip(places).collect();
        if starts.is_empty() {
            return;
        }
        for (id, place) in starts {
            if let Some(agent) = self.agents.get_mut(&id) {
                agent.state = State::Running;
            }
            self.out.push((id, ToAgent::Start(place)));
        }
        self.attempt = Some(self.next_attempt);
        self.barrier.clear();
        self.next_attempt += 1;
        self.phase = Phase::Running;
    }

    fn verdict(&self, failure: Option<Failure>) -> Verdict {
        Verdict { failure, setbacks: self.setbacks.iter().cloned().collect(), restarts: self.restarts }
    }

    fn end(&mut self, failure: Option<Failure>) {
        let verdict = Box::new(self.verdict(failure));
        self.out.extend(self.agents.keys().map(|&id| (id, ToAgent::End(verdict.clone()))));
        self.phase = Phase::Over;
    }
}

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
