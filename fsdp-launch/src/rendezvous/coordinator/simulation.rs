//! Simulated agents that come, go, fail and succeed, with a simulated clock.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::{
    End, RankReport,
    rendezvous::message::{KeepAlive, Secret},
};

/// The agents of a launch and their coordinator.
pub(crate) struct Hall {
    pub(crate) coordinator: Coordinator,
    pub(crate) now: Instant,
    /// What each agent heard, and which attempt's ranks it has running.
    pub(crate) agents: BTreeMap<AgentId, (Vec<ToAgent>, Option<u32>)>,
}

pub(crate) const KEEP_ALIVE: KeepAlive = KeepAlive { interval: Duration::from_millis(500), attempts: 3 };
pub(crate) const LAST_CALL: Duration = Duration::from_secs(30);
pub(crate) const GRACE: Duration = Duration::from_secs(5);

impl Hall {
    pub(crate) fn new(nnodes: (u32, u32), max_restarts: u32) -> Self {
        let times = (Duration::from_secs(600), LAST_CALL);
        let rules = Rules {
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
        Hall { coordinator: Coordinator::new(rules, now), now, agents: BTreeMap::new() }
    }

    pub(crate) fn join_as(&mut self, id: AgentId, change: impl FnOnce(&mut Member)) {
        let rules = &self.coordinator.rules;
        let mut member = Member {
            host: format!("host{id}"),
            machine: format!("machine{id}"),
            node_rank: None,
            ranks: 2,
            role: "default".into(),
            address: Some(format!("10.0.0.{id}")),
            master_addr: None,
            master_port: 1000 + id as u16,
            run_id: None,
            nnodes: rules.nnodes,
            keep_alive: rules.keep_alive,
            max_restarts: rules.max_restarts,
            grace: GRACE,
            attempts: 0,
            restarts: 0,
        };
        change(&mut member);
        self.agents.insert(id, (Vec::new(), None));
        self.say(id, FromAgent::Join(Box::new(member)));
    }

    pub(crate) fn join(&mut self, id: AgentId) {
        self.join_as(id, |_| {});
    }

    pub(crate) fn say(&mut self, id: AgentId, message: FromAgent) {
        self.coordinator.hear(self.now, id, message);
        self.deliver();
    }

    pub(crate) fn lose(&mut self, id: AgentId) {
        self.agents.remove(&id);
        self.coordinator.lose(self.now, id, "is gone");
        self.deliver();
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.coordinator.tick(self.now);
        self.deliver();
    }

    /// Tells agents what is for them; those that are to end their ranks do.
    pub(crate) fn deliver(&mut self) {
        loop {
            let messages = self.coordinator.take_messages();
            if messages.is_empty() {
                return;
            }
            // As the hub does: all have their messages before one answers.
            let mut asked = Vec::new();
            for (id, message) in messages {
                let Some((heard, running)) = self.agents.get_mut(&id) else { continue };
                match &message {
                    ToAgent::Start(place) => {
                        assert_eq!(*running, None, "two attempts at once on {id}");
                        *running = Some(place.attempt);
                    }
                    ToAgent::Stop { attempt, .. } => assert!(running.is_none_or(|running| running == *attempt)),
                    ToAgent::End(_) => assert_eq!(*running, None, "ranks of {id} outlive the end"),
                    _ => {}
                }
                heard.push(message.clone());
                if let ToAgent::Stop { attempt, .. } = message {
                    asked.push((id, attempt));
                }
            }
            for (id, attempt) in asked {
                // Of an attempt that is over, it changes nothing.
                if self.agents.get(&id).is_some_and(|(_, running)| *running == Some(attempt)) {
                    self.end(id, Ended::Stopped { may_restart: true });
                }
            }
        }
    }

    pub(crate) fn end(&mut self, id: AgentId, result: Ended) {
        let Some(attempt) = self.agents.get_mut(&id).and_then(|(_, running)| running.take()) else { return };
        self.coordinator.hear(self.now, id, FromAgent::Ended { attempt, result, master_port: 2000 + id as u16 });
        self.deliver();
    }

    pub(crate) fn fail(&mut self, id: AgentId, message: &str) {
        let report = Box::new(report(message));
        self.end(id, Ended::Failed { report, may_restart: true });
    }

    pub(crate) fn place(&self, id: AgentId) -> Option<&Place> {
        let heard = &self.agents.get(&id)?.0;
        heard.iter().rev().find_map(|message| if let ToAgent::Start(place) = message { Some(place) } else { None })
    }

    pub(crate) fn verdict(&self, id: AgentId) -> Option<&Verdict> {
        match self.agents.get(&id)?.0.last()? {
            ToAgent::End(verdict) => Some(verdict),
            _ => None,
        }
    }

    pub(crate) fn is_running(&self, id: AgentId) -> bool {
        self.agents.get(&id).is_some_and(|(_, running)| running.is_some())
    }
}

/// Of a rank that failed, saying `message`.
pub(crate) fn report(message: &str) -> RankReport {
    let (host, end) = ("h".into(), Some(End::Exited(7)));
    RankReport {
        rank: 1,
        host,
        pid: 5,
        end,
        ended_at: None,
        after: None,
        request: None,
        silent_for: None,
        whereabouts: None,
        message: Some(message.into()),
        stderr: None,
    }
}

#[test]
fn that_a_rank_is_done_is_passed_on_within_its_machine() {
    let mut hall = Hall::new((4, 4), 0);
    for id in 0..4 {
        // The last is elsewhere.
        hall.join_as(id, |member| member.machine = format!("machine{}", id / 3));
    }
    hall.end(2, Ended::Succeeded);
    for attempt in [0, 1] {
        hall.say(0, FromAgent::RankDone { attempt, rank: 1 });
    }
    let told = |id: AgentId| {
        let heard = hall.agents[&id].0.iter();
        heard.filter(|it| matches!(it, ToAgent::RankDone { attempt: 0, rank: 1 })).count()
    };
    // Not to who said it, whose ranks are all done, nor elsewhere; and nothing of another attempt.
    assert_eq!([0, 1, 2, 3].map(told), [0, 1, 0, 0]);
}

#[test]
fn what_ranks_put_over_pmi_goes_to_all_others_and_a_barrier_ends_when_all_wait() {
    let mut hall = Hall::new((3, 3), 1);
    (0..3).for_each(|id| hall.join_as(id, |it| it.ranks = [2, 2, 1][id as usize]));
    assert_eq!(hall.place(2).unwrap().ranks_of_hosts, [(2, 2), (1, 1)]);
    let secrets = [0, 2].map(|id| hall.place(id).unwrap().store_secret.clone());
    assert!(secrets[0] == secrets[1] && secrets[0].text().is_some());
    assert_eq!(hall.place(1).unwrap().pmi_space, "kvs_id_0");
    let heard = |hall: &Hall, id: AgentId| {
        let heard = hall.agents[&id].0.iter();
        heard.filter(|it| matches!(it, ToAgent::PmiPut { .. } | ToAgent::PmiGoOn { .. })).count()
    };
    let put = |attempt| FromAgent::PmiPut { attempt, entries: vec![("key".into(), "value".into())] };
    // Nothing of another attempt.
    [0, 1].into_iter().for_each(|attempt| hall.say(1, put(attempt)));
    assert_eq!([0, 1, 2].map(|id| heard(&hall, id)), [1, 0, 1]);
    [1, 1, 2].into_iter().for_each(|id| hall.say(id, FromAgent::PmiBarrier { attempt: 0 }));
    assert_eq!([0, 1, 2].map(|id| heard(&hall, id)), [1, 0, 1]);
    hall.say(0, FromAgent::PmiBarrier { attempt: 0 });
    assert_eq!([0, 1, 2].map(|id| heard(&hall, id)), [2, 1, 2]);
    // The next one; who waited before a restart waits no more after it.
    hall.say(0, FromAgent::PmiBarrier { attempt: 0 });
    hall.fail(1, "a");
    [1, 2].into_iter().for_each(|id| hall.say(id, FromAgent::PmiBarrier { attempt: 1 }));
    assert_eq!([0, 1, 2].map(|id| heard(&hall, id)), [2, 1, 2]);
    // And nobody waits for a host whose ranks have ended.
    hall.end(0, Ended::Succeeded);
    let told = hall.verdict(2).unwrap().failure.as_ref().unwrap().to_string();
    assert_eq!(told, "node host0 has ended its ranks while those of other hosts wait for them in a barrier of MPI");
}

#[test]
fn one_agent_starts_at_once_and_restarts_by_itself() {
    let mut hall = Hall::new((1, 1), 1);
    hall.join(0);
    let place = hall.place(0).unwrap();
    assert_eq!((place.attempt, place.world_size, place.master_port), (0, 2, 1000));
    hall.fail(0, "a");
    let place = hall.place(0).unwrap();
    assert_eq!((place.attempt, place.restarts, place.master_port), (1, 1, 2000));
    hall.fail(0, &"b".repeat(1000));
    let verdict = hall.verdict(0).unwrap();
    assert_eq!(verdict.failure, Some(Failure::Rank(report(&"b".repeat(1000)))));
    assert_eq!((verdict.restarts, verdict.setbacks.len(), verdict.setbacks[0].attempt), (1, 1, 0));
}

#[test]
fn ranks_follow_node_ranks_and_then_the_order_of_coming() {
    let mut hall = Hall::new((3, 3), 0);
    hall.join_as(0, |it| (it.role, it.ranks) = ("a".into(), 1));
    hall.join_as(1, |it| (it.role, it.node_rank) = ("b".into(), Some(0)));
    assert!(hall.place(0).is_none());
    hall.join_as(2, |it| (it.role, it.ranks) = ("a".into(), 4));
    let of = |id| {
        let place = hall.place(id).unwrap();
        let role = (place.first_role_rank, place.role_world_size);
        (place.group_rank, place.first_rank, role, place.master_addr.as_str(), place.master_port)
    };
    assert_eq!(of(1), (0, 0, (0, 2), "10.0.0.1", 1001));
    assert_eq!(of(0), (1, 2, (0, 5), "10.0.0.1", 1001));
    assert_eq!(of(2), (2, 3, (1, 5), "10.0.0.1", 1001));
    assert_eq!(hall.place(0).map(|place| (place.world_size, place.group_world_size, place.machines)), Some((7, 3, 3)));
    (0..3).for_each(|id| hall.end(id, Ended::Succeeded));
    assert!((0..3).all(|id| hall.verdict(id).unwrap().failure.is_none()));
}

#[test]
fn one_failure_stops_and_restarts_all_without_a_last_call() {
    let mut hall = Hall::new((1, 4), 1);
    hall.join(0);
    hall.join(1);
    assert!(!hall.is_running(0));
    hall.pass(LAST_CALL);
    hall.end(0, Ended::Succeeded);
    hall.fail(1, "x");
    assert!(hall.is_running(0) && hall.is_running(1) && hall.place(0).unwrap().attempt == 1);
    // The first word counts; what the same agent finds out later replaces it, an echo does not.
    hall.say(1, FromAgent::Failed { attempt: 1, report: Box::new(report("first")) });
    hall.fail(0, "echo");
    let failure = hall.verdict(1).unwrap().failure.clone();
    assert!(failure.is_some_and(|failure| failure.to_string().contains("first")));
}

#[test]
fn a_lost_agent_costs_a_restart_unless_enough_are_left() {
    let mut hall = Hall::new((1, 2), 0);
    hall.join(0);
    hall.join(1);
    hall.lose(1);
    assert!(!hall.is_running(0));
    hall.pass(LAST_CALL);
    let place = hall.place(0).unwrap();
    assert_eq!((place.attempt, place.restarts, place.world_size), (1, 0, 2));
    // It comes back: all start again, larger.
    hall.join(2);
    let place = hall.place(2).unwrap();
    assert_eq!((place.attempt, place.first_rank, place.world_size), (2, 2, 4));

    let mut fixed = Hall::new((2, 2), 1);
    [0, 1].into_iter().for_each(|id| fixed.join(id));
    fixed.lose(1);
    assert!(!fixed.is_running(0) && fixed.verdict(0).is_none());
    fixed.join(2);
    assert_eq!(fixed.place(0).map(|place| (place.attempt, place.restarts)), Some((1, 1)));
    fixed.lose(2);
    assert!(fixed.verdict(0).unwrap().failure.as_ref().unwrap().to_string().contains("host2 is gone"));
}

#[test]
fn a_loss_explains_the_failures_that_came_before_it() {
    let mut hall = Hall::new((1, 2), 0);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    // Its end is heard only after the others' ranks have noticed.
    hall.agents.get_mut(&1).unwrap().1 = None;
    hall.fail(0, "rank 2 is gone");
    assert!(hall.verdict(0).is_none());
    hall.lose(1);
    hall.pass(LAST_CALL);
    assert!(hall.is_running(0));
}

#[test]
fn a_host_whose_ranks_do_not_end_is_never_told_to_start_again() {
    let mut hall = Hall::new((1, 2), 5);
    hall.join(0);
    hall.pass(LAST_CALL);
    // Its ranks are asked to end because another host has come.
    hall.agents.get_mut(&0).unwrap().1 = None;
    hall.join(1);
    let result = Ended::Stopped { may_restart: false };
    hall.say(0, FromAgent::Ended { attempt: 0, result, master_port: 1 });
    let failure = hall.verdict(1).unwrap().failure.as_ref().unwrap().to_string();
    assert!(failure.contains("host0 can't start again"), "{failure}");
}

#[test]
fn who_had_succeeded_is_told_why_all_start_again() {
    let mut hall = Hall::new((2, 2), 1);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    hall.end(0, Ended::Succeeded);
    hall.fail(1, "x");
    let heard = &hall.agents[&0].0;
    assert!(
        heard
            .iter()
            .any(|it| matches!(it, ToAgent::Stop { attempt: 0, why, costs: true } if why.contains("failed first")))
    );
    assert!(hall.is_running(0) && hall.is_running(1));
}

#[test]
fn too_few_agents_are_an_end_with_their_names() {
    let mut hall = Hall::new((3, 3), 0);
    hall.join(0);
    hall.join(1);
    hall.pass(Duration::from_secs(599));
    assert!(hall.verdict(0).is_none());
    hall.pass(Duration::from_secs(1));
    let told = hall.verdict(1).unwrap().failure.as_ref().unwrap().to_string();
    assert!(told.contains("only 2 of at least 3 nodes (host0, host1)") && told.contains("join_timeout"), "{told}");
}

#[test]
fn who_does_not_fit_is_refused_and_who_is_one_too_many_waits() {
    let mut hall = Hall::new((2, 2), 5);
    hall.join_as(0, |it| it.node_rank = Some(0));
    for part in [
        "--node-rank 0 is taken by host0",
        "the run here is \"run\", not \"other\"",
        "--nnodes 2, not 1:2",
        "--max-restarts 5, not 0",
        "--rdzv-conf keep_alive_interval=0.5,keep_alive_max_attempt=3, not \
            keep_alive_interval=0.5,keep_alive_max_attempt=2",
    ] {
        hall.join_as(9, |it| match part {
            _ if part.contains("other") => it.run_id = Some("other".into()),
            _ if part.contains("nnodes") => it.nnodes = (1, 2),
            _ if part.contains("restarts") => it.max_restarts = 0,
            _ if part.contains("keep_alive") => it.keep_alive = Some(KeepAlive { attempts: 2, ..KEEP_ALIVE }),
            _ => it.node_rank = Some(0),
        });
        let Some(ToAgent::Refused { why }) = hall.agents[&9].0.last() else { panic!("{part}: taken") };
        assert!(why.contains(part), "{why}");
    }
    hall.join(1);
    hall.join(2);
    assert!(hall.is_running(1) && !hall.is_running(2));
    hall.lose(1);
    assert!(hall.is_running(2) && hall.place(2).unwrap().restarts == 0);
    hall.end(0, Ended::Succeeded);
    hall.end(2, Ended::Succeeded);
    hall.join(3);
    assert!(matches!(hall.agents[&3].0.last(), Some(ToAgent::Refused { .. })));
}

#[test]
fn what_a_coordinator_before_it_counted_is_not_forgotten() {
    let mut hall = Hall::new((2, 2), 3);
    hall.join_as(0, |it| (it.attempts, it.restarts) = (4, 2));
    hall.join(1);
    assert_eq!(hall.place(1).map(|place| (place.attempt, place.restarts)), Some((4, 2)));
}

#[test]
fn an_agent_of_a_later_attempt_stops_the_one_that_runs_and_is_heard() {
    let mut hall = Hall::new((1, 2), 1);
    hall.join(0);
    hall.pass(LAST_CALL);
    // Of a coordinator before this one, which counted further than this one.
    hall.join_as(1, |it| (it.attempts, it.restarts) = (3, 1));
    let place = |hall: &Hall, id| hall.place(id).map(|place| (place.attempt, place.restarts, place.world_size));
    assert_eq!((place(&hall, 0), place(&hall, 1)), (Some((3, 0, 4)), Some((3, 0, 4))));
    hall.fail(1, "x");
    assert_eq!((place(&hall, 0), place(&hall, 1)), (Some((4, 1, 4)), Some((4, 1, 4))));
}

#[test]
fn an_agent_that_can_not_start_its_ranks_goes_and_costs_a_restart() {
    let mut hall = Hall::new((1, 2), 1);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    let not_started = |hall: &mut Hall, id| {
        let attempt = hall.agents.get_mut(&id).and_then(|(_, running)| running.take()).unwrap();
        hall.say(id, FromAgent::NotStarted { attempt, why: "no interpreter".into() });
    };
    not_started(&mut hall, 1);
    let failure = hall.verdict(1).unwrap().failure.as_ref().unwrap();
    assert_eq!(failure.to_string(), "node host1: no interpreter");
    assert_eq!(hall.place(0).map(|place| (place.attempt, place.restarts, place.world_size)), Some((1, 1, 2)));
    hall.join(2);
    not_started(&mut hall, 2);
    assert_eq!(hall.verdict(0).unwrap().failure.as_ref().unwrap().to_string(), "node host2: no interpreter");
    assert_eq!(hall.verdict(0).unwrap().setbacks.len(), 1);

    // Alone, it hears the end, and what came before it.
    let mut alone = Hall::new((1, 1), 1);
    alone.join(0);
    alone.fail(0, "x");
    not_started(&mut alone, 0);
    let verdict = alone.verdict(0).unwrap();
    assert_eq!((verdict.restarts, verdict.setbacks.len()), (1, 1));
}

#[test]
fn an_agent_that_is_ending_its_ranks_stops_the_others_and_is_waited_for() {
    let mut hall = Hall::new((1, 2), 0);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    hall.pass(LAST_CALL);
    let grace = hall.agents.get_mut(&1).unwrap().1.take();
    hall.say(1, FromAgent::Leaving { attempt: grace.unwrap(), why: "is going".into() });
    assert!(!hall.is_running(0) && hall.place(0).unwrap().attempt == 0);
    hall.say(1, FromAgent::Leave { why: "is gone".into() });
    hall.pass(LAST_CALL);
    assert_eq!(hall.place(0).map(|place| (place.attempt, place.restarts, place.world_size)), Some((1, 0, 2)));
}

#[test]
fn ranks_do_not_start_while_a_silent_host_may_have_some() {
    let mut hall = Hall::new((1, 2), 0);
    hall.coordinator.rules.last_call_timeout = Duration::from_secs(1);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    hall.agents.remove(&1);
    hall.coordinator.fall_silent(hall.now, 1, "is gone");
    hall.deliver();
    hall.pass(GRACE);
    assert!(!hall.is_running(0));
    // Not for one that comes in its place either.
    hall.join(2);
    assert!(!hall.is_running(0));
    hall.pass(KEEP_ALIVE.interval);
    assert!(hall.is_running(0) && hall.is_running(2));
}

#[test]
fn an_agent_that_never_ends_its_ranks_is_given_up() {
    let mut hall = Hall::new((1, 2), 1);
    [0, 1].into_iter().for_each(|id| hall.join(id));
    // It hears nothing of what it is told.
    hall.agents.remove(&1);
    hall.fail(0, "x");
    hall.pass(GRACE + ENDING);
    assert!(!hall.is_running(0));
    hall.pass(Duration::from_millis(1));
    hall.pass(LAST_CALL);
    assert_eq!(hall.place(0).map(|place| (place.attempt, place.world_size)), Some((1, 2)));
}

proptest! {
    /// However agents come, go, fail and succeed: no attempt overlaps another (asserted by the hall), and it ends.
    #[test]
    fn any_story_ends(
        min in 1u32..4,
        more in 0u32..3,
        max_restarts in 0u32..4,
        story in proptest::collection::vec((0u8..9, 0u64..6), 0..60),
    ) {
        let mut hall = Hall::new((min, min + more), max_restarts);
        let mut next = 100;
        for (what, id) in story {
            match what {
                0 | 1 => {
                    hall.join(next);
                    next += 1;
                }
                7 => {
                    hall.join_as(next, |it| it.attempts = id as u32 * 3);
                    next += 1;
                }
                2 => hall.pass(LAST_CALL),
                other => {
                    let Some(&id) = hall.agents.keys().nth(id as usize) else { continue };
                    match other {
                        3 => hall.lose(id),
                        4 => hall.fail(id, "x"),
                        8 => {
                            if let Some(attempt) = hall.agents[&id].1 {
                                hall.say(id, FromAgent::PmiBarrier { attempt });
                            }
                        }
                        6 => {
                            if let Some(attempt) = hall.agents.get_mut(&id).and_then(|(_, running)| running.take()) {
                                hall.say(id, FromAgent::NotStarted { attempt, why: "x".into() });
                            }
                        }
                        _ => hall.end(id, Ended::Succeeded),
                    }
                }
            }
        }
        for _ in 0..3 {
            hall.pass(Duration::from_secs(600));
            let ids: Vec<_> = hall.agents.keys().copied().collect();
            ids.into_iter().for_each(|id| hall.end(id, Ended::Succeeded));
        }
        prop_assert!(hall.coordinator.is_over() || hall.agents.is_empty());
    }
}
