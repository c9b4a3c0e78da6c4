//! Temporary directories and files of this host: creating, renaming and removing them, and removing what dead
//! processes left.
//!
//! A temporary name holds the host, the process and the time, and the entry is locked (`flock`) while its process
//! lives. So a later save can tell entries of dead processes from those in use:
//!
//! - A lock may be known to its host only (NFS). Entries of another host must also be a day old.
//! - Without locks, an entry is dead if its process has ended on this host, or if it is a day old.
//!
//! A directory to remove gets a temporary name first. A crash then never leaves a final name without some of its files.

use std::fs::File;
use std::io;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::error::io_error;
use crate::escape::escape;
use crate::store::local::{LocalDir, LocalFile};
use crate::store::{Location, MoveOutcome, ReadAt, Staging, Store, split};
use crate::{Error, Result};

/// A temporary directory or file beside its target. Dropping it before it is renamed removes it.
pub(crate) struct LocalStaging {
    temp: TempEntry,
    target: PathBuf,
    renamed: bool,
}

impl LocalStaging {
    /// Creates a directory for `target`, which must not exist, and removes what dead processes left beside it.
    fn create_dir(target: &Path) -> Result<Self> {
        let (parent, name) = split(target)?;
        if target.symlink_metadata().is_ok() {
            return Err(Error::AlreadyExists { path: target.to_path_buf() });
        }
        remove_stale(&parent);
        let temp = TempEntry::create_dir(&parent, &name)?;
        Ok(LocalStaging { temp, target: target.to_path_buf(), renamed: false })
    }

    /// Creates a file for `target`, and opens it for writing.
    pub(crate) fn create_file(target: &Path) -> Result<Self> {
        let (parent, name) = split(target)?;
        let temp = TempEntry::create_file(&parent, &name)?;
        Ok(LocalStaging { temp, target: target.to_path_buf(), renamed: false })
    }

    pub(crate) fn file(&self) -> &File {
        &self.temp.file
    }

    pub(crate) fn path(&self) -> &Path {
        &self.temp.path
    }

    /// Syncs the entry and renames it to the target. Unless `replace`, keeps an entry that was created there meanwhile.
    pub(crate) fn rename(mut self, replace: bool) -> Result<()> {
        let (path, target) = (&*self.temp.path, &*self.target);
        self.temp.file.sync_all().map_err(io_error("sync", path))?;
        let renamed = if replace { std::fs::rename(path, target) } else { rename_noreplace(path, target) };
        renamed.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                Error::AlreadyExists { path: target.to_path_buf() }
            }
            _ => io_error("rename", path)(error),
        })?;
        self.renamed = true;
        if let Err(error) = sync_dir(&split(target)?.0) {
            // Undo the rename: a failed save must not have the final name.
            self.renamed = replace || rename_noreplace(target, path).is_err();
            return Err(error);
        }
        Ok(())
    }
}

impl Staging for LocalStaging {
    fn name(&self) -> String {
        // Temporary names are UTF-8.
        self.temp.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn commit(self: Box<Self>, manifest: &str, contents: &[u8]) -> Result<()> {
        let mut file = LocalDir::new(&self.temp.path).create(manifest, contents.len() as u64)?;
        file.append(contents)?;
        file.finish()?;
        self.publish()
    }

    fn publish(self: Box<Self>) -> Result<()> {
        self.rename(false)
    }
}

impl Drop for LocalStaging {
    fn drop(&mut self) {
        if !self.renamed
            && let Err(error) = remove_entry(&self.temp.path)
        {
            let path = escape(self.temp.path.display());
            tracing::warn!("can't remove {path}: {error}; the next save beside it tries again");
        }
    }
}

/// Removes a file, or a directory with its contents.
fn remove_entry(path: &Path) -> io::Result<()> {
    if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
}

/// Renames a directory or file to an unused name.
fn rename_noreplace(path: &Path, target: &Path) -> io::Result<()> {
    let cwd = rustix::fs::CWD;
    match renameat_with(cwd, path, cwd, target, RenameFlags::NOREPLACE) {
        // Some file systems can't refuse to replace. But rename never replaces a directory with entries, and files are
        // checked here.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match target.symlink_metadata() {
            Ok(there) if !there.is_dir() => Err(ErrorKind::AlreadyExists.into()),
            _ => std::fs::rename(path, target),
        },
        other => other.map_err(io::Error::from),
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
        Ok(Box::new(LocalStaging::create_dir(self.0)?))
    }

