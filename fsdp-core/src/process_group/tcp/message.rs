//! Messages between ranks and the hub. Both ends parse them as untrusted input.
//!
//! A message of the channel holds several *frames*, each with its length, so that many small frames take one write. A
//! frame is a [`ToHub`] or a [`FromHub`]. The hub forwards the bytes of a [`Note`] without reading them.

use std::io;

use crate::channel::MAX_MESSAGE_LEN;

/// Bytes of a frame's length.
const LEN: usize = 4;
/// Maximum length of a frame.
pub(super) const MAX_FRAME: usize = MAX_MESSAGE_LEN - LEN;

/// A frame of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToHub<'a> {
    /// The first frame of a connection: joins the `world`-th world of the job.
    Join { rank: u32, size: u32, world: u32, chunk_bytes: u32, host: &'a str },
    /// A note for other ranks of the world.
    Send { group: u64, to: Vec<u16>, note: &'a [u8] },
    /// The rank leaves the world. Its connection may close.
    Goodbye,
    /// The rank no longer waits for the others to join, for this reason.
    GiveUp(&'a str),
}

/// A frame of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FromHub<'a> {
    /// A rank has joined.
    Joined { rank: u32, chunk_bytes: u32, host: &'a str },
    /// The ranks cannot meet, for this reason.
    Refused(&'a str),
    /// A note of another rank.
    Note { from: u32, group: u64, note: &'a [u8] },
    /// A rank's connection has ended.
    Gone { rank: u32, how: Gone },
}

/// The end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// The rank said goodbye.
    Left,
    /// The connection closed, as the kernel closes those of a process that ends.
    Died,
    /// Nothing was heard for the time limit of a link.
    Unreachable,
}

impl Gone {
    /// Returns the meaning of an error of a connection.
    pub(super) fn of(error: io::ErrorKind) -> Self {
        use io::ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
        match error {
            TimedOut | HostUnreachable | NetworkUnreachable | NetworkDown => Gone::Unreachable,
            _ => Gone::Died,
        }
    }
}

/// A message of a rank to the other ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note<'a> {
    /// The slot of a step, and for a collective's first step the announcement. Zeros at their ends are left out.
    Step { announcement: &'a [u8], slot: &'a [u8] },
    /// The rank failed, for this encoded [`Failure`](super::super::Failure).
    Failed(&'a [u8]),
    /// The rank left the group.
    Left,
    /// The rank asks for the announcement page of the receiver.
    Ask,
    /// The answer.
    Page(&'a [u8]),
}

/// Reads a frame from its start.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn text(&mut self) -> Option<&'a str> {
        str::from_utf8(self.rest()).ok()
    }
}

/// Writes a frame: its kind, and its fields.
fn frame(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut frame = vec![kind];
    fields.iter().for_each(|field| frame.extend_from_slice(field));
    frame
}

impl<'a> ToHub<'a> {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            ToHub::Join { rank, size, world, chunk_bytes, host } => {
                let numbers = [rank, size, world, chunk_bytes].map(|number| number.to_le_bytes()).concat();
                frame(0, &[&numbers, host.as_bytes()])
            }
            ToHub::Send { group, to, note } => {
                let ranks: Vec<u8> = to.iter().flat_map(|rank| rank.to_le_bytes()).collect();
                frame(1, &[&group.to_le_bytes(), &(to.len() as u32).to_le_bytes(), &ranks, note])
            }
            ToHub::Goodbye => frame(2, &[]),
            ToHub::GiveUp(why) => frame(3, &[why.as_bytes()]),
        }
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut input = Input(rest);
        Some(match kind {
            0 => {
                let [rank, size, world, chunk_bytes] = [input.u32()?, input.u32()?, input.u32()?, input.u32()?];
                ToHub::Join { rank, size, world, chunk_bytes, host: input.text()? }
            }
            1 => {
                let (group, count) = (input.u64()?, input.u32()? as usize);
                let ranks = input.bytes(count.checked_mul(2)?)?;
                let to = ranks.as_chunks().0.iter().map(|rank| u16::from_le_bytes(*rank)).collect();
                ToHub::Send { group, to, note: input.rest() }
            }
            2 if rest.is_empty() => ToHub::Goodbye,
            3 => ToHub::GiveUp(input.text()?),
            _ => return None,
        })
    }
}

impl<'a> FromHub<'a> {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            FromHub::Joined { rank, chunk_bytes, host } => {
                frame(0, &[&rank.to_le_bytes(), &chunk_bytes.to_le_bytes(), host.as_bytes()])
            }
            FromHub::Refused(why) => frame(1, &[why.as_bytes()]),
            FromHub::Note { from, group, note } => frame(2, &[&from.to_le_bytes(), &group.to_le_bytes(), note]),
            FromHub::Gone { rank, how } => frame(3, &[&rank.to_le_bytes(), &[*how as u8]]),
        }
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut input = Input(rest);
        Some(match kind {
            0 => FromHub::Joined { rank: input.u32()?, chunk_bytes: input.u32()?, host: input.text()? },
            1 => FromHub::Refused(input.text()?),
            2 => FromHub::Note { from: input.u32()?, group: input.u64()?, note: input.rest() },
            3 => {
                let rank = input.u32()?;
                let how = [Gone::Left, Gone::Died, Gone::Unreachable].into_iter().find(|how| rest[4..] == [*how as u8]);
                FromHub::Gone { rank, how: how? }
            }
            _ => return None,
        })
    }
}

