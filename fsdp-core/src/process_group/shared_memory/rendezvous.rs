//! The rendezvous of the processes of one host.
//!
//! Rank 0 listens on a Unix socket in the abstract namespace, which needs no file. Only ranks of the same user, port,
//! job and group derive its name. The other ranks connect, send a hello and a pidfd of themselves. Once all have
//! connected, rank 0 sends each the shared file and the pidfds of all. Both sides check that the other has the same
//! user.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketAddrUnix, SocketFlags,
    },
    process::PidfdFlags,
};

use super::super::{
    options::Membership,
    waiting_ranks::{self, WarningTimer, is_same_user},
};
use crate::{Error, Result, hash::Hash, text::shortened};

/// Meets the other ranks. `number` and `file` are rank 0's, and passed to all ranks.
pub(super) fn meet(
    rendezvous: &Rendezvous<'_>,
    number: u64,
    file: impl FnOnce() -> Result<OwnedFd>,
) -> Result<RendezvousResult> {
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|errno| rendezvous.os("opening a pidfd of this process", errno))?;
    if rendezvous.group.rank == 0 { coordinate(rendezvous, number, file()?, own) } else { join(rendezvous, own) }
}

/// Interval of checks while waiting.
const SLICE: Duration = Duration::from_millis(50);

/// Message if descriptors run out.
const TOO_MANY_FILES: &str =
    "too many open files (a group needs one for each rank): raise the limit by ulimit -n 65536";

/// Parameters of a rendezvous.
pub(crate) struct Rendezvous<'a> {
    /// The job's `MASTER_ADDR`, for messages.
    pub(crate) addr: &'a str,
    /// The job's `MASTER_PORT`.
    pub(crate) port: u16,
    /// Identifies the job.
    pub(crate) run: String,
    /// The group to create.
    pub(crate) group: &'a Membership,
    /// Fails if there is a reason to stop waiting.
    pub(crate) check_peers: &'a dyn Fn() -> Result<()>,
    /// Returns whether a rank of the group has ended with exit code 0, according to the launcher.
    pub(crate) has_ended: &'a dyn Fn(usize) -> bool,
}

/// The result of a rendezvous.
pub(super) struct RendezvousResult {
    /// The file that rank 0 created.
    pub(super) file: OwnedFd,
    /// The number that rank 0 passed.
    pub(super) number: u64,
    /// A pidfd of each rank.
    pub(super) processes: Vec<OwnedFd>,
}

impl Rendezvous<'_> {
    /// Returns a hash of job and group.
    fn key(&self) -> u64 {
        let mut hash = Hash::default();
        hash.bytes(self.run.as_bytes());
        hash.bytes(self.group.name.as_bytes());
        hash.value()
    }

    pub(super) fn address(&self) -> Result<SocketAddrUnix> {
        let name = format!("fsdp-{}-{}-{:016x}", rustix::process::geteuid().as_raw(), self.port, self.key());
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|errno| self.os("naming a socket", errno))
    }

    pub(super) fn socket(&self) -> Result<OwnedFd> {
        waiting_ranks::socket().map_err(|errno| self.os("opening a socket", errno))
    }

    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        Error::Rendezvous { rank: self.group.rank, message: message.into() }
    }

    /// Warns that this rank still waits, if a warning is due.
    pub(super) fn warn_if_due(&self, timer: &mut WarningTimer, whom: impl FnOnce() -> String) {
        let Some(waited) = timer.is_due() else { return };
        let of = if self.group.is_world() { String::new() } else { format!(" of group \"{}\"", self.group.name) };
        tracing::warn!(
            "rank {}{of} has waited {:.0} s for {} at {}:{}; it gives up after {:.0} s (FSDP_TIMEOUT_S)",
            self.group.rank,
            waited.as_secs_f64(),
            whom(),
            self.addr,
            self.port,
            self.group.timeout.as_secs_f64(),
        );
    }

    pub(super) fn fail<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(self.error(message))
    }

    /// Fails if there is a reason to stop waiting for `missing`, such as that one of them has ended.
    ///
    /// Only rank 0 knows which ranks it has met before they ended. The other ranks ask for rank 0 alone.
    fn check_missing(&self, missing: &[usize]) -> Result<()> {
        (self.check_peers)()?;
        let ended: Vec<usize> = missing.iter().copied().filter(|&rank| (self.has_ended)(rank)).collect();
        if ended.is_empty() {
            return Ok(());
        }
        self.fail(format!(
            "rank(s) {} ended with exit code 0 before they joined the others: see what they printed, and start the \
             same program with the same arguments on every rank",
            listed(&ended)
        ))
    }

    pub(super) fn os(&self, what: &str, errno: Errno) -> Error {
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            return self.error(format!("{what}: {TOO_MANY_FILES}"));
        }
        Error::os(self.group.rank, format!("{what} to meet group \"{}\"", self.group.name), errno)
    }

    fn hello(&self) -> [u64; 4] {
        [MAGIC, self.key(), self.group.size as u64, self.group.rank as u64]
    }

    /// Parses a hello. Returns `None` if it is not from a rank of this group.
    pub(super) fn parse_hello(&self, message: &[u8]) -> Option<Result<usize, String>> {
        let [magic, key, size, rank]: [u64; 4] = bytemuck::try_pod_read_unaligned(message).ok()?;
        if (magic, key) != (MAGIC, self.key()) {
            return None;
        }
        let (rank, size) = (rank as usize, size as usize);
        Some(if size != self.group.size {
            Err(format!(
                "rank {rank} has a world size of {size} but rank 0 has {}: start all ranks with the same WORLD_SIZE",
                self.group.size
            ))
        } else if rank == 0 || rank >= self.group.size {
            Err(format!("a second process is rank {rank} of {size}: give each process a RANK of its own"))
        } else {
            Ok(rank)
        })
    }
}

