//! The shared memory page, and the seqlock that reads several of its words consistently.
//!
//! All `unsafe` code of the heartbeats is in this file.

use std::{
    io,
    ops::Deref,
    os::fd::OwnedFd,
    path::Path,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use memmap2::MmapRaw;
use rustix::fs::{Mode, OFlags};

use crate::shared_file;

const PAGE_BYTES: usize = 4096;
/// 64-bit words in a page.
pub(super) const WORDS: usize = PAGE_BYTES / size_of::<AtomicU64>();

/// A mapped page. A new page holds zeros.
pub(super) struct Page(MmapRaw);

impl Page {
    /// Creates an anonymous file of one page that no process can resize.
    pub(super) fn file() -> io::Result<OwnedFd> {
        shared_file::create("fsdp-heartbeat", PAGE_BYTES)
    }

    /// Maps a file that [`Page::file`] created, possibly in another process.
    pub(super) fn map(file: &OwnedFd) -> io::Result<Self> {
        shared_file::map(file, PAGE_BYTES).map(Page)
    }

    /// Maps the page at a path such as `/proc/1234/fd/5`.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // NONBLOCK: opening a FIFO must not wait.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        Page::map(&rustix::fs::open(path, flags, Mode::empty())?)
    }
}

impl Deref for Page {
    type Target = [AtomicU64; WORDS];

    fn deref(&self) -> &Self::Target {
        // SAFETY: the mapping is page-aligned, as long as the array, and valid until `self` is dropped. Any bits are
        // valid atomics. Processes that map the page use atomics; if one does not, the values are garbage, not
        // undefined.
        unsafe { &*self.0.as_ptr().cast() }
    }
}

/// Number of read attempts. A write takes far less time, unless the writer was stopped or killed during it.
const TRIES: usize = 200;

/// A seqlock: a version, and `N` words that one thread at a time writes.
///
/// The version is odd during a write. All words are atomics, so a reader that races with a writer gets old or new
/// words, never undefined behavior. The fences follow Boehm, "Can seqlocks get along with programming language memory
/// models?" (2012).
pub(super) struct Seqlock<'a, const N: usize> {
    version: &'a AtomicU64,
    words: &'a [AtomicU64],
}

/// Words that a reader found.
#[derive(Debug, PartialEq)]
pub(super) struct Read<const N: usize> {
    pub(super) words: [u64; N],
    /// Whether a write was in progress during all attempts: the words may mix two writes.
    pub(super) torn: bool,
}

impl<'a, const N: usize> Seqlock<'a, N> {
    /// Words that the lock takes, including the version.
    pub(super) const LEN: usize = 1 + N;

    /// Returns the lock that begins at word `start` of `memory`.
    ///
    /// # Panics
    /// When the lock does not fit.
    pub(super) fn at(memory: &'a [AtomicU64], start: usize) -> Self {
        Seqlock { version: &memory[start], words: &memory[start + 1..start + 1 + N] }
    }

    pub(super) fn write(&self, words: &[u64; N]) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        // A reader that sees one of the words below also sees an odd or a later version.
        fence(Ordering::Release);
        for (to, &word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// Returns the current words. For the writing thread, these are the words that it wrote last.
    pub(super) fn latest(&self) -> [u64; N] {
        std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed))
    }

    pub(super) fn read(&self) -> Read<N> {
        for _ in 0..TRIES {
            let before = self.version.load(Ordering::Acquire);
            let words = self.latest();
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before {
                return Read { words, torn: false };
            }
            std::thread::yield_now();
        }
        Read { words: self.latest(), torn: true }
    }
}

/// Packs `text` into words of eight bytes, and returns them with the length in bytes. Longer text is cut at a character
/// boundary.
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

/// Unpacks text of [`pack`]. Any words yield some text; control characters become `?`.
pub(super) fn unpack(words: &[u64], len: u64) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(len.min(1 << 12) as usize).collect();
    String::from_utf8_lossy(&bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::{io::Write, sync::atomic::AtomicBool};

    use super::*;

    #[test]
    fn two_mappings_of_one_file_share_memory() {
        let file = Page::file().unwrap();
        let (one, two) = (Page::map(&file).unwrap(), Page::map(&file).unwrap());
        one[WORDS - 1].store(7, Ordering::Release);
        assert_eq!((two[WORDS - 1].load(Ordering::Acquire), two[0].load(Ordering::Acquire)), (7, 0));
    }

    #[test]
    fn rejects_files_that_are_not_sealed_pages() {
        assert!(Page::map(&shared_file::create("short", 1).unwrap()).is_err());
        let path = std::env::temp_dir().join(format!("fsdp-core-heartbeat-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().write_all(&[0; PAGE_BYTES]).unwrap();
        assert!(Page::open(&path).is_err());
        std::fs::remove_file(&path).unwrap();
        for path in ["", "/no/such/file", "/dev/null", "/proc/self", "/dev/tty"] {
            assert!(Page::open(Path::new(path)).is_err(), "{path}");
        }
    }

    fn memory(words: usize) -> Vec<AtomicU64> {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_reader_gets_words_of_one_write() {
        let (memory, done) = (memory(2 * Seqlock::<6>::LEN), AtomicBool::new(false));
        let entry = || Seqlock::<6>::at(&memory, Seqlock::<6>::LEN);
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
        assert_eq!(entry().read(), Read { words: [rounds; 6], torn: false });
        assert!(memory[..Seqlock::<6>::LEN].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn an_interrupted_write_is_reported_as_torn() {
        let memory = memory(3);
        let entry = Seqlock::<2>::at(&memory, 0);
        entry.write(&[1, 2]);
        memory[0].fetch_add(1, Ordering::Relaxed);
        memory[1].store(8, Ordering::Relaxed);
        assert_eq!(entry.read(), Read { words: [8, 2], torn: true });
        // The next write repairs the lock.
        entry.write(&[3, 4]);
        assert_eq!(entry.read(), Read { words: [3, 4], torn: false });
        memory[0].store(u64::MAX, Ordering::Relaxed);
        entry.write(&[5, 6]);
        assert_eq!(entry.read(), Read { words: [5, 6], torn: false });
    }

    #[test]
    fn text_is_cut_at_a_character_and_any_words_unpack() {
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
