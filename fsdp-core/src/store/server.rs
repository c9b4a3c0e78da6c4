//! The holder's side: every client has a connection, and a thread that answers it.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::net::sockopt::set_socket_keepalive;

use super::{
    client::SLICE,
    memory::MemoryStore,
    message::{Answer, Request},
};
use crate::channel::{Channel, Guest, Host, Key, Listener};

/// Connections beyond those of the ranks: a rank has one for each thread that asks at a time.
const SPARES: usize = 64;
/// How long answers that are on their way may take when the holder leaves.
const FAREWELL: Duration = Duration::from_secs(1);

/// Lets clients in for as long as it lives, and hangs up on all of them then.
pub(super) struct Server {
    memory: MemoryStore,
    open: Arc<Open>,
    _listener: Listener,
}

/// The connections.
#[derive(Default)]
struct Open(Mutex<Connections>);

#[derive(Default)]
struct Connections {
    /// By numbers.
    streams: BTreeMap<u64, TcpStream>,
    next: u64,
    /// The server is gone.
    is_closed: bool,
}

impl Server {
    /// For the clients of `ranks` ranks.
    pub(super) fn start(listener: TcpListener, key: Key, ranks: usize, memory: MemoryStore) -> io::Result<Self> {
        let open = Arc::<Open>::default();
        let holder = Holder { memory: memory.clone(), open: open.clone() };
        let most = ranks.saturating_mul(4).saturating_add(SPARES);
        Ok(Server { memory, open, _listener: Listener::start(listener, key, most, holder)? })
    }
}

impl Drop for Server {
    /// Who was answered is to hear it: a rank may leave because of what another has just set.
    fn drop(&mut self) {
        self.memory.close();
        self.open.lock().is_closed = true;
        self.open.shut(Shutdown::Read);
        let until = Instant::now() + FAREWELL;
        while !self.open.lock().streams.is_empty() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.open.shut(Shutdown::Both);
    }
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a connection, unless it comes too late.
    fn enter(&self, stream: TcpStream) -> io::Result<u64> {
        let mut open = self.lock();
        if open.is_closed {
            return Err(io::Error::other("the store is gone"));
        }
        let id = open.next;
        open.next += 1;
        open.streams.insert(id, stream);
        Ok(id)
    }

    fn leave(&self, id: u64) {
        self.lock().streams.remove(&id);
    }

    fn shut(&self, how: Shutdown) {
        self.lock().streams.values().for_each(|stream| {
            // It may be closed.
            stream.shutdown(how).ok();
        });
    }
}

struct Holder {
    memory: MemoryStore,
    open: Arc<Open>,
}

impl Host for Holder {
    fn refused(&self, from: IpAddr, why: &io::Error) {
        tracing::warn!("the store of this job refused {from}: {why} (FSDP_STORE_SECRET), or is no rank of it");
    }

    fn serve(&self, guest: Guest) -> io::Result<()> {
        let Guest { mut channel, first, .. } = guest;
        let stream = channel.writer.stream()?;
        // A host that is gone without a word does not keep its thread for ever.
        set_socket_keepalive(&stream, true)?;
        let id = self.open.enter(stream)?;
        let served = self.talk(&mut channel, &first);
        self.open.leave(id);
        served
    }
}

impl Holder {
    /// Answers `first` and all that follows.
    fn talk(&self, channel: &mut Channel, first: &[u8]) -> io::Result<()> {
        self.reply(channel, first)?;
        loop {
            let bytes = channel.reader.receive(Duration::MAX)?.to_vec();
            self.reply(channel, &bytes)?;
        }
    }

    fn reply(&self, channel: &mut Channel, bytes: &[u8]) -> io::Result<()> {
        let Some(mut request) = Request::parse(bytes) else {
            let why = "a message that is no request of this version".to_owned();
            channel.writer.send(&Answer::Refused(why.clone()).to_bytes())?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        };
        // It asks again, if it still lives.
        if let Request::Get { wait, .. } = &mut request {
            *wait = (*wait).min(SLICE);
        }
        channel.writer.send(&self.memory.answer(&request).to_bytes())
    }
}
