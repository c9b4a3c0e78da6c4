//! What every store can do: files by name, read at any place and written from front to back, and directories that
//! appear as a whole.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::io_error;
use crate::{Error, Result};

/// A file that several threads may read at once, at any place.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Its name for messages.
    fn path(&self) -> &Path;

    /// Its size.
    fn bytes(&self) -> u64;

    /// How it is best read.
    fn grain(&self) -> Grain {
        Grain::LOCAL
    }

    /// Reads as many bytes as `into` has, from `at` on.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
}

/// How much of a file to read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grain {
    /// Bytes between two wanted ranges that are cheaper to read and drop than to read around.
    pub(crate) gap: usize,
    /// How many bytes of scattered ranges are read at once.
    pub(crate) block: usize,
    /// How many bytes of one range are read at once.
    pub(crate) piece: usize,
}

impl Grain {
    /// A disk gives whole pages anyway; a piece stays in a core's cache until it has been summed as well.
    const LOCAL: Grain = Grain { gap: 4096, block: 1 << 20, piece: 256 << 10 };
}

/// A new file that grows at its end. Dropped before [`Append::finish`], it is unfinished, or not there.
pub(crate) trait Append: Send {
    /// Adds bytes at the end.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Waits until everything is safe.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The files of one directory. Names are plain: without separators.
pub(crate) trait Store: Debug + Send + Sync {
    /// The directory's name, for messages.
    fn path(&self) -> &Path;

    /// The names of its files, sorted. [`Error::NotFound`] when there is no such directory.
    fn list(&self) -> Result<Vec<String>>;

    /// The names of the directories in it, sorted. [`Error::NotFound`] as for [`Store::list`].
    fn dirs(&self) -> Result<Vec<String>>;

    /// The size of a file, `None` when there is none of this name.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Where what has this name leads if it is a link, with nothing left to resolve as far as there is something.
    fn link(&self, _name: &str) -> Option<PathBuf> {
        None
    }

    /// Opens a file.
    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>>;

    /// The name to create a file under that no other writer of the same directory uses, for formats that leave the name
    /// free.
    fn unique_name(&self, name: &str) -> String {
        name.to_string()
    }

    /// Creates a file, which must not exist, that will have `bytes` bytes.
    fn create(&self, name: &str, bytes: u64) -> Result<Box<dyn Append>>;

    /// A whole file of at most `most` bytes, `None` when there is none of this name.
    fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        if self.size(name)?.is_none() {
            return Ok(None);
        }
        let file = self.open(name)?;
        let bytes = file.bytes();
        if bytes > most {
            return Err(Error::TooLarge { path: self.path().join(name), bytes, most });
        }
        let mut contents = room(file.path(), bytes)?;
        file.read_exact_at(&mut contents, 0)?;
        Ok(Some(contents))
    }
}

/// Memory for what a file has, which may claim more than there is memory.
pub(crate) fn room(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let mut contents = Vec::new();
    let reserved = usize::try_from(bytes).is_ok_and(|bytes| contents.try_reserve_exact(bytes).is_ok());
    if !reserved {
        let reason = format!("there is no memory for the {bytes} bytes to be read at once");
        return Err(io_error("read", path)(std::io::Error::new(std::io::ErrorKind::OutOfMemory, reason)));
    }
    contents.resize(bytes as usize, 0);
    Ok(contents)
}

/// A directory that grows out of sight until it is whole. Dropped before [`Staging::commit`], it is removed.
pub(crate) trait Staging: Send {
    /// What to pass to [`staged`](crate::store::staged), on any rank, for where its files go.
    fn name(&self) -> String;

    /// Writes the file that makes it whole, and shows it under its final name, for good.
    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()>;

    /// Shows it under its final name, for good, when it is whole as it is.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// What came of [`move_dir`](crate::store::move_dir).
pub(crate) enum Moved {
    Done,
    /// There is something under the new name.
    Taken,
    /// There is nothing under the old one.
    Gone,
}

/// Where a path leads in one kind of store. Each kind has one type that does this.
pub(crate) trait Location {
    /// The files of the directory there.
    fn store(&self) -> Result<Arc<dyn Store>>;

    /// Whether there is a file, not a directory or nothing.
    fn is_file(&self) -> Result<bool>;

    /// Opens the file there.
    fn open(&self) -> Result<Box<dyn ReadAt>>;

    /// Begins a directory that is to appear there.
    fn stage(&self) -> Result<Box<dyn Staging>>;

    /// What another rank has begun to appear there, by its name.
    fn staged(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// Gives the directory there a new name, that nothing has, in the same parent directory of the same store.
    fn move_to(&self, to: &Path) -> Result<Moved>;

    /// Removes the directory there. `false` when another process is at it.
    fn discard(&self) -> Result<bool>;
}
