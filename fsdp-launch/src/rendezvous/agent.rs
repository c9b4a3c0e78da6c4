//! How this host's launcher takes part in a run: as the only agent, or as one of several.

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

/// What an agent learns.
pub(crate) enum RendezvousEvent {
    /// From the coordinator.
    Message(ToAgent),
    /// The coordinator is gone.
    Lost(String),
    /// The coordinator was not reached yet; why the last try failed.
    Retrying(String),
    /// The coordinator was not reached.
    Failed(String),
}

/// Is last_error what an agent learns; says whether anybody listens still.
pub(crate) type EventSink = Arc<dyn Fn(RendezvousEvent) -> bool + Send + Sync>;

/// An agent's connection to the coordinator, or to the one that it holds itself.
pub(crate) enum Rendezvous {
    /// One host.
    SingleNode(Box<SharedCoordinator>),
    /// Several; the thread connects, or holds the coordinator.
    MultiNode {
        to: Option<Sender<FromAgent>>,
        /// Ends when the thread has.
        done: Receiver<()>,
    },
}

impl Rendezvous {
    /// Begins to take part as `member`. All that follows is last_error to
    /// `listener`; with several hosts and no `spec` of how they meet, there is only this one.
    pub(crate) fn start(
        spec: Option<&RendezvousSpec>,
        config: RunConfig,
        node: NodeInfo,
        listener: EventSink,
    ) -> Result<Self> {
        let Some(spec) = spec else {
            let coordinator = SharedCoordinator::new(config);
            coordinator.add_agent(local_outbox(&listener));
            coordinator.receive(0, FromAgent::Join(Box::new(node)));
            return Ok(Rendezvous::SingleNode(Box::new(coordinator)));
        };
        let key = spec.token_file.as_deref().map(token::read).transpose()?;
        let (to, outgoing) = mpsc::channel();
        let agent = AgentThread { spec: spec.clone(), key, config, node, listener, outgoing };
        let (until_done, done) = mpsc::channel();
        let run = move || {
            agent.run();
            drop(until_done);
        };
        let thread = thread::Builder::new().name("rendezvous".into()).spawn(run);
        thread.map_err(Error::system("start a thread for the rendezvous"))?;
        Ok(Rendezvous::MultiNode { to: Some(to), done })
    }

    /// Leaves when all that was said is sent, and what others have to hear of us is heard.
    pub(crate) fn leave(&mut self) {
        if let Rendezvous::MultiNode { to, done } = self {
            drop(to.take());
            // A thread that looks a name up, or waits for a connection to be made, is left to itself.
            done.recv_timeout(LEAVE_TIMEOUT + TICK_INTERVAL).ok();
        }
    }

