//! A file written from front to back whose bytes go to disk while more of them come.
//!
//! Left to itself the page cache keeps what is written until the end, and then there is a long wait, or it stops the
//! writer when it holds too much. Here the system begins to write a piece as soon as it is whole, into blocks that were
//! allocated at once: that is as fast as writing around the page cache, and the bytes stay in it: a run that is
//! restarted on the same host has them back at the speed of memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::files::Append;
use crate::Result;
use crate::error::io_error;

/// Bytes that are sent to disk together.
const TURN: u64 = 8 << 20;

/// A file that grows at its end.
pub(super) struct WrittenBack {
    path: PathBuf,
    file: File,
    /// Where the next bytes go.
    at: u64,
    /// Up to where bytes are on their way to disk.
    sent: u64,
}

impl WrittenBack {
    /// Creates a file, which must not exist, that will have `bytes` bytes, and takes the room for them.
    pub(super) fn create(path: &Path, bytes: u64) -> Result<Self> {
        let file = File::create_new(path).map_err(io_error("create", path))?;
        make_room(&file, bytes).map_err(io_error("make room for", path))?;
        Ok(WrittenBack { path: path.to_path_buf(), file, at: 0, sent: 0 })
    }
}

impl Append for WrittenBack {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(TURN as usize) {
            self.file.write_all_at(piece, self.at).map_err(io_error("write", &self.path))?;
            self.at += piece.len() as u64;
            if self.at - self.sent >= TURN {
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

/// A file system that can't allocate ahead has the size all the same.
fn make_room(file: &File, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        other => Ok(other?),
    }
}

/// Has the system begin to write a part of the file, and waits for nothing.
fn send(file: &File, at: u64, bytes: u64) {
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and the call touches no memory of ours.
    let _ = unsafe {
        // It only comes earlier: `finish` waits for all of it, and the system keeps an error until then.
        libc::sync_file_range(file.as_raw_fd(), at as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_what_is_in_the_file() {
        let root = tempfile::tempdir().unwrap();
        for (i, bytes) in [0, 1, TURN as usize + 1, 3 * TURN as usize + 7].into_iter().enumerate() {
            for piece in [1_000_003, 2 * TURN as usize + 5] {
                let data: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
                let path = root.path().join(format!("{i}-{piece}"));
                let mut file = WrittenBack::create(&path, bytes as u64).unwrap();
                for piece in data.chunks(piece) {
                    file.append(piece).unwrap();
                }
                Box::new(file).finish().unwrap();
                assert!(std::fs::read(&path).unwrap() == data, "{bytes} bytes");
                let error = WrittenBack::create(&path, 1).err().unwrap();
                let crate::Error::Io { source, .. } = error else { panic!("{error}") };
                assert_eq!(source.kind(), io::ErrorKind::AlreadyExists);
            }
        }
    }
}
