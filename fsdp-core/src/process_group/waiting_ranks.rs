//! Lists the ranks of a host that wait to meet the others, and their backends: all that a rank sees before it meets.
//!
//! A rank that waits holds a Unix socket in the abstract namespace, whose name follows from the user, the port, the
//! job, the rank and the backend. Other ranks try to connect to it. The socket goes when the rank stops waiting, or
//! ends.
//! When a rank that waits tells so: not at once, and ever more rarely.

use parking_lot::Mutex;
use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
};

use crate::{RankEnv, hash::Hash};

/// The backends that meet.
const BACKENDS: [&str; 2] = ["mpi", "shm"];
/// How long another rank has to wait by another backend before that counts: a program may meet by one and then by the
/// other, and ranks do not end a meeting at the same moment.
const GRACE: Duration = Duration::from_secs(5);
/// The time between two looks at the other ranks.
const PERIOD: Duration = Duration::from_secs(1);

/// This rank's entry, and its view of the others'.
pub(super) struct Roll {
    env: RankEnv,
    backend: &'static str,
    /// `None` where the system refuses one: the others then count this rank as missing.
    _own: Option<OwnedFd>,
    seen: Mutex<Seen>,
}

/// Result of the last look at the other ranks.
struct Seen {
    next: Instant,
    /// Since when some rank waits by another backend.
    strangers_since: Option<Instant>,
}

impl Roll {
    /// Enters this rank, which is about to meet the others by `backend`.
    pub(super) fn enter(env: &RankEnv, backend: &'static str) -> Self {
        let own = name(env, backend, env.rank).and_then(|name| {
            let socket = socket()?;
            rustix::net::bind(&socket, &name)?;
            rustix::net::listen(&socket, 16)?;
            Ok(socket)
        });
        let seen = Seen { next: Instant::now(), strangers_since: None };
        Roll { env: env.clone(), backend, _own: own.ok(), seen: Mutex::new(seen) }
    }

    /// The ranks of this host that wait to meet by a backend.
    fn entered(&self, backend: &str) -> Vec<usize> {
        let is_entered = |rank: &usize| {
            let Ok((socket, name)) = socket().and_then(|socket| Ok((socket, name(&self.env, backend, *rank)?))) else {
                return false;
            };
            match rustix::net::connect(&socket, &name) {
                Ok(()) => socket_peercred(&socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid()),
                // Nobody accepts: so many ranks have asked before.
                Err(Errno::AGAIN) => true,
                Err(_) => false,
            }
        };
        (0..self.env.world_size).filter(is_entered).collect()
    }

    /// Says which ranks this one has waited for, as far as a host can tell, in a message's words. `place` is what they
    /// have not come to.
    pub(super) fn missing(&self, place: &str) -> String {
        let here = self.entered(self.backend);
        let RankEnv { world_size, local_world_size, hosts, .. } = self.env;
        let absent: Vec<usize> = (0..world_size).filter(|rank| !here.contains(rank)).collect();
        match hosts {
            0 | 1 if absent.is_empty() => format!("all {world_size} ranks are in {place}, and it does not return"),
            0 | 1 => format!("rank(s) {absent:?} have not come to {place}"),
            _ if here.len() < local_world_size => {
                format!("of the {local_world_size} ranks on this host, only {here:?} have come to {place}")
            }
            _ => {
                format!("all {local_world_size} ranks on this host ({here:?}) are in {place}, ranks of others are not")
            }
        }
    }

