//! The page that a rank and its launcher share, as words that are atomics. All unsafe code of heartbeats is here.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    ptr::NonNull,
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

/// Bytes of a page.
const BYTES: usize = 4096;
/// Words of a page.
pub(super) const WORDS: usize = BYTES / size_of::<AtomicU64>();

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
        rustix::fs::ftruncate(&file, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    }

    /// Maps what [`Page::file`] made, maybe in another process.
    pub(super) fn map(file: impl AsFd) -> io::Result<Self> {
        // Without the seals somebody could truncate the file, and touching the mapping would kill this process.
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        if !sealed || rustix::fs::fstat(&file)?.st_size != BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no sealed page"));
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use; the file is as
        // large as the mapping and sealed.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
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
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, sync::atomic::Ordering};

    use super::*;

    #[test]
    fn two_mappings_of_one_file_are_one_memory() {
        let file = Page::file().unwrap();
        let (one, two) = (Page::map(&file).unwrap(), Page::map(&file).unwrap());
        one[WORDS - 1].store(7, Ordering::Release);
        assert_eq!((two[WORDS - 1].load(Ordering::Acquire), two[0].load(Ordering::Acquire)), (7, 0));
    }

    #[test]
    fn what_could_shrink_or_is_no_page_is_refused() {
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, BYTES as u64).unwrap();
        assert!(Page::map(&plain).is_err());
        rustix::fs::ftruncate(&plain, 1).unwrap();
        rustix::fs::fcntl_add_seals(&plain, SEALS).unwrap();
        assert!(Page::map(&plain).is_err());
        let path = std::env::temp_dir().join(format!("fsdp-core-heartbeat-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().write_all(&[0; BYTES]).unwrap();
        assert!(Page::open(&path).is_err());
        std::fs::remove_file(&path).unwrap();
        for path in ["", "/no/such/file", "/dev/null", "/proc/self", "/dev/tty"] {
            assert!(Page::open(Path::new(path)).is_err(), "{path}");
        }
    }
}