/// Lists ranks, at most 16 of them.
fn listed(ranks: &[usize]) -> String {
    const MOST: usize = 16;
    let shown: Vec<String> = ranks.iter().take(MOST).map(ToString::to_string).collect();
    match ranks.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn disconnected(rank: usize) -> String {
    format!("rank {rank} disconnected before all ranks had connected")
}

fn timespec(duration: Duration) -> Option<Timespec> {
    duration.try_into().ok()
}

/// Largest number of ranks: the kernel passes at most 253 descriptors in a message, and one is the shared file.
pub(crate) const MOST_RANKS: usize = 252;
/// First word of every message.
const MAGIC: u64 = u64::from_le_bytes(*b"FSDPSHM3");
/// Longest message.
const MESSAGE: usize = 4096;

/// Creates rank 0's answer: its number, or why the ranks cannot meet.
fn reply(outcome: Result<u64, &str>) -> Vec<u8> {
    let (has_failed, number, text) = match outcome {
        Ok(number) => (0, number, ""),
        Err(text) => (1, 0, shortened(text, MESSAGE / 2)),
    };
    [bytemuck::bytes_of(&[MAGIC, has_failed, number]), text.as_bytes()].concat()
}

/// Parses the message of [`reply`].
fn parse_reply(message: &[u8]) -> Option<Result<u64, String>> {
    let (numbers, text) = message.split_at_checked(size_of::<[u64; 3]>())?;
    match bytemuck::pod_read_unaligned::<[u64; 3]>(numbers) {
        [MAGIC, 0, number] => Some(Ok(number)),
        [MAGIC, ..] => Some(Err(String::from_utf8_lossy(text).into_owned())),
        _ => None,
    }
}

/// Sends one message with descriptors.
pub(super) fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Receives one message with its descriptors. The message is empty if the peer has closed its end.
pub(super) fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    match receive_once(socket) {
        // The peer closed its end without reading everything. Its own messages can be read after this error.
        Err(Errno::CONNRESET) => receive_once(socket),
        received => received,
    }
}

fn receive_once(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut message = vec![0; MESSAGE];
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    // The buffer has space for all descriptors, so this process has too many open.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    message.truncate(received.bytes);
    Ok((message, fds))
}

/// Connections without a hello that may be open at a time, beyond the number of ranks.
const MAX_UNIDENTIFIED: usize = 64;

/// A rank that has sent its hello.
struct Client {
    socket: OwnedFd,
    process: OwnedFd,
}