    /// Says why waiting is in vain, if it is: ranks of this host wait by another backend. May be called often.
    pub(super) fn in_vain(&self) -> Option<String> {
        let mut seen = self.seen.lock();
        let now = Instant::now();
        if now < seen.next {
            return None;
        }
        seen.next = now + PERIOD;
        let elsewhere = BACKENDS.iter().filter(|other| **other != self.backend).find_map(|other| {
            let ranks = self.entered(other);
            (!ranks.is_empty()).then_some((other, ranks))
        });
        let Some((other, ranks)) = elsewhere else {
            seen.strangers_since = None;
            return None;
        };
        (*seen.strangers_since.get_or_insert(now) + GRACE <= now).then(|| {
            let own = self.backend;
            format!(
                "rank(s) {ranks:?} wait for the others by the {other} backend, and this rank by {own}: they never \
                 meet. Set the same FSDP_BACKEND on all ranks"
            )
        })
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn name(env: &RankEnv, backend: &str, rank: usize) -> Result<SocketAddrUnix, Errno> {
    let mut hash = Hash::default();
    hash.bytes(env.run_id.as_bytes());
    hash.number(u64::from(env.attempt));
    hash.number(env.world_size as u64);
    let (user, port) = (rustix::process::geteuid().as_raw(), env.master_port);
    let name = format!("fsdp-roll-{user}-{port}-{:016x}-{backend}-{rank}", hash.value());
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

const FIRST: Duration = Duration::from_secs(5);

/// A wait that goes on.
pub(super) struct Patience {
    started: Instant,
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { started: Instant::now(), next: FIRST }
    }
}

impl Patience {
    /// How long it has been, when it is time to tell: after 5 s, 10 s, 20 s, and so on.
    pub(super) fn is_due(&mut self) -> Option<Duration> {
        self.is_due_after(self.started.elapsed())
    }

    fn is_due_after(&mut self, waited: Duration) -> Option<Duration> {
        if waited < self.next {
            return None;
        }
        while self.next <= waited {
            self.next = self.next.saturating_mul(2);
        }
        Some(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(test: &str, rank: usize, hosts: usize) -> RankEnv {
        let run_id = format!("roll {test} {}", std::process::id());
        RankEnv { rank, world_size: 4, local_world_size: 4 / hosts, hosts, run_id, ..RankEnv::single() }
    }

    #[test]
    fn ranks_that_have_not_come_are_named() {
        let first = Roll::enter(&env("one host", 0, 1), "mpi");
        let second = Roll::enter(&env("one host", 2, 1), "mpi");
        let _elsewhere = Roll::enter(&env("another job", 1, 1), "mpi");
        // More looks than an entry's queue holds.
        for _ in 0..40 {
            assert_eq!(first.missing("MPI_Init"), "rank(s) [1, 3] have not come to MPI_Init");
        }
        drop(second);
        assert_eq!(first.missing("MPI_Init"), "rank(s) [1, 2, 3] have not come to MPI_Init");
    }

    #[test]
    fn a_host_that_waits_for_another_says_so() {
        let first = Roll::enter(&env("two hosts", 0, 2), "mpi");
        assert_eq!(first.missing("MPI_Init"), "of the 2 ranks on this host, only [0] have come to MPI_Init");
        let _second = Roll::enter(&env("two hosts", 1, 2), "mpi");
        let expected = "all 2 ranks on this host ([0, 1]) are in MPI_Init, ranks of others are not";
        assert_eq!(first.missing("MPI_Init"), expected);
    }

    #[test]
    fn ranks_that_stay_with_another_backend_are_an_error() {
        let first = Roll::enter(&env("mixed", 0, 1), "mpi");
        let other = Roll::enter(&env("mixed", 1, 1), "shm");
        let look_again = |after: Option<Duration>| {
            let mut seen = first.seen.lock();
            seen.next = Instant::now();
            let ago = after.and_then(|after| Instant::now().checked_sub(after));
            seen.strangers_since = ago.or(seen.strangers_since);
        };
        assert_eq!(first.in_vain(), None, "it may be about to come");
        look_again(Some(GRACE));
        let why = first.in_vain().unwrap();
        assert!(why.contains("rank(s) [1] wait for the others by the shm backend, and this rank by mpi"), "{why}");
        assert!(why.contains("FSDP_BACKEND"), "{why}");
        drop(other);
        look_again(Some(GRACE));
        assert_eq!(first.in_vain(), None);
        assert!(first.seen.lock().strangers_since.is_none());
    }

    #[test]
    fn it_is_told_at_doubling_intervals() {
        let mut patience = Patience::default();
        let told: Vec<u64> =
            (0..100).filter(|&second| patience.is_due_after(Duration::from_secs(second)).is_some()).collect();
        assert_eq!(told, [5, 10, 20, 40, 80]);
        // A process that was stopped for long tells once.
        let mut patience = Patience::default();
        let long = Duration::from_secs(1000);
        assert_eq!((patience.is_due_after(long), patience.is_due_after(long)), (Some(long), None));
    }
}
