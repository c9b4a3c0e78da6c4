//! Announcements of collectives, by which ranks notice that they issued different ones.
//!
//! An announcement begins with a sequence number and a fingerprint. Ranks compare these two numbers. They read the rest
//! only if the numbers differ, so that the error can say what differs: the call as text, a digest of each part, and a
//! bit for each member of the signature's subject. An all-to-all adds a row of numbers for each rank, since only the
//! sender and the receiver know the length of a message. Ranks always compare these rows.
//!
//! The length of an announcement follows from the number of ranks alone. A backend can therefore reserve space for it,
//! and receive the announcement of a rank that issued another collective.

use std::fmt::{Display, Write};

use super::{
    host::packing::Stream,
    op::ExchangePart,
    options::Membership,
    signature::{Signature, has},
};
use crate::{DType, hash::Hash, text::shortened};

/// Bytes of an announcement's numbers and lengths, which come before its texts and lists.
const NUMBERS: usize = 32;
/// Bytes that are equal on ranks that issue the same collective: sequence number and fingerprint.
pub(super) const HEAD: usize = 16;
/// Longest text.
const TEXT: usize = 768;
/// Longest advice.
const ADVICE: usize = 256;
/// Largest number of a subject's members that are announced one by one.
pub(super) const MEMBERS: usize = 4096;
/// Largest number of parts that are announced one by one.
pub(super) const PARTS: usize = 192;
/// Numbers of a row for each rank: a hash of the counts sent to the rank, a hash of the counts expected from it, and
/// the packed bytes sent to it.
pub(super) const ROW: usize = 3;
/// Bytes of an announcement before its row.
pub(super) const FIXED: usize = NUMBERS + TEXT + ADVICE + MEMBERS / 8 + PARTS * 8;
/// Number of parts and members that the text lists.
pub(super) const SPELLED: usize = 6;

/// A collective as this rank issued it.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// Name of the collective.
    pub(super) name: &'static str,
    /// Hash of everything that must be the same on all ranks.
    fingerprint: u64,
    /// Text for messages, such as `all_gather(F32 [10, 10])`.
    text: String,
    parts: Vec<Part>,
    signature: Option<Signature>,
    /// Bytes of all ranks' parts, if the parts are the same on all ranks.
    pub(super) bytes: u64,
    /// [`ROW`] numbers for each rank, which peers need before data moves. Empty for most collectives.
    pub(super) row: Vec<u64>,
    uses_registered_memory: bool,
}

impl Call {
    /// Creates a call whose `how` and parts (dtype and counts) must be the same on all ranks.
    pub(super) fn new<C: AsRef<[usize]>>(
        name: &'static str,
        how: impl Display,
        parts: impl ExactSizeIterator<Item = (DType, C)>,
    ) -> Self {
        let mut hash = Hash::default();
        // Long enough for most calls.
        let mut text = String::with_capacity(96);
        // Writing to a string does not fail.
        let _ = write!(text, "{name}({how}");
        hash.bytes(text.as_bytes());
        let len = parts.len();
        hash.number(len as u64);
        let mut bytes = 0u64;
        let mut separator = if text.ends_with('(') { "" } else { ", " };
        let mut announced = Vec::with_capacity(len.min(PARTS));
        for (index, (dtype, counts)) in parts.enumerate() {
            let counts = counts.as_ref();
            let mut digest = Hash::default();
            digest.bytes(dtype.name().as_bytes());
            digest.counts(counts.iter().copied());
            hash.number(digest.value());
            let elements = counts.iter().fold(0, |sum: u64, &count| sum.saturating_add(count as u64));
            bytes = bytes.saturating_add(elements.saturating_mul(dtype.size() as u64));
            if index < PARTS {
                announced.push(Part::new(dtype, counts, digest.value()));
            }
            if index < SPELLED {
                text.push_str(separator);
                text.push_str(dtype.name());
                for (rank, count) in counts.iter().enumerate() {
                    // Announcements hold no longer text, and groups may be large.
                    if text.len() > TEXT {
                        break;
                    }
                    let _ = write!(text, "{}{count}", if rank == 0 { " [" } else { ", " });
                }
                text.push_str(if counts.is_empty() { "" } else { "]" });
                separator = ", ";
            }
        }
        if len > SPELLED {
            text.push_str(&format!(", {} more", len - SPELLED));
        }
        text.push(')');
        Call {
            name,
            fingerprint: hash.value(),
            text,
            parts: announced,
            signature: None,
            bytes,
            row: vec![],
            uses_registered_memory: false,
        }
    }

