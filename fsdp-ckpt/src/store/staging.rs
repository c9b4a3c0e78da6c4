//! A directory of this host that grows under another name until it is whole.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use super::{LocalDir, Staging, Store, split};
use crate::error::io_error;
use crate::{Error, Result};

/// A directory beside its target, which it becomes.
///
/// It is locked for as long as its process lives, so that another save can tell a dead one's directory from one in use.
pub(super) struct LocalStaging {
    dir: LocalDir,
    target: PathBuf,
    lock: File,
    committed: bool,
}

impl LocalStaging {
    /// Creates the directory for `target`, which must not exist, and removes those that dead saves of the same target have left.
    pub(super) fn create(target: &Path) -> Result<Self> {
        let (parent, name) = split(target)?;
        if target.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: target.to_path_buf() });
        }
        std::fs::create_dir_all(&parent).map_err(io_error("create", &parent))?;
        sweep(&parent, &name);
        let path = parent.join(format!("{}{}", prefix(&name), unique()));
        std::fs::create_dir(&path).map_err(io_error("create", &path))?;
        let lock = File::open(&path).map_err(io_error("open", &path))?;
        let staging = LocalStaging { dir: LocalDir::new(&path), target: target.to_path_buf(), lock, committed: false };
        match flock(&staging.lock, FlockOperation::NonBlockingLockExclusive) {
            // Some network file systems have no locks; there nothing is swept either.
            Ok(()) | Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => Ok(staging),
            Err(error) => Err(io_error("lock", &path)(error.into())),
        }
    }
}

impl Staging for LocalStaging {
    fn name(&self) -> String {
        // It was made from text.
        self.dir.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()> {
        let mut file = self.dir.create(manifest, contents.len() as u64)?;
        file.append(contents)?;
        file.finish()?;
        self.publish()
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        let (path, target) = (self.dir.path(), &*self.target);
        self.lock.sync_all().map_err(io_error("sync", path))?;
        let cwd = rustix::fs::CWD;
        let renamed = match renameat_with(cwd, path, cwd, target, RenameFlags::NOREPLACE) {
            // Not every file system can refuse to replace; all refuse to replace a directory that holds something.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => std::fs::rename(path, target),
            other => other.map_err(std::io::Error::from),
        };
        renamed.map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists | std::io::ErrorKind::DirectoryNotEmpty => {
                Error::Exists { path: target.to_path_buf() }
            }
            _ => io_error("rename", path)(error),
        })?;
        let parent = split(target)?.0;
        self.committed = true;
        sync_dir(&parent)
    }
}

impl Drop for LocalStaging {
    fn drop(&mut self) {
        if !self.committed
            && let Err(error) = std::fs::remove_dir_all(self.dir.path())
        {
            tracing::warn!(
                "can't remove {}: {error}; the next save of the same name tries again",
                self.dir.path().display()
            );
        }
    }
}

/// Waits until a directory's entries are on disk.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}

/// Something that no other live or dead process on any host has likely used.
pub(crate) fn unique() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{:x}", std::process::id(), since.as_nanos())
}

fn prefix(name: &str) -> String {
    format!(".{name}.tmp-")
}

/// Removes what dead saves of `name` have left. What can't be removed is no reason not to save.
fn sweep(parent: &Path, name: &str) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let prefix = prefix(name);
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix));
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        let Ok(dir) = File::open(&path) else { continue };
        if flock(&dir, FlockOperation::NonBlockingLockExclusive).is_err() {
            tracing::warn!("{} is in use by another save of {name}", path.display());
            continue;
        }
        match std::fs::remove_dir_all(&path) {
            Ok(()) => tracing::info!("removed {}, left by a save that did not finish", path.display()),
            Err(error) => tracing::warn!("can't remove {}: {error}", path.display()),
        }
    }
}
