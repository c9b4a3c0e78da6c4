//! Directories of this host.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::files::{Append, ReadAt, Store};
use super::written_back::WrittenBack;
use crate::error::io_error;
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
        // A pipe that nobody writes to would be waited for; a regular file knows no difference.
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

    /// The names of its entries that are `wanted`, sorted.
    fn names(&self, wanted: impl Fn(&std::fs::Metadata) -> bool) -> Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                Error::NotFound { path: self.path.clone(), looked_for: "checkpoint: there is no such directory".into() }
            }
            _ => io_error("list", &self.path)(error),
        })?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("list", &self.path))?;
            // A name that is no text is none of a checkpoint's.
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
        Ok(Box::new(WrittenBack::create(&self.path.join(name), bytes)?))
    }
}
