//! A store that rank 0 serves over TCP, at an address that all ranks know.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_keepalive;

use super::{
    MemoryStore, RequestContext, Store,
    message::{Answer, Request},
};
use crate::{
    Error, RankEnv, Result,
    channel::{Accepted, Channel, Handler, Key, Listener, MIN_SECRET_LEN, bind, connect, is_loopback},
};

const VARIABLE: &str = "FSDP_STORE_SECRET";
const FILE_VARIABLE: &str = "FSDP_STORE_SECRET_FILE";
/// Maximum size of a secret's file that is read.
const MAX_FILE: u64 = 64 << 10;

/// The secret that the ranks of one job share.
///
/// It is `FSDP_STORE_SECRET`, which `fsdp-launch` creates for every run, or else the content of the file
/// `FSDP_STORE_SECRET_FILE`. Without these variables it is derived from the job's id ([`RankEnv::run_id`]). The server
/// then refuses ranks of other jobs that connect by mistake, but not an attacker who knows the id.
#[derive(Clone, Debug)]
pub struct Secret {
    key: Key,
    is_given: bool,
}

impl Secret {
    /// Reads the secret of this process. It is valid for one attempt of one run.
    ///
    /// # Errors
    /// [`Error::Env`] when the secret is shorter than 16 bytes, or the file can't be read.
    pub fn from_env(env: &RankEnv) -> Result<Self> {
        Self::read(env, |name| std::env::var(name).ok())
    }

    fn read(env: &RankEnv, var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        if let Some(given) = var(VARIABLE) {
            return Self::new(env, Some(&given));
        }
        let Some(path) = var(FILE_VARIABLE) else { return Self::new(env, None) };
        let refused = |why: String| {
            Error::Env(format!(
                "{FILE_VARIABLE}={path:?}: {why}. Make the file with `(umask 077; head -c 32 /dev/urandom | base64 > \
                 FILE)`, and copy it to every host"
            ))
        };
        let mut text = String::new();
        let read = File::open(&path).and_then(|file| file.take(MAX_FILE).read_to_string(&mut text));
        read.map_err(|error| refused(format!("it can't be read ({error})")))?;
        let given = text.trim();
        if given.len() < MIN_SECRET_LEN {
            return Err(refused(format!("it has {} bytes, expected at least {MIN_SECRET_LEN}", given.len())));
        }
        Self::new(env, Some(given))
    }

    /// Derives the secret of a job from the value of `FSDP_STORE_SECRET`, if it is set.
    ///
    /// # Errors
    /// [`Error::Env`] when the value is shorter than 16 bytes.
    pub fn new(env: &RankEnv, given: Option<&str>) -> Result<Self> {
        let purpose = format!("fsdp store 1\n{}\n{}", env.attempt, env.run_id);
        if let Some(short) = given.filter(|given| given.len() < MIN_SECRET_LEN) {
            return Err(Error::Env(format!(
                "{VARIABLE} has {} bytes, but a secret needs at least {MIN_SECRET_LEN}: make one with \
                 `head -c 32 /dev/urandom | base64`, and give all ranks the same",
                short.len()
            )));
        }
        let key = Key::derive(&purpose, given.unwrap_or_default().as_bytes());
        Ok(Secret { key, is_given: given.is_some() })
    }

    /// Returns the key of connections.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Returns whether it is a secret: not derived from the job's id.
    pub(crate) fn is_given(&self) -> bool {
        self.is_given
    }
}

/// Time that an ending job may keep the port in use.
const PORT_IN_USE_TIMEOUT: Duration = Duration::from_secs(2);

/// A store at `MASTER_ADDR:MASTER_PORT`, which rank 0 serves until it drops its value. Every connection begins with a
/// handshake that needs the job's [`Secret`], and is encrypted.
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
    role: Role,
    rank: usize,
    holder: String,
    timeout: Duration,
}

enum Role {
    Server { memory: MemoryStore, _server: Option<Server> },
    Client(Client),
}