/// Waits for all other ranks and sends each the shared file and the pidfds. Runs on rank 0.
pub(super) fn coordinate(
    rendezvous: &Rendezvous<'_>,
    number: u64,
    file: OwnedFd,
    own: OwnedFd,
) -> Result<RendezvousResult> {
    let started = Instant::now();
    let mut timer = WarningTimer::default();
    let listener = listen(rendezvous)?;
    let mut clients: Vec<Option<Client>> = (1..rendezvous.group.size).map(|_| None).collect();
    let mut unidentified: Vec<OwnedFd> = Vec::new();
    let outcome = loop {
        let missing: Vec<_> = (1..rendezvous.group.size).filter(|rank| clients[rank - 1].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if let Err(error) = rendezvous.check_missing(&missing) {
            break Err(error);
        }
        if started.elapsed() >= rendezvous.group.timeout {
            let seconds = rendezvous.group.timeout.as_secs_f64();
            let advice = match rendezvous.group.is_world() {
                true => "are they running, on this host, with the same MASTER_PORT and run id?",
                false => "are they running, and do they share this host's memory and network?",
            };
            break rendezvous.fail(format!("rank(s) {missing:?} did not connect within {seconds:.1} s: {advice}"));
        }
        rendezvous.warn_if_due(&mut timer, || format!("rank(s) {}", listed(&missing)));
        if let Err(text) = receive_clients(rendezvous, &listener, &mut unidentified, &mut clients) {
            break rendezvous.fail(text);
        }
    };
    if outcome.is_err() {
        // Ranks that have connected meanwhile get the reason, too.
        accept(rendezvous, &listener, &mut unidentified).ok();
    }
    // Refuses later connections.
    drop(listener);
    if let Err(error) = outcome {
        let text = match &error {
            Error::Rendezvous { message, .. } => message.clone(),
            other => other.to_string(),
        };
        for socket in unidentified.iter().chain(clients.iter().flatten().map(|client| &client.socket)) {
            let _ = send(socket, &reply(Err(&text)), &[]);
        }
        return Err(error);
    }
    let clients: Vec<_> = clients.into_iter().flatten().collect();
    let mut fds = vec![file.as_fd(), own.as_fd()];
    fds.extend(clients.iter().map(|client| client.process.as_fd()));
    let message = reply(Ok(number));
    for (index, client) in clients.iter().enumerate() {
        let sent = loop {
            match send(&client.socket, &message, &fds) {
                // The kernel limits descriptors in flight: earlier ranks must receive theirs first.
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::INTR)
                    if started.elapsed() < rendezvous.group.timeout =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent => break sent,
            }
        };
        sent.map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => rendezvous.error(disconnected(index + 1)),
            errno => rendezvous.os(&format!("sending the shared memory to rank {}", index + 1), errno),
        })?;
    }
    let processes = std::iter::once(own).chain(clients.into_iter().map(|client| client.process)).collect();
    Ok(RendezvousResult { file, number, processes })
}

fn listen(rendezvous: &Rendezvous<'_>) -> Result<OwnedFd> {
    let address = rendezvous.address()?;
    let listener = rendezvous.socket()?;
    // Rank 0 of an earlier job may be about to close the address.
    let deadline = Instant::now() + rendezvous.group.timeout.min(Duration::from_secs(2));
    loop {
        match rustix::net::bind(&listener, &address) {
            Ok(()) => break,
            Err(Errno::ADDRINUSE) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::ADDRINUSE) => {
                return rendezvous.fail(
                    "another process is already rank 0: give each process a RANK of its own, and each job of a host \
                     its own MASTER_PORT or run id",
                );
            }
            Err(errno) => return Err(rendezvous.os("binding a socket", errno)),
        }
    }
    rustix::net::listen(&listener, rendezvous.group.size as i32).map_err(|errno| rendezvous.os("listening", errno))?;
    Ok(listener)
}

/// Waits briefly for connections and messages and processes them. An error is sent to all ranks.
fn receive_clients(
    rendezvous: &Rendezvous<'_>,
    listener: &OwnedFd,
    unidentified: &mut Vec<OwnedFd>,
    clients: &mut [Option<Client>],
) -> Result<(), String> {
    let joined: Vec<_> = (0..clients.len()).filter(|&index| clients[index].is_some()).collect();
    let ready: Vec<bool> = {
        let sockets = std::iter::once(listener)
            .chain(unidentified.iter())
            .chain(clients.iter().flatten().map(|client| &client.socket));
        let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        match rustix::event::poll(&mut fds, timespec(SLICE).as_ref()) {
            Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
            Err(_) => return Ok(()),
        }
    };
    let (strange, known) = ready[1..].split_at(unidentified.len());
    if let Some((&index, _)) = joined.iter().zip(known).find(|(_, ready)| **ready) {
        // A rank sends nothing after its hello, so it has disconnected.
        return Err(disconnected(index + 1));
    }
    let mut strange = strange.iter();
    let (speaking, silent): (Vec<_>, Vec<_>) =
        unidentified.drain(..).partition(|_| strange.next().is_some_and(|&ready| ready));
    *unidentified = silent;
    for socket in speaking {
        let (message, mut fds) = match receive(&socket) {
            Ok(received) => received,
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("accepting ranks: {TOO_MANY_FILES}")),
            Err(_) => continue,
        };
        match rendezvous.parse_hello(&message) {
            None => continue,
            Some(Err(text)) => {
                unidentified.push(socket);
                return Err(text);
            }
            Some(Ok(rank)) => {
                let Some(process) = fds.pop() else { continue };
                let place = &mut clients[rank - 1];
                if place.is_some() {
                    unidentified.push(socket);
                    return Err(format!("two processes say they are rank {rank}: give each process a RANK of its own"));
                }
                *place = Some(Client { socket, process });
            }
        }
    }
    if ready[0] {
        accept(rendezvous, listener, unidentified)?;
    }
    // Ranks send their hello at once, so the connections that were silent longest are closed.
    unidentified.drain(..unidentified.len().saturating_sub(rendezvous.group.size + MAX_UNIDENTIFIED));
    Ok(())
}