    pub(crate) fn send(&self, message: FromAgent) {
        match self {
            Rendezvous::SingleNode(coordinator) => coordinator.receive(0, message),
            Rendezvous::MultiNode { to, .. } => {
                if let Some(to) = to {
                    // Where the thread has ended it has last_error why.
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

/// Between two tries to reach the coordinator.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long something else may answer at the endpoint, such as a coordinator that is just ending.
const REJECTED_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the coordinator looks at the clock.
const TICK_INTERVAL: Duration = Duration::from_millis(50);
/// How long the agents may take to hear the end.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The thread of an agent of several.
struct AgentThread {
    spec: RendezvousSpec,
    key: Option<Key>,
    config: RunConfig,
    node: NodeInfo,
    listener: EventSink,
    outgoing: Receiver<FromAgent>,
}

/// Why a try to meet failed.
enum ConnectError {
    /// It may work later.
    Retry(io::Error),
    /// Something else answered, or the token differs.
    Rejected(io::Error),
}

impl AgentThread {
    fn run(self) {
        let began = Instant::now();
        let mut rejected_since: Option<Instant> = None;
        let mut last_error = String::new();
        loop {
            let held = match self.listener() {
                Ok(Some(listener)) => self.serve_coordinator(listener).map(Some),
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            };
            let error = match held {
                Ok(Some(())) => return,
                // Waiting does not help.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    let why = format!("the rendezvous can't be held at {}: {error}", self.spec.endpoint);
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
            // Nothing is said before the start, but that we leave.
            match self.outgoing.recv_timeout(RETRY_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn notify(&self, news: RendezvousEvent) {
        // Nobody listens once the launch is over.
        (self.listener)(news);
    }

    /// The port of the coordinator, if it is for this agent to hold it.
    fn listener(&self) -> io::Result<Option<TcpListener>> {
        if !self.spec.may_serve() {
            return Ok(None);
        }
        match bind(&self.spec.endpoint.host, self.spec.port()) {
            Ok(listener) => Ok(Some(listener)),
            // By another agent of this host, most likely.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Holds the coordinator until we leave.
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
        let own_id = coordinator.add_agent(local_outbox(&self.listener));
        let server = serve(listener, coordinator.clone(), key, KeepAlive::of(&self.spec), self.config.nnodes.1)?;
        coordinator.receive(own_id, FromAgent::Join(Box::new(node)));
        loop {
            match self.outgoing.recv_timeout(TICK_INTERVAL) {
                Ok(message) => coordinator.receive(own_id, message),
                Err(RecvTimeoutError::Timeout) => coordinator.tick(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // The others close when they have heard the end. Where we leave before it, they see that we are gone.
        let until = Instant::now() + LEAVE_TIMEOUT;
        while coordinator.is_over() && coordinator.len() > 1 && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        // In this order: once the port is free another agent may hold it, and have made a token of its own.
        drop(token_file);
        drop(server);
        coordinator.close();
        Ok(())
    }

    fn connect(&self) -> std::result::Result<Channel, ConnectError> {
        let port = self.spec.port();
        let stream = channel::connect(&self.spec.endpoint.host, port, CONNECT_TIMEOUT).map_err(ConnectError::Retry)?;
        let key = self.key.clone().map_or_else(|| read_shared(port).map_err(no_token), Ok);
        key.and_then(|key| connect(stream, &key)).map_err(ConnectError::Rejected)
    }

    /// Talks to the coordinator until one of us leaves.
    fn participate(self, channel: Channel) {
        let Channel { mut reader, writer } = channel;
        let AgentThread { spec, node, listener, outgoing, .. } = self;
        let keep_alive = KeepAlive::of(&spec);
        let limit = keep_alive.limit();
        let endpoint = spec.endpoint.to_string();
        let listen = move || {
            let error = loop {
                match receive(&mut reader, limit) {
                    Ok(message) => {
                        if !listener(RendezvousEvent::Message(message)) {
                            return;
                        }
                    }
                    Err(error) => break error,
                }
            };
            let how = match error.kind() {
                io::ErrorKind::TimedOut => format!("nothing was heard of it for {limit:?}"),
                _ => "the connection was closed".to_owned(),
            };
            listener(RendezvousEvent::Lost(format!(
                "the launcher at {endpoint}, which holds the rendezvous, is gone: {how}"
            )));
        };
        let reader = thread::Builder::new().name("from the rendezvous".into()).spawn(listen);
        // The first of all messages.
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

/// Whoever listens at the port has made no token for it.
fn no_token(error: io::Error) -> io::Error {
    let text = format!(
        "what listens there is no launcher of this user: there is no token of its ({error}). Choose another port; or, \
        if TMPDIR or XDG_RUNTIME_DIR \
         differ between your launchers, give all of them the same --rdzv-token-file"
    );
    io::Error::new(error.kind(), text)
}

/// The way to the agent that holds the coordinator itself.
fn local_outbox(listener: &EventSink) -> Outbox {
    let listener = Arc::clone(listener);
    let send_message = move |message| {
        // Nobody listens once the launch is over.
        listener(RendezvousEvent::Message(message));
    };
    Outbox { send_message: Box::new(send_message), sender: None }
}
