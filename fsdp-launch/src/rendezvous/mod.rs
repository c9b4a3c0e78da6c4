//! How the launchers of several hosts ("agents", of which each starts the ranks of its host) work as one.
//!
//! One of them holds the [`coordinator`], which makes all decisions; the others connect to it at `--rdzv-endpoint` ([`server`], [`channel`], [`token`]). A launch on one host
//! has a coordinator in the same process and no port. From the bottom up: `message`, `coordinator`, `hub`, `token`, `channel`, `sender`, `server`, and here an agent's membership.

mod channel;
mod coordinator;
mod endpoint;
mod hub;
mod message;
pub(crate) mod options;
mod sender;
mod server;
mod token;

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use channel::Channel;
pub(crate) use coordinator::Rules;
pub use endpoint::Endpoint;
use hub::{Hub, Outbox};
pub(crate) use message::{Ended, FromAgent, Member, Place, ToAgent, Verdict};
use rustix::net::sockopt::set_socket_linger;
use sender::send_until_closed;
use serde::{Deserialize, Serialize};
use server::Server;
pub(crate) use token::HOW_TO_MAKE_ONE;
use token::Token;

use crate::{Error, RendezvousSpec, Result, signals::Event};

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

/// How agents notice that one is gone without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeepAlive {
    /// The time between signs of life.
    pub(crate) interval: Duration,
    /// How many may be missed.
    pub(crate) attempts: u32,
}

impl fmt::Display for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.interval.as_secs_f64();
        write!(f, "keep_alive_interval={seconds},keep_alive_max_attempt={}", self.attempts)
    }
}

impl KeepAlive {
    /// The longest silence.
    fn limit(self) -> Duration {
        self.interval.saturating_mul(self.attempts)
    }
}

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
    /// Begins to take part as `member`. All that follows comes as events; with several hosts and no `spec` of how they meet, there is only this one.
    pub(crate) fn start(
        spec: Option<&RendezvousSpec>,
        rules: Rules,
        member: Member,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let Some(spec) = spec else {
            let hub = Hub::new(rules);
            hub.enter(local_outbox(events));
            hub.hear(0, FromAgent::Join(Box::new(member)));
            return Ok(Membership::Alone(Box::new(hub)));
        };
        let token = spec.token_file.as_deref().map(Token::read).transpose()?;
        let (to, from_us) = mpsc::channel();
        let agent = Agent { spec: spec.clone(), token, rules, member, events: events.clone(), from_us };
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

fn local_outbox(events: &Sender<Event>) -> Outbox {
    let events = events.clone();
    let put = move |message| {
        // Nobody listens once the launch is over.
        events.send(Event::News(News::Said(message))).ok();
    };
    Outbox { put: Box::new(put), sender: None }
}

/// Text that is equal for agents between whose ranks shared memory can be handed over: of one boot of one kernel, in one network namespace.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), network.display())
}

/// The thread of an agent of several.
struct Agent {
    spec: RendezvousSpec,
    token: Option<Token>,
    rules: Rules,
    member: Member,
    events: Sender<Event>,
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
                    "no launcher was reached at {} within {:?}: {error}. Check --rdzv-endpoint, and that the launcher of that host runs",
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
        self.events.send(Event::News(news)).ok();
    }

    /// The port of the coordinator, if it is for this agent to hold it.
    fn listener(&self) -> io::Result<Option<TcpListener>> {
        if !self.spec.may_hold() {
            return Ok(None);
        }
        match self.spec.endpoint.bind(self.spec.port()) {
            Ok(listener) => Ok(Some(listener)),
            // By another agent of this host, most likely.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Holds the coordinator until we leave.
    fn hold(&self, listener: TcpListener) -> io::Result<()> {
        let mut shared = None;
        let token = match &self.token {
            Some(token) => token.clone(),
            None => {
                let (token, file) = Token::make_for(self.spec.port())?;
                shared = Some(file);
                token
            }
        };
        let hub = Arc::new(Hub::new(self.rules.clone()));
        let mut member = self.member.clone();
        member.address.get_or_insert_with(|| self.spec.endpoint.host.clone());
        let us = hub.enter(local_outbox(&self.events));
        let server = Server::start(listener, hub.clone(), token, self.spec.keep_alive(), self.rules.nnodes.1)?;
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
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in (self.spec.endpoint.host.as_str(), port).to_socket_addrs().map_err(Trouble::Later)? {
            match TcpStream::connect_timeout(&address, CONNECT) {
                // Where nobody listens at a port that connections may begin at, one may begin at the port that it leads
                // to.
                Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                    // Without a trace that would keep the port from who is to listen there.
                    set_socket_linger(&stream, Some(Duration::ZERO)).map_err(|errno| Trouble::Later(errno.into()))?;
                    last = io::ErrorKind::ConnectionRefused.into();
                }
                Ok(stream) => {
                    let token = self.token.clone().map_or_else(|| Token::shared_at(port).map_err(no_token), Ok);
                    return token.and_then(|token| Channel::connect(stream, &token)).map_err(Trouble::Stranger);
                }
                Err(error) => last = error,
            }
        }
        Err(Trouble::Later(last))
    }

    /// Talks to the coordinator until one of us leaves.
    fn take_part(self, channel: Channel) {
        let Channel { mut reader, writer } = channel;
        let Agent { spec, member, events, from_us, .. } = self;
        let limit = spec.keep_alive().limit();
        let endpoint = spec.endpoint.to_string();
        let listen = move || {
            let error = loop {
                match reader.receive(limit) {
                    Ok(message) => {
                        if events.send(Event::News(News::Said(message))).is_err() {
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
            events
                .send(Event::News(News::Gone(format!(
                    "the launcher at {endpoint}, which holds the rendezvous, is gone: {how}"
                ))))
                .ok();
        };
        let reader = thread::Builder::new().name("from the rendezvous".into()).spawn(listen);
        // The first of all messages.
        let (to, messages) = mpsc::channel();
        to.send(FromAgent::Join(Box::new(member))).ok();
        let sender = thread::Builder::new()
            .name("to the rendezvous".into())
            .spawn(move || send_until_closed(writer, &messages, spec.keep_alive().interval, &FromAgent::Ping));
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
        "what listens there is no launcher of this user: there is no token of its ({error}). Choose another port; or, if TMPDIR or XDG_RUNTIME_DIR \
         differ between your launchers, give all of them the same --rdzv-token-file"
    );
    io::Error::new(error.kind(), text)
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> io::Result<u16> {
    TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0))?.local_addr().map(|address| address.port())
}