/// Accepts the connections that wait.
fn accept(rendezvous: &Rendezvous<'_>, listener: &OwnedFd, unidentified: &mut Vec<OwnedFd>) -> Result<(), String> {
    while unidentified.len() < 2 * (rendezvous.group.size + MAX_UNIDENTIFIED) {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) if is_same_user(&socket) => unidentified.push(socket),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("accepting ranks: {TOO_MANY_FILES}")),
            Err(_) => break,
        }
    }
    Ok(())
}

/// Connects to rank 0 and receives its answer. Runs on all other ranks.
pub(super) fn join(rendezvous: &Rendezvous<'_>, own: OwnedFd) -> Result<RendezvousResult> {
    let mut timer = WarningTimer::default();
    let socket = connect(rendezvous, &mut timer)?;
    if !is_same_user(&socket) {
        return rendezvous.fail("the process that answers for rank 0 belongs to another user");
    }
    match send(&socket, bytemuck::bytes_of(&rendezvous.hello()), &[own.as_fd()]) {
        // Rank 0's message before it closed its end can still be read.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(errno) => return Err(rendezvous.os("saying hello", errno)),
    }
    // Rank 0 answers when its own timeout is over, and it may have started later.
    let (started, longest) = (Instant::now(), rendezvous.group.timeout.saturating_add(Duration::from_secs(2)));
    loop {
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        if rustix::event::poll(&mut fds, timespec(SLICE).as_ref()).is_ok_and(|ready| ready > 0) {
            break;
        }
        (rendezvous.check_peers)()?;
        if started.elapsed() >= longest {
            return rendezvous.fail(format!(
                "rank 0 did not answer within {:.1} s: is it stopped? Otherwise raise FSDP_TIMEOUT_S",
                longest.as_secs_f64()
            ));
        }
        rendezvous.warn_if_due(&mut timer, || "the ranks that rank 0 has not met yet".into());
    }
    let (message, mut fds) = match receive(&socket) {
        Ok(received) => received,
        Err(Errno::CONNRESET) => Default::default(),
        Err(errno) => return Err(rendezvous.os("receiving rank 0's answer", errno)),
    };
    if message.is_empty() {
        (rendezvous.check_peers)()?;
        return rendezvous.fail(disconnected(0));
    }
    let number = match parse_reply(&message) {
        Some(Ok(number)) => number,
        Some(Err(text)) => return rendezvous.fail(format!("rank 0 says: {text}")),
        None => return rendezvous.fail("rank 0 answered in another protocol: run the same build everywhere"),
    };
    if fds.len() != rendezvous.group.size + 1 {
        return rendezvous.fail(format!(
            "rank 0 sent {} descriptors, expected {}",
            fds.len(),
            rendezvous.group.size + 1
        ));
    }
    let processes = fds.split_off(1);
    match fds.pop() {
        Some(file) => Ok(RendezvousResult { file, number, processes }),
        None => rendezvous.fail("rank 0 sent no shared memory"),
    }
}

