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

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};

use super::session::{Channel, Key, part};

/// Maximum number of connections that have not proved the key. A further connection closes the oldest one.
const MAX_UNAUTHENTICATED: usize = 64;
/// Connections beyond the maximum that are told so at a time. A further connection is closed without a word.
const MAX_REFUSED: usize = 64;
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
    /// Serves one connection until it ends, on a thread of its own. The listener then waits until the peer has read
    /// all messages, so the last message may be a refusal. Another thread may still send queued messages.
    ///
    /// # Errors
    /// The reason why the connection ended.
    fn serve(&self, guest: Accepted) -> io::Result<()>;

    /// Encodes the message that tells a peer why it is not served.
    fn refusal(&self, why: &str) -> Vec<u8>;

    /// Reports a connection with another secret, or without one. Called for the first such connection only.
    fn refused(&self, from: IpAddr, why: &io::Error);
}

/// Listens until dropped. Connections that were accepted stay open.
pub struct Listener {
    /// Dropping the pipe ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
    accepted: Arc<AcceptedCount>,
}

/// Number of accepted connections, until their peers have closed them.
#[derive(Default)]
struct AcceptedCount {
    count: Mutex<usize>,
    changed: Condvar,
}

/// State that the threads of all connections share.
struct Shared<H> {
    handler: H,
    key: Key,
    /// Connections that have not proved the key, the oldest first. Each has a thread.
    unauthenticated: Mutex<VecDeque<(SocketAddr, Arc<TcpStream>)>>,
    /// Number of handshake threads, including those of closed connections.
    handshake_threads: AtomicUsize,
    /// Whether a refused connection was reported.
    has_refused: AtomicBool,
    accepted: Arc<AcceptedCount>,
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
        let accepted = Arc::<AcceptedCount>::default();
        let shared = Arc::new(Shared {
            handler,
            key,
            unauthenticated: Mutex::default(),
            handshake_threads: AtomicUsize::new(0),
            has_refused: AtomicBool::new(false),
            accepted: accepted.clone(),
            max_accepted: max,
        });
        let thread = thread::Builder::new().name("listener".into());
        let thread = thread.spawn(move || listen(&listener, &stopped, &shared))?;
        Ok(Listener { stop: Some(stop), thread: Some(thread), accepted })
    }

    /// Stops listening. Connections that were accepted stay open.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Fails only after a panic, which was printed.
            thread.join().ok();
        }
    }

    /// Waits until the peers have closed all accepted connections, for at most `timeout`. Returns whether they have.
    ///
    /// If the process ended earlier, the peers could lose the last messages.
    pub fn wait_until_closed(&self, timeout: Duration) -> bool {
        let mut count = self.accepted.count.lock();
        self.accepted.changed.wait_while_for(&mut count, |count| *count > 0, timeout);
        *count == 0
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

impl AcceptedCount {
    /// Counts a connection. Returns the number of the others.
    fn add(&self) -> usize {
        let mut count = self.count.lock();
        *count += 1;
        *count - 1
    }

    fn remove(&self) {
        *self.count.lock() -= 1;
        self.changed.notify_all();
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
    fn add_unauthenticated(&self, connection: (SocketAddr, Arc<TcpStream>)) {
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

    fn serve(&self, stream: &Arc<TcpStream>, from: SocketAddr) -> io::Result<()> {
        // Some systems let accepted sockets inherit the flag.
        let opened = stream.set_nonblocking(false).and_then(|()| {
            let mut channel = Channel::accept(stream.clone(), &self.key)?;
            let first = channel.reader.receive(FIRST_MESSAGE_TIMEOUT)?.to_vec();
            Ok((channel, first))
        });
        let opened = opened.map(|opened| (opened, self.accepted.add()));
        self.end_handshake(from);
        let ((mut channel, first), others) = opened?;
        let may_refuse = others < self.max_accepted.saturating_add(MAX_REFUSED);
        let served = if others < self.max_accepted {
            self.handler.serve(Accepted { channel, first, from })
        } else {
            let why = format!("{} connections are open, which is the maximum", self.max_accepted);
            let told = if may_refuse { channel.writer.send(&self.handler.refusal(&why)) } else { Ok(()) };
            drop(channel);
            told.and(Err(io::Error::other(why)))
        };
        if may_refuse {
            part(stream);
        }
        self.accepted.remove();
        served
    }
}

/// Starts the handshake of a new connection on its own thread.
fn admit(stream: TcpStream, from: SocketAddr, shared: &Arc<Shared<impl Handler>>) -> io::Result<()> {
    let stream = Arc::new(stream);
    shared.add_unauthenticated((from, stream.clone()));
    shared.handshake_threads.fetch_add(1, Ordering::Relaxed);
    let for_thread = shared.clone();
    let serve = move || {
        if let Err(error) = for_thread.serve(&stream, from) {
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
