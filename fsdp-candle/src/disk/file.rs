//! A file of a rank's state. It has no name, so the system frees it when the process ends, even if the
//! process is killed.

use std::fmt::{self, Debug, Formatter};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::file_limit;
use parking_lot::Mutex;
use rustix::fs::statvfs;
use rustix::io::Errno;

use super::direct::{AlignedBuffer, Disk, bypass_page_cache};
use super::stream::{Access, BLOCKS, Failure, FileRange, stream};
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
    /// Memory of all blocks.
    blocks: Mutex<AlignedBuffer>,
    space: Mutex<Space>,
    /// Whether a write failed, so that the file has both old and new values.
    is_incomplete: AtomicBool,
}

struct Space {
    /// Bytes of the file.
    bytes: u64,
    /// Bytes that [`StateFile::grow`] has given out.
    used: u64,
}

/// Files that are being written. They are incomplete if this is dropped before it is `done`.
struct Writing<'a> {
    files: Vec<&'a StateFile>,
    done: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.files.iter().filter(|_| !self.done).for_each(|file| file.is_incomplete.store(true, Ordering::SeqCst));
    }
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
        bypass_page_cache(&file, &mut state.blocks.lock(), dir).map_err(|error| fail("open", error))?;
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
        let blocks = AlignedBuffer::zeros(count as usize * block).ok_or_else(|| {
            let message = format!("can't allocate {count} blocks of {block} bytes: use smaller blocks");
            Error::StateOnDisk { rank, dir: dir.into(), kind: ErrorKind::OutOfMemory, message }
        })?;
        let (blocks, space) = (Mutex::new(blocks), Mutex::new(Space { bytes, used: 0 }));
        Ok(StateFile { disk, dir: dir.into(), rank, block, blocks, space, is_incomplete: AtomicBool::new(false) })
    }

    /// Returns the bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.block
    }

    /// Gives out bytes of the file that were not given out before. Allocates more if needed. Returns their offset.
    pub(super) fn grow(&self, bytes: u64) -> Result<u64> {
        let mut space = self.space.lock();
        let (start, end) = (space.used, space.used + bytes);
        if end > space.bytes {
            let more = end - space.bytes;
            let allocated = check_space(&self.dir, more).and_then(|()| self.disk.allocate(end));
            allocated.map_err(|error| full(&self.dir, self.rank, more, error))?;
            space.bytes = end;
        }
        space.used = end;
        Ok(start)
    }

    pub(super) fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.disk.read(into, at)
    }

    pub(super) fn write(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.disk.write(from, at)
    }

    /// Calls `f` with the index and the bytes of each range of this file, as [`StateFile::stream_items`].
    pub(crate) fn stream(
        &self,
        ranges: &[Range<u64>],
        access: Access,
        f: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let item = |range: &Range<u64>| vec![FileRange { file: self, bytes: range.clone() }];
        self.stream_items(&ranges.iter().map(item).collect::<Vec<_>>(), access, f)
    }

    /// Calls `f` with the index and the bytes of each item, as [`stream`] does, by way of this file's blocks.
    /// Fails if an earlier write to one of the files has failed.
    pub(crate) fn stream_items(
        &self,
        items: &[Vec<FileRange<'_>>],
        access: Access,
        f: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let mut files = vec![self];
        for range in items.iter().flatten() {
            if !files.iter().any(|file| std::ptr::eq(*file, range.file)) {
                files.push(range.file);
            }
        }
        if let Some(file) = files.iter().find(|file| file.is_incomplete.load(Ordering::SeqCst)) {
            let message = "it is incomplete, because an earlier write failed: resume from a checkpoint, or reset it";
            return Err(file.error(ErrorKind::Other, message.into()));
        }
        let mut writing = Writing { files, done: access == Access::Read };
        let done = stream(blocks.bytes_mut().chunks_exact_mut(self.block.max(1)), items, access, f);
        writing.done |= done.is_ok();
        done.map_err(|failure| self.failed(failure, access))
    }

    /// Overwrites the file with zeros, also after a failed write.
    pub(crate) fn zero(&self) -> Result<()> {
        let (mut blocks, end) = (self.blocks.lock(), self.space.lock().bytes);
        let mut writing = Writing { files: vec![self], done: false };
        let block = &mut blocks.bytes_mut()[..self.block];
        block.fill(0);
        let mut at = 0;
        while at < end {
            let bytes = (end - at).min(block.len() as u64);
            let written = self.disk.write(&block[..bytes as usize], at);
            written.map_err(|error| self.failed(Failure::Write(self, error), Access::Write))?;
            at += bytes;
        }
        writing.done = true;
        self.is_incomplete.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn failed(&self, failure: Failure<'_>, access: Access) -> Error {
        let (file, doing, error) = match failure {
            Failure::Caller(error) => return error,
            Failure::Panic(panic) => resume_unwind(panic),
            Failure::Read(file, error) => (file, "read", error),
            Failure::Write(file, error) => (file, "write", error),
            Failure::Thread(error) => (self, "start a thread for", error),
        };
        let then = match access {
            Access::Read => "If the disk fails again, use another directory",
            _ => "The state is incomplete: resume from a checkpoint. If the disk fails again, use another directory",
        };
        let error = file_limit::explained(error);
        file.error(error.kind(), format!("can't {doing} it: {error}. {then}"))
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
    if let Some(advice) = file_limit::advice(&error) {
        let message = format!("it needs {bytes} bytes: {error}: {advice}, or use more ranks");
        return Error::StateOnDisk { rank, dir: dir.into(), kind: error.kind(), message };
    }
    let free = free_bytes(dir).map_or("an unknown number".into(), |free| free.to_string());
    let message = format!(
        "it needs {bytes} bytes, found {free} free: {error}. Free space, use another directory, or use more ranks"
    );
    Error::StateOnDisk { rank, dir: dir.into(), kind: error.kind(), message }
}