impl TcpStore {
    /// Starts the server on rank 0, or connects to it on other ranks. `timeout` limits the connection, and later each
    /// request that does not wait for a value.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the port is in use, when rank 0 cannot be reached in time, or when it
    /// has another secret.
    pub fn connect(env: &RankEnv, secret: &Secret, timeout: Duration) -> Result<Self> {
        let holder = holder(env);
        let asked = RequestContext::new(&Request::Ping, Some(env.rank), &holder);
        check_address(env, &asked)?;
        let memory = MemoryStore::default();
        let role = match env.rank {
            0 if env.world_size == 1 => Role::Server { memory, _server: None },
            0 => {
                let server = listen(env, &asked, |listener| {
                    Server::start(listener, secret.key.clone(), env.world_size, memory.clone())
                })?;
                Role::Server { memory, _server: Some(server) }
            }
            _ => Role::Client(Client::connect(env, secret, &asked, timeout)?),
        };
        Ok(TcpStore { role, rank: env.rank, holder, timeout })
    }
}

/// Returns the name of the server in messages.
pub(crate) fn holder(env: &RankEnv) -> String {
    format!("rank 0 at {}:{}", env.master_addr, env.master_port)
}

/// Fails if other ranks cannot reach the server's address.
pub(crate) fn check_address(env: &RankEnv, asked: &RequestContext<'_>) -> Result<()> {
    if env.master_port == 0 && env.world_size > 1 {
        return Err(asked.failed("the port is 0, which other ranks do not know: set MASTER_PORT to a free port"));
    }
    if env.hosts <= 1 || !is_loopback(&env.master_addr) {
        return Ok(());
    }
    Err(asked.failed(format!(
        "{} is a loopback address, but the ranks run on {} hosts: set MASTER_ADDR to an address of rank 0's host that \
         the other hosts reach",
        env.master_addr, env.hosts
    )))
}

/// Binds the port on rank 0, and starts a server there.
pub(crate) fn listen<T>(
    env: &RankEnv,
    asked: &RequestContext<'_>,
    start: impl FnOnce(TcpListener) -> io::Result<T>,
) -> Result<T> {
    listener(env, asked.began).and_then(start).map_err(|error| {
        asked.failed(format!(
            "rank 0 can't listen there ({error}): set MASTER_ADDR to rank 0's host, and MASTER_PORT to a free port of \
             that host"
        ))
    })
}

/// Binds the port. Waits for an ending job to free it.
fn listener(env: &RankEnv, began: Instant) -> io::Result<TcpListener> {
    loop {
        match bind(&env.master_addr, env.master_port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && began.elapsed() < PORT_IN_USE_TIMEOUT => {
                thread::sleep(Duration::from_millis(20));
            }
            bound => return bound,
        }
    }
}

impl Store for TcpStore {
    fn ask(&self, request: &Request<'_>) -> Result<Option<Vec<u8>>> {
        let asked = RequestContext::new(request, Some(self.rank), &self.holder);
        match &self.role {
            Role::Client(client) => client.ask(request, &asked, self.timeout),
            Role::Server { memory, .. } => asked.result(memory.answer(request)),
        }
    }
}

/// Maximum time that the server waits for a value before it answers that the key is unset. The client then asks again.
/// Each side thus notices soon that the other one is gone.
const GET_SLICE: Duration = Duration::from_secs(1);
/// Minimum time limit of an exchange.
const MIN_WAIT: Duration = Duration::from_millis(10);
/// Maximum pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_millis(50);
/// Time that another program, such as an ending job, may answer at the server's port.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections of one rank to the server.
struct Client {
    endpoint: Endpoint,
    /// Idle connections. Each concurrent request takes one.
    idle: Mutex<Vec<Channel>>,
    /// Why the server is gone, once it is.
    ended: OnceLock<String>,
}

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    began: Instant,
    timeout: Duration,
}

impl Deadline {
    fn left(self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
}

impl Client {
    /// Connects to the server, which may not be up yet.
    fn connect(env: &RankEnv, secret: &Secret, asked: &RequestContext<'_>, timeout: Duration) -> Result<Self> {
        let endpoint = Endpoint::new(&env.master_addr, env.master_port, secret);
        let channel = endpoint.dial(asked, timeout, ping, &|| None)?;
        Ok(Client { endpoint, idle: Mutex::new(vec![channel]), ended: OnceLock::new() })
    }

