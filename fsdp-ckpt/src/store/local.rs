//! Directories and files of this host.
//!
//! New files are written back while they grow. With plain buffered writes, the page cache would hold the bytes until
//! the final sync, which then takes long. [`LocalWriter`] preallocates the file and starts writeback of each piece.
//! That is as fast as direct I/O and leaves the bytes in the page cache, so a restarted run reads them at memory speed.

use std::fs::File;
use std::io;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use crate::error::io_error;
use crate::store::{Append, ReadAt, Store};
use crate::{Error, Result};

/// A file of this host.
#[derive(Debug)]
pub(crate) struct LocalFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LocalFile {
    /// Opens a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Opening a pipe without a writer would block. Regular files ignore the flag.
        let options = OFlags::NONBLOCK.bits() as i32;
        let file = File::options().read(true).custom_flags(options).open(path).map_err(io_error("open", path))?;
        let status = file.metadata().map_err(io_error("open", path))?;
        if !status.is_file() {
            return Err(io_error("open", path)(std::io::Error::other("it is not a regular file")));
        }
        Ok(LocalFile { path: path.to_path_buf(), file, bytes: status.len() })
    }
}

impl ReadAt for LocalFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()> {
        self.file.read_exact_at(into, at).map_err(io_error("read", &self.path))
    }
}

/// A directory of this host.
#[derive(Debug)]
pub(crate) struct LocalDir {
    path: PathBuf,
}

impl LocalDir {
    pub(crate) fn new(path: &Path) -> Self {
        LocalDir { path: path.to_path_buf() }
    }

    /// Returns the sorted names of the `wanted` entries.
    fn names(&self, wanted: impl Fn(&std::fs::Metadata) -> bool) -> Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                Error::NotFound { path: self.path.clone(), looked_for: "checkpoint: no such directory".into() }
            }
            _ => io_error("list", &self.path)(error),
        })?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("list", &self.path))?;
            // Names that are not UTF-8 belong to no checkpoint.
            if let Ok(name) = entry.file_name().into_string()
                && std::fs::metadata(entry.path()).is_ok_and(|status| wanted(&status))
            {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

impl Store for LocalDir {
    fn path(&self) -> &Path {
        &self.path
    }

    fn list(&self) -> Result<Vec<String>> {
        self.names(std::fs::Metadata::is_file)
    }

    fn dirs(&self) -> Result<Vec<String>> {
        self.names(std::fs::Metadata::is_dir)
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path.join(name);
        match std::fs::metadata(&path) {
            Ok(status) => Ok(Some(status.len())),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(io_error("open", &path)(error)),
        }
    }

    fn link(&self, name: &str) -> Option<PathBuf> {
        let path = self.path.join(name);
        let target = std::fs::read_link(&path).ok()?;
        Some(path.canonicalize().unwrap_or(target))
    }

    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>> {
        Ok(Box::new(LocalFile::open(&self.path.join(name))?))
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn Append>> {
        Ok(Box::new(LocalWriter::create(&self.path.join(name), bytes)?))
    }
}

/// Bytes to write back at once.
const WRITEBACK_BYTES: u64 = 8 << 20;

/// A new file that is appended to.
pub(super) struct LocalWriter {
    path: PathBuf,
    file: File,
    /// Offset of the next append.
    at: u64,
    /// End of the range whose writeback has started.
    sent: u64,
}

impl LocalWriter {
    /// Creates a file, which must not exist, and allocates `bytes` bytes.
    pub(super) fn create(path: &Path, bytes: u64) -> Result<Self> {
        let file = File::create_new(path).map_err(io_error("create", path))?;
        preallocate(&file, bytes).map_err(io_error("make room for", path))?;
        Ok(LocalWriter { path: path.to_path_buf(), file, at: 0, sent: 0 })
    }
}

impl Append for LocalWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(WRITEBACK_BYTES as usize) {
            self.file.write_all_at(piece, self.at).map_err(io_error("write", &self.path))?;
            self.at += piece.len() as u64;
            if self.at - self.sent >= WRITEBACK_BYTES {
                send(&self.file, self.sent, self.at - self.sent);
                self.sent = self.at;
            }
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.file.sync_all().map_err(io_error("sync", &self.path))
    }
}

/// Allocates space, or only sets the size where the file system can't allocate.
fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        other => Ok(other?),
    }
}

/// Starts writeback of a range without waiting for it.
fn send(file: &File, at: u64, bytes: u64) {
    // SAFETY: the descriptor is open while `file` is borrowed, and the call accesses no memory of this process.
    let _ = unsafe {
        // Errors are reported by the sync in `finish`.
        libc::sync_file_range(file.as_raw_fd(), at as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_appended_bytes() {
        let root = tempfile::tempdir().unwrap();
        for (i, bytes) in [0, 1, WRITEBACK_BYTES as usize + 1, 3 * WRITEBACK_BYTES as usize + 7].into_iter().enumerate()
        {
            for piece in [1_000_003, 2 * WRITEBACK_BYTES as usize + 5] {
                let data: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
                let path = root.path().join(format!("{i}-{piece}"));
                let mut file = LocalWriter::create(&path, bytes as u64).unwrap();
                for piece in data.chunks(piece) {
                    file.append(piece).unwrap();
                }
                Box::new(file).finish().unwrap();
                assert!(std::fs::read(&path).unwrap() == data, "{bytes} bytes");
                let error = LocalWriter::create(&path, 1).err().unwrap();
                let crate::Error::Io { source, .. } = error else { panic!("{error}") };
                assert_eq!(source.kind(), io::ErrorKind::AlreadyExists);
            }
        }
    }
}
