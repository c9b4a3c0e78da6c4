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
        coordinator::Rules,
        message::{FromAgent, KeepAlive, Member, ToAgent},
        server::{Hub, Outbox, connect, receive, send_until_closed, serve},
        token::{self, make_for, shared_at},
    },
};

/// What an agent learns.
pub(crate) enum News {
    /// From the coordinator.
    Said(ToAgent),
    /// The coordinator is gone.
    Gone(String),
    /// The coordinator was not reached yet; why the last try failed.
    NotYet(String),
    /// The coordinator was not reached.
    Unreachable(String),
}

/// Is told what an agent learns; says whether anybody listens still.
pub(crate) type Listener = Arc<dyn Fn(News) -> bool + Send + Sync>;

/// An agent's connection to the coordinator, or to the one that it holds itself.
pub(crate) enum Membership {
    /// One host.
    Alone(Box<Hub>),
    /// Several; the thread connects, or holds the coordinator.
    Several {
        to: Option<Sender<FromAgent>>,
        /// Ends when the thread has.
        done: Receiver<()>,
    },
}

impl Membership {
    /// Begins to take part as `member`. All that follows is told to
    /// `listener`; with several hosts and no `spec` of how they meet, there is only this one.
    pub(crate) fn start(
        spec: Option<&RendezvousSpec>,
        rules: Rules,
        member: Member,
        listener: Listener,
    ) -> Result<Self> {
        let Some(spec) = spec else {
            let hub = Hub::new(rules);
            hub.enter(local_outbox(&listener));
            hub.hear(0, FromAgent::Join(Box::new(member)));
            return Ok(Membership::Alone(Box::new(hub)));
        };
        let key = spec.token_file.as_deref().map(token::read).transpose()?;
        let (to, from_us) = mpsc::channel();
        let agent = Agent { spec: spec.clone(), key, rules, member, listener, from_us };
        let (until_done, done) = mpsc::channel();
        let run = move || {
            agent.run();
            drop(until_done);
        };
        let thread = thread::Builder::new().name("rendezvous".into()).spawn(run);
        thread.map_err(Error::system("start a thread for the rendezvous"))?;
        Ok(Membership::Several { to: Some(to), done })
    }

    /// Leaves when all that was said is sent, and what others have to hear of us is heard.
    pub(crate) fn part(&mut self) {
        if let Membership::Several { to, done } = self {
            drop(to.take());
            // A thread that looks a name up, or waits for a connection to be made, is left to itself.
            done.recv_timeout(FAREWELL + TICK).ok();
        }
    }

