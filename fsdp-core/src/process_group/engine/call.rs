//! What a rank announces of a collective, so that ranks that issue different ones notice.

use std::fmt::Display;

use crate::{DType, hash::Hash, text::shortened};

/// Bytes of an announcement before its text.
pub(crate) const FIXED: usize = 24;
/// The longest text.
pub(crate) const TEXT: usize = 488;
/// Parts that the text spells out.
const SPELLED: usize = 6;

/// A collective as this rank issued it.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Its name.
    pub(crate) name: &'static str,
    /// Equal on ranks that issue the same.
    pub(crate) fingerprint: u64,
    /// The call for people, such as `all_gather(F32 [10, 10])`.
    pub(crate) text: String,
    /// Three numbers a rank that peers want to know before data moves; empty for most collectives.
    pub(crate) row: Vec<u64>,
}

impl Call {
    /// A collective whose parts (a dtype and counts each) must be the same everywhere, as `how` must.
    pub(crate) fn new<'a>(
        name: &'static str,
        how: impl Display,
        parts: impl ExactSizeIterator<Item = (DType, &'a [usize])>,
    ) -> Self {
        let mut hash = Hash::default();
        let mut texts = Vec::new();
        let how = how.to_string();
        hash.bytes(name.as_bytes());
        hash.bytes(how.as_bytes());
        if !how.is_empty() {
            texts.push(how);
        }
        let len = parts.len();
        hash.number(len as u64);
        for (index, (dtype, counts)) in parts.enumerate() {
            hash.bytes(dtype.name().as_bytes());
            hash.counts(counts.iter().copied());
            if index < SPELLED {
                texts.push(if counts.is_empty() { dtype.to_string() } else { format!("{dtype} {counts:?}") });
            }
        }
        if len > SPELLED {
            texts.push(format!("{} more", len - SPELLED));
        }
        Call { name, fingerprint: hash.0, text: format!("{name}({})", texts.join(", ")), row: Vec::new() }
    }

    /// Writes the announcement of the collective at `sequence` in its group.
    pub(crate) fn write(&self, sequence: u64, header: &mut [u8]) {
        let text = shortened(&self.text, TEXT).as_bytes();
        header[..8].copy_from_slice(&sequence.to_le_bytes());
        header[8..16].copy_from_slice(&self.fingerprint.to_le_bytes());
        header[16..24].copy_from_slice(&(text.len() as u64).to_le_bytes());
        header[FIXED..FIXED + text.len()].copy_from_slice(text);
        for (to, number) in header[FIXED + TEXT..].chunks_exact_mut(8).zip(&self.row) {
            to.copy_from_slice(&number.to_le_bytes());
        }
    }
}

/// A peer's announcement.
#[derive(Debug)]
pub(crate) struct Announcement<'a>(&'a [u8]);

impl<'a> Announcement<'a> {
    pub(crate) fn new(header: &'a [u8]) -> Self {
        Announcement(header)
    }

    fn number(&self, at: usize) -> u64 {
        self.0[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Whether the peer issued the same.
    pub(crate) fn is(&self, sequence: u64, call: &Call) -> bool {
        self.number(0) == sequence && self.number(8) == call.fingerprint
    }

    /// The call for people.
    pub(crate) fn text(&self) -> String {
        let len = (self.number(16) as usize).min(TEXT);
        String::from_utf8_lossy(&self.0[FIXED..FIXED + len]).into_owned()
    }

    /// The first `len` numbers of the row.
    pub(crate) fn row(&self, len: usize) -> Vec<u64> {
        (0..len).map(|index| self.number(FIXED + TEXT + 8 * index)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_must_agree_is_in_the_fingerprint() {
        let call = |name, how, parts: &[(DType, &[usize])]| Call::new(name, how, parts.iter().copied()).fingerprint;
        let base = call("all_reduce", "sum", &[(DType::F32, &[1, 2])]);
        assert_eq!(base, call("all_reduce", "sum", &[(DType::F32, &[1, 2])]));
        for other in [
            call("broadcast", "sum", &[(DType::F32, &[1, 2])]),
            call("all_reduce", "avg", &[(DType::F32, &[1, 2])]),
            call("all_reduce", "sum", &[(DType::BF16, &[1, 2])]),
            call("all_reduce", "sum", &[(DType::F32, &[2, 1])]),
            call("all_reduce", "sum", &[(DType::F32, &[1]), (DType::F32, &[2])]),
            call("all_reduce", "sum", &[]),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn announcements_survive_the_way_and_any_bytes_can_be_read() {
        let mut call = Call::new("all_gather", "", [(DType::F32, &[10usize, 10][..]); 8].into_iter());
        assert!(call.text.starts_with("all_gather(F32 [10, 10], ") && call.text.ends_with("2 more)"), "{}", call.text);
        call.row = vec![1, 2, 3];
        let mut header = vec![0xff; FIXED + TEXT + 24];
        Announcement::new(&header).text();
        call.write(5, &mut header);
        let read = Announcement::new(&header);
        assert!(read.is(5, &call) && !read.is(6, &call));
        assert_eq!((read.text(), read.row(3)), (call.text, vec![1, 2, 3]));
    }
}
