//! Who meets whom, what ranks say of themselves, and the errors of a meeting.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use rustix::{
    event::Timespec,
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
};

use super::{
    super::super::{membership::Membership, patience::Patience},
    message::MAGIC,
};
use crate::{Error, Result, hash::Hash};

const VERSION: u32 = 2;
/// How long to wait before looking whether all is well.
pub(super) const SLICE: Duration = Duration::from_millis(50);

/// Descriptors that don't fit, in words.
pub(super) const TOO_MANY_FILES: &str =
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
pub(crate) struct Met {
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
    pub(super) fn may_come(&self, missing: &[usize]) -> Result<()> {
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

    pub(super) fn hello(&self) -> Vec<u8> {
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
pub(super) fn listed(ranks: &[usize]) -> String {
    const MOST: usize = 16;
    let shown: Vec<String> = ranks.iter().take(MOST).map(ToString::to_string).collect();
    match ranks.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

pub(super) fn went_away(rank: usize) -> String {
    format!("rank {rank} went away again before all ranks were there")
}

pub(super) fn is_same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

pub(super) fn timespec(duration: Duration) -> Option<Timespec> {
    duration.try_into().ok()
}
