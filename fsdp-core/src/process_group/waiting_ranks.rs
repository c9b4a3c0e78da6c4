//! The ranks of a host that wait to meet the others, by backend, and warnings while a rank waits.
//!
//! A waiting rank listens on a Unix socket in the abstract namespace. Its name follows from user, port, job, rank and
//! backend. Other ranks test by connecting. The socket closes when the rank stops waiting or ends.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
};

use crate::{RankEnv, hash::Hash};

/// The backends that need a rendezvous.
const BACKENDS: [&str; 3] = ["mpi", "shm", "tcp"];
/// How long another rank must wait with another backend before that is an error. A program may use both backends one
/// after the other, and ranks do not leave a rendezvous at the same moment.
const GRACE: Duration = Duration::from_secs(5);
/// Interval of checks of the other ranks.
const PERIOD: Duration = Duration::from_secs(1);

/// This rank's registration, and its view of the other ranks.
pub(super) struct WaitingRanks {
    env: RankEnv,
    backend: &'static str,
    /// `None` if the system refuses a socket. Other ranks then report this rank as missing.
    _own: Option<OwnedFd>,
    seen: Mutex<Seen>,
}

/// Result of the last check of the other ranks.
struct Seen {
    next: Instant,
    /// Since when a rank has waited with another backend.
    conflict_since: Option<Instant>,
}

impl WaitingRanks {
    /// Registers this rank, which is about to meet the others with `backend`.
    pub(super) fn register(env: &RankEnv, backend: &'static str) -> Self {
        let own = name(env, backend, env.rank).and_then(|name| {
            let socket = socket()?;
            rustix::net::bind(&socket, &name)?;
            rustix::net::listen(&socket, 16)?;
            Ok(socket)
        });
        let seen = Seen { next: Instant::now(), conflict_since: None };
        WaitingRanks { env: env.clone(), backend, _own: own.ok(), seen: Mutex::new(seen) }
    }

    /// Returns the ranks of this host that wait with a backend.
    fn registered(&self, backend: &str) -> Vec<usize> {
        let is_registered = |rank: &usize| {
            let Ok((socket, name)) = socket().and_then(|socket| Ok((socket, name(&self.env, backend, *rank)?))) else {
                return false;
            };
            match rustix::net::connect(&socket, &name) {
                Ok(()) => is_same_user(&socket),
                // The queue is full of earlier connections that nobody accepts.
                Err(Errno::AGAIN) => true,
                Err(_) => false,
            }
        };
        (0..self.env.world_size).filter(is_registered).collect()
    }

    /// Describes the ranks that have not reached `place`, as far as this host can tell.
    pub(super) fn missing(&self, place: &str) -> String {
        let here = self.registered(self.backend);
        let RankEnv { world_size, local_world_size, hosts, .. } = self.env;
        let absent: Vec<usize> = (0..world_size).filter(|rank| !here.contains(rank)).collect();
        match hosts {
            0 | 1 if absent.is_empty() => format!("all {world_size} ranks are in {place}, and it does not return"),
            0 | 1 => format!("rank(s) {absent:?} have not reached {place}"),
            _ if here.len() < local_world_size => {
                format!("of the {local_world_size} ranks on this host, only {here:?} have reached {place}")
            }
            _ => {
                format!("all {local_world_size} ranks on this host ({here:?}) are in {place}, ranks of others are not")
            }
        }
    }

    /// Returns an error message if ranks of this host wait with another backend. May be called often.
    pub(super) fn backend_conflict(&self) -> Option<String> {
        let mut seen = self.seen.lock();
        let now = Instant::now();
        if now < seen.next {
            return None;
        }
        seen.next = now + PERIOD;
        let elsewhere = BACKENDS.iter().filter(|other| **other != self.backend).find_map(|other| {
            let ranks = self.registered(other);
            (!ranks.is_empty()).then_some((other, ranks))
        });
        let Some((other, ranks)) = elsewhere else {
            seen.conflict_since = None;
            return None;
        };
        (*seen.conflict_since.get_or_insert(now) + GRACE <= now).then(|| {
            let own = self.backend;
            format!(
                "rank(s) {ranks:?} wait with the {other} backend, and this rank with {own}: set the same FSDP_BACKEND \
                 on all ranks"
            )
        })
    }
}

/// Opens a Unix socket for messages.
pub(super) fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Returns whether the peer's process has the user of this one.
pub(super) fn is_same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
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

/// Timer for warnings while a rank waits: after 5 s, 10 s, 20 s, and so on.
pub(super) struct WarningTimer {
    started: Instant,
    next: Duration,
}

impl Default for WarningTimer {
    fn default() -> Self {
        WarningTimer { started: Instant::now(), next: FIRST }
    }
}

impl WarningTimer {
    /// Returns how long the wait has lasted, if a warning is due.
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
        let first = WaitingRanks::register(&env("one host", 0, 1), "mpi");
        let second = WaitingRanks::register(&env("one host", 2, 1), "mpi");
        let _elsewhere = WaitingRanks::register(&env("another job", 1, 1), "mpi");
        // More checks than the socket's queue holds.
        for _ in 0..40 {
            assert_eq!(first.missing("MPI_Init"), "rank(s) [1, 3] have not reached MPI_Init");
        }
        drop(second);
        assert_eq!(first.missing("MPI_Init"), "rank(s) [1, 2, 3] have not reached MPI_Init");
    }

    #[test]
    fn ranks_of_other_hosts_are_counted() {
        let first = WaitingRanks::register(&env("two hosts", 0, 2), "mpi");
        assert_eq!(first.missing("MPI_Init"), "of the 2 ranks on this host, only [0] have reached MPI_Init");
        let _second = WaitingRanks::register(&env("two hosts", 1, 2), "mpi");
        let expected = "all 2 ranks on this host ([0, 1]) are in MPI_Init, ranks of others are not";
        assert_eq!(first.missing("MPI_Init"), expected);
    }

    #[test]
    fn waiting_with_another_backend_is_an_error() {
        let first = WaitingRanks::register(&env("mixed", 0, 1), "mpi");
        let other = WaitingRanks::register(&env("mixed", 1, 1), "shm");
        let look_again = |after: Option<Duration>| {
            let mut seen = first.seen.lock();
            seen.next = Instant::now();
            let ago = after.and_then(|after| Instant::now().checked_sub(after));
            seen.conflict_since = ago.or(seen.conflict_since);
        };
        assert_eq!(first.backend_conflict(), None, "it may be about to come");
        look_again(Some(GRACE));
        let why = first.backend_conflict().unwrap();
        assert!(why.contains("rank(s) [1] wait with the shm backend, and this rank with mpi"), "{why}");
        assert!(why.contains("FSDP_BACKEND"), "{why}");
        drop(other);
        look_again(Some(GRACE));
        assert_eq!(first.backend_conflict(), None);
        assert!(first.seen.lock().conflict_since.is_none());
    }

    #[test]
    fn it_is_told_at_doubling_intervals() {
        let mut timer = WarningTimer::default();
        let told: Vec<u64> =
            (0..100).filter(|&second| timer.is_due_after(Duration::from_secs(second)).is_some()).collect();
        assert_eq!(told, [5, 10, 20, 40, 80]);
        // A process that was stopped for long tells once.
        let mut timer = WarningTimer::default();
        let long = Duration::from_secs(1000);
        assert_eq!((timer.is_due_after(long), timer.is_due_after(long)), (Some(long), None));
    }
}
