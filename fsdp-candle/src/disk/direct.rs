//! Reads and writes of a file that bypass the page cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// Alignment in a file and in memory, which direct I/O requires.
pub(crate) const ALIGN: usize = 4096;

/// Memory at an address that direct I/O accepts.
pub(crate) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl AlignedBuffer {
    /// Allocates zeros. Returns `None` without enough memory.
    pub(crate) fn zeros(bytes: usize) -> Option<Self> {
        let mut memory = vec![];
        memory.try_reserve_exact(bytes.checked_add(ALIGN)?).ok()?;
        memory.resize(bytes + ALIGN, 0);
        let start = memory.as_ptr().align_offset(ALIGN);
        Some(AlignedBuffer { memory, start, bytes })
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
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

/// Makes reads and writes of a new file bypass the page cache if its file system can, and otherwise warns. `block` has
/// at least [`ALIGN`] bytes of zeros. They are written to the start of the file.
pub(crate) fn bypass_page_cache(file: &File, block: &mut AlignedBuffer, dir: &Path) -> io::Result<()> {
    let block = &mut block.bytes_mut()[..ALIGN];
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
