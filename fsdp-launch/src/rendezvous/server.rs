//! The coordinator with its connections to the agents.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fsdp_core::channel::{self, Accepted, Channel, Handler, Key, Listener, Reader, Writer};
use parking_lot::{Mutex, MutexGuard};
use serde::{Serialize, de::DeserializeOwned};

use crate::rendezvous::{
    coordinator::{Coordinator, RunConfig},
    message::{AgentId, FromAgent, KeepAlive, ToAgent},
};

/// The way to an agent.
pub(crate) struct Outbox {
    /// Takes a message on its way, without waiting.
    pub(crate) send_message: Box<dyn Fn(ToAgent) + Send>,
    /// What sends them, until `send_message` is dropped and all are sent.
    pub(crate) sender: Option<JoinHandle<()>>,
}

pub(crate) struct SharedCoordinator(Mutex<Inner>);

struct Inner {
    coordinator: Coordinator,
    outboxes: BTreeMap<AgentId, Outbox>,
    next: AgentId,
}

impl SharedCoordinator {
    pub(crate) fn new(config: RunConfig) -> Self {
        let coordinator = Coordinator::new(config, Instant::now());
        SharedCoordinator(Mutex::new(Inner { coordinator, outboxes: BTreeMap::new(), next: 0 }))
    }

    /// Takes in an agent, which is told things through `outbox` until it is gone.
    pub(crate) fn add_agent(&self, outbox: Outbox) -> AgentId {
        let mut inner = self.lock();
        let id = inner.next;
        inner.next += 1;
        inner.outboxes.insert(id, outbox);
        id
    }

    pub(crate) fn receive(&self, id: AgentId, message: FromAgent) {
        self.with(|coordinator, now| coordinator.receive(now, id, message));
    }

    /// An agent is gone.
    pub(crate) fn disconnect(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.disconnect(now, id, how));
        self.lock().outboxes.remove(&id);
    }

    /// Nothing is heard of an agent any more.
    pub(crate) fn time_out(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.time_out(now, id, how));
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
                (outbox.send_message)(message);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // What a panic left half done is at worst a message that was not sent, and its agent times out.
        self.0.lock()
    }
}

/// The most agents beyond those that can take part.
const SPARE_CONNECTIONS: usize = 64;
/// What a thread of a connection needs is little.
const STACK_BYTES: usize = 256 << 10;

/// Admits up to `most` agents (and some spare ones) that connect to `listener` with the token, for as long as what is
/// returned lives.
pub(crate) fn serve(
    listener: TcpListener,
    coordinator: Arc<SharedCoordinator>,
    key: Key,
    keep_alive: KeepAlive,
    most: u32,
) -> io::Result<Listener> {
    let most = (most as usize).saturating_add(SPARE_CONNECTIONS);
    Listener::start(listener, key, most, AgentHandler { coordinator, keep_alive })
}

struct AgentHandler {
    coordinator: Arc<SharedCoordinator>,
    keep_alive: KeepAlive,
}

impl Handler for AgentHandler {
    fn refused(&self, from: IpAddr, why: &io::Error) {
        tracing::warn!("refused {from}: {why} (--rdzv-token-file), or is no fsdp-launch");
    }

