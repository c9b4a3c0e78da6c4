//! The coordinator with the agents that it talks to: one lock, and a way out to each of them.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Instant,
};

use crate::rendezvous::{
    coordinator::{Coordinator, Rules},
    message::{AgentId, FromAgent, ToAgent},
};

/// The way to an agent.
pub(crate) struct Outbox {
    /// Takes a message on its way, without waiting.
    pub(crate) put: Box<dyn Fn(ToAgent) + Send>,
    /// What sends them, until `put` is dropped and all are sent.
    pub(crate) sender: Option<JoinHandle<()>>,
}

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

    /// Talks to nobody any more. Returns when what was said is on its way, however soon the process ends then; an agent
    /// that takes nothing is waited for as long as a write to it may last.
    pub(crate) fn close(&self) {
        let outboxes = std::mem::take(&mut self.lock().outboxes);
        // All hear that nothing more comes before one is waited for.
        let senders: Vec<_> = outboxes.into_values().filter_map(|outbox| outbox.sender).collect();
        senders.into_iter().for_each(|sender| {
            // It only fails by a panic, which has been printed.
            sender.join().ok();
        });
    }

    fn with(&self, act: impl FnOnce(&mut Coordinator, Instant)) {
        let mut inner = self.lock();
        act(&mut inner.coordinator, Instant::now());
        for (id, message) in inner.coordinator.take_messages() {
            if let Some(outbox) = inner.outboxes.get(&id) {
                (outbox.put)(message);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // What a panic left half done is at worst a message that was not sent, and its agent times out.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Sender, channel},
        thread,
        time::Duration,
    };

    use super::*;

    /// An agent that is slow to be told things: a message goes to `heard` a while after it was put.
    fn slow(heard: Sender<ToAgent>) -> Outbox {
        let (put, messages) = channel();
        let sender = thread::spawn(move || {
            for message in messages {
                thread::sleep(Duration::from_millis(20));
                heard.send(message).ok();
            }
        });
        Outbox { put: Box::new(move |message| put.send(message).unwrap()), sender: Some(sender) }
    }

    #[test]
    fn what_was_said_is_on_its_way_when_the_hub_is_closed() {
        let spec = crate::LaunchSpec::new("p", 1);
        let hub = Hub::new(Rules::of(&spec, "run").unwrap());
        let heard: Vec<_> = (0..3)
            .map(|_| {
                let (tell, heard) = channel();
                let id = hub.enter(slow(tell));
                (hub.lock().outboxes[&id].put)(ToAgent::Ping);
                heard
            })
            .collect();
        hub.close();
        // At once: the process may end now.
        assert!(heard.iter().all(|heard| heard.try_recv().is_ok()));
        assert_eq!(hub.len(), 0);
    }
}
