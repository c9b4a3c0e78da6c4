//! The shared page, and the seqlock that reads several of its words together.
//!
//! All unsafe code of heartbeats is here.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// Words of a page.
pub(super) const WORDS: usize = PAGE_BYTES / size_of::<AtomicU64>();

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapped page; it holds zeros at first.
pub(super) struct Page(NonNull<[AtomicU64; WORDS]>);

// SAFETY: the mapping is valid in every thread until it is dropped, and all access to it is through atomics.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// A file without a name for a page, that nobody can resize.
    pub(super) fn file() -> io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create("fsdp-heartbeat", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, PAGE_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    }

    /// Maps what [`Page::file`] made, maybe in another process.
    pub(super) fn map(file: impl AsFd) -> io::Result<Self> {
        // Without the seals somebody could truncate the file, and touching the mapping would kill this process.
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        if !sealed || rustix::fs::fstat(&file)?.st_size != PAGE_BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a sealed page"));
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use; the file is as
        // large as the mapping and sealed.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        NonNull::new(base.cast()).map(Page).ok_or_else(|| Errno::NOMEM.into())
    }

    /// Maps the page behind a path such as `/proc/1234/fd/5`.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Whatever the path names, opening it does not wait.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        Page::map(rustix::fs::open(path, flags, Mode::empty())?)
    }
}

impl Deref for Page {
    type Target = [AtomicU64; WORDS];

    fn deref(&self) -> &Self::Target {
        // SAFETY: the mapping is page-aligned, as long as the array and valid until `self` is dropped; any bits are
        // valid atomics, and no process that maps the page accesses it but through atomics, or at worst the values are
        // garbage.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: address and length are those of the mapping that this value owns; no reference into it outlives it.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}

/// How often a reader looks again. A writer is done in far less time, unless it was stopped or killed in the middle.
const TRIES: usize = 200;

/// An entry: its count, and `N` words. Written by one thread at a time.
pub(super) struct Seqlock<'a, const N: usize> {
    version: &'a AtomicU64,
    words: &'a [AtomicU64],
}

/// What a reader found.
#[derive(Debug, PartialEq)]
pub(super) struct Read<const N: usize> {
    pub(super) words: [u64; N],
    /// The writer was in the middle of it for as long as the reader looked: the words are not of one moment.
    pub(super) torn: bool,
}

impl<'a, const N: usize> Seqlock<'a, N> {
    /// Words that the entry takes.
    pub(super) const LEN: usize = 1 + N;

    /// The entry that begins at word `start` of `memory`.
    ///
    /// # Panics
    /// When it does not fit.
    pub(super) fn at(memory: &'a [AtomicU64], start: usize) -> Self {
        Seqlock { version: &memory[start], words: &memory[start + 1..start + 1 + N] }
    }

    pub(super) fn write(&self, words: &[u64; N]) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        // Whoever reads one of the words below also sees the count as odd, or later.
        fence(Ordering::Release);
        for (to, &word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// What this thread wrote last, if it is the writer.
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
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, PAGE_BYTES as u64).unwrap();
        assert!(Page::map(&plain).is_err());
        rustix::fs::ftruncate(&plain, 1).unwrap();
        rustix::fs::fcntl_add_seals(&plain, SEALS).unwrap();
        assert!(Page::map(&plain).is_err());
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
        // Whoever writes next heals it.
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
