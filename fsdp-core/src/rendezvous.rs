//! How the processes of one host meet.
//!
//! Rank 0 listens on a Unix socket in the abstract namespace, which leaves no file behind, under a name that only ranks of the same user, port, job and
//! group derive. The others connect, say who they are, and hand over a pidfd of themselves. When all are there rank 0 sends each the shared file and
//! the pidfds of all. Both sides check that the other belongs to the same user.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred,
    },
    process::PidfdFlags,
};

use crate::{Error, Result};

/// The most ranks: the kernel passes at most 253 descriptors in a message, and one is the shared file.
pub(crate) const MOST_RANKS: usize = 252;

const MAGIC: &[u8; 8] = b"FSDPSHM\n";
const VERSION: u32 = 1;
/// The longest message.
const MESSAGE: usize = 4096;
/// How long to wait before looking whether all is well.
const SLICE: Duration = Duration::from_millis(50);
/// Connections beyond the number of ranks that may be open at a time.
const STRANGERS: usize = 64;

/// Who meets whom.
pub(crate) struct Meeting<'a> {
    /// The job's `MASTER_PORT`.
    pub(crate) port: u16,
    /// What tells this job from others.
    pub(crate) run: String,
    /// The group to be made.
    pub(crate) group: &'a str,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// The number of ranks in the group.
    pub(crate) size: usize,
    /// How long to wait for the others.
    pub(crate) timeout: Duration,
    /// Fails when there is a reason not to wait any longer.
    pub(crate) all_well: &'a dyn Fn() -> Result<()>,
}

/// What the ranks share after they met.
pub(crate) struct Gathering {
    /// The file that rank 0 made.
    pub(crate) file: OwnedFd,
    /// The number that rank 0 passed.
    pub(crate) number: u64,
    /// A pidfd of each rank.
    pub(crate) processes: Vec<OwnedFd>,
}

/// Meets the other ranks. `number` and `file` are what rank 0 gives to all.
pub(crate) fn meet(meeting: &Meeting<'_>, number: u64, file: impl FnOnce() -> Result<OwnedFd>) -> Result<Gathering> {
    if meeting.run.len() + meeting.group.len() > MESSAGE / 2 {
        return meeting.fail("the job's run id is longer than 2000 bytes: choose a shorter TORCHELASTIC_RUN_ID");
    }
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|errno| meeting.os("opening a pidfd of this process", errno))?;
    if meeting.rank == 0 { host(meeting, number, file()?, own) } else { join(meeting, own) }
}

impl Meeting<'_> {
    fn key(&self) -> String {
        format!("{}\n{}", self.run, self.group)
    }

    fn address(&self) -> Result<SocketAddrUnix> {
        let mut hash = crate::hash::Hash::default();
        hash.bytes(self.key().as_bytes());
        let name = format!("fsdp-{}-{}-{:016x}", rustix::process::geteuid().as_raw(), self.port, hash.0);
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|errno| self.os("naming a socket", errno))
    }

    fn socket(&self) -> Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|errno| self.os("opening a socket", errno))
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::Rendezvous { rank: self.rank, message: message.into() }
    }

    fn fail<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(self.error(message))
    }

    fn os(&self, what: &str, errno: Errno) -> Error {
        Error::Os {
            rank: self.rank,
            what: format!("{what} to meet group \"{}\"", self.group),
            source: Arc::new(errno.into()),
        }
    }

    fn hello(&self) -> Vec<u8> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend((self.size as u32).to_le_bytes());
        hello.extend((self.rank as u32).to_le_bytes());
        hello.extend(self.key().as_bytes());
        hello
    }

    /// Who says hello, or `None` for a stranger.
    fn guest(&self, message: &[u8]) -> Option<Result<usize, String>> {
        let mut rest = message.strip_prefix(MAGIC)?;
        let mut number = || {
            let (head, tail) = rest.split_first_chunk()?;
            rest = tail;
            Some(u32::from_le_bytes(*head))
        };
        let (version, size, rank) = (number()?, number()?, number()?);
        if version != VERSION {
            return Some(Err(format!(
                "a rank of this job speaks version {version} of the protocol and rank 0 version {VERSION}: run the same build everywhere"
            )));
        }
        if rest != self.key().as_bytes() {
            return None;
        }
        let (rank, size) = (rank as usize, size as usize);
        Some(if size != self.size {
            Err(format!(
                "rank {rank} has a world size of {size} but rank 0 has {}: start all with the same WORLD_SIZE",
                self.size
            ))
        } else if rank == 0 || rank >= self.size {
            Err(format!("a second process says it is rank {rank} of {size}: give each process a RANK of its own"))
        } else {
            Ok(rank)
        })
    }
}

