//! How the processes of one host meet.
//!
//! Rank 0 listens on a Unix socket in the abstract namespace, which leaves no file behind, under a name that only ranks of the same user, port, job and
//! group derive. The others connect, say who they are, and hand over a pidfd of themselves. When all are there rank 0 sends each the shared file and
//! the pidfds of all. Both sides check that the other belongs to the same user.

mod message;
mod patience;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
    process::PidfdFlags,
};

pub(crate) use message::MOST_RANKS;
use message::{MAGIC, MESSAGE, parse_reply, receive, reply, send};

use self::patience::Patience;
use crate::{Error, Result};

const VERSION: u32 = 1;
/// How long to wait before looking whether all is well.
const SLICE: Duration = Duration::from_millis(50);
/// Connections beyond the number of ranks that may be open at a time.
const STRANGERS: usize = 64;

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
    pub(crate) group: &'a str,
    /// This rank in the group.
    pub(crate) rank: usize,
    /// The number of ranks in the group.
    pub(crate) size: usize,
    /// How long to wait for the others.
    pub(crate) timeout: Duration,
    /// Fails when there is a reason not to wait any longer.
    pub(crate) all_well: &'a dyn Fn() -> Result<()>,
    /// Whether the launcher says that a rank of the group has ended, with exit code 0.
    pub(crate) has_ended: &'a dyn Fn(usize) -> bool,
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
        return meeting.fail("the job's run id and the group's name take more than 2000 bytes: choose a shorter TORCHELASTIC_RUN_ID, or split groups less deep");
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

    /// Tells that this rank still waits, when it is time to.
    fn tell(&self, patience: &mut Patience, whom: impl FnOnce() -> String) {
        let Some(waited) = patience.is_due() else { return };
        let of = if self.group == crate::process_group::WORLD {
            String::new()
        } else {
            format!(" of group \"{}\"", self.group)
        };
        tracing::warn!(
            "rank {}{of} waits for {} at {}:{}, for {:.0} s now; it gives up after {:.0} s (FSDP_TIMEOUT_S)",
            self.rank,
            whom(),
            self.addr,
            self.port,
            waited.as_secs_f64(),
            self.timeout.as_secs_f64(),
        );
    }

    fn fail<T>(&self, message: impl Into<String>) -> Result<T> {
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
            "rank(s) {} ended with exit code 0 before they joined the others, and will not come: see what they printed, \
             and start the same program with the same arguments as every rank",
            listed(&ended)
        ))
    }

    fn os(&self, what: &str, errno: Errno) -> Error {
        if matches!(errno, Errno::MFILE | Errno::NFILE) {
            return self.error(format!("{what}: {TOO_MANY_FILES}"));
        }
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

/// A rank that has said hello.
struct Guest {
    socket: OwnedFd,
    process: OwnedFd,
}

/// Rank 0's side.
fn host(meeting: &Meeting<'_>, number: u64, file: OwnedFd, own: OwnedFd) -> Result<Gathering> {
    let started = Instant::now();
    let mut patience = Patience::default();
    let listener = listen(meeting)?;
    let mut guests: Vec<Option<Guest>> = (1..meeting.size).map(|_| None).collect();
    let mut strangers: Vec<OwnedFd> = Vec::new();
    let outcome = loop {
        let missing: Vec<_> = (1..meeting.size).filter(|rank| guests[rank - 1].is_none()).collect();
        if missing.is_empty() {
            break Ok(());
        }
        if let Err(error) = meeting.may_come(&missing) {
            break Err(error);
        }
        if started.elapsed() >= meeting.timeout {
            let seconds = meeting.timeout.as_secs_f64();
            break meeting.fail(format!(
                "rank(s) {missing:?} did not arrive within {seconds:.1} s: are they running, on this host, with the same MASTER_PORT and run id?"
            ));
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
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::INTR) if started.elapsed() < meeting.timeout => {
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
    Ok(Gathering { file, number, processes })
}

fn listen(meeting: &Meeting<'_>) -> Result<OwnedFd> {
    let address = meeting.address()?;
    let listener = meeting.socket()?;
    // An earlier job's rank 0 may be about to close it.
    let deadline = Instant::now() + meeting.timeout.min(Duration::from_secs(2));
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
    while ready[0] && strangers.len() < 2 * (meeting.size + STRANGERS) {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) if is_same_user(&socket) => strangers.push(socket),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) => return Err(format!("letting ranks in: {TOO_MANY_FILES}")),
            Err(_) => break,
        }
    }
    // Ranks speak as soon as they are connected: who has been silent longest keeps others out for nothing.
    strangers.drain(..strangers.len().saturating_sub(meeting.size + STRANGERS));
    Ok(())
}