    /// Creates a call that moves no data.
    pub(super) fn without_parts(name: &'static str, how: &str) -> Self {
        Self::new(name, how, std::iter::empty::<(DType, [usize; 0])>())
    }

    /// Adds the row of an all-to-all, in which only sender and receiver know the size of a message.
    pub(super) fn with_row(mut self, parts: &[ExchangePart], group: &Membership) -> Self {
        let hash = |counts: &dyn Fn(&ExchangePart) -> usize| {
            let mut hash = Hash::default();
            hash.counts(parts.iter().map(counts));
            hash.value()
        };
        let sent = Stream::by_rank(group.size, parts.iter().map(|p| (p.input.dtype(), &p.send_counts[..])));
        let numbers = |peer: usize| {
            [
                hash(&|part| part.send_counts[peer]),
                hash(&|part| part.recv_counts[peer]),
                if peer == group.rank { 0 } else { sent[peer].len() as u64 },
            ]
        };
        self.row = (0..group.size).flat_map(numbers).collect();
        self
    }

    /// Adds a signature to the fingerprint and the text.
    pub(super) fn signed(mut self, signature: &Signature) -> Self {
        let mut hash = Hash::default();
        hash.number(self.fingerprint);
        signature.hash_into(&mut hash);
        self.fingerprint = hash.value();
        let mut about = String::new();
        signature.spell(SPELLED, &mut about);
        if !self.text.ends_with("()") {
            about.push_str("; ");
        }
        self.text.insert_str(self.name.len() + 1, &about);
        self.signature = Some(signature.clone());
        self
    }

    /// Adds to the fingerprint and the text that the collective uses memory of the backend.
    pub(super) fn with_registered_memory(mut self) -> Self {
        let mut hash = Hash::default();
        hash.number(self.fingerprint);
        hash.bytes(b"registered memory");
        self.fingerprint = hash.value();
        self.text.push_str(", by registered memory");
        self.uses_registered_memory = true;
        self
    }

    /// Returns whether the collective uses memory of the backend.
    #[cfg(feature = "nccl")]
    pub(super) fn uses_registered_memory(&self) -> bool {
        self.uses_registered_memory
    }

    /// Returns the signature, if there is one.
    pub(super) fn signature(&self) -> Option<&Signature> {
        self.signature.as_ref()
    }

    /// Writes the announcement of this call at position `sequence` of its group.
    pub(super) fn write(&self, sequence: u64, header: &mut [u8]) {
        let text = shortened(&self.text, TEXT).as_bytes();
        let (mut subject, mut advice, mut bits, mut members) = (0, &b""[..], &[][..], 0);
        if let Some(signature) = &self.signature {
            subject = signature.subject().hash();
            advice = shortened(signature.advice(), ADVICE).as_bytes();
            members = signature.subject().members().len().min(MEMBERS);
            bits = &signature.bits()[..members.div_ceil(8)];
        }
        let lengths = [text.len(), advice.len(), members, self.parts.len()];
        let lengths = lengths.iter().rev().fold(0, |packed, &length| packed << 16 | length as u64);
        let mut end = 0;
        let mut put = |bytes: &[u8]| {
            header[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        };
        [sequence, self.fingerprint, subject, lengths].iter().for_each(|number| put(&number.to_le_bytes()));
        [text, advice, bits].into_iter().for_each(&mut put);
        self.parts.iter().for_each(|part| put(&part.0.to_le_bytes()));
        for (to, number) in header[FIXED..].chunks_exact_mut(8).zip(&self.row) {
            to.copy_from_slice(&number.to_le_bytes());
        }
    }
}

/// A part in eight bytes: dtype, number of elements, and a digest of their split over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part(u64);

impl Part {
    const ELEMENTS: u32 = 40;