    fn serve(&self, guest: Accepted) -> io::Result<()> {
        let Accepted { channel: Channel { mut reader, writer }, first, from } = guest;
        let FromAgent::Join(mut node) = serde_json::from_slice(&first)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its first message is not that it joins"));
        };
        node.address.get_or_insert_with(|| from.ip().to_canonical().to_string());
        let host = node.host.clone();
        let (outbox, messages) = mpsc::channel();
        let interval = self.keep_alive.interval;
        let sender = thread::Builder::new()
            .name(format!("to agent {from}"))
            .stack_size(STACK_BYTES)
            .spawn(move || send_until_closed(writer, &messages, interval, &ToAgent::Ping))?;
        let send_message = move |message| {
            // The thread ends when the connection breaks, which the reader notices.
            outbox.send(message).ok();
        };
        let id = self.coordinator.add_agent(Outbox { send_message: Box::new(send_message), sender: Some(sender) });
        self.coordinator.receive(id, FromAgent::Join(node));
        let limit = self.keep_alive.limit();
        let error = loop {
            match receive(&mut reader, limit) {
                Ok(message) => self.coordinator.receive(id, message),
                Err(error) => break error,
            }
        };
        tracing::debug!("agent {host} is gone ({error})");
        match error.kind() {
            io::ErrorKind::TimedOut => {
                self.coordinator.time_out(id, &format!("is gone: nothing was heard of its launcher for {limit:?}"));
            }
            _ => self.coordinator.disconnect(id, "is gone: its launcher has ended"),
        }
        Ok(())
    }
}

/// Sends `messages` until no more can come or the connection breaks, `ping` after each `interval` without any; then
/// closes the connection.
pub(crate) fn send_until_closed<M: Serialize>(
    mut writer: Writer,
    messages: &Receiver<M>,
    interval: Duration,
    ping: &M,
) {
    loop {
        let sent = match messages.recv_timeout(interval) {
            Ok(message) => send(&mut writer, &message),
            Err(RecvTimeoutError::Timeout) => send(&mut writer, ping),
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Err(error) = sent {
            tracing::debug!("a message was not sent: {error}");
            break;
        }
    }
    writer.close();
}

/// Both sides must mean the same by the messages that follow.
const PURPOSE: &str = "fsdp-launch rendezvous 4";

/// The key of a token.
pub(crate) fn key(token: &[u8]) -> Key {
    Key::derive(PURPOSE, token)
}

/// The side that connects.
pub(crate) fn connect(stream: TcpStream, key: &Key) -> io::Result<channel::Channel> {
    channel::Channel::connect(stream, key).map_err(|error| {
        let way_out = "give all launchers the same --rdzv-token-file, and start the same version of fsdp-launch";
        io::Error::new(error.kind(), format!("{error}: {way_out}"))
    })
}

/// Sends a message.
///
/// # Errors
/// The connection can't be used any more then.
pub(crate) fn send<M: Serialize>(writer: &mut Writer, message: &M) -> io::Result<()> {
    writer.send(&serde_json::to_vec(message)?)
}

/// The peer's next message, which must have come whole within `timeout`.
///
/// # Errors
/// The connection can't be used any more then: nothing came in time, it was closed, or what came is no message.
pub(crate) fn receive<M: DeserializeOwned>(reader: &mut Reader, timeout: Duration) -> io::Result<M> {
    Ok(serde_json::from_slice(reader.receive(timeout)?)?)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// An agent that is slow to be told things: a message goes to `heard` a while after it was send_message.
    fn slow(heard: Sender<ToAgent>) -> Outbox {
        let (send_message, messages) = channel();
        let sender = thread::spawn(move || {
            for message in messages {
                thread::sleep(Duration::from_millis(20));
                heard.send(message).ok();
            }
        });
        Outbox { send_message: Box::new(move |message| send_message.send(message).unwrap()), sender: Some(sender) }
    }

    #[test]
    fn what_was_said_is_on_its_way_when_the_hub_is_closed() {
        let spec = crate::LaunchSpec::new("p", 1);
        let coordinator = SharedCoordinator::new(RunConfig::of(&spec, "run").unwrap());
        let heard: Vec<_> = (0..3)
            .map(|_| {
                let (tell, heard) = channel();
                let id = coordinator.add_agent(slow(tell));
                (coordinator.lock().outboxes[&id].send_message)(ToAgent::Ping);
                heard
            })
            .collect();
        coordinator.close();
        // At once: the process may end now.
        assert!(heard.iter().all(|heard| heard.try_recv().is_ok()));
        assert_eq!(coordinator.len(), 0);
    }
}