/// The side of every other rank.
fn join(meeting: &Meeting<'_>, own: OwnedFd) -> Result<Gathering> {
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
    let (started, longest) = (Instant::now(), meeting.timeout.saturating_add(Duration::from_secs(2)));
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
    if fds.len() != meeting.size + 1 {
        return meeting.fail(format!("rank 0 sent {} descriptors instead of {}", fds.len(), meeting.size + 1));
    }
    let processes = fds.split_off(1);
    match fds.pop() {
        Some(file) => Ok(Gathering { file, number, processes }),
        None => meeting.fail("rank 0 sent no shared memory"),
    }
}

fn connect(meeting: &Meeting<'_>, patience: &mut Patience) -> Result<OwnedFd> {
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
        if started.elapsed() >= meeting.timeout {
            return meeting.fail(format!(
                "rank(s) [0] did not arrive within {:.1} s: is it running, on this host, with the same MASTER_PORT and run id?",
                meeting.timeout.as_secs_f64()
            ));
        }
        meeting.tell(patience, || "rank(s) 0".into());
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn timespec(duration: Duration) -> Option<Timespec> {
    duration.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends waits that should have ended long ago.
    fn all_well() -> Result<()> {
        static STARTED: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        if STARTED.elapsed() > Duration::from_secs(60) { Err(Error::Env("hung".into())) } else { Ok(()) }
    }

    fn meeting(group: &str, rank: usize, timeout: Duration) -> Meeting<'_> {
        let run = format!("unit test {}", std::process::id());
        Meeting {
            addr: "127.0.0.1",
            port: 1,
            run,
            group,
            rank,
            size: 2,
            timeout,
            all_well: &all_well,
            has_ended: &|_| false,
        }
    }

    /// Rank 0 and rank 1 meet, with `before` done between.
    fn two_meet(group: &str, timeout: Duration, before: impl FnOnce(&Meeting<'_>)) -> [Result<Gathering>; 2] {
        std::thread::scope(|scope| {
            let file = || Ok(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            let host = scope.spawn(move || meet(&meeting(group, 0, timeout), 7, file));
            let guest = meeting(group, 1, timeout);
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
        let host = meeting("hellos", 0, Duration::ZERO);
        let hello = |change: fn(&mut Meeting<'_>)| {
            let mut guest = meeting("hellos", 1, Duration::ZERO);
            change(&mut guest);
            host.guest(&guest.hello())
        };
        assert_eq!(hello(|_| ()), Some(Ok(1)));
        assert_eq!(hello(|guest| guest.group = "another"), None);
        for (said, part) in [
            (hello(|guest| guest.size = 3), "WORLD_SIZE"),
            (hello(|guest| guest.rank = 0), "RANK of its own"),
            (hello(|guest| guest.rank = usize::MAX), "RANK of its own"),
        ] {
            assert!(said.unwrap().unwrap_err().contains(part));
        }
        let whole = meeting("hellos", 1, Duration::ZERO).hello();
        assert!((0..whole.len()).all(|len| host.guest(&whole[..len]).is_none()));
    }
}