    fn new(dtype: DType, counts: &[usize], digest: u64) -> Self {
        let elements = counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count)) as u64;
        let dtype = DType::ALL.iter().position(|&other| other == dtype).unwrap_or(DType::ALL.len());
        Part((dtype as u64) << 56 | (digest & 0xffff) << Self::ELEMENTS | elements.min((1 << Self::ELEMENTS) - 1))
    }

    fn dtype(self) -> Option<DType> {
        DType::ALL.get((self.0 >> 56) as usize).copied()
    }

    fn elements(self) -> u64 {
        self.0 & ((1 << Self::ELEMENTS) - 1)
    }

    /// Describes the part. Shows the digest of its split if one of the `other` parts is otherwise equal.
    pub(super) fn beside(self, other: &[Part]) -> String {
        let dtype = self.dtype().map_or("?", DType::name);
        let alike =
            |other: &Part| *other != self && (other.dtype(), other.elements()) == (self.dtype(), self.elements());
        let how = if other.iter().any(alike) {
            format!(" (split {:04x})", self.0 >> Self::ELEMENTS & 0xffff)
        } else {
            String::new()
        };
        format!("{} {dtype}{how}", self.elements())
    }
}

/// A rank's announcement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announcement<'a>(&'a [u8]);

impl<'a> Announcement<'a> {
    pub(super) fn new(header: &'a [u8]) -> Self {
        Announcement(header)
    }

