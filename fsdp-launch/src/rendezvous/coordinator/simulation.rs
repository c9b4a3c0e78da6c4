//! Tests of the coordinator with simulated agents and a simulated clock.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::{
    ExitStatus, RankReport,
    rendezvous::message::{KeepAlive, Secret},
};

/// A coordinator and simulated agents.
pub(crate) struct Simulation {
    pub(crate) coordinator: Coordinator,
    pub(crate) now: Instant,
    /// The messages that each agent received, and its running attempt.
    pub(crate) agents: BTreeMap<AgentId, (Vec<ToAgent>, Option<u32>)>,
}

pub(crate) const KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_millis(500), attempts: 3 };
pub(crate) const LAST_CALL: Duration = Duration::from_secs(30);
pub(crate) const GRACE: Duration = Duration::from_secs(5);

impl Simulation {
    pub(crate) fn new(nnodes: (u32, u32), max_restarts: u32) -> Self {
        let times = (Duration::from_secs(600), LAST_CALL);
        let config = RunConfig {
            run_id: "run".into(),
            nnodes,
            max_restarts,
            keep_alive: Some(KEEP_ALIVE),
            join_timeout: times.0,
            last_call_timeout: times.1,
            store_secret: Secret::new().unwrap(),
            unique_id: "id".into(),
        };
        let now = Instant::now();
        Simulation { coordinator: Coordinator::new(config, now), now, agents: BTreeMap::new() }
    }

    pub(crate) fn join_as(&mut self, id: AgentId, change: impl FnOnce(&mut NodeInfo)) {
        let config = &self.coordinator.config;
        let mut node = NodeInfo {
            host: format!("host{id}"),
            machine: format!("machine{id}"),
            node_rank: None,
            ranks: 2,
            role: "default".into(),
            address: Some(format!("10.0.0.{id}")),
            master_addr: None,
            master_port: 1000 + id as u16,
            run_id: None,
            nnodes: config.nnodes,
            keep_alive: config.keep_alive,
            max_restarts: config.max_restarts,
            grace: GRACE,
            attempts: 0,
            restarts: 0,
        };
        change(&mut node);
        self.agents.insert(id, (Vec::new(), None));
        self.say(id, FromAgent::Join(Box::new(node)));
    }

    pub(crate) fn join(&mut self, id: AgentId) {
        self.join_as(id, |_| {});
    }

    pub(crate) fn say(&mut self, id: AgentId, message: FromAgent) {
        self.coordinator.receive(self.now, id, message);
        self.deliver();
    }

    pub(crate) fn lose(&mut self, id: AgentId) {
        self.agents.remove(&id);
        self.coordinator.disconnect(self.now, id, "is gone");
        self.deliver();
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.coordinator.tick(self.now);
        self.deliver();
    }

    /// Delivers messages. Agents stop their ranks when asked to.
    pub(crate) fn deliver(&mut self) {
        loop {
            let messages = self.coordinator.take_messages();
            if messages.is_empty() {
                return;
            }
            // As in the server: all agents receive their messages before one answers.
            let mut asked = Vec::new();
            for (id, message) in messages {
                let Some((received, running)) = self.agents.get_mut(&id) else { continue };
                match &message {
                    ToAgent::Start(assignment) => {
                        assert_eq!(*running, None, "two attempts at once on {id}");
                        *running = Some(assignment.attempt);
                    }
                    ToAgent::Stop { attempt, .. } => assert!(running.is_none_or(|running| running == *attempt)),
                    ToAgent::End(_) => assert_eq!(*running, None, "ranks of {id} outlive the end"),
                    _ => {}
                }
                received.push(message.clone());
                if let ToAgent::Stop { attempt, .. } = message {
                    asked.push((id, attempt));
                }
            }
            for (id, attempt) in asked {
                // A stop of a finished attempt has no effect.
                if self.agents.get(&id).is_some_and(|(_, running)| *running == Some(attempt)) {
                    self.end(id, AttemptResult::Stopped { may_restart: true });
                }
            }
        }
    }

