//! A file written from front to back whose bytes go to disk while more of them come.
//!
//! Left to itself the page cache keeps what is written until the end, and then there is a long wait, or it stops the writer when it holds too much.
//! The bytes stay in the page cache as well: a run that is restarted on the same host has them back at the speed of memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::Append;
use crate::Result;
use crate::error::io_error;

/// Bytes written before they are sent to disk.
const TURN: u64 = 32 << 20;

/// A file that grows at its end.
pub(super) struct WrittenBack {
    path: PathBuf,
    file: File,
    /// Where the next bytes go.
    at: u64,
    /// Where the next turn begins.
    turn: u64,
    syncer: Option<Syncer>,
}

/// A thread that syncs when told to. It is told again while it is busy at most once.
struct Syncer {
    tell: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl WrittenBack {
    /// Creates a file, which must not exist, that will have `bytes` bytes.
    pub(super) fn create(path: &Path, bytes: u64) -> Result<Self> {
        let create = || {
            let file = File::create_new(path)?;
            file.set_len(bytes)?;
            let syncer = if bytes > TURN { Some(Syncer::start(file.try_clone()?)?) } else { None };
            Ok(WrittenBack { path: path.to_path_buf(), file, at: 0, turn: TURN, syncer })
        };
        create().map_err(io_error("create", path))
    }
}

impl Append for WrittenBack {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.at).map_err(io_error("write", &self.path))?;
        self.at += bytes.len() as u64;
        if self.at >= self.turn {
            self.turn = self.at + TURN;
            if let Some(syncer) = &self.syncer {
                // Full: it will sync these bytes, too. Gone: it failed, and `finish` tells how.
                let _ = syncer.tell.try_send(());
            }
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let WrittenBack { path, file, syncer, .. } = *self;
        let finish = || {
            if let Some(Syncer { tell, thread }) = syncer {
                drop(tell);
                // The system tells an error of a write-back once only: the thread may have got it.
                thread.join().map_err(|_| io::Error::other("the thread that syncs the file panicked"))??;
            }
            file.sync_all()
        };
        finish().map_err(io_error("write", &path))
    }
}

impl Syncer {
    fn start(file: File) -> io::Result<Self> {
        let (tell, told) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("fsdp-ckpt-sync".into())
            .spawn(move || told.iter().try_for_each(|()| file.sync_data()))?;
        Ok(Syncer { tell, thread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_what_is_in_the_file() {
        let root = tempfile::tempdir().unwrap();
        for (i, bytes) in [0, 1, TURN as usize + 1, 3 * TURN as usize + 7].into_iter().enumerate() {
            let data: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
            let path = root.path().join(i.to_string());
            let mut file = WrittenBack::create(&path, bytes as u64).unwrap();
            for piece in data.chunks(1_000_003) {
                file.append(piece).unwrap();
            }
            Box::new(file).finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == data, "{bytes} bytes");
            let error = WrittenBack::create(&path, 1).err().unwrap();
            assert!(matches!(error, crate::Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists));
        }
    }
}
