//! The holder's side: every client has a connection, and a thread that answers it.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
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

/// Lets clients in for as long as it lives, and hangs up on all of them then.
pub(super) struct Server {
    memory: MemoryStore,
    open: Arc<Open>,
    _listener: Listener,
}

/// The connections, by numbers, until the server is gone.
struct Open(Mutex<Option<BTreeMap<u64, TcpStream>>>);

impl Server {
    /// For the clients of `ranks` ranks.
    pub(super) fn start(listener: TcpListener, key: Key, ranks: usize, memory: MemoryStore) -> io::Result<Self> {
        let open = Arc::new(Open(Mutex::new(Some(BTreeMap::new()))));
        let holder = Holder { memory: memory.clone(), open: open.clone() };
        let most = ranks.saturating_mul(4).saturating_add(SPARES);
        Ok(Server { memory, open, _listener: Listener::start(listener, key, most, holder)? })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.memory.close();
        let open = self.open.lock().take();
        open.iter().flat_map(BTreeMap::values).for_each(|stream| {
            // It may be closed.
            stream.shutdown(Shutdown::Both).ok();
        });
    }
}

impl Open {
    fn lock(&self) -> MutexGuard<'_, Option<BTreeMap<u64, TcpStream>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a connection, unless it comes too late.
    fn enter(&self, stream: TcpStream) -> io::Result<u64> {
        let mut open = self.lock();
        let open = open.as_mut().ok_or_else(|| io::Error::other("the store is gone"))?;
        let id = open.last_key_value().map_or(0, |(last, _)| last + 1);
        open.insert(id, stream);
        Ok(id)
    }

    fn leave(&self, id: u64) {
        if let Some(open) = self.lock().as_mut() {
            open.remove(&id);
        }
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
