//! A listener that serves only connections with the key, and bounds what other connections can cost.

use std::{
    collections::VecDeque,
    io::{self, PipeReader, PipeWriter},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use super::session::{Channel, Key};

/// Maximum number of connections that have not proved the key. A further connection closes the oldest one.
const MAX_UNAUTHENTICATED: usize = 64;
/// Time that an authenticated connection has to send its first message.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Stack of a connection's thread.
const STACK_BYTES: usize = 256 << 10;

/// A connection whose peer has proved that it has the key.
pub struct Accepted {
    /// The connection.
    pub channel: Channel,
    /// First message of the peer.
    pub first: Vec<u8>,
    /// Address of the peer.
    pub from: SocketAddr,
}

/// Serves the connections of a [`Listener`].
pub trait Handler: Send + Sync + 'static {
    /// Serves one connection until it ends, on a thread of its own.
    ///
    /// # Errors
    /// The reason why the connection ended.
    fn serve(&self, guest: Accepted) -> io::Result<()>;

    /// Reports a connection with another secret, or without one. Called for the first such connection only.
    fn refused(&self, from: IpAddr, why: &io::Error);
}

/// Listens until dropped. Connections that were accepted stay open.
pub struct Listener {
    /// Dropping the pipe ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

/// State that the threads of all connections share.
struct Shared<H> {
    handler: H,
    key: Key,
    /// Connections that have not proved the key, the oldest first. Each has a thread.
    unauthenticated: Mutex<VecDeque<(SocketAddr, TcpStream)>>,
    /// Number of handshake threads, including those of closed connections.
    handshake_threads: AtomicUsize,
    /// Whether a refused connection was reported.
    has_refused: AtomicBool,
    accepted: AtomicUsize,
    max_accepted: usize,
}

impl Listener {
    /// Serves up to `max` connections at a time that prove the key.
    ///
    /// # Errors
    /// When the system cannot create a pipe or a thread.
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
            // Fails only after a panic, which was printed.
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
            // Threads of closed connections are about to end.
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
                // Most likely the process has too many open files; wait for some to close.
                tracing::debug!("a connection could not be accepted: {error}");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

impl<H: Handler> Shared<H> {
    /// Adds a new connection. Closes the oldest one if there are too many.
    fn add_unauthenticated(&self, connection: (SocketAddr, TcpStream)) {
        let mut connections = self.unauthenticated.lock();
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

    /// Removes a connection that has authenticated or failed.
    fn end_handshake(&self, from: SocketAddr) {
        self.unauthenticated.lock().retain(|(other, _)| *other != from);
        self.handshake_threads.fetch_sub(1, Ordering::Relaxed);
    }

    fn serve(&self, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        // Some systems let accepted sockets inherit the flag.
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

/// Starts the handshake of a new connection on its own thread.
fn admit(stream: TcpStream, from: SocketAddr, shared: &Arc<Shared<impl Handler>>) -> io::Result<()> {
    shared.add_unauthenticated((from, stream.try_clone()?));
    shared.handshake_threads.fetch_add(1, Ordering::Relaxed);
    let for_thread = shared.clone();
    let serve = move || {
        if let Err(error) = for_thread.serve(stream, from) {
            // Report only the first, so that a scanner cannot flood the log.
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
