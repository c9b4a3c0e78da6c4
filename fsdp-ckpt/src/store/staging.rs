//! A directory of this host that grows under another name until it is whole, and one that goes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;

use super::files::{Location, Moved, ReadAt, Staging, Store};
use super::hidden::{Hidden, sweep, sync_dir};
use super::local::{LocalDir, LocalFile};
use super::place::split;
use crate::error::io_error;
use crate::shown::shown;
use crate::{Error, Result};

/// A directory beside its target, which it becomes.
struct LocalStaging {
    hidden: Hidden,
    target: PathBuf,
    committed: bool,
}

impl LocalStaging {
    /// Creates the directory for `target`, which must not exist, and removes what dead processes have left beside it.
    fn create(target: &Path) -> Result<Self> {
        let (parent, name) = split(target)?;
        if target.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: target.to_path_buf() });
        }
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
        if let Err(error) = sync_dir(&split(target)?.0) {
            // What has failed is not to have the name. It goes as if it had never had it.
            self.committed = rename_to_new(target, path).is_err();
            return Err(error);
        }
        Ok(())
    }
}

impl Drop for LocalStaging {
    fn drop(&mut self) {
        if !self.committed
            && let Err(error) = std::fs::remove_dir_all(&self.hidden.path)
        {
            let path = shown(self.hidden.path.display());
            tracing::warn!("can't remove {path}: {error}; the next save beside it tries again");
        }
    }
}

/// Renames a directory or a file to a name that nothing has.
pub(crate) fn rename_to_new(path: &Path, target: &Path) -> std::io::Result<()> {
    let cwd = rustix::fs::CWD;
    match renameat_with(cwd, path, cwd, target, RenameFlags::NOREPLACE) {
        // Not every file system can refuse to replace. All refuse to replace a directory that holds something; a file
        // is looked for first.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match target.symlink_metadata() {
            Ok(there) if !there.is_dir() => Err(ErrorKind::AlreadyExists.into()),
            _ => std::fs::rename(path, target),
        },
        other => other.map_err(std::io::Error::from),
    }
}

/// A path of this host.
pub(super) struct LocalPath<'a>(pub(super) &'a Path);

impl Location for LocalPath<'_> {
    fn store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(LocalDir::new(self.0)))
    }

    fn is_file(&self) -> Result<bool> {
        Ok(self.0.is_file())
    }

    fn open(&self) -> Result<Box<dyn ReadAt>> {
        Ok(Box::new(LocalFile::open(self.0)?))
    }

    fn stage(&self) -> Result<Box<dyn Staging>> {
        Ok(Box::new(LocalStaging::create(self.0)?))
    }

    fn staged(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(LocalDir::new(&split(self.0)?.0.join(name))))
    }

    /// For good.
    fn move_to(&self, to: &Path) -> Result<Moved> {
        match rename_to_new(self.0, to) {
            Ok(()) => {}
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound => Ok(Moved::Gone),
                    ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory => {
                        Ok(Moved::Taken)
                    }
                    _ => Err(io_error("rename", self.0)(error)),
                };
            }
        }
        sync_dir(&split(to)?.0)?;
        Ok(Moved::Done)
    }

    /// Under its name it is there as a whole, or not at all.
    fn discard(&self) -> Result<bool> {
        let (parent, name) = split(self.0)?;
        match Hidden::take(self.0, &parent, &name)? {
            Some(hidden) => hidden.remove().map(|()| true),
            None => Ok(false),
        }
    }
}
