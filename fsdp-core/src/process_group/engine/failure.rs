//! How a rank tells its peers why it failed, so that all of them report the cause and not its echoes.

use std::{
    sync::atomic::{AtomicU8, AtomicU32, Ordering},
    time::Duration,
};

use super::segment::{Control, RECORD};
use crate::{Error, text::shortened};

/// A failure in a form that fits a control block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    Mismatch { sequence: u64, details: String, advice: String },
    Timeout { what: String, missing: Vec<usize>, waited: Duration },
    PeerLost { what: String, peer: usize, how: String },
    Other { text: String },
}

impl Failure {
    /// What peers are told of an error of this rank.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::Mismatch { sequence, details, advice, .. } => {
                Failure::Mismatch { sequence: *sequence, details: details.clone(), advice: advice.clone() }
            }
            Error::Timeout { what, missing, seconds, .. } => Failure::Timeout {
                what: what.clone(),
                missing: missing.clone(),
                waited: Duration::try_from_secs_f64(*seconds).unwrap_or_default(),
            },
            Error::PeerLost { what, peer, how, .. } => {
                Failure::PeerLost { what: what.clone(), peer: *peer, how: how.clone() }
            }
            other => Failure::Other { text: other.to_string() },
        }
    }

    /// The error of `rank`, which was in `what` when it learned that `peer` had failed so.
    pub(crate) fn into_error(self, rank: usize, group: &str, what: &str, peer: usize) -> Error {
        let group = group.to_string();
        match self {
            Failure::Mismatch { sequence, details, advice } => {
                Error::Mismatch { rank, group, sequence, details, advice }
            }
            Failure::Timeout { missing, .. } if missing.contains(&rank) => Error::PeerLost {
                rank,
                group,
                what: what.to_string(),
                peer,
                how: format!("waited for this rank, which came too late: rank(s) {missing:?} were missing"),
            },
            Failure::Timeout { what, missing, waited } => {
                Error::Timeout { rank, group, what, missing, seconds: waited.as_secs_f64() }
            }
            Failure::PeerLost { what, peer, how } if peer != rank => Error::PeerLost { rank, group, what, peer, how },
            Failure::PeerLost { how: text, .. } | Failure::Other { text } => {
                Error::PeerLost { rank, group, what: what.to_string(), peer, how: format!("failed: {text}") }
            }
        }
    }

    /// Writes the failure into a control block, shortened where it must be.
    pub(crate) fn store(&self, control: &Control) {
        let mut fields = Vec::new();
        let number = |n: usize| (n as u64).to_le_bytes();
        let texts: [&str; 2] = match self {
            Failure::Mismatch { sequence, details, advice } => {
                fields.push(1);
                fields.extend(sequence.to_le_bytes());
                [details, advice]
            }
            Failure::Timeout { what, missing, waited } => {
                fields.push(2);
                fields.extend((waited.as_millis() as u64).to_le_bytes());
                // A rank takes eight bytes and leaves room for the text.
                let missing = &missing[..missing.len().min(RECORD / 16)];
                fields.extend(number(missing.len()));
                missing.iter().for_each(|&rank| fields.extend(number(rank)));
                [what, ""]
            }
            Failure::PeerLost { what, peer, how } => {
                fields.push(3);
                fields.extend(number(*peer));
                [what, how]
            }
            Failure::Other { text } => {
                fields.push(4);
                [text, ""]
            }
        };
        let room = (RECORD - fields.len() - 16) / 2;
        for text in texts {
            let text = shortened(text, room);
            fields.extend(number(text.len()));
            fields.extend(text.as_bytes());
        }
        store_bytes(&control.record, &control.record_len, &fields);
    }

    /// Reads what [`Failure::store`] wrote. Whatever the bytes are, the answer is a failure.
    pub(crate) fn load(control: &Control) -> Self {
        let bytes = load_bytes(&control.record, &control.record_len);
        Self::parse(&bytes).unwrap_or_else(|| Failure::Other { text: "an unreadable reason".into() })
    }

    fn parse(mut bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        bytes = rest;
        let mut number = || {
            let (head, rest) = bytes.split_first_chunk::<8>()?;
            bytes = rest;
            Some(u64::from_le_bytes(*head))
        };
        let failure = match kind {
            1 => Failure::Mismatch { sequence: number()?, details: String::new(), advice: String::new() },
            2 => {
                let waited = Duration::from_millis(number()?);
                let count = number()?.min(RECORD as u64);
                let missing = (0..count).map(|_| number().map(|n| n as usize)).collect::<Option<_>>()?;
                Failure::Timeout { what: String::new(), missing, waited }
            }
            3 => Failure::PeerLost { peer: number()? as usize, what: String::new(), how: String::new() },
            4 => Failure::Other { text: String::new() },
            _ => return None,
        };
        let mut text = || {
            let (head, rest) = bytes.split_first_chunk::<8>()?;
            let (text, rest) = rest.split_at_checked(u64::from_le_bytes(*head) as usize)?;
            bytes = rest;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        Some(match failure {
            Failure::Mismatch { sequence, .. } => Failure::Mismatch { sequence, details: text()?, advice: text()? },
            Failure::Timeout { missing, waited, .. } => Failure::Timeout { what: text()?, missing, waited },
            Failure::PeerLost { peer, .. } => Failure::PeerLost { what: text()?, peer, how: text()? },
            Failure::Other { .. } => Failure::Other { text: text()? },
        })
    }
}

fn store_bytes(record: &[AtomicU8], len: &AtomicU32, bytes: &[u8]) {
    for (to, &byte) in record.iter().zip(bytes) {
        to.store(byte, Ordering::Relaxed);
    }
    len.store(bytes.len().min(record.len()) as u32, Ordering::Relaxed);
}

fn load_bytes(record: &[AtomicU8], len: &AtomicU32) -> Vec<u8> {
    let len = (len.load(Ordering::Relaxed) as usize).min(record.len());
    record[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_group::engine::segment::{Segment, Shape};
    use proptest::prelude::*;

    fn through(failure: &Failure) -> Failure {
        let segment = Segment::anonymous(Shape::new(1, 4096)).unwrap();
        failure.store(segment.control(0));
        Failure::load(segment.control(0))
    }

    #[test]
    fn every_kind_survives() {
        for failure in [
            Failure::Mismatch { sequence: 7, details: "rank 0: this, rank 1: \u{2260}".into(), advice: ". Or".into() },
            Failure::Timeout { what: "barrier".into(), missing: vec![1, 3], waited: Duration::from_millis(1500) },
            Failure::PeerLost { what: "barrier".into(), peer: 2, how: "died".into() },
            Failure::Other { text: "no".into() },
        ] {
            assert_eq!(through(&failure), failure);
        }
    }

    #[test]
    fn long_texts_are_cut_not_lost() {
        let Failure::Other { text } = through(&Failure::Other { text: "\u{2260}".repeat(3000) }) else {
            panic!("another kind")
        };
        assert!(text.len() > 900 && text.chars().all(|c| c == '\u{2260}'));
        let many = Failure::Timeout { what: "x".repeat(3000), missing: (0..250).collect(), waited: Duration::ZERO };
        assert!(matches!(through(&many), Failure::Timeout { missing, .. } if missing.len() == RECORD / 16));
    }

    proptest! {
        #[test]
        fn any_bytes_are_some_failure(bytes in proptest::collection::vec(any::<u8>(), 0..RECORD)) {
            let segment = Segment::anonymous(Shape::new(1, 4096)).unwrap();
            store_bytes(&segment.control(0).record, &segment.control(0).record_len, &bytes);
            Failure::load(segment.control(0));
        }
    }
}