    pub(crate) fn end(&mut self, id: AgentId, result: AttemptResult) {
        let Some(attempt) = self.agents.get_mut(&id).and_then(|(_, running)| running.take()) else { return };
        self.coordinator.receive(
            self.now,
            id,
            FromAgent::AttemptEnded { attempt, result, master_port: 2000 + id as u16 },
        );
        self.deliver();
    }

    pub(crate) fn fail(&mut self, id: AgentId, message: &str) {
        let report = Box::new(report(message));
        self.end(id, AttemptResult::Failed { report, may_restart: true });
    }

    pub(crate) fn assignment(&self, id: AgentId) -> Option<&Assignment> {
        let received = &self.agents.get(&id)?.0;
        received
            .iter()
            .rev()
            .find_map(|message| if let ToAgent::Start(assignment) = message { Some(assignment) } else { None })
    }

    pub(crate) fn run_result(&self, id: AgentId) -> Option<&RunResult> {
        match self.agents.get(&id)?.0.last()? {
            ToAgent::End(run_result) => Some(run_result),
            _ => None,
        }
    }

    pub(crate) fn is_running(&self, id: AgentId) -> bool {
        self.agents.get(&id).is_some_and(|(_, running)| running.is_some())
    }
}

/// Returns the report of a failed rank.
pub(crate) fn report(message: &str) -> RankReport {
    let (host, end) = ("h".into(), Some(ExitStatus::Exited(7)));
    RankReport {
        rank: 1,
        host,
        pid: 5,
        exit_status: end,
        ended_at: None,
        after: None,
        request: None,
        silent_for: None,
        snapshot: None,
        message: Some(message.into()),
        stderr: None,
    }
}

#[test]
fn an_agent_hears_no_more_in_a_large_run() {
    println!("ranks  messages and bytes of an agent of 8 ranks  messages of the coordinator");
    for ranks in [8, 64, 512, 4096] {
        let hosts = ranks / 8;
        let mut sim = Simulation::new((hosts as u32, hosts as u32), 0);
        (0..hosts as AgentId).for_each(|id| sim.join_as(id, |node| node.ranks = 8));
        let bytes = |message: &ToAgent| serde_json::to_vec(message).unwrap().len();
        let heard =
            sim.agents.values().map(|(messages, _)| (messages.len(), messages.iter().map(bytes).sum::<usize>()));
        let (messages, most): (Vec<usize>, Vec<usize>) = heard.unzip();
        let most = most.into_iter().max().unwrap();
        println!("{ranks:>5}  {:>8} {most:>5} {:>10}", messages[0], messages.iter().sum::<usize>());
        // The hosts that are there, and the assignment.
        assert!(
            messages.iter().all(|&count| count == 2) && most < 1 << 10,
            "{ranks} ranks: {messages:?}, {most} bytes"
        );
        assert_eq!(sim.assignment(hosts as AgentId - 1).unwrap().first_rank, ranks - 8);
    }
}

#[test]
fn rank_exits_are_forwarded_within_a_machine() {
    let mut sim = Simulation::new((4, 4), 0);
    for id in 0..4 {
        // Agent 3 is on another machine.
        sim.join_as(id, |node| node.machine = format!("machine{}", id / 3));
    }
    sim.end(2, AttemptResult::Succeeded);
    for attempt in [0, 1] {
        sim.say(0, FromAgent::RankDone { attempt, rank: 1 });
    }
    let message = |id: AgentId| {
        let received = sim.agents[&id].0.iter();
        received.filter(|it| matches!(it, ToAgent::RankDone { attempt: 0, rank: 1 })).count()
    };
    // Not to the sender, to an agent whose ranks have ended, or to another machine; and nothing of another attempt.
    assert_eq!([0, 1, 2, 3].map(message), [0, 1, 0, 0]);
}

