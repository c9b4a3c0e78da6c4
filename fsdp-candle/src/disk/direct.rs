//! Reads and writes of a file that bypass the page cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytemuck::{Pod, Zeroable};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// Alignment in a file and in memory, which direct I/O requires.
pub(crate) const ALIGN: usize = 4096;

/// Memory that direct I/O accepts, in huge pages if the system has them. A transfer to or from pages of 4 KiB is split
/// into many requests, and a fast disk then reaches less than half of its bandwidth.
pub(crate) struct AlignedBuffer {
    pages: Vec<HugePage>,
    bytes: usize,
}

const HUGE_PAGE: usize = 2 << 20;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(2097152))]
struct HugePage([u8; HUGE_PAGE]);

impl AlignedBuffer {
    /// Allocates zeros, in whole huge pages. Returns `None` without enough memory.
    pub(crate) fn zeros(bytes: usize) -> Option<Self> {
        let count = bytes.div_ceil(HUGE_PAGE);
        let mut pages: Vec<HugePage> = vec![];
        pages.try_reserve_exact(count).ok()?;
        let address = pages.as_mut_ptr();
        // Before the first access, which chooses the size of a page. Fails in a kernel without huge pages.
        // SAFETY: the pages are reserved, and advice changes neither their contents nor their address.
        let _ = unsafe { madvise(address.cast(), count * HUGE_PAGE, Advice::LinuxHugepage) };
        // SAFETY: the pages are reserved, and zeros are valid.
        unsafe {
            address.write_bytes(0, count);
            pages.set_len(count);
        }
        Some(AlignedBuffer { pages, bytes })
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.pages)[..self.bytes]
    }
}

/// Random access to a file. Tests replace it.
pub(crate) trait Disk: Send + Sync {
    /// Fills `into` from offset `at`.
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Writes all of `from` at offset `at`.
    fn write(&self, from: &[u8], at: u64) -> io::Result<()>;

    /// Allocates the file's bytes up to `end`. Returns false if they may lack space when they are written.
    fn allocate(&self, end: u64) -> io::Result<bool>;
}

impl Disk for File {
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(into, at)
    }

    fn write(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(from, at)
    }

    fn allocate(&self, end: u64) -> io::Result<bool> {
        match fallocate(self, FallocateFlags::empty(), 0, end) {
            // The file system can't.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.set_len(end).map(|()| false),
            allocated => Ok(allocated.map(|()| true)?),
        }
    }
}

/// Makes reads and writes of a new file bypass the page cache if its file system can, and otherwise warns. `memory` has
/// at least [`ALIGN`] bytes of zeros. They are written to the start of the file.
pub(crate) fn bypass_page_cache(file: &File, memory: &mut AlignedBuffer, dir: &Path) -> io::Result<()> {
    let block = &mut memory.bytes_mut()[..ALIGN];
    let is_direct = set_direct(file, true).is_ok();
    if !(is_direct && file.write(block, 0).and_then(|()| file.read(block, 0)).is_ok()) {
        set_direct(file, false)?;
        let dir = dir.display();
        tracing::warn!(
            "{dir} does not support direct I/O, so what is on it also takes memory in the page cache: use a directory \
             on a disk with ext4 or XFS"
        );
    }
    Ok(())
}

/// Makes reads and writes bypass the page cache, or not.
fn set_direct(file: &File, direct: bool) -> rustix::io::Result<()> {
    let flags = fcntl_getfl(file)?;
    fcntl_setfl(file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })
}
