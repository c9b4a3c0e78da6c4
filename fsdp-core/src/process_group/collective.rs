//! A collective as its backend sees it: identity, comparison between ranks, and the errors that can end it.

use std::{fmt, time::Duration};

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
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the differences.
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

/// Sizes of an all-to-all's messages, which only senders and receivers know before ranks compare.
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
                        "rank {from} sends rank {to} another number of elements than rank {to} expects"
                    ));
                }
                longest = longest.max(rows[from][call::ROW * to + 2] as usize);
            }
        }
        Ok(Traffic { longest })
    }

    /// Returns the most bytes that one rank sends to another, with parts aligned to 64 bytes. 0 for collectives other
    /// than all-to-all.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// The reason why a rank left its group by an error, in a form that can be sent, so that all ranks report the cause.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure(Why);

#[derive(Clone, Debug, PartialEq)]
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
        let mut fields = Vec::new();
        let number = |n: usize| (n as u64).to_le_bytes();
        let texts: [&str; 2] = match &self.0 {
            Why::Mismatch { sequence, details, advice } => {
                fields.push(1);
                fields.extend(sequence.to_le_bytes());
                [details, advice]
            }
            Why::Timeout { what, missing, waited } => {
                fields.push(2);
                fields.extend((waited.as_millis() as u64).to_le_bytes());
                // Ranks may take half of the space, texts the rest.
                let missing = &missing[..missing.len().min(room / 16)];
                fields.extend(number(missing.len()));
                missing.iter().for_each(|&rank| fields.extend(number(rank)));
                [what, ""]
            }
            Why::PeerLost { what, peer, how } => {
                fields.push(3);
                fields.extend(number(*peer));
                [what, how]
            }
            Why::Other { text } => {
                fields.push(4);
                [text, ""]
            }
        };
        let room = (room - fields.len() - 16) / 2;
        for text in texts {
            let text = shortened(text, room);
            fields.extend(number(text.len()));
            fields.extend(text.as_bytes());
        }
        fields
    }

    /// Decodes the bytes of [`Failure::to_bytes`]. Bytes that cannot be decoded are a failure without a reason.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Failure(Why::parse(bytes).unwrap_or_else(|| Why::Other { text: "an unreadable reason".into() }))
    }
}

impl Why {
    fn parse(mut bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        bytes = rest;
        let mut number = || {
            let (head, rest) = bytes.split_first_chunk::<8>()?;
            bytes = rest;
            Some(u64::from_le_bytes(*head))
        };
        let failure = match kind {
            1 => Why::Mismatch { sequence: number()?, details: String::new(), advice: String::new() },
            2 => {
                let waited = Duration::from_millis(number()?);
                let count = number()?;
                let missing = (0..count).map(|_| number().map(|n| n as usize)).collect::<Option<_>>()?;
                Why::Timeout { what: String::new(), missing, waited }
            }
            3 => Why::PeerLost { peer: number()? as usize, what: String::new(), how: String::new() },
            4 => Why::Other { text: String::new() },
            _ => return None,
        };
        let mut text = || {
            let (head, rest) = bytes.split_first_chunk::<8>()?;
            let (text, rest) = rest.split_at_checked(u64::from_le_bytes(*head) as usize)?;
            bytes = rest;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        Some(match failure {
            Why::Mismatch { sequence, .. } => Why::Mismatch { sequence, details: text()?, advice: text()? },
            Why::Timeout { missing, waited, .. } => Why::Timeout { what: text()?, missing, waited },
            Why::PeerLost { peer, .. } => Why::PeerLost { what: text()?, peer, how: text()? },
            Why::Other { .. } => Why::Other { text: text()? },
        })
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
