//! How the processes of one host meet.
//!
//! Rank 0 listens on a Unix socket in the abstract namespace, which leaves no file behind, under a name that only ranks
//! of the same user, port, job and group derive. The others connect, say who they are, and hand over a pidfd of
//! themselves. When all are there rank 0 sends each the shared file and the pidfds of all. Both sides check that the
//! other belongs to the same user.
//! Who meets whom, what ranks say of themselves, and the errors of a meeting.

//! The messages of a meeting, and sending them with descriptors.

//! Rank 0's side of a meeting: it lets the others in.

//! The side of every rank but rank 0: it asks to be let in.

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

use super::super::{options::Membership, waiting_ranks::Patience};
use crate::{Error, Result, hash::Hash};

/// Meets the other ranks. `number` and `file` are what rank 0 gives to all.
pub(super) fn meet(meeting: &Meeting<'_>, number: u64, file: impl FnOnce() -> Result<OwnedFd>) -> Result<Met> {
    if meeting.run.len() + meeting.group.name.len() > MESSAGE / 2 {
        return meeting.fail(
            "the job's run id and the group's name take more than 2000 bytes: choose a shorter \
                             TORCHELASTIC_RUN_ID, or split groups less deep",
        );
    }
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|errno| meeting.os("opening a pidfd of this process", errno))?;
    if meeting.group.rank == 0 { host(meeting, number, file()?, own) } else { join(meeting, own) }
}

const VERSION: u32 = 2;
/// How long to wait before looking whether all is well.
pub(super) const SLICE: Duration = Duration::from_millis(50);

/// Descriptors that don't fit, in words.
const TOO_MANY_FILES: &str =
    "too many files are open (each group needs one a rank): raise the limit, such as by `ulimit -n 65536`";

/// Who meets whom.
pub(crate) struct Meeting<'a> {
    /// The job's `MASTER_ADDR`, for messages.
    pub(crate) addr: &'a str,
    /// The job's `MASTER_PORT`.
    pub(crate) port: u16,
    /// What tells this job from others.
    pub(crate) run: String,
    /// The group to be made.
    pub(crate) group: &'a Membership,
    /// Fails when there is a reason not to wait any longer.
    pub(crate) all_well: &'a dyn Fn() -> Result<()>,
    /// Whether the launcher says that a rank of the group has ended, with exit code 0.
    pub(crate) has_ended: &'a dyn Fn(usize) -> bool,
}

/// What the ranks share after they met.
struct Met {
    /// The file that rank 0 made.
    pub(crate) file: OwnedFd,
    /// The number that rank 0 passed.
    pub(crate) number: u64,
    /// A pidfd of each rank.
    pub(crate) processes: Vec<OwnedFd>,
}