    pub(crate) fn say(&self, message: FromAgent) {
        match self {
            Membership::Alone(hub) => hub.hear(0, message),
            Membership::Several { to, .. } => {
                if let Some(to) = to {
                    // Where the thread has ended it has told why.
                    to.send(message).ok();
                }
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.part();
    }
}

/// Between two tries to reach the coordinator.
const RETRY: Duration = Duration::from_millis(200);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long something else may answer at the endpoint, such as a coordinator that is just ending.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the coordinator looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// How long the agents may take to hear the end.
const FAREWELL: Duration = Duration::from_secs(5);

/// The thread of an agent of several.
struct Agent {
    spec: RendezvousSpec,
    key: Option<Key>,
    rules: Rules,
    member: Member,
    listener: Listener,
    from_us: Receiver<FromAgent>,
}

/// Why a try to meet failed.
enum Trouble {
    /// It may work later.
    Later(io::Error),
    /// Something else answered, or the token differs.
    Stranger(io::Error),
}

impl Agent {
    fn run(self) {
        let began = Instant::now();
        let mut strange_since: Option<Instant> = None;
        let mut told = String::new();
        loop {
            let held = match self.listener() {
                Ok(Some(listener)) => self.hold(listener).map(Some),
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            };
            let error = match held {
                Ok(Some(())) => return,
                // Waiting does not help.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    let why = format!("the rendezvous can't be held at {}: {error}", self.spec.endpoint);
                    return self.tell(News::Unreachable(why));
                }
                Ok(None) => match self.connect() {
                    Ok(channel) => return self.take_part(channel),
                    Err(Trouble::Later(error)) => {
                        strange_since = None;
                        error
                    }
                    Err(Trouble::Stranger(error)) => {
                        let since = *strange_since.get_or_insert_with(Instant::now);
                        if since.elapsed() >= PATIENCE {
                            return self.tell(News::Unreachable(format!("{}: {error}", self.spec.endpoint)));
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            let error = error.to_string();
            if error != told {
                tracing::debug!("no rendezvous at {} yet: {error}", self.spec.endpoint);
                self.tell(News::NotYet(error.clone()));
                told.clone_from(&error);
            }
            if began.elapsed() >= self.rules.join_timeout {
                return self.tell(News::Unreachable(format!(
                    "no launcher was reached at {} within {:?}: {error}. Check --rdzv-endpoint, and that the launcher \
                        of that host runs",
                    self.spec.endpoint, self.rules.join_timeout
                )));
            }
            // Nothing is said before the start, but that we leave.
            match self.from_us.recv_timeout(RETRY) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn tell(&self, news: News) {
        // Nobody listens once the launch is over.
        (self.listener)(news);
    }

    /// The port of the coordinator, if it is for this agent to hold it.
    fn listener(&self) -> io::Result<Option<TcpListener>> {
        if !self.spec.may_hold() {
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
    fn hold(&self, listener: TcpListener) -> io::Result<()> {
        let mut shared = None;
        let key = match &self.key {
            Some(key) => key.clone(),
            None => {
                let (key, file) = make_for(self.spec.port())?;
                shared = Some(file);
                key
            }
        };
        let hub = Arc::new(Hub::new(self.rules.clone()));
        let mut member = self.member.clone();
        member.address.get_or_insert_with(|| self.spec.endpoint.host.clone());
        let us = hub.enter(local_outbox(&self.listener));
        let server = serve(listener, hub.clone(), key, KeepAlive::of(&self.spec), self.rules.nnodes.1)?;
        hub.hear(us, FromAgent::Join(Box::new(member)));
        loop {
            match self.from_us.recv_timeout(TICK) {
                Ok(message) => hub.hear(us, message),
                Err(RecvTimeoutError::Timeout) => hub.tick(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        // The others close when they have heard the end. Where we leave before it, they see that we are gone.
        let until = Instant::now() + FAREWELL;
        while hub.is_over() && hub.len() > 1 && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        // In this order: once the port is free another agent may hold it, and have made a token of its own.
        drop(shared);
        drop(server);
        hub.close();
        Ok(())
    }

    fn connect(&self) -> std::result::Result<Channel, Trouble> {
        let port = self.spec.port();
        let stream = channel::connect(&self.spec.endpoint.host, port, CONNECT).map_err(Trouble::Later)?;
        let key = self.key.clone().map_or_else(|| shared_at(port).map_err(no_token), Ok);
        key.and_then(|key| connect(stream, &key)).map_err(Trouble::Stranger)
    }

    /// Talks to the coordinator until one of us leaves.
    fn take_part(self, channel: Channel) {
        let Channel { mut reader, writer } = channel;
        let Agent { spec, member, listener, from_us, .. } = self;
        let keep_alive = KeepAlive::of(&spec);
        let limit = keep_alive.limit();
        let endpoint = spec.endpoint.to_string();
        let listen = move || {
            let error = loop {
                match receive(&mut reader, limit) {
                    Ok(message) => {
                        if !listener(News::Said(message)) {
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
            listener(News::Gone(format!("the launcher at {endpoint}, which holds the rendezvous, is gone: {how}")));
        };
        let reader = thread::Builder::new().name("from the rendezvous".into()).spawn(listen);
        // The first of all messages.
        let (to, messages) = mpsc::channel();
        to.send(FromAgent::Join(Box::new(member))).ok();
        let sender = thread::Builder::new()
            .name("to the rendezvous".into())
            .spawn(move || send_until_closed(writer, &messages, keep_alive.interval, &FromAgent::Ping));
        from_us.iter().for_each(|message| {
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
fn local_outbox(listener: &Listener) -> Outbox {
    let listener = Arc::clone(listener);
    let put = move |message| {
        // Nobody listens once the launch is over.
        listener(News::Said(message));
    };
    Outbox { put: Box::new(put), sender: None }
}