fn went_away(rank: usize) -> String {
    format!("rank {rank} went away again before all ranks were there")
}

fn is_same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// A rank that has said hello.
struct Guest {
    socket: OwnedFd,
    process: OwnedFd,
}

/// Rank 0's side.
fn host(meeting: &Meeting<'_>, number: u64, file: OwnedFd, own: OwnedFd) -> Result<Gathering> {
    let deadline = Instant::now() + meeting.timeout;
    let listener = listen(meeting, deadline)?;
    let mut guests: Vec<Option<Guest>> = (1..meeting.size).map(|_| None).collect();
    let mut strangers: Vec<OwnedFd> = Vec::new();
    let outcome = loop {
        let missing: Vec<_> = (1..meeting.size).filter(|rank| guests[rank - 1].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if let Err(error) = (meeting.all_well)() {
            break Err(error);
        }
        if Instant::now() >= deadline {
            let seconds = meeting.timeout.as_secs_f64();
            break meeting.fail(format!(
                "rank(s) {missing:?} did not arrive within {seconds:.1} s: are they running, on this host, with the same MASTER_PORT and run id?"
            ));
        }
        if let Err(text) = receive_guests(meeting, &listener, &mut strangers, &mut guests) {
            break meeting.fail(text);
        }
    };
    // Whoever comes now is too late.
    drop(listener);
    if let Err(error) = outcome {
        let text = match &error {
            Error::Rendezvous { message, .. } => message.clone(),
            other => other.to_string(),
        };
        for socket in strangers.iter().chain(guests.iter().flatten().map(|guest| &guest.socket)) {
            let _ = send(socket, &reply(1, 0, &text), &[]);
        }
        return Err(error);
    }
    let guests: Vec<_> = guests.into_iter().flatten().collect();
    let mut fds = vec![file.as_fd(), own.as_fd()];
    fds.extend(guests.iter().map(|guest| guest.process.as_fd()));
    let message = reply(0, number, "");
    for (index, guest) in guests.iter().enumerate() {
        send(&guest.socket, &message, &fds).map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => meeting.error(went_away(index + 1)),
            errno => meeting.os(&format!("sending the shared memory to rank {}", index + 1), errno),
        })?;
    }
    let processes = std::iter::once(own).chain(guests.into_iter().map(|guest| guest.process)).collect();
    Ok(Gathering { file, number, processes })
}

fn listen(meeting: &Meeting<'_>, deadline: Instant) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let listener = meeting.socket()?;
    // An earlier job's rank 0 may be about to close it.
    let deadline = deadline.min(Instant::now() + Duration::from_secs(2));
    loop {
        match rustix::net::bind(&listener, &address) {
            Ok(()) => break,
            Err(Errno::ADDRINUSE) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::ADDRINUSE) => {
                return meeting.fail(
                    "another process is rank 0 already: give each process a RANK of its own, and jobs that run side by side \
                     MASTER_PORTs or run ids of their own",
                );
            }
            Err(errno) => return Err(meeting.os("binding a socket", errno)),
        }
    }
    rustix::net::listen(&listener, meeting.size as i32).map_err(|errno| meeting.os("listening", errno))?;
    Ok(listener)
}