    fn number(&self, at: usize) -> u64 {
        self.0[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Returns whether the peer issued the same collective.
    pub(super) fn is(&self, sequence: u64, call: &Call) -> bool {
        self.sequence() == sequence && self.fingerprint() == call.fingerprint
    }

    /// Returns the position in the group's order of collectives.
    pub(super) fn sequence(&self) -> u64 {
        self.number(0)
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.number(8)
    }

    /// Returns the hash of the subject, or 0 without a subject.
    pub(super) fn subject(&self) -> u64 {
        self.number(16)
    }

    /// Returns the lengths of text and advice and the numbers of members and parts, limited so that any bytes are safe.
    fn lengths(&self) -> [usize; 4] {
        let packed = self.number(24);
        let length = |at: u32| (packed >> (16 * at) & 0xffff) as usize;
        [length(0).min(TEXT), length(1).min(ADVICE), length(2).min(MEMBERS), length(3).min(PARTS)]
    }

    /// Returns the text for messages.
    pub(super) fn text(&self) -> String {
        let [text, ..] = self.lengths();
        String::from_utf8_lossy(&self.0[NUMBERS..][..text]).into_owned()
    }

    /// Returns whether the text may have been shortened.
    pub(super) fn is_cut(&self) -> bool {
        self.lengths()[0] + 4 > TEXT
    }

    /// Returns the advice for ranks that disagree.
    pub(super) fn advice(&self) -> String {
        let [text, advice, ..] = self.lengths();
        String::from_utf8_lossy(&self.0[NUMBERS + text..][..advice]).into_owned()
    }

    /// Returns the number of announced members.
    pub(super) fn members(&self) -> usize {
        self.lengths()[2]
    }

    /// Returns whether the collective is about a member.
    pub(super) fn has(&self, member: usize) -> bool {
        let [text, advice, members, _] = self.lengths();
        member < members && has(&self.0[NUMBERS + text + advice..][..members.div_ceil(8)], member)
    }

    /// Returns the announced parts.
    pub(super) fn parts(&self) -> Vec<Part> {
        let [text, advice, members, parts] = self.lengths();
        let start = NUMBERS + text + advice + members.div_ceil(8);
        (0..parts).map(|part| Part(self.number(start + 8 * part))).collect()
    }

    /// Returns the first `len` numbers of the row.
    pub(super) fn row(&self, len: usize) -> Vec<u64> {
        (0..len).map(|index| self.number(FIXED + 8 * index)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::signature::Subject;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fingerprints_cover_everything_that_must_agree() {
        let call = |name, how, parts: &[(DType, &[usize])]| Call::new(name, how, parts.iter().copied());
        let subject = Subject::new("unit", ["a", "b"].map(String::from));
        let other = Subject::new("unit", ["a", "c"].map(String::from));
        let base = || call("all_reduce", "sum", &[(DType::F32, &[1, 2])]);
        let signed = |signature: &Signature| base().signed(signature);
        let all = [
            base(),
            call("broadcast", "sum", &[(DType::F32, &[1, 2])]),
            call("all_reduce", "avg", &[(DType::F32, &[1, 2])]),
            call("all_reduce", "sum", &[(DType::BF16, &[1, 2])]),
            call("all_reduce", "sum", &[(DType::F32, &[2, 1])]),
            call("all_reduce", "sum", &[(DType::F32, &[1]), (DType::F32, &[2])]),
            call("all_reduce", "sum", &[]),
            signed(&Signature::new(&subject, [0])),
            signed(&Signature::new(&subject, [1])),
            signed(&Signature::new(&subject, [0, 1])),
            signed(&Signature::new(&other, [0])),
            signed(&Signature::new(&subject, [0]).with_how(", 2 backwards")),
        ];
        for (i, one) in all.iter().enumerate() {
            for (j, two) in all.iter().enumerate() {
                assert_eq!(one.fingerprint == two.fingerprint, i == j, "{} and {}", one.text, two.text);
            }
        }
        assert_eq!(base().fingerprint, base().fingerprint);
    }

    #[test]
    fn announcements_survive_encoding() {
        let mut call = Call::new("all_gather", "", [(DType::F32, &[10usize, 10][..]); 8].into_iter());
        assert!(call.text.starts_with("all_gather(F32 [10, 10], ") && call.text.ends_with("2 more)"), "{}", call.text);
        let subject = Subject::new("unit `x`", (0..20).map(|i| format!("p{i}")));
        call = call.signed(&Signature::new(&subject, [3, 17]).with_how(", twice").with_advice("Do so"));
        assert!(call.text.starts_with("all_gather(unit `x`, twice: p3, p17; F32 [10, 10], "), "{}", call.text);
        call.row = vec![1, 2, 3];
        let mut header = vec![0xff; FIXED + 24];
        call.write(5, &mut header);
        let read = Announcement::new(&header);
        assert!(read.is(5, &call) && !read.is(6, &call));
        assert_eq!((read.text(), read.advice(), read.row(3)), (call.text.clone(), "Do so".into(), vec![1, 2, 3]));
        assert_eq!((0..30).filter(|&member| read.has(member)).collect::<Vec<_>>(), [3, 17]);
        assert_eq!(read.parts(), call.parts);
        assert_eq!(read.parts()[0].beside(&[]), "20 F32");
        // Everything is cut to its limit.
        let huge = Subject::new("u".repeat(3000), (0..MEMBERS + 9).map(|i| format!("p{i}")));
        let advice: &'static str = "a".repeat(3000).leak();
        call = Call::new("all_gather", "h".repeat(3000), [(DType::F32, &[10usize, 10][..]); PARTS + 9].into_iter())
            .signed(&Signature::new(&huge, 0..MEMBERS + 9).with_how("w".repeat(3000)).with_advice(advice));
        call.row = vec![1, 2, 3];
        call.write(5, &mut header);
        let read = Announcement::new(&header);
        assert!(read.is(5, &call) && read.is_cut() && read.has(MEMBERS - 1) && read.parts().len() == PARTS);
        assert_eq!(read.row(3), [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), FIXED + 24)) {
            let read = Announcement::new(&bytes);
            let (_, _, _, _) = (read.text(), read.advice(), read.parts(), read.row(3));
            prop_assert!((0..MEMBERS + 9).filter(|&member| read.has(member)).count() <= read.members());
        }
    }
}
