//! Several words that are read together though their writer does not wait: a seqlock.
//!
//! The first word counts: it is odd while the entry is being written. Everything is an atomic, so that a reader that
//! meets a writer reads old or new words, never undefined ones; the fences are those of Boehm, "Can seqlocks get along
//! with programming language memory models?" (2012).

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How often a reader looks again. A writer is done in far less time, unless it was stopped or killed in the middle.
const TRIES: usize = 200;

/// An entry: its count, and `N` words. Written by one thread at a time.
pub(super) struct Entry<'a, const N: usize> {
    count: &'a AtomicU64,
    words: &'a [AtomicU64],
}

/// What a reader found.
#[derive(Debug, PartialEq)]
pub(super) struct Seen<const N: usize> {
    pub(super) words: [u64; N],
    /// The writer was in the middle of it for as long as the reader looked: the words are not of one moment.
    pub(super) torn: bool,
}

impl<'a, const N: usize> Entry<'a, N> {
    /// Words that the entry takes.
    pub(super) const LEN: usize = 1 + N;

    /// The entry that begins at word `start` of `memory`.
    ///
    /// # Panics
    /// When it does not fit.
    pub(super) fn at(memory: &'a [AtomicU64], start: usize) -> Self {
        Entry { count: &memory[start], words: &memory[start + 1..start + 1 + N] }
    }

    pub(super) fn write(&self, words: &[u64; N]) {
        let count = self.count.load(Ordering::Relaxed) | 1;
        self.count.store(count, Ordering::Relaxed);
        // Whoever reads one of the words below also sees the count as odd, or later.
        fence(Ordering::Release);
        for (to, &word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.count.store(count.wrapping_add(1), Ordering::Release);
    }

    /// What this thread wrote last, if it is the writer.
    pub(super) fn own(&self) -> [u64; N] {
        std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed))
    }

    pub(super) fn read(&self) -> Seen<N> {
        for _ in 0..TRIES {
            let before = self.count.load(Ordering::Acquire);
            let words = self.own();
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.count.load(Ordering::Relaxed) == before {
                return Seen { words, torn: false };
            }
            std::thread::yield_now();
        }
        Seen { words: self.own(), torn: true }
    }
}

/// `text` as words of eight bytes, cut at the end of a character where it is too long; and its length in bytes.
pub(super) fn pack<const N: usize>(text: &[&str]) -> ([u64; N], u64) {
    let mut words = [0; N];
    let mut len = 0;
    for text in text {
        let text = crate::text::shortened(text, 8 * N - len);
        for &byte in text.as_bytes() {
            words[len / 8] |= u64::from(byte) << (8 * (len % 8));
            len += 1;
        }
    }
    (words, len as u64)
}

/// The text of [`pack`], or whatever text can be made of any words: what a terminal would obey is shown as `?`.
pub(super) fn unpack(words: &[u64], len: u64) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(len.min(1 << 12) as usize).collect();
    String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn memory(words: usize) -> Vec<AtomicU64> {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_reader_sees_words_of_one_moment() {
        let (memory, done) = (memory(2 * Entry::<6>::LEN), AtomicBool::new(false));
        let entry = || Entry::<6>::at(&memory, Entry::<6>::LEN);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (1..=rounds).for_each(|round| entry().write(&[round; 6]));
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                let seen = entry().read();
                assert!(seen.torn || seen.words.iter().all(|word| *word == seen.words[0]), "{seen:?}");
            }
        });
        assert_eq!(entry().read(), Seen { words: [rounds; 6], torn: false });
        assert!(memory[..Entry::<6>::LEN].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_writer_that_stopped_in_the_middle_is_told_from_one_that_did_not() {
        let memory = memory(3);
        let entry = Entry::<2>::at(&memory, 0);
        entry.write(&[1, 2]);
        memory[0].fetch_add(1, Ordering::Relaxed);
        memory[1].store(8, Ordering::Relaxed);
        assert_eq!(entry.read(), Seen { words: [8, 2], torn: true });
        // Whoever writes next heals it.
        entry.write(&[3, 4]);
        assert_eq!(entry.read(), Seen { words: [3, 4], torn: false });
        memory[0].store(u64::MAX, Ordering::Relaxed);
        entry.write(&[5, 6]);
        assert_eq!(entry.read(), Seen { words: [5, 6], torn: false });
    }

    #[test]
    fn texts_survive_or_are_cut_and_any_words_are_some_text() {
        let through = |text: &[&str]| {
            let (words, len) = pack::<2>(text);
            unpack(&words, len)
        };
        assert_eq!(through(&["forward", " ", "layers"]), "forward layers");
        assert_eq!(through(&["", "sixteen bytes ok"]), "sixteen bytes ok");
        assert_eq!(through(&["fifteen bytes..", " \u{2260}"]), "fifteen bytes.. ");
        assert_eq!(through(&["a\u{1b}[2Jb"]), "a?[2Jb");
        assert_eq!(unpack(&[u64::MAX; 2], u64::MAX).chars().count(), 16);
    }
}