#[test]
fn forwards_pmi_entries_and_barriers() {
    let mut sim = Simulation::new((3, 3), 1);
    (0..3).for_each(|id| sim.join_as(id, |it| it.ranks = [2, 2, 1][id as usize]));
    assert_eq!(sim.assignment(2).unwrap().ranks_of_hosts, [(2, 2), (1, 1)]);
    let secrets = [0, 2].map(|id| sim.assignment(id).unwrap().store_secret.clone());
    assert!(secrets[0] == secrets[1] && secrets[0].text().is_some());
    assert_eq!(sim.assignment(1).unwrap().pmi_space, "kvs_id_0");
    let received = |sim: &Simulation, id: AgentId| {
        let received = sim.agents[&id].0.iter();
        received.filter(|it| matches!(it, ToAgent::PmiPut { .. } | ToAgent::PmiBarrierDone { .. })).count()
    };
    let put = |attempt| FromAgent::PmiPut { attempt, entries: vec![("key".into(), "value".into())] };
    // Nothing of another attempt.
    [0, 1].into_iter().for_each(|attempt| sim.say(1, put(attempt)));
    assert_eq!([0, 1, 2].map(|id| received(&sim, id)), [1, 0, 1]);
    [1, 1, 2].into_iter().for_each(|id| sim.say(id, FromAgent::PmiBarrier { attempt: 0 }));
    assert_eq!([0, 1, 2].map(|id| received(&sim, id)), [1, 0, 1]);
    sim.say(0, FromAgent::PmiBarrier { attempt: 0 });
    assert_eq!([0, 1, 2].map(|id| received(&sim, id)), [2, 1, 2]);
    // The barrier of an attempt does not carry over to the next.
    sim.say(0, FromAgent::PmiBarrier { attempt: 0 });
    sim.fail(1, "a");
    [1, 2].into_iter().for_each(|id| sim.say(id, FromAgent::PmiBarrier { attempt: 1 }));
    assert_eq!([0, 1, 2].map(|id| received(&sim, id)), [2, 1, 2]);
    // A host whose ranks have ended breaks the barrier.
    sim.end(0, AttemptResult::Succeeded);
    let message = sim.run_result(2).unwrap().failure.as_ref().unwrap().to_string();
    assert_eq!(message, "node host0 has ended its ranks while those of other hosts wait for them in a barrier of MPI");
}

#[test]
fn a_single_agent_starts_at_once() {
    let mut sim = Simulation::new((1, 1), 1);
    sim.join(0);
    let assignment = sim.assignment(0).unwrap();
    assert_eq!((assignment.attempt, assignment.world_size, assignment.master_port), (0, 2, 1000));
    sim.fail(0, "a");
    let assignment = sim.assignment(0).unwrap();
    assert_eq!((assignment.attempt, assignment.restarts, assignment.master_port), (1, 1, 2000));
    sim.fail(0, &"b".repeat(1000));
    let run_result = sim.run_result(0).unwrap();
    assert_eq!(run_result.failure, Some(Failure::Rank(report(&"b".repeat(1000)))));
    assert_eq!(
        (run_result.restarts, run_result.failed_attempts.len(), run_result.failed_attempts[0].attempt),
        (1, 1, 0)
    );
}

#[test]
fn ranks_follow_node_ranks_then_join_order() {
    let mut sim = Simulation::new((3, 3), 0);
    sim.join_as(0, |it| (it.role, it.ranks) = ("a".into(), 1));
    sim.join_as(1, |it| (it.role, it.node_rank) = ("b".into(), Some(0)));
    assert!(sim.assignment(0).is_none());
    sim.join_as(2, |it| (it.role, it.ranks) = ("a".into(), 4));
    let of = |id| {
        let assignment = sim.assignment(id).unwrap();
        let role = (assignment.first_role_rank, assignment.role_world_size);
        (assignment.group_rank, assignment.first_rank, role, assignment.master_addr.as_str(), assignment.master_port)
    };
    assert_eq!(of(1), (0, 0, (0, 2), "10.0.0.1", 1001));
    assert_eq!(of(0), (1, 2, (0, 5), "10.0.0.1", 1001));
    assert_eq!(of(2), (2, 3, (1, 5), "10.0.0.1", 1001));
    assert_eq!(
        sim.assignment(0).map(|assignment| (assignment.world_size, assignment.group_world_size, assignment.machines)),
        Some((7, 3, 3))
    );
    (0..3).for_each(|id| sim.end(id, AttemptResult::Succeeded));
    assert!((0..3).all(|id| sim.run_result(id).unwrap().failure.is_none()));
}