impl Meeting<'_> {
    pub(super) fn key(&self) -> String {
        format!("{}\n{}", self.run, self.group.name)
    }

    pub(super) fn address(&self) -> Result<SocketAddrUnix> {
        let mut hash = Hash::default();
        hash.bytes(self.key().as_bytes());
        let name = format!("fsdp-{}-{}-{:016x}", rustix::process::geteuid().as_raw(), self.port, hash.value());
        SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|errno| self.os("naming a socket", errno))
    }

    pub(super) fn socket(&self) -> Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|errno| self.os("opening a socket", errno))
    }

    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        Error::Rendezvous { rank: self.group.rank, message: message.into() }
    }

    /// Tells that this rank still waits, when it is time to.
    pub(super) fn tell(&self, patience: &mut Patience, whom: impl FnOnce() -> String) {
        let Some(waited) = patience.is_due() else { return };
        let of = if self.group.is_world() { String::new() } else { format!(" of group \"{}\"", self.group.name) };
        tracing::warn!(
            "rank {}{of} waits for {} at {}:{}, for {:.0} s now; it gives up after {:.0} s (FSDP_TIMEOUT_S)",
            self.group.rank,
            whom(),
            self.addr,
            self.port,
            waited.as_secs_f64(),
            self.group.timeout.as_secs_f64(),
        );
    }

    pub(super) fn fail<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(self.error(message))
    }

    /// Fails when there is a reason not to wait any longer for `missing`: nobody who has ended comes.
    ///
    /// Who has met a rank that has ended, and who has not, only rank 0 knows; the others ask for rank 0 alone.
    fn may_come(&self, missing: &[usize]) -> Result<()> {
        (self.all_well)()?;
        let ended: Vec<usize> = missing.iter().copied().filter(|&rank| (self.has_ended)(rank)).collect();
        if ended.is_empty() {
            return Ok(());
        }
        self.fail(format!(
            "rank(s) {} ended with exit code 0 before they joined the others, and will not come: see what they \
             printed, \
             and start the same program with the same arguments as every rank",
            listed(&ended)
        ))
    }

    pub(super) fn os(&self, what: &str, errno: Errno) -> Error {
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            return self.error(format!("{what}: {TOO_MANY_FILES}"));
        }
        Error::Os {
            rank: self.group.rank,
            what: format!("{what} to meet group \"{}\"", self.group.name),
            source: Arc::new(errno.into()),
        }
    }

    fn hello(&self) -> Vec<u8> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend((self.group.size as u32).to_le_bytes());
        hello.extend((self.group.rank as u32).to_le_bytes());
        hello.extend(self.key().as_bytes());
        hello
    }

    /// Who says hello, or `None` for a stranger.
    pub(super) fn guest(&self, message: &[u8]) -> Option<Result<usize, String>> {
        let mut rest = message.strip_prefix(MAGIC)?;
        let mut number = || {
            let (head, tail) = rest.split_first_chunk()?;
            rest = tail;
            Some(u32::from_le_bytes(*head))
        };
        let (version, size, rank) = (number()?, number()?, number()?);
        if version != VERSION {
            return Some(Err(format!(
                "a rank of this job speaks version {version} of the protocol and rank 0 version {VERSION}: run the \
                 same build everywhere"
            )));
        }
        if rest != self.key().as_bytes() {
            return None;
        }
        let (rank, size) = (rank as usize, size as usize);
        Some(if size != self.group.size {
            Err(format!(
                "rank {rank} has a world size of {size} but rank 0 has {}: start all with the same WORLD_SIZE",
                self.group.size
            ))
        } else if rank == 0 || rank >= self.group.size {
            Err(format!("a second process says it is rank {rank} of {size}: give each process a RANK of its own"))
        } else {
            Ok(rank)
        })
    }
}

/// Numbers with commas; of many, the first ones.
fn listed(ranks: &[usize]) -> String {
    const MOST: usize = 16;
    let shown: Vec<String> = ranks.iter().take(MOST).map(ToString::to_string).collect();
    match ranks.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn went_away(rank: usize) -> String {
    format!("rank {rank} went away again before all ranks were there")
}

fn is_same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

fn timespec(duration: Duration) -> Option<Timespec> {
    duration.try_into().ok()
}

/// The most ranks: the kernel passes at most 253 descriptors in a message, and one is the shared file.
pub(crate) const MOST_RANKS: usize = 252;
/// How every message begins.
pub(super) const MAGIC: &[u8; 8] = b"FSDPSHM\n";
/// The longest message.
const MESSAGE: usize = 4096;

/// Rank 0's answer: a status (0 for good), a number and a text.
pub(super) fn reply(status: u32, number: u64, text: &str) -> Vec<u8> {
    let mut reply = MAGIC.to_vec();
    reply.extend(status.to_le_bytes());
    reply.extend(number.to_le_bytes());
    reply.extend(crate::text::shortened(text, MESSAGE / 2).as_bytes());
    reply
}

/// What [`reply`] made.
fn parse_reply(message: &[u8]) -> Option<(u32, u64, String)> {
    let rest = message.strip_prefix(MAGIC)?;
    let (status, rest) = rest.split_first_chunk()?;
    let (number, text) = rest.split_first_chunk()?;
    Some((u32::from_le_bytes(*status), u64::from_le_bytes(*number), String::from_utf8_lossy(text).into_owned()))
}

/// Sends one message with descriptors in it.
pub(super) fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RANKS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// One message with the descriptors in it. Empty when the other side is gone.
pub(super) fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    match receive_once(socket) {
        // The other side is gone without having read all that it was sent. What it said before comes after this error.
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
    // There is room for all descriptors that fit a message, unless this process has too many.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    message.truncate(received.bytes);
    Ok((message, fds))
}

/// Connections beyond the number of ranks that may be open at a time.
const STRANGERS: usize = 64;

/// A rank that has said hello.
struct Guest {
    socket: OwnedFd,
    process: OwnedFd,
}

/// Waits for all others and gives each what they share.
pub(super) fn host(meeting: &Meeting<'_>, number: u64, file: OwnedFd, own: OwnedFd) -> Result<Met> {
    let started = Instant::now();
    let mut patience = Patience::default();
    let listener = listen(meeting)?;
    let mut guests: Vec<Option<Guest>> = (1..meeting.group.size).map(|_| None).collect();
    let mut strangers: Vec<OwnedFd> = Vec::new();
    let outcome = loop {
        let missing: Vec<_> = (1..meeting.group.size).filter(|rank| guests[rank - 1].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if let Err(error) = meeting.may_come(&missing) {
            break Err(error);
        }
        if started.elapsed() >= meeting.group.timeout {
            let seconds = meeting.group.timeout.as_secs_f64();
            let advice = match meeting.group.is_world() {
                true => "are they running, on this host, with the same MASTER_PORT and run id?",
                false => "are they running, and do they share this host's memory and network?",
            };
            break meeting.fail(format!("rank(s) {missing:?} did not arrive within {seconds:.1} s: {advice}"));
        }
        meeting.tell(&mut patience, || format!("rank(s) {}", listed(&missing)));
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
        let sent = loop {
            match send(&guest.socket, &message, &fds) {
                // The kernel limits how many descriptors are on their way: the guests before have to take theirs.
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::INTR) if started.elapsed() < meeting.group.timeout => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent => break sent,
            }
        };
        sent.map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => meeting.error(went_away(index + 1)),
            errno => meeting.os(&format!("sending the shared memory to rank {}", index + 1), errno),
        })?;
    }
    let processes = std::iter::once(own).chain(guests.into_iter().map(|guest| guest.process)).collect();
    Ok(Met { file, number, processes })
}

