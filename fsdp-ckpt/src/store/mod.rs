//! Where the files of a checkpoint lie: a directory of this host's file systems.
//!
//! Formats know files by name, read them at any place and write them from front to back; what a file is, is known here only. A path says which store it
//! is in.

mod hidden;
mod local;
mod staging;
mod written_back;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use hidden::{sync_dir, unique};
pub(crate) use local::{LocalDir, LocalFile};
pub(crate) use staging::discard;

use crate::{Error, Result};

/// A file that several threads may read at once, at any place.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Its name for messages.
    fn path(&self) -> &Path;

    /// Its size.
    fn bytes(&self) -> u64;

    /// Reads as many bytes as `into` has, from `at` on.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
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

    /// The size of a file, `None` when there is none of this name.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Whether what has this name is a link to a file elsewhere.
    fn is_link(&self, _name: &str) -> bool {
        false
    }

    /// Opens a file.
    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>>;

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
        let mut contents = vec![0; bytes as usize];
        file.read_exact_at(&mut contents, 0)?;
        Ok(Some(contents))
    }
}

/// A directory that grows out of sight until it is whole. Dropped before [`Staging::commit`], it is removed.
pub(crate) trait Staging: Send {
    /// What to pass to [`staged`], on any rank, for where its files go.
    fn name(&self) -> String;

    /// Writes the file that makes it whole, and shows it under its final name, for good.
    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()>;

    /// Shows it under its final name, for good, when it is whole as it is.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// The store of a directory's files.
pub(crate) fn store(dir: &Path) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(LocalDir::new(dir)))
}

/// Begins a directory that is to become `target`, which must not exist. What dead writers have left beside it is removed.
pub(crate) fn stage(target: &Path) -> Result<Box<dyn Staging>> {
    Ok(Box::new(staging::LocalStaging::create(target)?))
}

/// What another rank has begun for `target`, by its name.
pub(crate) fn staged(target: &Path, name: &str) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(LocalDir::new(&split(target)?.0.join(name))))
}

/// A target's parent directory and file name.
pub(crate) fn split(target: &Path) -> Result<(PathBuf, String)> {
    let name = target.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Error::Argument(format!(
            "{:?} does not end in a name for a checkpoint",
            target.display().to_string()
        )));
    };
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_string()))
}
