//! A port at which those who have the key are let in, and nobody else takes up more than a little room.

use std::{
    collections::VecDeque,
    io::{self, PipeReader, PipeWriter},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};

use super::session::{Channel, Key};

/// The most connections that have not shown yet that they have the key. For one more the oldest is closed: who has the
/// key shows it at once.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long a connection with the key has to say what it wants.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// What a thread of a connection needs is little.
const STACK_BYTES: usize = 256 << 10;

/// A connection that has shown that it has the key.
pub struct Accepted {
    /// The connection.
    pub channel: Channel,
    /// Its first message.
    pub first: Vec<u8>,
    /// Where it comes from.
    pub from: SocketAddr,
}

/// Who lets guests in.
pub trait Handler: Send + Sync + 'static {
    /// Talks with a guest until the end, on a thread of the guest's.
    ///
    /// # Errors
    /// What ended it.
    fn serve(&self, guest: Accepted) -> io::Result<()>;

    /// Somebody with another secret, or without one, was turned away. Called for the first only.
    fn refused(&self, from: IpAddr, why: &io::Error);
}

/// Listens for as long as it lives. Guests that are there stay.
pub struct Listener {
    /// Dropping it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

/// What the connections' threads share.
struct Shared<H> {
    handler: H,
    key: Key,
    /// The oldest first; each has a thread.
    unauthenticated: Mutex<VecDeque<(SocketAddr, TcpStream)>>,
    /// The threads of strangers, those whose connection was closed too.
    handshake_threads: AtomicUsize,
    /// One was turned away.
    has_refused: AtomicBool,
    accepted: AtomicUsize,
    max_accepted: usize,
}

impl Listener {
    /// Lets `host` talk with up to `most` guests at a time that connect to `listener` with the key.
    ///
    /// # Errors
    /// When the system has no pipe or no thread.
    pub fn start(listener: TcpListener, key: Key, max: usize, handler: impl Handler) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (stopped, stop) = io::pipe()?;
        let shared = Arc::new(Shared {
            handler,
            key,
            unauthenticated: Mutex::default(),
            handshake_threads: AtomicUsize::new(0),
            has_refused: AtomicBool::new(false),
            accepted: AtomicUsize::new(0),
            max_accepted: max,
        });
        let thread = thread::Builder::new().name("listener".into());
        let thread = thread.spawn(move || listen(&listener, &stopped, &shared))?;
        Ok(Listener { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only fails by a panic, which has been printed.
            thread.join().ok();
        }
    }
}

fn listen(listener: &TcpListener, stopped: &PipeReader, shared: &Arc<Shared<impl Handler>>) {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        if poll(&mut fds, None).is_ok() && !fds[1].revents().is_empty() {
            return;
        }
        if shared.handshake_threads.load(Ordering::Relaxed) >= 2 * MAX_UNAUTHENTICATED {
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

impl<H: Handler> Shared<H> {
    fn unauthenticated(&self) -> MutexGuard<'_, VecDeque<(SocketAddr, TcpStream)>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one that came just now, in the place of the oldest if they are too many.
    fn add_unauthenticated(&self, connection: (SocketAddr, TcpStream)) {
        let mut connections = self.unauthenticated();
        if connections.len() >= MAX_UNAUTHENTICATED
            && let Some((from, oldest)) = connections.pop_front()
        {
            tracing::debug!(
                "the connection from {from} was closed: it did not prove the secret while many others connected"
            );
            oldest.shutdown(Shutdown::Both).ok();
        }
        connections.push_back(connection);
    }

    /// The one from there is none any more.
    fn end_handshake(&self, from: SocketAddr) {
        self.unauthenticated().retain(|(other, _)| *other != from);
        self.handshake_threads.fetch_sub(1, Ordering::Relaxed);
    }

    fn serve(&self, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        // Accepted sockets do not inherit it everywhere.
        let opened = stream.set_nonblocking(false).and_then(|()| {
            let mut channel = Channel::accept(stream, &self.key)?;
            let first = channel.reader.receive(FIRST_MESSAGE_TIMEOUT)?.to_vec();
            Ok((channel, first))
        });
        self.end_handshake(from);
        let (channel, first) = opened?;
        let others = self.accepted.fetch_add(1, Ordering::Relaxed);
        let served = match others < self.max_accepted {
            true => self.handler.serve(Accepted { channel, first, from }),
            false => Err(io::Error::other(format!("{others} others are connected, which is the maximum"))),
        };
        self.accepted.fetch_sub(1, Ordering::Relaxed);
        served
    }
}

/// Lets a stranger try.
fn admit(stream: TcpStream, from: SocketAddr, shared: &Arc<Shared<impl Handler>>) -> io::Result<()> {
    shared.add_unauthenticated((from, stream.try_clone()?));
    shared.handshake_threads.fetch_add(1, Ordering::Relaxed);
    let for_thread = shared.clone();
    let serve = move || {
        if let Err(error) = for_thread.serve(stream, from) {
            // Once: a stranger could come often.
            if error.kind() == io::ErrorKind::PermissionDenied && !for_thread.has_refused.swap(true, Ordering::Relaxed)
            {
                for_thread.handler.refused(from.ip(), &error);
            }
            tracing::debug!("the connection from {from} was closed: {error}");
        }
    };
    let thread = thread::Builder::new().name(format!("connection {from}")).stack_size(STACK_BYTES);
    thread.spawn(serve).map(drop).inspect_err(|_| shared.end_handshake(from))
}
