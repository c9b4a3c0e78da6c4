//! A store that rank 0 holds, at an address that all ranks know.

use std::{
    io,
    time::{Duration, Instant},
};

use super::{
    asked::Asked, client::Client, interface::Store, memory::MemoryStore, message::Request, secret::Secret,
    server::Server,
};
use crate::{
    RankEnv, Result,
    channel::{bind, is_loopback},
};

/// How long the port of a job that is just ending may be in use.
const PATIENCE: Duration = Duration::from_secs(2);

/// A store at `MASTER_ADDR:MASTER_PORT`, which rank 0 holds for as long as its value lives. Every connection begins
/// with a handshake that needs the job's [`Secret`], and is encrypted.
///
/// ```
/// use std::time::Duration;
/// use fsdp_core::{RankEnv, store::{Secret, Store, TcpStore}};
/// let env = |rank| RankEnv { rank, world_size: 2, local_world_size: 2, master_port: 29511, ..RankEnv::single() };
/// let minute = Duration::from_secs(60);
/// let store = |rank| TcpStore::connect(&env(rank), &Secret::from_env(&env(rank))?, minute);
/// std::thread::scope(|scope| {
///     let other = scope.spawn(|| store(1)?.get("host of rank 0", minute));
///     let first = store(0)?;
///     first.set("host of rank 0", b"node0")?;
///     assert_eq!(other.join().unwrap()?, b"node0");
///     Ok::<(), fsdp_core::Error>(())
/// })?;
/// # Ok::<(), fsdp_core::Error>(())
/// ```
pub struct TcpStore {
    side: Side,
    rank: usize,
    holder: String,
    timeout: Duration,
}

enum Side {
    Holder { memory: MemoryStore, _server: Option<Server> },
    Client(Client),
}

impl TcpStore {
    /// Rank 0 listens, the others reach it, which `timeout` is for, and later for each request that waits for nothing.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the port is taken, when rank 0 can't be reached in time, or when it
    /// has another secret.
    pub fn connect(env: &RankEnv, secret: &Secret, timeout: Duration) -> Result<Self> {
        let holder = format!("rank 0 at {}:{}", env.master_addr, env.master_port);
        let asked = Asked::of(&Request::Hello, Some(env.rank), &holder);
        if env.hosts > 1 && is_loopback(&env.master_addr) {
            return Err(asked.failed(format!(
                "{} leads to no other host, and the ranks run on {}: set MASTER_ADDR to the host of rank 0, as the \
                 others know it",
                env.master_addr, env.hosts
            )));
        }
        let side = match env.rank {
            0 => Side::Holder { memory: MemoryStore::default(), _server: None },
            rank => Side::Client(Client::connect(&env.master_addr, env.master_port, secret.clone(), rank, timeout)?),
        };
        let mut store = TcpStore { side, rank: env.rank, holder: holder.clone(), timeout };
        if let Side::Holder { memory, _server: server } = &mut store.side
            && env.world_size > 1
        {
            let started = listener(env, asked.began)
                .and_then(|listener| Server::start(listener, secret.key().clone(), env.world_size, memory.clone()));
            *server = Some(started.map_err(|error| {
                asked.failed(format!(
                    "rank 0 can't listen there ({error}): MASTER_ADDR is the host of rank 0, and MASTER_PORT a port \
                     that is free there"
                ))
            })?);
        }
        Ok(store)
    }

    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>> {
        match &self.side {
            Side::Client(client) => client.ask(request, self.timeout),
            Side::Holder { memory, .. } => self.asked(request).before(memory.answer(request)),
        }
    }

    fn asked(&self, request: &Request<'_>) -> Asked<'_> {
        Asked::of(request, Some(self.rank), &self.holder)
    }
}

/// The port, which an earlier job may be about to give back.
fn listener(env: &RankEnv, began: Instant) -> io::Result<std::net::TcpListener> {
    loop {
        match bind(&env.master_addr, env.master_port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            bound => return bound,
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(&Request::Set { key, value }).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        match &self.side {
            Side::Client(client) => client.get(key, timeout),
            Side::Holder { memory, .. } => {
                let request = Request::Get { key, wait: timeout };
                let asked = self.asked(&request);
                asked.before(memory.answer(&request))?.ok_or_else(|| asked.not_set())
            }
        }
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<Option<Vec<u8>>> {
        self.ask(&Request::CompareSet { key, expected, value })
    }
}
