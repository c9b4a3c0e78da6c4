//! A collective as its backend sees it: identity, comparison between ranks, and the errors that can end it.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    call::{self, Announcement, Call},
    mismatch,
    options::Membership,
    signature::Signature,
};
use crate::{Error, Result, text::shortened};

/// A collective that a group passes to its backend. Displays as in errors: `all_gather (collective 7)`.
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

    /// Returns the call.
    pub(super) fn call(&self) -> &'a Call {
        self.call
    }

    /// Returns the group that runs it.
    pub fn group(&self) -> &'a Membership {
        self.group
    }

    /// Returns its position in the group's order, from 0.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns whether the running thread also waits for it, so that its core has nothing else to do.
    pub fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Returns whether ranks learn from each other's announcements how much data moves.
    pub fn is_sized_by_peers(&self) -> bool {
        !self.call.row.is_empty()
    }

    /// Returns the length of an announcement, in bytes, in a group of `ranks` ranks.
    pub const fn announcement_len(ranks: usize) -> usize {
        call::FIXED + 8 * call::ROW * ranks
    }

    /// Writes this rank's announcement to the start of `to`, which must be long enough. Leaves the rest unchanged.
    pub fn announce(&self, to: &mut [u8]) {
        self.call.write(self.sequence, to);
    }

    /// Compares the announcements of all ranks. `announced` returns another rank's; it is not called for this rank.
    /// Returns the most bytes that one rank sends to another in an all-to-all, with parts aligned to 64 bytes, and 0
    /// for other collectives.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the differences.
    pub fn compare<'b>(&self, announced: impl Fn(usize) -> &'b [u8]) -> Result<usize> {
        let Membership { name, rank, size, .. } = self.group;
        let announcement = |peer| Announcement::new(announced(peer));
        let mut peers = (0..*size).filter(|peer| peer != rank);
        let disagreement = if peers.all(|peer| announcement(peer).is(self.sequence, self.call)) {
            if !self.is_sized_by_peers() {
                return Ok(0);
            }
            let own = &self.call.row;
            let row = |peer| if peer == *rank { own.clone() } else { announcement(peer).row(own.len()) };
            match longest_message(&(0..*size).map(row).collect::<Vec<_>>()) {
                Ok(longest) => return Ok(longest),
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

    /// Returns the error of a wait of length `waited` for the ranks `missing`.
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

    /// Returns the error of a wait for a rank that is gone. `how` is "died" or "left the group".
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

/// Returns the length of an all-to-all's longest message, given the rows of all ranks.
fn longest_message(rows: &[Vec<u64>]) -> Result<usize, String> {
    let mut longest = 0;
    for from in 0..rows.len() {
        for to in 0..rows.len() {
            if rows[from][call::ROW * to] != rows[to][call::ROW * from + 1] {
                return Err(format!("rank {from} sends rank {to} another number of elements than rank {to} expects"));
            }
            longest = longest.max(rows[from][call::ROW * to + 2] as usize);
        }
    }
    Ok(longest)
}

/// The reason why a rank left its group by an error, in a form that can be sent, so that all ranks report the cause.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure(Why);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Why {
    Mismatch { sequence: u64, details: String, advice: String },
    Timeout { what: String, missing: Vec<usize>, waited: Duration },
    PeerLost { what: String, peer: usize, how: String },
    Other { text: String },
}

impl Failure {
    /// The smallest limit on bytes that [`Failure::to_bytes`] keeps to.
    pub const LEAST: usize = 256;

    /// Creates the failure that peers receive for an error of this rank.
    pub fn of(error: &Error) -> Self {
        Failure(match error {
            Error::Mismatch { sequence, details, advice, .. } => {
                Why::Mismatch { sequence: *sequence, details: details.clone(), advice: advice.clone() }
            }
            Error::Timeout { what, missing, seconds, .. } => Why::Timeout {
                what: what.clone(),
                missing: missing.clone(),
                waited: Duration::try_from_secs_f64(*seconds).unwrap_or_default(),
            },
            Error::PeerLost { what, peer, how, .. } => {
                Why::PeerLost { what: what.clone(), peer: *peer, how: how.clone() }
            }
            other => Why::Other { text: other.to_string() },
        })
    }

    /// Returns whether the failed rank had waited for `rank` in vain.
    pub(crate) fn blames(&self, rank: usize) -> bool {
        matches!(&self.0, Why::Timeout { missing, .. } if missing.contains(&rank))
    }

    /// Returns the error of a rank that learned during `collective` that `peer` failed.
    pub fn into_error(self, collective: &Collective<'_>, peer: usize) -> Error {
        let Membership { rank, name, hosts, .. } = collective.group().clone();
        let group = name.into_boxed_str();
        match self.0 {
            Why::Mismatch { sequence, details, advice } => Error::Mismatch { rank, group, sequence, details, advice },
            Why::Timeout { missing, .. } if missing.contains(&rank) => {
                let missing = hosts.ranks(&missing);
                collective.lost(peer, format!("timed out waiting for this rank; missing: {missing}"))
            }
            Why::Timeout { what, missing, waited } => {
                Error::Timeout { rank, group, what, missing, hosts, seconds: waited.as_secs_f64() }
            }
            Why::PeerLost { what, peer, how } if peer != rank => {
                Error::PeerLost { rank, group, what, peer, hosts, how }
            }
            Why::PeerLost { how: text, .. } | Why::Other { text } => collective.lost(peer, format!("failed: {text}")),
        }
    }

    /// Encodes the failure in at most `room` bytes (at least [`Failure::LEAST`]), with shortened texts if necessary.
    pub fn to_bytes(&self, room: usize) -> Vec<u8> {
        let room = room.max(Self::LEAST);
        let mut most = room;
        loop {
            let bytes = serde_json::to_vec(&self.0.shortened(most)).unwrap_or_default();
            // Escaped characters take more than one byte.
            if bytes.len() <= room || most == 0 {
                return bytes;
            }
            most = most / 4 * 3;
        }
    }

    /// Decodes the bytes of [`Failure::to_bytes`]. Bytes that cannot be decoded are a failure without a reason.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Failure(serde_json::from_slice(bytes).unwrap_or_else(|_| Why::Other { text: "an unreadable reason".into() }))
    }
}

impl Why {
    /// Returns a copy that takes about `most` bytes: half of them for ranks or for each text.
    fn shortened(&self, most: usize) -> Self {
        let short = |text: &str| shortened(text, most / 2).to_owned();
        match self {
            Why::Mismatch { sequence, details, advice } => {
                Why::Mismatch { sequence: *sequence, details: short(details), advice: short(advice) }
            }
            Why::Timeout { what, missing, waited } => {
                let missing = missing.iter().take(most / 16).copied().collect();
                Why::Timeout { what: short(what), missing, waited: *waited }
            }
            Why::PeerLost { what, peer, how } => Why::PeerLost { what: short(what), peer: *peer, how: short(how) },
            Why::Other { text } => Why::Other { text: short(text) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOM: usize = 2048;

    fn round_trip(why: &Why) -> Why {
        let bytes = Failure(why.clone()).to_bytes(ROOM);
        assert!(bytes.len() <= ROOM);
        Failure::from_bytes(&bytes).0
    }

    #[test]
    fn failures_survive_encoding() {
        for failure in [
            Why::Mismatch { sequence: 7, details: "rank 0: this, rank 1: \u{2260}".into(), advice: ". Or".into() },
            Why::Timeout { what: "barrier".into(), missing: vec![1, 3], waited: Duration::from_millis(1500) },
            Why::PeerLost { what: "barrier".into(), peer: 2, how: "died".into() },
            Why::Other { text: "no".into() },
        ] {
            assert_eq!(round_trip(&failure), failure);
        }
    }

    #[test]
    fn long_texts_are_shortened() {
        let Why::Other { text } = round_trip(&Why::Other { text: "\u{2260}".repeat(3000) }) else {
            panic!("another kind")
        };
        assert!(text.len() > 900 && text.chars().all(|c| c == '\u{2260}'));
        let many = Why::Timeout { what: "x".repeat(3000), missing: (0..250).collect(), waited: Duration::ZERO };
        assert!(matches!(round_trip(&many), Why::Timeout { missing, .. } if missing.len() == ROOM / 16));
    }

    proptest! {
        #[test]
        fn any_bytes_decode(bytes in proptest::collection::vec(any::<u8>(), 0..ROOM)) {
            Failure::from_bytes(&bytes);
        }
    }
}