    fn open_staging(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(LocalDir::new(&split(self.0)?.0.join(name))))
    }

    /// Durable when it returns.
    fn move_to(&self, to: &Path) -> Result<MoveOutcome> {
        match rename_noreplace(self.0, to) {
            Ok(()) => {}
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound => Ok(MoveOutcome::SourceMissing),
                    ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory => {
                        Ok(MoveOutcome::TargetExists)
                    }
                    _ => Err(io_error("rename", self.0)(error)),
                };
            }
        }
        sync_dir(&split(to)?.0)?;
        Ok(MoveOutcome::Moved)
    }

    /// Under its own name, the directory is always complete.
    fn remove_dir(&self) -> Result<bool> {
        let (parent, name) = split(self.0)?;
        match TempEntry::take(self.0, &parent, &name)? {
            Some(temp) => temp.remove().map(|()| true),
            None => Ok(false),
        }
    }
}

/// Purposes in temporary names.
const WRITING: &str = "tmp";
const DELETING: &str = "deleting";
/// Age beyond which no save or removal is still running.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);
/// Attempts to create an entry while other processes remove it, or its empty parent.
const ATTEMPTS: usize = 32;

/// A temporary directory or file, locked while its process lives.
#[derive(Debug)]
struct TempEntry {
    path: PathBuf,
    file: File,
}

impl TempEntry {
    /// Creates a directory for `name` in `parent`, and `parent` itself.
    fn create_dir(parent: &Path, name: &str) -> Result<Self> {
        Self::create(parent, name, |path| std::fs::create_dir(path).and_then(|()| File::open(path)))
    }

    /// Creates a file for `name` in `parent`, and `parent` itself, and opens it for writing.
    fn create_file(parent: &Path, name: &str) -> Result<Self> {
        Self::create(parent, name, |path| File::create_new(path))
    }

    fn create(parent: &Path, name: &str, make: impl Fn(&Path) -> io::Result<File>) -> Result<Self> {
        for attempt in 1.. {
            let path = parent.join(temp_name(name, WRITING));
            let (made, what) = match std::fs::create_dir_all(parent) {
                Ok(()) => (make(&path), &*path),
                Err(error) => (Err(error), parent),
            };
            let file = match made {
                // Another run may have removed the empty parent, or the new entry before it was locked.
                Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS => continue,
                made => made.map_err(io_error("create", what))?,
            };
            let locked = lock(&file).map_err(io_error("lock", &path))?;
            if locked != Lock::Taken && path.exists() {
                return Ok(TempEntry { path, file });
            }
            if attempt == ATTEMPTS {
                break;
            }
        }
        Err(io_error("lock a new entry in", parent)(io::Error::other("other processes removed each one")))
    }

    /// Renames the directory `path` to a temporary name, to remove it. Returns `None` if another process uses it.
    fn take(path: &Path, parent: &Path, name: &str) -> Result<Option<Self>> {
        let file = File::open(path).map_err(io_error("open", path))?;
        if lock(&file).map_err(io_error("lock", path))? == Lock::Taken {
            return Ok(None);
        }
        let temp = parent.join(temp_name(name, DELETING));
        match std::fs::rename(path, &temp) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            renamed => renamed.map_err(io_error("rename", path))?,
        }
        // Make the rename durable first: after a crash, the old name must not show a directory without some files.
        sync_dir(parent)?;
        Ok(Some(TempEntry { path: temp, file }))
    }

    fn remove(self) -> Result<()> {
        std::fs::remove_dir_all(&self.path).map_err(io_error("remove", &self.path))
    }
}

/// Syncs a directory's entries.
fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}

/// Returns text that is unique to this process and time.
pub(crate) fn unique() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}-{:x}", host(), std::process::id(), since.as_nanos())
}

/// Removes directories and files in `parent` of dead processes. Failures are only logged.
pub(crate) fn remove_stale(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(maker) = name.to_str().and_then(TempName::of) else { continue };
        let Ok(kind) = entry.file_type() else { continue };
        if !kind.is_dir() && !kind.is_file() {
            continue;
        }
        let path = entry.path();
        let Ok(file) = File::open(&path) else { continue };
        let dead = match lock(&file) {
            // On shared file systems, locks may be local to each host, such as NFS with `local_lock=flock`. Then a lock
            // says nothing about another host's process.
            Ok(Lock::Held) => maker.is_of_this_host() || maker.is_stale(),
            Ok(Lock::Unsupported) => maker.is_dead(),
            Ok(Lock::Taken) | Err(_) => false,
        };
        if !dead {
            tracing::info!("{} is in use by another process", escape(path.display()));
            continue;
        }
        match remove_entry(&path) {
            Ok(()) => tracing::info!("removed {}, left by a process that did not finish", escape(path.display())),
            Err(error) => tracing::warn!("can't remove {}: {error}", escape(path.display())),
        }
    }
}

fn temp_name(name: &str, purpose: &str) -> String {
    format!(".{name}.{purpose}-{}", unique())
}

fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(40).collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Lock {
    Held,
    /// Locked by another process.
    Taken,
    /// The file system does not support locks, or not on directories.
    Unsupported,
}

fn lock(file: &File) -> io::Result<Lock> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock::Held),
        Err(Errno::WOULDBLOCK) => Ok(Lock::Taken),
        // NFS locks only files that are open for writing, which directories never are.
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK | Errno::BADF | Errno::INVAL) => Ok(Lock::Unsupported),
        Err(error) => Err(error.into()),
    }
}

/// The parts of a temporary name.
#[derive(Debug, PartialEq)]
struct TempName<'a> {
    host: &'a str,
    process: i32,
    /// Time since the epoch.
    at: Duration,
}

impl<'a> TempName<'a> {
    /// Parses a name; `None` for names that [`temp_name`] does not make.
    fn of(name: &'a str) -> Option<Self> {
        let rest = name.strip_prefix('.')?;
        let (rest, nanos) = rest.rsplit_once('-')?;
        let (rest, process) = rest.rsplit_once('-')?;
        let host = [WRITING, DELETING].iter().find_map(|purpose| {
            let (name, host) = rest.rsplit_once(&format!(".{purpose}-"))?;
            (!name.is_empty()).then_some(host)
        })?;
        let nanos = u64::from_str_radix(nanos, 16).ok()?;
        Some(TempName { host, process: process.parse().ok()?, at: Duration::from_nanos(nanos) })
    }

    /// Without locks: an ended process of this host, or any old entry.
    fn is_dead(&self) -> bool {
        let gone = || Pid::from_raw(self.process).is_some_and(|process| test_kill_process(process) == Err(Errno::SRCH));
        self.is_stale() || (self.is_of_this_host() && gone())
    }

    fn is_of_this_host(&self) -> bool {
        self.host == host()
    }

    /// Returns whether the entry is too old to be in use.
    fn is_stale(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now.saturating_sub(self.at) > STALE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_temporary_names() {
        let name = temp_name("step-00000010", WRITING);
        let maker = TempName::of(&name).unwrap();
        assert_eq!((maker.host, maker.process), (&*host(), std::process::id() as i32));
        assert!(!maker.is_dead());
        assert!(TempName { at: Duration::ZERO, ..maker }.is_dead());
        let other = TempName { host: "another.host", process: i32::MAX, ..TempName::of(&name).unwrap() };
        assert!(!other.is_dead());
        assert!(TempName { process: i32::MAX, ..TempName::of(&name).unwrap() }.is_dead());
        assert!(TempName::of(&temp_name("a.tmp-b", DELETING)).is_some());
        for no in ["step-1", ".hidden", ".step-1.tmp-x", ".tmp-host-1-1f", ".step.tmp-host-x-1f", "step.tmp-host-1-1f"]
        {
            assert_eq!(TempName::of(no), None, "{no}");
        }
    }

    #[test]
    fn removes_only_unlocked_entries() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("step-1");
        std::fs::create_dir(&path).unwrap();
        let user = File::open(&path).unwrap();
        assert!(lock(&user).unwrap() == Lock::Held);
        assert!(TempEntry::take(&path, root.path(), "step-1").unwrap().is_none());
        drop(user);
        let taken = TempEntry::take(&path, root.path(), "step-1").unwrap().unwrap();
        assert!(!path.exists() && taken.path.exists());
        remove_stale(root.path());
        assert!(taken.path.exists(), "it is locked");
        let left = taken.path.clone();
        drop(taken);
        remove_stale(root.path());
        assert!(!left.exists());
        // Files are treated alike. Entries with other names stay.
        let file = TempEntry::create_file(root.path(), "model.safetensors").unwrap();
        let other = root.path().join(".model.safetensors.tmp-mine");
        std::fs::write(&other, "").unwrap();
        remove_stale(root.path());
        let left = file.path.clone();
        assert!(left.exists(), "it is locked");
        drop(file);
        remove_stale(root.path());
        assert!(!left.exists() && other.exists());
    }

    #[test]
    fn keeps_entries_of_other_hosts_for_a_day() {
        let root = tempfile::tempdir().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let left = |host: &str, at: Duration| {
            let path = root.path().join(format!(".step-1.tmp-{host}-{}-{:x}", i32::MAX, at.as_nanos()));
            std::fs::create_dir(&path).unwrap();
            path
        };
        // None of these is locked on this host.
        let fresh = left("another-host", now);
        let stale = left("another-host", now - STALE - Duration::from_secs(1));
        let ours = left(&host(), now);
        remove_stale(root.path());
        assert!(fresh.exists() && !stale.exists() && !ours.exists());
    }
}
