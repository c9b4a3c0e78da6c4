//! A launcher's part in the rendezvous: alone on one host, or as one of several agents.

use std::{
    io,
    net::TcpListener,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use fsdp_core::channel::{self, Channel, Key, bind};

use crate::{
    Error, RendezvousSpec, Result,
    rendezvous::{
        coordinator::RunConfig,
        message::{FromAgent, KeepAlive, NodeInfo, ToAgent},
        server::{Outbox, SharedCoordinator, connect, receive, send_until_closed, serve},
        token::{self, create_shared, read_shared},
    },
};

/// An event of the rendezvous.
pub(crate) enum RendezvousEvent {
    /// A message of the coordinator.
    Message(ToAgent),
    /// The coordinator is gone.
    Lost(String),
    /// The coordinator is not reachable yet; the error of the last attempt.
    Retrying(String),
    /// The coordinator was not reachable in time.
    Failed(String),
}

/// Receives events. Returns whether the launch still listens.
pub(crate) type EventSink = Arc<dyn Fn(RendezvousEvent) -> bool + Send + Sync>;

/// The launcher's connection to the coordinator.
pub(crate) enum Rendezvous {
    /// The only host: the coordinator is in this process.
    SingleNode(Box<SharedCoordinator>),
    /// Several hosts: a thread connects to the coordinator, or serves it.
    MultiNode {
        to: Option<Sender<FromAgent>>,
        /// Closed when the thread ends.
        done: Receiver<()>,
    },
}

impl Rendezvous {
    /// Joins a run. Messages go to `events`. Without a `spec`, this is the only host.
    pub(crate) fn start(
        spec: Option<&RendezvousSpec>,
        config: RunConfig,
        node: NodeInfo,
        events: EventSink,
    ) -> Result<Self> {
        let Some(spec) = spec else {
            let coordinator = SharedCoordinator::new(config);
            coordinator.add_agent(local_outbox(&events));
            coordinator.receive(0, FromAgent::Join(Box::new(node)));
            return Ok(Rendezvous::SingleNode(Box::new(coordinator)));
        };
        let key = spec.token_file.as_deref().map(token::read).transpose()?;
        let (to, outgoing) = mpsc::channel();
        let agent = AgentThread { spec: spec.clone(), key, config, node, events, outgoing };
        let (until_done, done) = mpsc::channel();
        let run = move || {
            agent.run();
            drop(until_done);
        };
        let thread = thread::Builder::new().name("rendezvous".into()).spawn(run);
        thread.map_err(Error::system("start a thread for the rendezvous"))?;
        Ok(Rendezvous::MultiNode { to: Some(to), done })
    }

    /// Leaves the run once all messages are sent.
    pub(crate) fn leave(&mut self) {
        if let Rendezvous::MultiNode { to, done } = self {
            drop(to.take());
            // The thread may be blocked in a name lookup or a connect.
            done.recv_timeout(LEAVE_TIMEOUT + TICK_INTERVAL).ok();
        }
    }

    pub(crate) fn send(&self, message: FromAgent) {
        match self {
            Rendezvous::SingleNode(coordinator) => coordinator.receive(0, message),
            Rendezvous::MultiNode { to, .. } => {
                if let Some(to) = to {
                    // An ended thread has reported why.
                    to.send(message).ok();
                }
            }
        }
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Pause between attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that another program, such as an ending coordinator, may answer at the endpoint.
const REJECTED_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the coordinator's clock.
const TICK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the agents to receive the final message.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The thread of one of several agents.
struct AgentThread {
    spec: RendezvousSpec,
    key: Option<Key>,
    config: RunConfig,
    node: NodeInfo,
    events: EventSink,
    outgoing: Receiver<FromAgent>,
}

/// Error of an attempt to connect.
enum ConnectError {
    /// A later attempt may succeed.
    Retry(io::Error),
    /// Another program answered, or the token differs.
    Rejected(io::Error),
}

impl AgentThread {
    fn run(self) {
        let began = Instant::now();
        let mut rejected_since: Option<Instant> = None;
        let mut last_error = String::new();
        loop {
            let listener = self.listener();
            let held = listener.and_then(|listener| listener.map(|it| self.serve_coordinator(it)).transpose());
            let error = match held {
                Ok(Some(())) => return,
                // Waiting would not help.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    let why = format!("can't serve the rendezvous at {}: {error}", self.spec.endpoint);
                    return self.notify(RendezvousEvent::Failed(why));
                }
                Ok(None) => match self.connect() {
                    Ok(channel) => return self.participate(channel),
                    Err(ConnectError::Retry(error)) => {
                        rejected_since = None;
                        error
                    }
                    Err(ConnectError::Rejected(error)) => {
                        let since = *rejected_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= REJECTED_TIMEOUT {
                            return self.notify(RendezvousEvent::Failed(format!("{}: {error}", self.spec.endpoint)));
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            let error = error.to_string();
            if error != last_error {
                tracing::debug!("no rendezvous at {} yet: {error}", self.spec.endpoint);
                self.notify(RendezvousEvent::Retrying(error.clone()));
                last_error.clone_from(&error);
            }
            if began.elapsed() >= self.config.join_timeout {
                return self.notify(RendezvousEvent::Failed(format!(
                    "no launcher was reached at {} within {:?}: {error}. Check --rdzv-endpoint, and that the launcher \
                        of that host runs",
                    self.spec.endpoint, self.config.join_timeout
                )));
            }
            // Before the start, the launch only sends that it leaves.
            match self.outgoing.recv_timeout(RETRY_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn notify(&self, event: RendezvousEvent) {
        // The launch may be over.
        (self.events)(event);
    }

    /// Binds the endpoint, if this agent may serve the coordinator.
    fn listener(&self) -> io::Result<Option<TcpListener>> {
        if !self.spec.may_serve() {
            return Ok(None);
        }
        match bind(&self.spec.endpoint.host, self.spec.port()) {
            Ok(listener) => Ok(Some(listener)),
            // Most likely another agent of this host serves the coordinator.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Serves the coordinator until the launch ends.
    fn serve_coordinator(&self, listener: TcpListener) -> io::Result<()> {
        let mut token_file = None;
        let key = match &self.key {
            Some(key) => key.clone(),
            None => {
                let (key, file) = create_shared(self.spec.port())?;
                token_file = Some(file);
                key
            }
        };
        let coordinator = Arc::new(SharedCoordinator::new(self.config.clone()));
        let mut node = self.node.clone();
        node.address.get_or_insert_with(|| self.spec.endpoint.host.clone());
        let own_id = coordinator.add_agent(local_outbox(&self.events));
        let mut server = serve(listener, coordinator.clone(), key, KeepAlive::of(&self.spec), self.config.nnodes.1)?;
        coordinator.receive(own_id, FromAgent::Join(Box::new(node)));
        loop {
            match self.outgoing.recv_timeout(TICK_INTERVAL) {
                Ok(message) => coordinator.receive(own_id, message),
                Err(RecvTimeoutError::Timeout) => coordinator.tick(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // The other agents disconnect after the final message. Without one, they see the connection close.
        let until = Instant::now() + LEAVE_TIMEOUT;
        while coordinator.is_over() && coordinator.len() > 1 && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        // Keep this order: once the port is free, another agent may serve it with a new token file.
        drop(token_file);
        server.stop();
        coordinator.close();
        server.wait_until_closed(until.saturating_duration_since(Instant::now()));
        Ok(())
    }

    fn connect(&self) -> std::result::Result<Channel, ConnectError> {
        let port = self.spec.port();
        let stream = channel::connect(&self.spec.endpoint.host, port, CONNECT_TIMEOUT).map_err(ConnectError::Retry)?;
        let key = self.key.clone().map_or_else(|| read_shared(port).map_err(no_token), Ok);
        key.and_then(|key| connect(stream, &key)).map_err(|error| match error.kind() {
            // Its process may be stopped for a while.
            io::ErrorKind::TimedOut => ConnectError::Retry(error),
            _ => ConnectError::Rejected(error),
        })
    }

    /// Exchanges messages with the coordinator until one side leaves.
    fn participate(self, channel: Channel) {
        let Channel { mut reader, writer } = channel;
        let AgentThread { spec, node, events, outgoing, .. } = self;
        let keep_alive = KeepAlive::of(&spec);
        let limit = keep_alive.limit();
        let endpoint = spec.endpoint.to_string();
        let listen = move || {
            let error = loop {
                match receive(&mut reader, limit) {
                    Ok(message) => {
                        if !events(RendezvousEvent::Message(message)) {
                            return;
                        }
                    }
                    Err(error) => break error,
                }
            };
            // The coordinator waits until its agents have read its last message.
            reader.close();
            let how = match error.kind() {
                io::ErrorKind::TimedOut => format!("no message from it for {limit:?}"),
                _ => "the connection was closed".to_owned(),
            };
            events(RendezvousEvent::Lost(format!(
                "the launcher at {endpoint}, which serves the rendezvous, is gone: {how}"
            )));
        };
        let reader = thread::Builder::new().name("from the rendezvous".into()).spawn(listen);
        // Join is the first message.
        let (to, messages) = mpsc::channel();
        to.send(FromAgent::Join(Box::new(node))).ok();
        let sender = thread::Builder::new()
            .name("to the rendezvous".into())
            .spawn(move || send_until_closed(writer, &messages, keep_alive.interval, &FromAgent::Ping));
        outgoing.iter().for_each(|message| {
            to.send(message).ok();
        });
        drop(to);
        for thread in [reader, sender] {
            match thread {
                Ok(thread) => {
                    thread.join().ok();
                }
                Err(error) => tracing::error!("no thread for the rendezvous: {error}"),
            }
        }
    }
}

/// Adds advice to the error of a missing token file.
fn no_token(error: io::Error) -> io::Error {
    let text = format!(
        "another program listens there: this user has no token file for the port ({error}). Choose another port, or \
         give all launchers the same --rdzv-token-file (they differ in TMPDIR or XDG_RUNTIME_DIR)"
    );
    io::Error::new(error.kind(), text)
}

/// Returns the outbox of the agent in the coordinator's process.
fn local_outbox(events: &EventSink) -> Outbox {
    let events = Arc::clone(events);
    let send_message = move |message| {
        // The launch may be over.
        events(RendezvousEvent::Message(message));
    };
    Outbox { send_message: Box::new(send_message), sender: None }
}