fn listen(meeting: &Meeting<'_>) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let listener = meeting.socket()?;
    // An earlier job's rank 0 may be about to close it.
    let deadline = Instant::now() + meeting.group.timeout.min(Duration::from_secs(2));
    loop {
        match rustix::net::bind(&listener, &address) {
            Ok(()) => break,
            Err(Errno::ADDRINUSE) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::ADDRINUSE) => {
                return meeting.fail(
                    "another process is rank 0 already: give each process a RANK of its own, and jobs that run side \
                     by side \
                     MASTER_PORTs or run ids of their own",
                );
            }
            Err(errno) => return Err(meeting.os("binding a socket", errno)),
        }
    }
    rustix::net::listen(&listener, meeting.group.size as i32).map_err(|errno| meeting.os("listening", errno))?;
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
        let (message, mut fds) = match receive(&socket) {
            Ok(received) => received,
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("letting ranks in: {TOO_MANY_FILES}")),
            Err(_) => continue,
        };
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
    while ready[0] && strangers.len() < 2 * (meeting.group.size + STRANGERS) {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) if is_same_user(&socket) => strangers.push(socket),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("letting ranks in: {TOO_MANY_FILES}")),
            Err(_) => break,
        }
    }
    // Ranks speak as soon as they are connected: who has been silent longest keeps others out for nothing.
    strangers.drain(..strangers.len().saturating_sub(meeting.group.size + STRANGERS));
    Ok(())
}