#[test]
fn a_failure_restarts_all_without_a_last_call() {
    let mut sim = Simulation::new((1, 4), 1);
    sim.join(0);
    sim.join(1);
    assert!(!sim.is_running(0));
    sim.pass(LAST_CALL);
    sim.end(0, AttemptResult::Succeeded);
    sim.fail(1, "x");
    assert!(sim.is_running(0) && sim.is_running(1) && sim.assignment(0).unwrap().attempt == 1);
    // The first report counts. A later report of the same agent replaces it; a report of another agent does not.
    sim.say(1, FromAgent::Failed { attempt: 1, report: Box::new(report("first")) });
    sim.fail(0, "echo");
    let failure = sim.run_result(1).unwrap().failure.clone();
    assert!(failure.is_some_and(|failure| failure.to_string().contains("first")));
}

#[test]
fn a_lost_agent_costs_a_restart_unless_enough_are_left() {
    let mut sim = Simulation::new((1, 2), 0);
    sim.join(0);
    sim.join(1);
    sim.lose(1);
    assert!(!sim.is_running(0));
    sim.pass(LAST_CALL);
    let assignment = sim.assignment(0).unwrap();
    assert_eq!((assignment.attempt, assignment.restarts, assignment.world_size), (1, 0, 2));
    // When a host joins, all ranks start again.
    sim.join(2);
    let assignment = sim.assignment(2).unwrap();
    assert_eq!((assignment.attempt, assignment.first_rank, assignment.world_size), (2, 2, 4));

    let mut fixed = Simulation::new((2, 2), 1);
    [0, 1].into_iter().for_each(|id| fixed.join(id));
    fixed.lose(1);
    assert!(!fixed.is_running(0) && fixed.run_result(0).is_none());
    fixed.join(2);
    assert_eq!(fixed.assignment(0).map(|assignment| (assignment.attempt, assignment.restarts)), Some((1, 1)));
    fixed.lose(2);
    assert!(fixed.run_result(0).unwrap().failure.as_ref().unwrap().to_string().contains("host2 is gone"));
}

#[test]
fn a_lost_agent_explains_earlier_failures() {
    let mut sim = Simulation::new((1, 2), 0);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    // Its end is noticed only after the other host's ranks have failed.
    sim.agents.get_mut(&1).unwrap().1 = None;
    sim.fail(0, "rank 2 is gone");
    assert!(sim.run_result(0).is_none());
    sim.lose(1);
    sim.pass(LAST_CALL);
    assert!(sim.is_running(0));
}

#[test]
fn an_agent_with_unkillable_ranks_ends_the_run() {
    let mut sim = Simulation::new((1, 2), 5);
    sim.join(0);
    sim.pass(LAST_CALL);
    // A new host makes the coordinator stop its ranks.
    sim.agents.get_mut(&0).unwrap().1 = None;
    sim.join(1);
    let result = AttemptResult::Stopped { may_restart: false };
    sim.say(0, FromAgent::AttemptEnded { attempt: 0, result, master_port: 1 });
    let failure = sim.run_result(1).unwrap().failure.as_ref().unwrap().to_string();
    assert!(failure.contains("host0 can't start again"), "{failure}");
}

#[test]
fn a_succeeded_agent_gets_the_reason_of_a_restart() {
    let mut sim = Simulation::new((2, 2), 1);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    sim.end(0, AttemptResult::Succeeded);
    sim.fail(1, "x");
    let received = &sim.agents[&0].0;
    assert!(
        received
            .iter()
            .any(|it| matches!(it, ToAgent::Stop { attempt: 0, why, costs: true } if why.contains("failed first")))
    );
    assert!(sim.is_running(0) && sim.is_running(1));
}

#[test]
fn too_few_agents_end_the_run_with_their_names() {
    let mut sim = Simulation::new((3, 3), 0);
    sim.join(0);
    sim.join(1);
    sim.pass(Duration::from_secs(599));
    assert!(sim.run_result(0).is_none());
    sim.pass(Duration::from_secs(1));
    let message = sim.run_result(1).unwrap().failure.as_ref().unwrap().to_string();
    assert!(
        message.contains("only 2 of at least 3 nodes (host0, host1)") && message.contains("join_timeout"),
        "{message}"
    );
}

