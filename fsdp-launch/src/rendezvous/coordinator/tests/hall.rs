//! Agents that do as they are told at once, and a clock that is turned by hand.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{
    End, RankReport,
    rendezvous::{
        coordinator::{Coordinator, Rules},
        keep_alive::KeepAlive,
        message::{AgentId, Ended, FromAgent, Member, Place, ToAgent, Verdict},
        secret::Secret,
    },
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
