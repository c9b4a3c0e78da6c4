//! The thread of an agent of several: reaches the coordinator, or holds it, and carries what both say.

use std::{
    io,
    net::TcpListener,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use fsdp_core::channel::{self, Channel, Key, bind};

use crate::{
    RendezvousSpec,
    rendezvous::{
        channel::{connect, receive},
        coordinator::Rules,
        hub::{Hub, Outbox},
        keep_alive::KeepAlive,
        message::{FromAgent, Member},
        news::{Listener, News},
        sender::send_until_closed,
        server::serve,
        token::{make_for, shared_at},
    },
};

/// Between two tries to reach the coordinator.
const RETRY: Duration = Duration::from_millis(200);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long something else may answer at the endpoint, such as a coordinator that is just ending.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the coordinator looks at the clock.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// How long the agents may take to hear the end.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);

/// The thread of an agent of several.
pub(crate) struct Agent {
    pub(crate) spec: RendezvousSpec,
    pub(crate) key: Option<Key>,
    pub(crate) rules: Rules,
    pub(crate) member: Member,
    pub(crate) listener: Listener,
    pub(crate) from_us: Receiver<FromAgent>,
}

/// Why a try to meet failed.
enum Trouble {
    /// It may work later.
    Later(io::Error),
    /// Something else answered, or the token differs.
    Stranger(io::Error),
}

impl Agent {
    pub(crate) fn run(self) {
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
pub(crate) fn local_outbox(listener: &Listener) -> Outbox {
    let listener = Arc::clone(listener);
    let put = move |message| {
        // Nobody listens once the launch is over.
        listener(News::Said(message));
    };
    Outbox { put: Box::new(put), sender: None }
}