/// Meets rank 0, and through it the others.
pub(super) fn join(meeting: &Meeting<'_>, own: OwnedFd) -> Result<Met> {
    let mut patience = Patience::default();
    let socket = connect(meeting, &mut patience)?;
    if !is_same_user(&socket) {
        return meeting.fail("the process that answers for rank 0 belongs to another user");
    }
    match send(&socket, &meeting.hello(), &[own.as_fd()]) {
        // What rank 0 said before it hung up is still to be read.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(errno) => return Err(meeting.os("saying hello", errno)),
    }
    // Rank 0 answers when its own time is over, and it may have started later than this rank.
    let (started, longest) = (Instant::now(), meeting.group.timeout.saturating_add(Duration::from_secs(2)));
    loop {
        let mut fds = [PollFd::new(&socket, PollFlags::IN)];
        if rustix::event::poll(&mut fds, timespec(SLICE).as_ref()).is_ok_and(|ready| ready > 0) {
            break;
        }
        (meeting.all_well)()?;
        if started.elapsed() >= longest {
            return meeting.fail(format!(
                "rank 0 did not answer within {:.1} s: is it stopped? Otherwise raise FSDP_TIMEOUT_S",
                longest.as_secs_f64()
            ));
        }
        meeting.tell(&mut patience, || "the ranks that rank 0 has not met yet".into());
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
    if fds.len() != meeting.group.size + 1 {
        return meeting.fail(format!("rank 0 sent {} descriptors instead of {}", fds.len(), meeting.group.size + 1));
    }
    let processes = fds.split_off(1);
    match fds.pop() {
        Some(file) => Ok(Met { file, number, processes }),
        None => meeting.fail("rank 0 sent no shared memory"),
    }
}

/// A connection to rank 0, which may not be there yet.
pub(super) fn connect(meeting: &Meeting<'_>, patience: &mut Patience) -> Result<OwnedFd> {
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
        meeting.may_come(&[0])?;
        if started.elapsed() >= meeting.group.timeout {
            return meeting.fail(format!(
                "rank(s) [0] did not arrive within {:.1} s: is it running, on this host, with the same MASTER_PORT \
                 and run id?",
                meeting.group.timeout.as_secs_f64()
            ));
        }
        meeting.tell(patience, || "rank(s) 0".into());
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::super::super::{options::Membership, waiting_ranks::Patience};
    use crate::Error;

    /// Ends waits that should have ended long ago.
    fn all_well() -> Result<()> {
        static STARTED: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        if STARTED.elapsed() > Duration::from_secs(60) { Err(Error::Env("hung".into())) } else { Ok(()) }
    }

    fn group(name: &str, rank: usize, timeout: Duration) -> Membership {
        Membership { name: name.into(), rank, size: 2, ..Membership::world(rank, 2, timeout) }
    }

    fn meeting(group: &Membership) -> Meeting<'_> {
        let run = format!("unit test {}", std::process::id());
        Meeting { addr: "127.0.0.1", port: 1, run, group, all_well: &all_well, has_ended: &|_| false }
    }

    /// Rank 0 and rank 1 meet, with `before` done between.
    fn two_meet(name: &str, timeout: Duration, before: impl FnOnce(&Meeting<'_>)) -> [Result<Met>; 2] {
        std::thread::scope(|scope| {
            let file = || Ok(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            let host = scope.spawn(move || meet(&meeting(&group(name, 0, timeout)), 7, file));
            let guest = group(name, 1, timeout);
            let guest = meeting(&guest);
            before(&guest);
            let guest = meet(&guest, 0, || unreachable!("rank 0 makes the file"));
            [host.join().unwrap(), guest]
        })
    }

    #[test]
    fn the_longest_timeout_is_no_overflow() {
        for met in two_meet("longest", Duration::MAX, |_| ()) {
            let met = met.unwrap();
            assert_eq!((met.number, met.processes.len()), (7, 2));
        }
    }

    #[test]
    fn strangers_who_say_nothing_or_nonsense_keep_nobody_out() {
        let mut strangers = Vec::new();
        let met = two_meet("strangers", Duration::from_secs(30), |guest| {
            for index in 0..3 * STRANGERS {
                let stranger = connect(guest, &mut Patience::default()).unwrap();
                let nonsense: [&[u8]; 4] = [&[], MAGIC, &[0xff; MESSAGE], &guest.hello()[..20]];
                // Every second one is silent. Rank 0 may have hung up already.
                if index % 2 == 0 {
                    let _ = send(&stranger, nonsense[index / 2 % 4], &[]);
                }
                strangers.push(stranger);
            }
        });
        for met in met {
            assert_eq!(met.unwrap().number, 7);
        }
    }

    #[test]
    fn hellos_of_strangers_are_told_from_those_of_ranks_that_disagree() {
        let host = group("hellos", 0, Duration::ZERO);
        let host = meeting(&host);
        let hello = |change: fn(&mut Membership)| {
            let mut guest = group("hellos", 1, Duration::ZERO);
            change(&mut guest);
            host.guest(&meeting(&guest).hello())
        };
        assert_eq!(hello(|_| ()), Some(Ok(1)));
        assert_eq!(hello(|guest| guest.name = "another".into()), None);
        for (said, part) in [
            (hello(|guest| guest.size = 3), "WORLD_SIZE"),
            (hello(|guest| guest.rank = 0), "RANK of its own"),
            (hello(|guest| guest.rank = usize::MAX), "RANK of its own"),
        ] {
            assert!(said.unwrap().unwrap_err().contains(part));
        }
        let whole = meeting(&group("hellos", 1, Duration::ZERO)).hello();
        assert!((0..whole.len()).all(|len| host.guest(&whole[..len]).is_none()));
    }

    #[test]
    fn what_somebody_said_before_hanging_up_unread_is_heard() {
        let (flags, kind) = (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, SocketType::SEQPACKET);
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        send(&one, b"never read", &[]).unwrap();
        send(&other, &reply(1, 0, "why"), &[]).unwrap();
        drop(other);
        let (message, _) = receive(&one).unwrap();
        assert_eq!(parse_reply(&message), Some((1, 0, "why".to_string())));
        assert!(receive(&one).unwrap().0.is_empty());
    }
}