    /// Sends a request. `timeout` limits a request that does not wait.
    fn ask(&self, request: &Request<'_>, asked: &RequestContext<'_>, timeout: Duration) -> Result<Option<Vec<u8>>> {
        if let Some(why) = request.refusal() {
            return Err(asked.failed(why));
        }
        let deadline = |timeout| Deadline { began: asked.began, timeout };
        match *request {
            Request::Get { key, wait } => self.get(key, deadline(wait), asked),
            _ => asked.result(self.exchange(request, deadline(timeout), asked, None)?),
        }
    }

    /// Waits for a value.
    fn get(&self, key: &str, deadline: Deadline, asked: &RequestContext<'_>) -> Result<Option<Vec<u8>>> {
        let mut answered: Option<Instant> = None;
        loop {
            let left = deadline.left();
            // Leave a quarter of the time for the answer.
            let wait = (left / 4 * 3).min(GET_SLICE);
            let answer = self.exchange(&Request::Get { key, wait }, deadline, asked, answered)?;
            answered = Some(Instant::now());
            if answer != Answer::Nothing || deadline.left() <= MIN_WAIT {
                return asked.result(answer);
            }
        }
    }

    /// Sends one request. `answered` is the time of the server's previous answer: soon after it, a timeout means that
    /// the value is not set, not that the server is gone.
    fn exchange(
        &self,
        request: &Request<'_>,
        deadline: Deadline,
        asked: &RequestContext<'_>,
        answered: Option<Instant>,
    ) -> Result<Answer> {
        if let Some(why) = self.ended.get() {
            return Err(asked.failed(why));
        }
        let idle = self.idle.lock().pop();
        let mut channel = match idle {
            Some(channel) => channel,
            None => {
                let opened = self.endpoint.open(deadline).and_then(|channel| ping(channel, deadline));
                opened.map_err(|error| asked.failed(self.endpoint.failure(&error)))?
            }
        };
        let answer = round_trip(&mut channel, request, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut if answered.is_some_and(|at| at.elapsed() < 2 * GET_SLICE) => asked.not_set(),
            _ => self.request_failure(&error, asked),
        })?;
        self.release(channel);
        Ok(answer)
    }

    fn release(&self, channel: Channel) {
        self.idle.lock().push(channel);
    }

    fn request_failure(&self, error: &io::Error, asked: &RequestContext<'_>) -> Error {
        if error.kind() == io::ErrorKind::TimedOut {
            return asked.failed("it does not answer: its process is stopped, or its host or the network is down");
        }
        let why = format!("rank 0 has ended, and the store with it ({error}). See the output of rank 0");
        asked.failed(self.ended.get_or_init(|| why))
    }
}

/// The server's address, and the job's secret.
pub(crate) struct Endpoint {
    host: String,
    port: u16,
    secret: Secret,
}

impl Endpoint {
    pub(crate) fn new(host: &str, port: u16, secret: &Secret) -> Self {
        Endpoint { host: host.into(), port, secret: secret.clone() }
    }