#[test]
fn refuses_unfit_agents_and_keeps_spares() {
    let mut sim = Simulation::new((2, 2), 5);
    sim.join_as(0, |it| it.node_rank = Some(0));
    for part in [
        "--node-rank 0 is taken by host0",
        "the run here is \"run\", not \"other\"",
        "--nnodes 2, not 1:2",
        "--max-restarts 5, not 0",
        "--rdzv-conf keep_alive_interval=0.5,keep_alive_max_attempt=3, not \
            keep_alive_interval=0.5,keep_alive_max_attempt=2",
    ] {
        sim.join_as(9, |it| match part {
            _ if part.contains("other") => it.run_id = Some("other".into()),
            _ if part.contains("nnodes") => it.nnodes = (1, 2),
            _ if part.contains("restarts") => it.max_restarts = 0,
            _ if part.contains("keep_alive") => it.keep_alive = Some(KeepAlive { attempts: 2, ..KEEP_ALIVE }),
            _ => it.node_rank = Some(0),
        });
        let Some(ToAgent::Refused { why }) = sim.agents[&9].0.last() else { panic!("{part}: taken") };
        assert!(why.contains(part), "{why}");
    }
    sim.join(1);
    sim.join(2);
    assert!(sim.is_running(1) && !sim.is_running(2));
    sim.lose(1);
    assert!(sim.is_running(2) && sim.assignment(2).unwrap().restarts == 0);
    sim.end(0, AttemptResult::Succeeded);
    sim.end(2, AttemptResult::Succeeded);
    sim.join(3);
    assert!(matches!(sim.agents[&3].0.last(), Some(ToAgent::Refused { .. })));
}

#[test]
fn keeps_an_earlier_coordinators_counts() {
    let mut sim = Simulation::new((2, 2), 3);
    sim.join_as(0, |it| (it.attempts, it.restarts) = (4, 2));
    sim.join(1);
    assert_eq!(sim.assignment(1).map(|assignment| (assignment.attempt, assignment.restarts)), Some((4, 2)));
}

#[test]
fn an_agent_with_a_later_attempt_advances_the_count() {
    let mut sim = Simulation::new((1, 2), 1);
    sim.join(0);
    sim.pass(LAST_CALL);
    // An agent that an earlier coordinator had counted further.
    sim.join_as(1, |it| (it.attempts, it.restarts) = (3, 1));
    let assignment = |sim: &Simulation, id| {
        sim.assignment(id).map(|assignment| (assignment.attempt, assignment.restarts, assignment.world_size))
    };
    assert_eq!((assignment(&sim, 0), assignment(&sim, 1)), (Some((3, 0, 4)), Some((3, 0, 4))));
    sim.fail(1, "x");
    assert_eq!((assignment(&sim, 0), assignment(&sim, 1)), (Some((4, 1, 4)), Some((4, 1, 4))));
}

#[test]
fn a_failed_start_removes_the_agent_and_costs_a_restart() {
    let mut sim = Simulation::new((1, 2), 1);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    let not_started = |sim: &mut Simulation, id| {
        let attempt = sim.agents.get_mut(&id).and_then(|(_, running)| running.take()).unwrap();
        sim.say(id, FromAgent::NotStarted { attempt, why: "no interpreter".into() });
    };
    not_started(&mut sim, 1);
    let failure = sim.run_result(1).unwrap().failure.as_ref().unwrap();
    assert_eq!(failure.to_string(), "node host1: no interpreter");
    assert_eq!(
        sim.assignment(0).map(|assignment| (assignment.attempt, assignment.restarts, assignment.world_size)),
        Some((1, 1, 2))
    );
    sim.join(2);
    not_started(&mut sim, 2);
    assert_eq!(sim.run_result(0).unwrap().failure.as_ref().unwrap().to_string(), "node host2: no interpreter");
    assert_eq!(sim.run_result(0).unwrap().failed_attempts.len(), 1);

    // A single agent receives the result with the earlier failures.
    let mut alone = Simulation::new((1, 1), 1);
    alone.join(0);
    alone.fail(0, "x");
    not_started(&mut alone, 0);
    let run_result = alone.run_result(0).unwrap();
    assert_eq!((run_result.restarts, run_result.failed_attempts.len()), (1, 1));
}

