//! How a rank tells its peers why it failed, so that all of them report the cause and not its echoes.

use std::time::Duration;

use super::{collective::Collective, membership::Membership};
use crate::{Error, text::shortened};

/// Why a rank takes part in its group no more, in a form that travels as bytes.
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
    /// The fewest bytes that a failure is cut to.
    pub const LEAST: usize = 256;

    /// What peers are told of an error of this rank.
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

    /// Whether it is that of a rank for which `rank` did not come.
    pub(crate) fn blames(&self, rank: usize) -> bool {
        matches!(&self.0, Why::Timeout { missing, .. } if missing.contains(&rank))
    }

    /// The error of a rank that was in `collective` when it learned that `peer` had failed so.
    pub fn into_error(self, collective: &Collective<'_>, peer: usize) -> Error {
        let Membership { rank, name, hosts, .. } = collective.group().clone();
        let group = name.into_boxed_str();
        match self.0 {
            Why::Mismatch { sequence, details, advice } => Error::Mismatch { rank, group, sequence, details, advice },
            Why::Timeout { missing, .. } if missing.contains(&rank) => {
                let missing = hosts.ranks(&missing);
                collective.lost(peer, format!("waited for this rank, which came too late: {missing} were missing"))
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

    /// The failure as at most `room` bytes, of which there are at least [`Failure::LEAST`]: shortened where it must be.
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
                // A rank takes eight bytes and leaves room for the text.
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

    /// Reads what [`Failure::to_bytes`] made. Whatever the bytes are, the answer is a failure.
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

    fn through(why: &Why) -> Why {
        let bytes = Failure(why.clone()).to_bytes(ROOM);
        assert!(bytes.len() <= ROOM);
        Failure::from_bytes(&bytes).0
    }

    #[test]
    fn every_kind_survives() {
        for failure in [
            Why::Mismatch { sequence: 7, details: "rank 0: this, rank 1: \u{2260}".into(), advice: ". Or".into() },
            Why::Timeout { what: "barrier".into(), missing: vec![1, 3], waited: Duration::from_millis(1500) },
            Why::PeerLost { what: "barrier".into(), peer: 2, how: "died".into() },
            Why::Other { text: "no".into() },
        ] {
            assert_eq!(through(&failure), failure);
        }
    }

    #[test]
    fn long_texts_are_cut_not_lost() {
        let Why::Other { text } = through(&Why::Other { text: "\u{2260}".repeat(3000) }) else {
            panic!("another kind")
        };
        assert!(text.len() > 900 && text.chars().all(|c| c == '\u{2260}'));
        let many = Why::Timeout { what: "x".repeat(3000), missing: (0..250).collect(), waited: Duration::ZERO };
        assert!(matches!(through(&many), Why::Timeout { missing, .. } if missing.len() == ROOM / 16));
    }

    proptest! {
        #[test]
        fn any_bytes_are_some_failure(bytes in proptest::collection::vec(any::<u8>(), 0..ROOM)) {
            Failure::from_bytes(&bytes);
        }
    }
}
