//! A collective as its backend sees it: which one it is, what ranks compare of it, and the errors that end it.

use std::{fmt, time::Duration};

use super::{
    call::{self, Announcement, Call},
    membership::Membership,
    mismatch,
    signature::Signature,
};
use crate::{Error, Result};

/// A collective that a group hands to its backend.
///
/// As text it is what errors call it, such as `all_gather (collective 7)`.
#[derive(Clone, Copy, Debug)]
pub struct Collective<'a> {
    call: &'a Call,
    group: &'a Membership,
    sequence: u64,
    is_awaited: bool,
}

impl<'a> Collective<'a> {
    pub(super) fn new(call: &'a Call, group: &'a Membership, sequence: u64, is_awaited: bool) -> Self {
        Collective { call, group, sequence, is_awaited }
    }

    /// What was issued.
    pub(super) fn call(&self) -> &'a Call {
        self.call
    }

    /// The group that runs it.
    pub fn group(&self) -> &'a Membership {
        self.group
    }

    /// Its position in the group's order, from 0.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether the thread that runs it is the one that waits for it: the core has nothing else to do meanwhile.
    pub fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Whether ranks learn how much moves from each other's announcements only.
    pub fn is_sized_by_peers(&self) -> bool {
        !self.call.row.is_empty()
    }

    /// Bytes of an announcement in a group of `ranks` ranks.
    pub const fn announcement_len(ranks: usize) -> usize {
        call::FIXED + 8 * call::ROW * ranks
    }

    /// Writes what this rank announces of the collective to the start of `to`, which has room for it. What lies behind
    /// is left as it is.
    pub fn announce(&self, to: &mut [u8]) {
        self.call.write(self.sequence, to);
    }

    /// Compares what all ranks announced. `announced` tells what another rank wrote; this rank's own is not asked for.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when they differ, which says in what.
    pub fn compare<'b>(&self, announced: impl Fn(usize) -> &'b [u8]) -> Result<Traffic> {
        let Membership { name, rank, size, .. } = self.group;
        let announcement = |peer| Announcement::new(announced(peer));
        let mut peers = (0..*size).filter(|peer| peer != rank);
        let disagreement = if peers.all(|peer| announcement(peer).is(self.sequence, self.call)) {
            if !self.is_sized_by_peers() {
                return Ok(Traffic::default());
            }
            let own = &self.call.row;
            let row = |peer| if peer == *rank { own.clone() } else { announcement(peer).row(own.len()) };
            match Traffic::of(&(0..*size).map(row).collect::<Vec<_>>()) {
                Ok(traffic) => return Ok(traffic),
                Err(disagreement) => Some(disagreement),
            }
        } else {
            None
        };
        let mut own = vec![0; Self::announcement_len(*size)];
        self.announce(&mut own);
        let issued: Vec<_> =
            (0..*size).map(|peer| if peer == *rank { Announcement::new(&own) } else { announcement(peer) }).collect();
        let subject = self.call.signature().map(Signature::subject);
        Err(mismatch::error(*rank, name, self.sequence, &issued, subject, disagreement))
    }

    /// The error of a wait that took `waited` while the ranks `missing` did not come.
    pub fn timed_out(&self, missing: Vec<usize>, waited: Duration) -> Error {
        Error::Timeout {
            rank: self.group.rank,
            group: self.group.name.as_str().into(),
            what: self.to_string(),
            missing,
            hosts: self.group.hosts.clone(),
            seconds: waited.as_secs_f64(),
        }
    }

    /// The error of a wait for a rank that is gone; `how` is "died" or "left the group".
    pub fn lost(&self, peer: usize, how: impl Into<String>) -> Error {
        Error::PeerLost {
            rank: self.group.rank,
            group: self.group.name.as_str().into(),
            what: self.to_string(),
            peer,
            hosts: self.group.hosts.clone(),
            how: how.into(),
        }
    }
}

impl fmt::Display for Collective<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (collective {})", self.call.name, self.sequence)
    }
}

/// How much moves between the ranks of an all-to-all: what only sender and receiver know before they compare.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    longest: usize,
}

impl Traffic {
    fn of(rows: &[Vec<u64>]) -> Result<Self, String> {
        let mut longest = 0;
        for from in 0..rows.len() {
            for to in 0..rows.len() {
                if rows[from][call::ROW * to] != rows[to][call::ROW * from + 1] {
                    return Err(format!(
                        "what rank {from} sends to rank {to} is not as many elements as rank {to} expects from it"
                    ));
                }
                longest = longest.max(rows[from][call::ROW * to + 2] as usize);
            }
        }
        Ok(Traffic { longest })
    }

    /// The most bytes that a rank sends to another, where each part begins at a multiple of 64 bytes behind the one
    /// before; 0 but for an all-to-all.
    pub fn longest(&self) -> usize {
        self.longest
    }
}
