//! A file of a rank's state. It has no name, so the system frees it when the process ends, even if the
//! process is killed.

use std::fmt::{self, Debug, Formatter};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::statvfs;
use rustix::io::Errno;

use super::direct::{AlignedBuffer, Disk, bypass_page_cache};
use super::stream::{BLOCKS, Failure, stream};
use crate::error::{Error, Result};

/// A file without a name, with blocks of memory to access it.
pub(crate) struct StateFile {
    disk: Box<dyn Disk>,
    /// Directory on the file's disk.
    dir: PathBuf,
    /// This rank, for errors.
    rank: usize,
    /// Bytes of a block.
    block: usize,
    memory: Mutex<Memory>,
}

struct Memory {
    /// Bytes of the file.
    bytes: u64,
    /// Bytes that [`StateFile::grow`] has given out.
    used: u64,
    blocks: Vec<AlignedBuffer>,
    /// Whether a write runs or failed, so that the file has both old and new values.
    is_incomplete: bool,
}

impl StateFile {
    /// Allocates a file of zeros on the disk of a directory, and blocks of memory.
    pub(crate) fn create(dir: &Path, rank: usize, bytes: u64, block: usize) -> Result<Self> {
        let fail = |doing: &str, error: io::Error| {
            let message = format!("can't {doing} a file: {error}. Pass a directory that this process may write to");
            Error::StateOnDisk { rank, dir: dir.into(), kind: error.kind(), message }
        };
        let file = tempfile::tempfile_in(dir).map_err(|error| fail("create", error))?;
        let full = |error: io::Error| full(dir, rank, bytes, error);
        check_space(dir, bytes).map_err(full)?;
        let has_zeros = file.allocate(bytes).map_err(full)?;
        let state =
            StateFile::new(Box::new(file.try_clone().map_err(|error| fail("open", error))?), dir, rank, bytes, block)?;
        bypass_page_cache(&file, &mut state.memory.lock().blocks[0], dir).map_err(|error| fail("open", error))?;
        if !has_zeros {
            state.zero().map_err(|error| match error {
                Error::StateOnDisk { kind: ErrorKind::StorageFull, .. } => full(Errno::NOSPC.into()),
                error => error,
            })?;
        }
        Ok(state)
    }

    /// Allocates the memory for a file.
    pub(crate) fn new(disk: Box<dyn Disk>, dir: &Path, rank: usize, bytes: u64, block: usize) -> Result<Self> {
        let count = bytes.div_ceil(block.max(1) as u64).clamp(1, BLOCKS as u64);
        let blocks = (0..count).map(|_| AlignedBuffer::zeros(block)).collect::<Option<_>>().ok_or_else(|| {
            let message = format!("can't allocate {count} blocks of {block} bytes: use smaller blocks");
            Error::StateOnDisk { rank, dir: dir.into(), kind: ErrorKind::OutOfMemory, message }
        })?;
        let memory = Mutex::new(Memory { bytes, used: 0, blocks, is_incomplete: false });
        Ok(StateFile { disk, dir: dir.into(), rank, block, memory })
    }

    /// Returns the bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.block
    }

    /// Gives out bytes of the file that were not given out before. Allocates more if needed. Returns their offset.
    pub(super) fn grow(&self, bytes: u64) -> Result<u64> {
        let mut memory = self.memory.lock();
        let (start, end) = (memory.used, memory.used + bytes);
        if end > memory.bytes {
            let more = end - memory.bytes;
            let allocated = check_space(&self.dir, more).and_then(|()| self.disk.allocate(end));
            allocated.map_err(|error| full(&self.dir, self.rank, more, error))?;
            memory.bytes = end;
        }
        memory.used = end;
        Ok(start)
    }

    /// Calls `f` with the index and the bytes of each range, in order, as [`stream`] does. Fails if an earlier write
    /// has failed.
    pub(crate) fn stream(
        &self,
        ranges: &[Range<u64>],
        write: bool,
        f: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut memory = self.memory.lock();
        if memory.is_incomplete {
            let message = "it is incomplete, because an earlier write failed: resume from a checkpoint, or reset it";
            return Err(self.error(ErrorKind::Other, message.into()));
        }
        memory.is_incomplete = write;
        let done = stream(&*self.disk, &mut memory.blocks, ranges, write, f);
        memory.is_incomplete = write && done.is_err();
        done.map_err(|failure| self.failed(failure, write))
    }

    /// Overwrites the file with zeros, also after a failed write.
    pub(crate) fn zero(&self) -> Result<()> {
        let mut memory = self.memory.lock();
        memory.is_incomplete = true;
        let end = memory.bytes;
        let block = memory.blocks[0].bytes_mut();
        block.fill(0);
        let mut at = 0;
        while at < end {
            let bytes = (end - at).min(block.len() as u64);
            let written = self.disk.write(&block[..bytes as usize], at);
            written.map_err(|error| self.failed(Failure::Write(error), true))?;
            at += bytes;
        }
        memory.is_incomplete = false;
        Ok(())
    }

    fn failed(&self, failure: Failure, write: bool) -> Error {
        let (doing, error) = match failure {
            Failure::Caller(error) => return error,
            Failure::Read(error) => ("read", error),
            Failure::Write(error) => ("write", error),
            Failure::Thread(error) => ("start a thread for", error),
        };
        let then = match write {
            true => "The state is incomplete: resume from a checkpoint. If the disk fails again, use another directory",
            false => "If the disk fails again, use another directory",
        };
        self.error(error.kind(), format!("can't {doing} it: {error}. {then}"))
    }

    fn error(&self, kind: ErrorKind, message: String) -> Error {
        Error::StateOnDisk { rank: self.rank, dir: self.dir.clone(), kind, message }
    }
}

impl Debug for StateFile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateFile").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// Returns the free bytes of a directory's disk, if the file system tells its size.
fn free_bytes(dir: &Path) -> Option<u64> {
    statvfs(dir).ok().filter(|found| found.f_blocks > 0).map(|found| found.f_bavail.saturating_mul(found.f_frsize))
}

/// Checks the free space of a disk. Without this check, a file that is too large would fill the disk until its
/// allocation fails.
fn check_space(dir: &Path, bytes: u64) -> io::Result<()> {
    match free_bytes(dir).is_some_and(|free| free < bytes) {
        true => Err(Errno::NOSPC.into()),
        false => Ok(()),
    }
}

/// Makes the error of a file that needs more bytes than the disk has.
fn full(dir: &Path, rank: usize, bytes: u64, error: io::Error) -> Error {
    let free = free_bytes(dir).map_or("an unknown number".into(), |free| free.to_string());
    let message = format!(
        "it needs {bytes} bytes, found {free} free: {error}. Free space, use another directory, or use more ranks"
    );
    Error::StateOnDisk { rank, dir: dir.into(), kind: error.kind(), message }
}