/// Connects to rank 0, which may not be listening yet.
pub(super) fn connect(rendezvous: &Rendezvous<'_>, timer: &mut WarningTimer) -> Result<OwnedFd> {
    let address = rendezvous.address()?;
    let socket = rendezvous.socket()?;
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Nobody listens yet, or the queue of connections is full.
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(rendezvous.os("connecting to rank 0", errno)),
        }
        rendezvous.check_missing(&[0])?;
        if started.elapsed() >= rendezvous.group.timeout {
            return rendezvous.fail(format!(
                "rank(s) [0] did not connect within {:.1} s: is it running, on this host, with the same MASTER_PORT \
                 and run id?",
                rendezvous.group.timeout.as_secs_f64()
            ));
        }
        rendezvous.warn_if_due(timer, || "rank(s) 0".into());
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// Ends waits that take too long.
    fn check_peers() -> Result<()> {
        static STARTED: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        if STARTED.elapsed() > Duration::from_secs(60) { Err(Error::Env("hung".into())) } else { Ok(()) }
    }

    fn group(name: &str, rank: usize, timeout: Duration) -> Membership {
        Membership { name: name.into(), rank, size: 2, ..Membership::world(rank, 2, timeout) }
    }

    fn rendezvous(group: &Membership) -> Rendezvous<'_> {
        let run = format!("unit test {}", std::process::id());
        Rendezvous { addr: "127.0.0.1", port: 1, run, group, check_peers: &check_peers, has_ended: &|_| false }
    }

    /// Has rank 0 and rank 1 meet, with `before` called in between.
    fn two_meet(name: &str, timeout: Duration, before: impl FnOnce(&Rendezvous<'_>)) -> [Result<RendezvousResult>; 2] {
        std::thread::scope(|scope| {
            let file = || Ok(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            let host = scope.spawn(move || meet(&rendezvous(&group(name, 0, timeout)), 7, file));
            let client = group(name, 1, timeout);
            let client = rendezvous(&client);
            before(&client);
            let client = meet(&client, 0, || unreachable!("rank 0 makes the file"));
            [host.join().unwrap(), client]
        })
    }

    #[test]
    fn the_longest_timeout_does_not_overflow() {
        for met in two_meet("longest", Duration::MAX, |_| ()) {
            let met = met.unwrap();
            assert_eq!((met.number, met.processes.len()), (7, 2));
        }
    }

    #[test]
    fn connections_without_a_hello_keep_no_rank_out() {
        let mut unidentified = Vec::new();
        let met = two_meet("unidentified", Duration::from_secs(30), |client| {
            for index in 0..3 * MAX_UNIDENTIFIED {
                let connection = connect(client, &mut WarningTimer::default()).unwrap();
                let hello = client.hello();
                let hello = bytemuck::bytes_of(&hello);
                let nonsense: [&[u8]; 4] = [&[], &hello[..8], &[0xff; MESSAGE], &hello[..20]];
                // Every other one is silent. Rank 0 may have closed the connection.
                if index % 2 == 0 {
                    let _ = send(&connection, nonsense[index / 2 % 4], &[]);
                }
                unidentified.push(connection);
            }
        });
        for met in met {
            assert_eq!(met.unwrap().number, 7);
        }
    }

    #[test]
    fn a_rank_that_has_just_connected_gets_the_reason() {
        let host = group("just connected", 0, Duration::from_secs(30));
        let connection = std::cell::OnceCell::new();
        // Called while rank 0 listens.
        let check_peers = || {
            let client = group("just connected", 1, Duration::from_secs(30));
            let client = rendezvous(&client);
            connection.get_or_init(|| connect(&client, &mut WarningTimer::default()).unwrap());
            client.fail("on purpose")
        };
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let met = meet(&Rendezvous { check_peers: &check_peers, ..rendezvous(&host) }, 7, || Ok(file));
        assert!(met.err().unwrap().to_string().contains("on purpose"));
        let (message, _) = receive(connection.get().unwrap()).unwrap();
        assert_eq!(parse_reply(&message), Some(Err("on purpose".to_string())));
    }

    #[test]
    fn hellos_of_other_jobs_are_ignored_and_wrong_ones_refused() {
        let host = group("hellos", 0, Duration::ZERO);
        let host = rendezvous(&host);
        let hello = |change: fn(&mut Membership)| {
            let mut client = group("hellos", 1, Duration::ZERO);
            change(&mut client);
            host.parse_hello(bytemuck::bytes_of(&rendezvous(&client).hello()))
        };
        assert_eq!(hello(|_| ()), Some(Ok(1)));
        assert_eq!(hello(|client| client.name = "another".into()), None);
        for (said, part) in [
            (hello(|client| client.size = 3), "WORLD_SIZE"),
            (hello(|client| client.rank = 0), "RANK of its own"),
            (hello(|client| client.rank = usize::MAX), "RANK of its own"),
        ] {
            assert!(said.unwrap().unwrap_err().contains(part));
        }
        let whole = rendezvous(&group("hellos", 1, Duration::ZERO)).hello();
        let whole = bytemuck::bytes_of(&whole);
        assert!((0..whole.len()).all(|len| host.parse_hello(&whole[..len]).is_none()));
    }

    #[test]
    fn messages_sent_before_a_close_are_received() {
        let (flags, kind) = (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, SocketType::SEQPACKET);
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        send(&one, b"never read", &[]).unwrap();
        send(&other, &reply(Err("why")), &[]).unwrap();
        drop(other);
        let (message, _) = receive(&one).unwrap();
        assert_eq!(parse_reply(&message), Some(Err("why".to_string())));
        assert!(receive(&one).unwrap().0.is_empty());
    }
}
