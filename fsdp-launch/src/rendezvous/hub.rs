//! The coordinator with the agents that it talks to: one lock, and a way out to each of them.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::{
    coordinator::{AgentId, Coordinator, Rules},
    message::{FromAgent, ToAgent},
};

/// Takes a message on its way, without waiting.
pub(crate) type Outbox = Box<dyn Fn(ToAgent) + Send>;

pub(crate) struct Hub(Mutex<Inner>);

struct Inner {
    coordinator: Coordinator,
    outboxes: BTreeMap<AgentId, Outbox>,
    next: AgentId,
}

impl Hub {
    pub(crate) fn new(rules: Rules) -> Self {
        let coordinator = Coordinator::new(rules, Instant::now());
        Hub(Mutex::new(Inner { coordinator, outboxes: BTreeMap::new(), next: 0 }))
    }

    /// Takes in an agent, which is told things through `outbox` until it is gone.
    pub(crate) fn enter(&self, outbox: Outbox) -> AgentId {
        let mut inner = self.lock();
        let id = inner.next;
        inner.next += 1;
        inner.outboxes.insert(id, outbox);
        id
    }

    pub(crate) fn hear(&self, id: AgentId, message: FromAgent) {
        self.with(|coordinator, now| coordinator.hear(now, id, message));
    }

    /// An agent is gone.
    pub(crate) fn lose(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.lose(now, id, how));
        self.lock().outboxes.remove(&id);
    }

    /// Nothing is heard of an agent any more.
    pub(crate) fn fall_silent(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.fall_silent(now, id, how));
        self.lock().outboxes.remove(&id);
    }

    pub(crate) fn tick(&self) {
        self.with(Coordinator::tick);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.lock().coordinator.is_over()
    }

    /// How many agents it talks to.
    pub(crate) fn len(&self) -> usize {
        self.lock().outboxes.len()
    }

    /// Talks to nobody any more.
    pub(crate) fn close(&self) {
        self.lock().outboxes.clear();
    }

    fn with(&self, act: impl FnOnce(&mut Coordinator, Instant)) {
        let mut inner = self.lock();
        act(&mut inner.coordinator, Instant::now());
        for (id, message) in inner.coordinator.take_messages() {
            if let Some(outbox) = inner.outboxes.get(&id) {
                outbox(message);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // What a panic left half done is at worst a message that was not sent, and its agent times out.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