#[test]
fn a_leaving_agent_stops_the_others() {
    let mut sim = Simulation::new((1, 2), 0);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    sim.pass(LAST_CALL);
    let grace = sim.agents.get_mut(&1).unwrap().1.take();
    sim.say(1, FromAgent::Leaving { attempt: grace.unwrap(), why: "is going".into() });
    assert!(!sim.is_running(0) && sim.assignment(0).unwrap().attempt == 0);
    sim.say(1, FromAgent::Leave { why: "is gone".into() });
    sim.pass(LAST_CALL);
    assert_eq!(
        sim.assignment(0).map(|assignment| (assignment.attempt, assignment.restarts, assignment.world_size)),
        Some((1, 0, 2))
    );
}

#[test]
fn waits_for_the_ranks_of_a_timed_out_host() {
    let mut sim = Simulation::new((1, 2), 0);
    sim.coordinator.config.last_call_timeout = Duration::from_secs(1);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    sim.agents.remove(&1);
    sim.coordinator.time_out(sim.now, 1, "is gone");
    sim.deliver();
    sim.pass(GRACE);
    assert!(!sim.is_running(0));
    // A replacement does not start earlier either.
    sim.join(2);
    assert!(!sim.is_running(0));
    sim.pass(KEEP_ALIVE.interval);
    assert!(sim.is_running(0) && sim.is_running(2));
}

#[test]
fn gives_up_an_agent_that_does_not_stop() {
    let mut sim = Simulation::new((1, 2), 1);
    [0, 1].into_iter().for_each(|id| sim.join(id));
    // It does not react to messages.
    sim.agents.remove(&1);
    sim.fail(0, "x");
    sim.pass(GRACE + STOP_MARGIN);
    assert!(!sim.is_running(0));
    sim.pass(Duration::from_millis(1));
    sim.pass(LAST_CALL);
    assert_eq!(sim.assignment(0).map(|assignment| (assignment.attempt, assignment.world_size)), Some((1, 2)));
}

proptest! {
    /// For any order of joins, losses, failures and successes, attempts do not overlap (the simulation asserts it) and
    /// the run ends.
    #[test]
    fn any_sequence_of_events_ends(
        min in 1u32..4,
        more in 0u32..3,
        max_restarts in 0u32..4,
        story in proptest::collection::vec((0u8..9, 0u64..6), 0..60),
    ) {
        let mut sim = Simulation::new((min, min + more), max_restarts);
        let mut next = 100;
        for (what, id) in story {
            match what {
                0 | 1 => {
                    sim.join(next);
                    next += 1;
                }
                7 => {
                    sim.join_as(next, |it| it.attempts = id as u32 * 3);
                    next += 1;
                }
                2 => sim.pass(LAST_CALL),
                other => {
                    let Some(&id) = sim.agents.keys().nth(id as usize) else { continue };
                    match other {
                        3 => sim.lose(id),
                        4 => sim.fail(id, "x"),
                        8 => {
                            if let Some(attempt) = sim.agents[&id].1 {
                                sim.say(id, FromAgent::PmiBarrier { attempt });
                            }
                        }
                        6 => {
                            if let Some(attempt) = sim.agents.get_mut(&id).and_then(|(_, running)| running.take()) {
                                sim.say(id, FromAgent::NotStarted { attempt, why: "x".into() });
                            }
                        }
                        _ => sim.end(id, AttemptResult::Succeeded),
                    }
                }
            }
        }
        for _ in 0..3 {
            sim.pass(Duration::from_secs(600));
            let ids: Vec<_> = sim.agents.keys().copied().collect();
            ids.into_iter().for_each(|id| sim.end(id, AttemptResult::Succeeded));
        }
        prop_assert!(sim.coordinator.is_over() || sim.agents.is_empty());
    }
}