    /// Connects to the server, which may not be up yet, and makes the first use of the connection. Gives up after
    /// `timeout`, or when `trouble` returns a reason.
    pub(crate) fn dial<T>(
        &self,
        asked: &RequestContext<'_>,
        timeout: Duration,
        first_use: impl Fn(Channel, Deadline) -> io::Result<T>,
        trouble: &dyn Fn() -> Option<String>,
    ) -> Result<T> {
        let deadline = Deadline { began: asked.began, timeout };
        let mut refused_since: Option<Instant> = None;
        let mut pause = Duration::from_millis(1);
        loop {
            let error = match self.open(deadline).and_then(|channel| first_use(channel, deadline)) {
                Ok(made) => return Ok(made),
                Err(error) => error,
            };
            if let Some(why) = trouble() {
                return Err(asked.failed(why));
            }
            refused_since = match error.kind() {
                io::ErrorKind::PermissionDenied => refused_since.or_else(|| Some(Instant::now())),
                _ => None,
            };
            if deadline.left() < pause || refused_since.is_some_and(|since| since.elapsed() >= REFUSED_TIMEOUT) {
                return Err(asked.failed(self.failure(&error)));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Opens a connection to a server with the same secret.
    fn open(&self, deadline: Deadline) -> io::Result<Channel> {
        let stream = connect(&self.host, self.port, deadline.left().max(MIN_WAIT))?;
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut => error,
            _ => io::Error::new(io::ErrorKind::PermissionDenied, error.to_string()),
        };
        Channel::connect(stream, &self.secret.key).map_err(refused)
    }

    fn failure(&self, error: &io::Error) -> String {
        if error.kind() == io::ErrorKind::PermissionDenied {
            let remedy = if self.secret.is_given {
                "give all ranks the same FSDP_STORE_SECRET, and start them as one job"
            } else {
                "start all ranks as one job, or give all of them the same FSDP_STORE_SECRET"
            };
            return format!("{error}: {remedy}, or choose another MASTER_PORT");
        }
        if error.kind() == io::ErrorKind::ResourceBusy {
            return format!("it refuses this rank: {error}");
        }
        format!(
            "it can't be reached ({error}). Check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT are its host \
             and a port that all ranks can reach"
        )
    }
}

/// Pings the server, which proves the secret to it.
fn ping(mut channel: Channel, deadline: Deadline) -> io::Result<Channel> {
    match round_trip(&mut channel, &Request::Ping, deadline)? {
        Answer::Nothing => Ok(channel),
        Answer::Refused(why) => Err(io::Error::new(io::ErrorKind::ResourceBusy, why)),
        answer => Err(io::Error::other(format!("it answered {answer:?} to a ping"))),
    }
}

/// Sends a request and receives the answer.
fn round_trip(channel: &mut Channel, request: &Request<'_>, deadline: Deadline) -> io::Result<Answer> {
    // If the server refuses the connection, its answer may be there although the request can't be sent.
    let sent = channel.writer.send(&request.to_bytes());
    let answer = channel.reader.receive(deadline.left().max(MIN_WAIT));
    let answer = answer.map_err(|error| sent.err().unwrap_or(error))?;
    Answer::parse(answer).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its answer can't be understood"))
}

/// Connections beyond four for each rank. A rank needs one for each concurrent request.
const SPARE_CONNECTIONS: usize = 64;
/// Time to send pending answers when the server stops.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves clients until dropped, then closes their connections.
struct Server {
    memory: MemoryStore,
    connections: Arc<Connections>,
    _listener: Listener,
}

/// Open connections.
#[derive(Default)]
struct Connections(Mutex<Streams>);

#[derive(Default)]
struct Streams {
    by_id: BTreeMap<u64, Arc<TcpStream>>,
    next: u64,
    /// Whether the server has stopped.
    is_closed: bool,
}

impl Server {
    /// Serves `ranks` ranks.
    fn start(listener: TcpListener, key: Key, ranks: usize, memory: MemoryStore) -> io::Result<Self> {
        let connections = Arc::<Connections>::default();
        let handler = Requests { memory: memory.clone(), connections: connections.clone() };
        let max = ranks.saturating_mul(4).saturating_add(SPARE_CONNECTIONS);
        Ok(Server { memory, connections, _listener: Listener::start(listener, key, max, handler)? })
    }
}

impl Drop for Server {
    /// Lets pending answers go out first: the server may stop because of a value that a client has just set.
    fn drop(&mut self) {
        self.memory.close();
        self.connections.0.lock().is_closed = true;
        self.connections.shutdown(Shutdown::Read);
        let until = Instant::now() + REPLY_TIMEOUT;
        while !self.connections.0.lock().by_id.is_empty() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.connections.shutdown(Shutdown::Both);
    }
}

impl Connections {
    /// Adds a connection, unless the server has stopped.
    fn add(&self, stream: Arc<TcpStream>) -> io::Result<u64> {
        let mut streams = self.0.lock();
        if streams.is_closed {
            return Err(io::Error::other("the store is gone"));
        }
        let id = streams.next;
        streams.next += 1;
        streams.by_id.insert(id, stream);
        Ok(id)
    }

    fn remove(&self, id: u64) {
        self.0.lock().by_id.remove(&id);
    }

    fn shutdown(&self, how: Shutdown) {
        self.0.lock().by_id.values().for_each(|stream| {
            // The peer may have closed it.
            stream.shutdown(how).ok();
        });
    }
}

struct Requests {
    memory: MemoryStore,
    connections: Arc<Connections>,
}

impl Handler for Requests {
    fn refused(&self, from: IpAddr, why: &io::Error) {
        tracing::warn!("the store of this job refused {from}: {why}. Ranks need the job's FSDP_STORE_SECRET");
    }

    fn refusal(&self, why: &str) -> Vec<u8> {
        Answer::Refused(why.to_owned()).to_bytes()
    }

    fn serve(&self, guest: Accepted) -> io::Result<()> {
        let Accepted { mut channel, first, .. } = guest;
        let stream = channel.writer.stream().clone();
        // Keepalive ends the connection of a host that disappeared.
        set_socket_keepalive(&stream, true)?;
        let id = self.connections.add(stream)?;
        let served = self.answer_all(&mut channel, &first);
        self.connections.remove(id);
        served
    }
}

impl Requests {
    /// Answers `first` and all following requests.
    fn answer_all(&self, channel: &mut Channel, first: &[u8]) -> io::Result<()> {
        self.reply(channel, first)?;
        loop {
            let bytes = channel.reader.receive(Duration::MAX)?.to_vec();
            self.reply(channel, &bytes)?;
        }
    }

    fn reply(&self, channel: &mut Channel, bytes: &[u8]) -> io::Result<()> {
        let Some(mut request) = Request::parse(bytes) else {
            let why = "a message is not a request of this version: run the same build on all ranks";
            channel.writer.send(&self.refusal(why))?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        };
        // The client asks again after a slice.
        if let Request::Get { wait, .. } = &mut request {
            *wait = (*wait).min(GET_SLICE);
        }
        channel.writer.send(&self.memory.answer(&request).to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a stopped rank 0: the kernel accepts connections.
    #[test]
    fn a_server_that_does_not_answer_is_not_one_of_another_job() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (master_addr, master_port) = ("127.0.0.1".into(), silent.local_addr().unwrap().port());
        let env = RankEnv { rank: 1, world_size: 2, master_addr, master_port, ..RankEnv::single() };
        let secret = Secret::new(&env, Some("0123456789abcdef")).unwrap();
        let error = TcpStore::connect(&env, &secret, Duration::from_secs(1)).err().unwrap().to_string();
        assert!(error.contains("(the peer does not answer: ") && !error.contains("SECRET"), "{error}");
    }

    #[test]
    fn a_secret_depends_on_job_and_attempt_and_is_not_printed() {
        let env = RankEnv { run_id: "job".into(), ..RankEnv::single() };
        let of = |env: &RankEnv, given| Secret::new(env, given).unwrap();
        let given = Some("0123456789abcdef");
        let secret = of(&env, given);
        assert_eq!(secret.key, of(&env, given).key);
        let others = [
            of(&env, None),
            of(&env, Some("0123456789abcdeg")),
            of(&RankEnv { attempt: 1, ..env.clone() }, given),
            of(&RankEnv { run_id: "other".into(), ..env.clone() }, given),
        ];
        assert!(others.iter().all(|other| other.key != secret.key));
        assert_ne!(others[0].key, of(&RankEnv { run_id: "other".into(), ..env.clone() }, None).key);
        assert_eq!(format!("{secret:?}"), "Secret { key: Key, is_given: true }");
        let dir = std::env::temp_dir().join(format!("fsdp-secret-{}", std::process::id()));
        let read = || Secret::read(&env, |name| (name == FILE_VARIABLE).then(|| dir.to_str().unwrap().into()));
        let error = read().unwrap_err().to_string();
        assert!(error.contains("FSDP_STORE_SECRET_FILE=") && error.contains("it can't be read"), "{error}");
        std::fs::write(&dir, "short\n").unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains("it has 5 bytes, expected at least 16"), "{error}");
        std::fs::write(&dir, "0123456789abcdef\n").unwrap();
        assert_eq!(read().unwrap().key, secret.key);
        std::fs::remove_file(&dir).unwrap();
        let error = Secret::new(&env, Some("short")).unwrap_err().to_string();
        assert!(error.contains("FSDP_STORE_SECRET has 5 bytes") && !error.contains("short\""), "{error}");
    }
}