/// Waits a little for connections and messages and takes them in. The error is for all ranks.
fn receive_guests(
    meeting: &Meeting<'_>,
    listener: &OwnedFd,
    strangers: &mut Vec<OwnedFd>,
    guests: &mut [Option<Guest>],
) -> Result<(), String> {
    let seated: Vec<_> = (0..guests.len()).filter(|&index| guests[index].is_some()).collect();
    let ready: Vec<bool> = {
        let sockets =
            std::iter::once(listener).chain(strangers.iter()).chain(guests.iter().flatten().map(|guest| &guest.socket));
        let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        match rustix::event::poll(&mut fds, timespec(SLICE).as_ref()) {
            Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
            Err(_) => return Ok(()),
        }
    };
    let (strange, known) = ready[1..].split_at(strangers.len());
    if let Some((&index, _)) = seated.iter().zip(known).find(|(_, ready)| **ready) {
        // A seated guest has nothing more to say.
        return Err(went_away(index + 1));
    }
    let mut strange = strange.iter();
    let (speaking, silent): (Vec<_>, Vec<_>) =
        strangers.drain(..).partition(|_| strange.next().is_some_and(|&ready| ready));
    *strangers = silent;
    for socket in speaking {
        let Ok((message, mut fds)) = receive(&socket) else { continue };
        match meeting.guest(&message) {
            None => continue,
            Some(Err(text)) => {
                strangers.push(socket);
                return Err(text);
            }
            Some(Ok(rank)) => {
                let Some(process) = fds.pop() else { continue };
                let seat = &mut guests[rank - 1];
                if seat.is_some() {
                    strangers.push(socket);
                    return Err(format!("two processes say they are rank {rank}: give each process a RANK of its own"));
                }
                *seat = Some(Guest { socket, process });
            }
        }
    }
    if ready[0] && strangers.len() < meeting.size + STRANGERS {
        while let Ok(socket) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            if is_same_user(&socket) {
                strangers.push(socket);
            }
        }
    }
    Ok(())
}

/// The side of every other rank.
fn join(meeting: &Meeting<'_>, own: OwnedFd) -> Result<Gathering> {
    let socket = connect(meeting)?;
    if !is_same_user(&socket) {
        return meeting.fail("the process that answers for rank 0 belongs to another user");
    }
    match send(&socket, &meeting.hello(), &[own.as_fd()]) {
        // What rank 0 said before it hung up is still to be read.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(errno) => return Err(meeting.os("saying hello", errno)),
    }
    // Rank 0 answers when its own time is over, and it may have started later than this rank.
    let deadline = Instant::now() + meeting.timeout + Duration::from_secs(2);
    loop {
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        if rustix::event::poll(&mut fds, timespec(SLICE).as_ref()).is_ok_and(|ready| ready > 0) {
            break;
        }
        (meeting.all_well)()?;
        if Instant::now() >= deadline {
            return meeting.fail(format!("rank 0 did not answer within {:.1} s", meeting.timeout.as_secs_f64()));
        }
    }
    let (message, mut fds) = match receive(&socket) {
        Ok(received) => received,
        Err(Errno::CONNRESET) => Default::default(),
        Err(errno) => return Err(meeting.os("receiving rank 0's answer", errno)),
    };
    if message.is_empty() {
        (meeting.all_well)()?;
        return meeting.fail(went_away(0));
    }
    let Some((status, number, text)) = parse_reply(&message) else {
        return meeting.fail("rank 0 answered in another protocol: run the same build everywhere");
    };
    if status != 0 {
        return meeting.fail(format!("rank 0 says: {text}"));
    }
    if fds.len() != meeting.size + 1 {
        return meeting.fail(format!("rank 0 sent {} descriptors instead of {}", fds.len(), meeting.size + 1));
    }
    let processes = fds.split_off(1);
    match fds.pop() {
        Some(file) => Ok(Gathering { file, number, processes }),
        None => meeting.fail("rank 0 sent no shared memory"),
    }
}

fn connect(meeting: &Meeting<'_>) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let socket = meeting.socket()?;
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Nobody listens yet, or too many wait to be let in.
            Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(meeting.os("connecting to rank 0", errno)),
        }
        (meeting.all_well)()?;
        if started.elapsed() >= meeting.timeout {
            return meeting.fail(format!(
                "rank(s) [0] did not arrive within {:.1} s: is it running, on this host, with the same MASTER_PORT and run id?",
                meeting.timeout.as_secs_f64()
            ));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn reply(status: u32, number: u64, text: &str) -> Vec<u8> {
    let mut reply = MAGIC.to_vec();
    reply.extend(status.to_le_bytes());
    reply.extend(number.to_le_bytes());
    reply.extend(crate::text::shortened(text, MESSAGE / 2).as_bytes());
    reply
}

fn parse_reply(message: &[u8]) -> Option<(u32, u64, String)> {
    let rest = message.strip_prefix(MAGIC)?;
    let (status, rest) = rest.split_first_chunk()?;
    let (number, text) = rest.split_first_chunk()?;
    Some((u32::from_le_bytes(*status), u64::from_le_bytes(*number), String::from_utf8_lossy(text).into_owned()))
}

fn timespec(duration: Duration) -> Option<Timespec> {
    duration.try_into().ok()
}

fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// One message with the descriptors in it. Empty when the other side is gone.
fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
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
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    message.truncate(received.bytes);
    Ok((message, fds))
}
