//! A directory of this host that grows under another name until it is whole, and one that goes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;

use super::hidden::{Hidden, sweep, sync_dir};
use super::{LocalDir, Moved, Staging, Store, split};
use crate::error::io_error;
use crate::{Error, Result};

/// A directory beside its target, which it becomes.
pub(super) struct LocalStaging {
    hidden: Hidden,
    target: PathBuf,
    committed: bool,
}

impl LocalStaging {
    /// Creates the directory for `target`, which must not exist, and removes what dead processes have left beside it.
    pub(super) fn create(target: &Path) -> Result<Self> {
        let (parent, name) = split(target)?;
        if target.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: target.to_path_buf() });
        }
        std::fs::create_dir_all(&parent).map_err(io_error("create", &parent))?;
        sweep(&parent);
        let hidden = Hidden::create_dir(&parent, &name)?;
        Ok(LocalStaging { hidden, target: target.to_path_buf(), committed: false })
    }
}

impl Staging for LocalStaging {
    fn name(&self) -> String {
        // It was made from text.
        self.hidden.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()> {
        let mut file = LocalDir::new(&self.hidden.path).create(manifest, contents.len() as u64)?;
        file.append(contents)?;
        file.finish()?;
        self.publish()
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        let (path, target) = (&*self.hidden.path, &*self.target);
        self.hidden.file.sync_all().map_err(io_error("sync", path))?;
        rename_to_new(path, target).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => Error::Exists { path: target.to_path_buf() },
            _ => io_error("rename", path)(error),
        })?;
        self.committed = true;
        sync_dir(&split(&self.target)?.0)
    }
}

impl Drop for LocalStaging {
    fn drop(&mut self) {
        if !self.committed
            && let Err(error) = std::fs::remove_dir_all(&self.hidden.path)
        {
            tracing::warn!("can't remove {}: {error}; the next save beside it tries again", self.hidden.path.display());
        }
    }
}

/// Renames a directory to a name that nothing has.
fn rename_to_new(path: &Path, target: &Path) -> std::io::Result<()> {
    let cwd = rustix::fs::CWD;
    match renameat_with(cwd, path, cwd, target, RenameFlags::NOREPLACE) {
        // Not every file system can refuse to replace; all refuse to replace a directory that holds something.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => std::fs::rename(path, target),
        other => other.map_err(std::io::Error::from),
    }
}

/// Gives a directory a new name for good.
pub(super) fn move_dir(from: &Path, to: &Path) -> Result<Moved> {
    match rename_to_new(from, to) {
        Ok(()) => {}
        Err(error) => {
            return match error.kind() {
                ErrorKind::NotFound => Ok(Moved::Gone),
                ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory => Ok(Moved::Taken),
                _ => Err(io_error("rename", from)(error)),
            };
        }
    }
    sync_dir(&split(to)?.0)?;
    Ok(Moved::Done)
}

/// Removes a directory: under its name it is there as a whole, or not at all. `false` when another process is at it.
pub(crate) fn discard(dir: &Path) -> Result<bool> {
    let (parent, name) = split(dir)?;
    match Hidden::take(dir, &parent, &name)? {
        Some(hidden) => hidden.remove().map(|()| true),
        None => Ok(false),
    }
}
