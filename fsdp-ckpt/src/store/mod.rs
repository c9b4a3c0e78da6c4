//! Where the files of a checkpoint lie: a directory of this host's file systems.
//!
//! Formats know files by name and read them at any place; what a file is, is known here only.

mod local;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

pub(crate) use local::{LocalDir, LocalFile};

use crate::Result;

/// A file that several threads may read at once, at any place.
pub(crate) trait ReadAt: Debug + Send + Sync {
    /// Its name for messages.
    fn path(&self) -> &Path;

    /// Its size.
    fn bytes(&self) -> u64;

    /// Reads as many bytes as `into` has, from `at` on.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()>;
}

/// The files of one directory. Names are plain: without separators.
pub(crate) trait Store: Debug + Send + Sync {
    /// The directory's name, for messages.
    fn path(&self) -> &Path;

    /// The names of its files, sorted. [`crate::Error::NotFound`] when there is no such directory.
    fn list(&self) -> Result<Vec<String>>;

    /// The size of a file, `None` when there is none of this name.
    fn size(&self, name: &str) -> Result<Option<u64>>;

    /// Opens a file.
    fn open(&self, name: &str) -> Result<Box<dyn ReadAt>>;

    /// A whole file of at most `most` bytes, `None` when there is none of this name.
    fn read(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        if self.size(name)?.is_none() {
            return Ok(None);
        }
        let file = self.open(name)?;
        let bytes = file.bytes();
        if bytes > most {
            let path = self.path().join(name);
            return Err(crate::Error::TooLarge { path, bytes, most });
        }
        let mut contents = vec![0; bytes as usize];
        file.read_exact_at(&mut contents, 0)?;
        Ok(Some(contents))
    }
}

/// The store of a directory's files.
pub(crate) fn store(dir: &Path) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(LocalDir::new(dir)))
}