impl<'a> Note<'a> {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Note::Step { announcement, slot } => {
                frame(0, &[&(announcement.len() as u32).to_le_bytes(), announcement, slot])
            }
            Note::Failed(why) => frame(1, &[why]),
            Note::Left => frame(2, &[]),
            Note::Ask => frame(3, &[]),
            Note::Page(page) => frame(4, &[page]),
        }
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let mut input = Input(rest);
        Some(match kind {
            0 => {
                let len = input.u32()? as usize;
                Note::Step { announcement: input.bytes(len)?, slot: input.rest() }
            }
            1 => Note::Failed(input.rest()),
            2 if rest.is_empty() => Note::Left,
            3 if rest.is_empty() => Note::Ask,
            4 => Note::Page(input.rest()),
            _ => return None,
        })
    }

    /// Returns whether the bytes of a note are [`Note::Failed`].
    pub(super) fn is_failure(bytes: &[u8]) -> bool {
        bytes.first() == Some(&1)
    }
}

/// Appends a frame to a message of the channel. Returns whether it had room.
pub(super) fn append(message: &mut Vec<u8>, frame: &[u8]) -> bool {
    let has_room = message.len() + LEN + frame.len() <= MAX_MESSAGE_LEN;
    if has_room {
        message.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        message.extend_from_slice(frame);
    }
    has_room
}

/// Returns the frames of a message of the channel; `None` for other bytes.
pub(super) fn frames(message: &[u8]) -> Option<Vec<&[u8]>> {
    let (mut input, mut frames) = (Input(message), vec![]);
    while !input.0.is_empty() {
        let len = input.u32()? as usize;
        frames.push(input.bytes(len)?);
    }
    Some(frames)
}

/// Returns bytes without the zeros at their end.
pub(super) fn without_zeros(bytes: &[u8]) -> &[u8] {
    let len = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    &bytes[..len]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_survive_encoding() {
        for frame in [
            ToHub::Join { rank: 3, size: 4, world: 1, chunk_bytes: 1000, host: "node1" },
            ToHub::Send { group: 7, to: vec![1, 300], note: &[1, 2] },
            ToHub::Send { group: 7, to: vec![], note: &[] },
            ToHub::Goodbye,
            ToHub::GiveUp("late"),
        ] {
            assert_eq!(ToHub::parse(&frame.to_bytes()), Some(frame));
        }
        for frame in [
            FromHub::Joined { rank: 3, chunk_bytes: 1000, host: "" },
            FromHub::Refused("no"),
            FromHub::Note { from: 2, group: u64::MAX, note: &[0; 9] },
            FromHub::Gone { rank: 2, how: Gone::Left },
            FromHub::Gone { rank: 2, how: Gone::Died },
            FromHub::Gone { rank: 2, how: Gone::Unreachable },
        ] {
            assert_eq!(FromHub::parse(&frame.to_bytes()), Some(frame));
        }
        for note in [
            Note::Step { announcement: &[1], slot: &[2, 3] },
            Note::Step { announcement: &[], slot: &[] },
            Note::Failed(b"{}"),
            Note::Left,
            Note::Ask,
            Note::Page(&[5]),
        ] {
            let bytes = note.to_bytes();
            assert_eq!(Note::is_failure(&bytes), matches!(note, Note::Failed(_)));
            assert_eq!(Note::parse(&bytes), Some(note));
        }
    }

    #[test]
    fn a_message_holds_frames_up_to_its_maximum_length() {
        let mut message = vec![];
        assert!(append(&mut message, &[]) && append(&mut message, &[7; 3]));
        assert_eq!(frames(&message), Some(vec![&[][..], &[7; 3]]));
        assert!(!append(&mut message, &[0; MAX_FRAME]));
        let mut full = vec![];
        assert!(append(&mut full, &[0; MAX_FRAME]) && full.len() == MAX_MESSAGE_LEN && !append(&mut full, &[]));
        assert_eq!(frames(&[9, 0, 0, 0, 1]), None);
    }

    #[test]
    fn zeros_at_the_end_are_left_out() {
        assert_eq!(without_zeros(&[0, 1, 0, 0]), [0, 1]);
        assert!(without_zeros(&[0; 9]).is_empty() && without_zeros(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            frames(&bytes);
            if let Some(frame) = ToHub::parse(&bytes) {
                let again = frame.to_bytes();
                prop_assert_eq!(ToHub::parse(&again), Some(frame));
            }
            if let Some(frame) = FromHub::parse(&bytes) {
                let again = frame.to_bytes();
                prop_assert_eq!(FromHub::parse(&again), Some(frame));
            }
            if let Some(note) = Note::parse(&bytes) {
                let again = note.to_bytes();
                prop_assert_eq!(Note::parse(&again), Some(note));
            }
        }
    }
}
