//! The port at which agents of other hosts reach the coordinator.

use std::{
    collections::VecDeque,
    io::{self, PipeReader, PipeWriter},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::rendezvous::{
    channel::Channel,
    hub::{Hub, Outbox},
    keep_alive::KeepAlive,
    message::{FromAgent, ToAgent},
    sender::send_until_closed,
    token::Token,
};

/// The most connections that have not shown yet that they have the token. For one more the oldest is closed: who has
/// the token shows it at once.
const MOST_STRANGERS: usize = 64;
/// The most agents beyond those that can take part.
const MOST_SPARES: usize = 64;
/// How long a connection with the token has to say what it wants.
const FIRST_MESSAGE: Duration = Duration::from_secs(5);
/// What a thread of a connection needs is little.
const STACK: usize = 256 << 10;

/// Listens for as long as it lives.
pub(crate) struct Server {
    /// Dropping it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

/// What the connections' threads share.
struct Shared {
    hub: Arc<Hub>,
    token: Token,
    keep_alive: KeepAlive,
    /// The oldest first; each has a thread.
    strangers: Mutex<VecDeque<(SocketAddr, TcpStream)>>,
    /// The threads of strangers, those whose connection was closed too.
    stranger_threads: AtomicUsize,
    /// The user has been told of one.
    is_stranger_told: AtomicBool,
    most_agents: usize,
}

impl Server {
    /// Admits up to `most` agents (and some spare ones) that connect to `listener` with the token.
    pub(crate) fn start(
        listener: TcpListener,
        hub: Arc<Hub>,
        token: Token,
        keep_alive: KeepAlive,
        most: u32,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (stopped, stop) = io::pipe()?;
        let most_agents = (most as usize).saturating_add(MOST_SPARES);
        let shared = Arc::new(Shared {
            hub,
            token,
            keep_alive,
            strangers: Mutex::default(),
            stranger_threads: AtomicUsize::new(0),
            is_stranger_told: AtomicBool::new(false),
            most_agents,
        });
        let thread = thread::Builder::new().name("rendezvous port".into());
        let thread = thread.spawn(move || listen(&listener, &stopped, &shared))?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only fails by a panic, which has been printed.
            thread.join().ok();
        }
    }
}

fn listen(listener: &TcpListener, stopped: &PipeReader, shared: &Arc<Shared>) {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        if poll(&mut fds, None).is_ok() && !fds[1].revents().is_empty() {
            return;
        }
        if shared.stranger_threads.load(Ordering::Relaxed) >= 2 * MOST_STRANGERS {
            // Those of closed connections are about to end.
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        match listener.accept() {
            Ok((stream, from)) => {
                if let Err(error) = admit(stream, from, shared) {
                    tracing::debug!("the connection from {from} could not be served: {error}");
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                // Of descriptors, most likely; they come back.
                tracing::debug!("a connection could not be accepted: {error}");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

impl Shared {
    fn strangers(&self) -> MutexGuard<'_, VecDeque<(SocketAddr, TcpStream)>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one that came just now, in the place of the oldest if they are too many.
    fn come(&self, stranger: (SocketAddr, TcpStream)) {
        let mut strangers = self.strangers();
        if strangers.len() >= MOST_STRANGERS
            && let Some((from, oldest)) = strangers.pop_front()
        {
            tracing::debug!("the connection from {from} was closed: it did not show the token while many others came");
            oldest.shutdown(Shutdown::Both).ok();
        }
        strangers.push_back(stranger);
    }

    /// The one from there is none any more.
    fn known(&self, from: SocketAddr) {
        self.strangers().retain(|(other, _)| *other != from);
        self.stranger_threads.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets a stranger try.
fn admit(stream: TcpStream, from: SocketAddr, shared: &Arc<Shared>) -> io::Result<()> {
    shared.come((from, stream.try_clone()?));
    shared.stranger_threads.fetch_add(1, Ordering::Relaxed);
    let of_thread = shared.clone();
    let serve = move || {
        if let Err(error) = serve(stream, from, &of_thread) {
            // Once: a stranger could come often.
            if error.kind() == io::ErrorKind::PermissionDenied
                && !of_thread.is_stranger_told.swap(true, Ordering::Relaxed)
            {
                tracing::warn!("refused {}: {error} (--rdzv-token-file), or is no fsdp-launch", from.ip());
            }
            tracing::debug!("the connection from {from} was closed: {error}");
        }
    };
    let thread = thread::Builder::new().name(format!("agent {from}")).stack_size(STACK);
    thread.spawn(serve).map(drop).inspect_err(|_| shared.known(from))
}

fn serve(stream: TcpStream, from: SocketAddr, shared: &Shared) -> io::Result<()> {
    // Accepted sockets do not inherit it everywhere.
    let opened = stream.set_nonblocking(false).and_then(|()| {
        let mut channel = Channel::accept(stream, &shared.token)?;
        let first = channel.reader.receive::<FromAgent>(FIRST_MESSAGE)?;
        Ok((channel, first))
    });
    shared.known(from);
    let (Channel { mut reader, writer }, first) = opened?;
    let FromAgent::Join(mut member) = first else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its first message is not that it joins"));
    };
    if shared.hub.len() >= shared.most_agents {
        return Err(io::Error::other("there are too many agents"));
    }
    member.address.get_or_insert_with(|| from.ip().to_canonical().to_string());
    let host = member.host.clone();
    let (outbox, messages) = mpsc::channel();
    let interval = shared.keep_alive.interval;
    let sender = thread::Builder::new()
        .name(format!("to agent {from}"))
        .stack_size(STACK)
        .spawn(move || send_until_closed(writer, &messages, interval, &ToAgent::Ping))?;
    let put = move |message| {
        // The thread ends when the connection breaks, which the reader notices.
        outbox.send(message).ok();
    };
    let id = shared.hub.enter(Outbox { put: Box::new(put), sender: Some(sender) });
    shared.hub.hear(id, FromAgent::Join(member));
    let limit = shared.keep_alive.limit();
    let error = loop {
        match reader.receive(limit) {
            Ok(message) => shared.hub.hear(id, message),
            Err(error) => break error,
        }
    };
    tracing::debug!("agent {host} is gone ({error})");
    match error.kind() {
        io::ErrorKind::TimedOut => {
            shared.hub.fall_silent(id, &format!("is gone: nothing was heard of its launcher for {limit:?}"));
        }
        _ => shared.hub.lose(id, "is gone: its launcher has ended"),
    }
    Ok(())
}
