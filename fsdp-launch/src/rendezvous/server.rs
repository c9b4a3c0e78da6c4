//! Serves the coordinator: its lock, and its connections to the agents.

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
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};

use crate::rendezvous::{
    coordinator::{Coordinator, RunConfig},
    message::{AgentId, FromAgent, KeepAlive, ToAgent},
};

/// Sends messages to one agent.
pub(crate) struct Outbox {
    /// Queues a message without waiting.
    pub(crate) send_message: Box<dyn Fn(ToAgent) + Send>,
    /// Thread that sends queued messages. It ends when `send_message` is dropped and the queue is empty.
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

    /// Adds an agent. Messages for it go to `outbox`.
    pub(crate) fn add_agent(&self, outbox: Outbox) -> AgentId {
        let mut inner = self.0.lock();
        let id = inner.next;
        inner.next += 1;
        inner.outboxes.insert(id, outbox);
        id
    }

    pub(crate) fn receive(&self, id: AgentId, message: FromAgent) {
        self.with(|coordinator, now| coordinator.receive(now, id, message));
    }

    /// Handles an agent that disconnected.
    pub(crate) fn disconnect(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.disconnect(now, id, how));
        self.0.lock().outboxes.remove(&id);
    }

    /// Handles an agent that timed out.
    pub(crate) fn time_out(&self, id: AgentId, how: &str) {
        self.with(|coordinator, now| coordinator.time_out(now, id, how));
        self.0.lock().outboxes.remove(&id);
    }

    pub(crate) fn tick(&self) {
        self.with(Coordinator::tick);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.lock().coordinator.is_over()
    }

    /// Returns the number of connected agents.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().outboxes.len()
    }

    /// Closes all connections after sending the queued messages. An agent that does not read delays it for the time
    /// limit of a write.
    pub(crate) fn close(&self) {
        let outboxes = std::mem::take(&mut self.0.lock().outboxes);
        // Drop all queues before waiting for the first thread.
        let senders: Vec<_> = outboxes.into_values().filter_map(|outbox| outbox.sender).collect();
        senders.into_iter().for_each(|sender| {
            // Fails only after a panic, which was printed.
            sender.join().ok();
        });
    }

    fn with(&self, act: impl FnOnce(&mut Coordinator, Instant)) {
        let mut inner = self.0.lock();
        act(&mut inner.coordinator, Instant::now());
        for (id, message) in inner.coordinator.take_messages() {
            if let Some(outbox) = inner.outboxes.get(&id) {
                (outbox.send_message)(message);
            }
        }
    }
}

/// Connections beyond the maximum number of agents.
const SPARE_CONNECTIONS: usize = 64;
const STACK_BYTES: usize = 256 << 10;

/// Accepts up to `most` agents, and some spare ones, that connect with the token. Dropping the listener stops it.
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
        tracing::warn!("refused {from}: {why}. All launchers need the same --rdzv-token-file");
    }

    fn refusal(&self, why: &str) -> Vec<u8> {
        // Has no map with keys that are not strings.
        serde_json::to_vec(&ToAgent::Refused { why: why.to_owned() }).unwrap_or_default()
    }

    fn serve(&self, guest: Accepted) -> io::Result<()> {
        let Accepted { channel: Channel { mut reader, mut writer }, first, from } = guest;
        let Ok(FromAgent::Join(mut node)) = serde_json::from_slice(&first) else {
            let why = "the first message is not one of this version: run the same version of fsdp-launch on all hosts";
            writer.send(&self.refusal(why))?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
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
            // The thread ends when the connection breaks; the reader then notices too.
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
                self.coordinator.time_out(id, &format!("is gone: no message from its launcher for {limit:?}"));
            }
            _ => self.coordinator.disconnect(id, "is gone: its launcher has ended"),
        }
        Ok(())
    }
}

/// Sends `messages`, and `ping` after each `interval` without one. Ends the direction at the end, so that the peer
/// reads all messages.
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
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(error) = sent {
            tracing::debug!("a message was not sent: {error}");
            // Wakes the thread that reads.
            writer.close();
            return;
        }
    }
}

/// Version of the messages.
const PURPOSE: &str = "fsdp-launch rendezvous 4";

/// Derives the key of a token.
pub(crate) fn key(token: &[u8]) -> Key {
    Key::derive(PURPOSE, token)
}

/// Connects with the token.
pub(crate) fn connect(stream: TcpStream, key: &Key) -> io::Result<channel::Channel> {
    channel::Channel::connect(stream, key).map_err(|error| {
        let way_out = "give all launchers the same --rdzv-token-file, and start the same version of fsdp-launch";
        io::Error::new(error.kind(), format!("{error}: {way_out}"))
    })
}

/// Sends a message.
pub(crate) fn send<M: Serialize>(writer: &mut Writer, message: &M) -> io::Result<()> {
    writer.send(&serde_json::to_vec(message)?)
}

/// Receives a message. All of it must arrive within `timeout`.
pub(crate) fn receive<M: DeserializeOwned>(reader: &mut Reader, timeout: Duration) -> io::Result<M> {
    Ok(serde_json::from_slice(reader.receive(timeout)?)?)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// An outbox that sends slowly.
    fn slow(received: Sender<ToAgent>) -> Outbox {
        let (send_message, messages) = channel();
        let sender = thread::spawn(move || {
            for message in messages {
                thread::sleep(Duration::from_millis(20));
                received.send(message).ok();
            }
        });
        Outbox { send_message: Box::new(move |message| send_message.send(message).unwrap()), sender: Some(sender) }
    }

    #[test]
    fn a_message_of_another_version_is_refused_with_a_reason() {
        let spec = crate::LaunchSpec::new("p", 1);
        let coordinator = Arc::new(SharedCoordinator::new(RunConfig::of(&spec, "run").unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let soon = Duration::from_secs(60);
        let keep_alive = KeepAlive { interval: soon, attempts: 3 };
        let _server = serve(listener, coordinator, key(b"a secret of the tests"), keep_alive, 2).unwrap();
        let mut agent = connect(TcpStream::connect(address).unwrap(), &key(b"a secret of the tests")).unwrap();
        // It writes much before it reads.
        for _ in 0..500 {
            agent.writer.send(&[b'x'; channel::MAX_MESSAGE_LEN]).unwrap();
        }
        let answer: ToAgent = receive(&mut agent.reader, soon).unwrap();
        let ToAgent::Refused { why } = answer else { panic!("{answer:?}") };
        assert!(why.contains("run the same version of fsdp-launch on all hosts"), "{why}");
    }

    #[test]
    fn close_sends_queued_messages() {
        let spec = crate::LaunchSpec::new("p", 1);
        let coordinator = SharedCoordinator::new(RunConfig::of(&spec, "run").unwrap());
        let received: Vec<_> = (0..3)
            .map(|_| {
                let (tell, received) = channel();
                let id = coordinator.add_agent(slow(tell));
                (coordinator.0.lock().outboxes[&id].send_message)(ToAgent::Ping);
                received
            })
            .collect();
        coordinator.close();
        // Without waiting: the process may end now.
        assert!(received.iter().all(|received| received.try_recv().is_ok()));
        assert_eq!(coordinator.len(), 0);
    }
}
