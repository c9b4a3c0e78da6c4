//! Checking before training that checkpoints can be written.

use std::collections::BTreeMap;
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};

use fsdp_core::ProcessGroup;

use crate::checkpoint::agree::{agree, for_purpose};
use crate::checkpoint::hosts::Hosts;
use crate::error::io_error;
use crate::file_names::file_name;
use crate::store::{Store, as_local, location, split};
use crate::{Error, Result};

/// Name of the test directory's target.
const NAME: &str = ".write-test";
/// A block of most file systems: smaller writes may fit into allocated space.
const BYTES: usize = 4096;

/// Checks that every rank of `group` can write to the directory `dir`, which need not exist, with the steps of
/// [`crate::save`]: rank 0 creates a temporary directory, and each rank writes and syncs a file in it. Removes the test
/// files, directories created for them, and what killed processes left in `dir`. Collective.
///
/// # Errors
/// [`Rank`](crate::Error::Rank) on every rank if any rank fails; [`Group`](crate::Error::Group) if a collective fails.
///
/// ```
/// use fsdp_core::process_group::local;
///
/// let root = tempfile::tempdir()?;
/// std::fs::write(root.path().join("file"), "")?;
/// local::run(2, |group| {
///     fsdp_ckpt::check_writable(&root.path().join("new/runs"), &group).unwrap();
///     let error = fsdp_ckpt::check_writable(&root.path().join("file/below"), &group).unwrap_err();
///     assert!(error.to_string().starts_with("rank 0 failed to make a directory there: can't create"));
/// });
/// assert_eq!(std::fs::read_dir(root.path())?.count(), 1);
/// # Ok::<_, std::io::Error>(())
/// ```
pub fn check_writable(dir: impl AsRef<Path>, group: &ProcessGroup) -> Result<()> {
    let dir = dir.as_ref();
    check(dir, group, &Hosts::shared(group.size()))
}

/// Checks the directories of all hosts; the first rank of each host creates the temporary directory.
pub(crate) fn check(dir: &Path, group: &ProcessGroup, hosts: &Hosts) -> Result<()> {
    let group = &for_purpose(group, "check that a directory can be written");
    let target = dir.join(NAME);
    let (mut made, mut staging) = (None, None);
    let begun = hosts.on_first_ranks(group, "make a directory there", || {
        if let Some(dir) = as_local(dir)? {
            check_path(dir)?;
            made = Some(RemoveIfEmpty::missing(dir));
        }
        Ok(staging.insert(location(&target)?.stage()?).name())
    })?;
    let here = hosts.first(group.rank());
    let written = check_distinct(&target, &begun, hosts, group.rank())
        .and_then(|()| location(&target)?.open_staging(&begun[&here]))
        .and_then(|store| write(&*store, &file_name(group.rank())));
    let written = agree(group, "write a file there", written);
    drop(staging);
    // If hosts share the directory, each must remove its own part before the directory can be removed.
    let emptied = group.barrier().wait();
    drop(made);
    // Return only when everything is removed.
    let settled = emptied.and_then(|_| group.barrier().wait());
    written?;
    Ok(settled.map(drop)?)
}

/// Fails if a host sees the temporary directory of another host: then two saves would conflict.
fn check_distinct(target: &Path, begun: &BTreeMap<usize, String>, hosts: &Hosts, rank: usize) -> Result<()> {
    let Some(target) = as_local(target)? else { return Ok(()) };
    let (dir, _) = split(target)?;
    let others = begun.iter().filter(|(other, _)| **other != rank && hosts.is_first(rank));
    for (other, name) in others {
        if dir.join(name).exists() {
            let [own, other] = [rank, *other].map(|rank| hosts.name(rank).unwrap_or_default());
            let dir = dir.display();
            return Err(Error::Argument(format!(
                "{own} and {other} share the directory {dir}; give each host its own, or let all ranks share one \
                 without naming hosts"
            )));
        }
    }
    Ok(())
}

fn write(store: &dyn Store, name: &str) -> Result<()> {
    let mut file = store.create(&store.unique_name(name), BYTES as u64)?;
    file.append(&[0; BYTES])?;
    file.finish()
}

/// Explains a path below a file or a dangling link, for which the system only says "File exists".
fn check_path(dir: &Path) -> Result<()> {
    let Some(path) = dir.ancestors().find(|path| path.symlink_metadata().is_ok() && !path.is_dir()) else {
        return Ok(());
    };
    let cause = match std::fs::read_link(path) {
        Ok(target) if !path.exists() => {
            format!("{} is a symbolic link to {}, which does not exist", path.display(), target.display())
        }
        _ => format!("{} is not a directory", path.display()),
    };
    Err(io_error("create", dir)(IoError::new(ErrorKind::NotADirectory, cause)))
}

/// Directories to remove on drop if they are empty, the innermost first.
pub struct RemoveIfEmpty(pub Vec<PathBuf>);

impl RemoveIfEmpty {
    /// Lists `dir` and its parents that do not exist.
    pub fn missing(dir: impl AsRef<Path>) -> Self {
        let dir = dir.as_ref();
        let missing = dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        RemoveIfEmpty(missing.map(Path::to_path_buf).collect())
    }
}

impl Drop for RemoveIfEmpty {
    fn drop(&mut self) {
        for dir in &self.0 {
            // Fails unless the directory is empty.
            let _ = std::fs::remove_dir(dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use fsdp_core::process_group::local;

    #[test]
    fn names_the_failed_rank_on_all_ranks() {
        let root = tempfile::tempdir().unwrap();
        // Rank 1 sees another file system, like a host without the shared mount.
        let messages = local::run(3, |group| {
            let dir = if group.rank() == 1 { "elsewhere" } else { "runs" };
            check_writable(root.path().join(dir), &group).unwrap_err().to_string()
        });
        let start = "rank 1 failed to write a file there: can't create";
        assert!(messages[0].starts_with(start) && messages[0].contains("elsewhere/..write-test.tmp-"), "{messages:?}");
        assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn names_the_obstacle() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("nowhere", root.path().join("link")).unwrap();
        for (dir, part) in [
            (root.path().join("link"), "is a symbolic link to nowhere, which does not exist"),
            (root.path().join("link/below"), "is a symbolic link to nowhere, which does not exist"),
            (root.path().join("file"), "file is not a directory"),
            (root.path().join("file/below"), "file is not a directory"),
            ("/proc/runs".into(), "/proc/runs: No such file or directory"),
        ] {
            let outcome = local::run(1, |group| check_writable(&dir, &group)).pop().unwrap();
            let Err(Error::Rank { cause, .. }) = outcome else { panic!("{outcome:?}") };
            assert!(cause.contains(part), "{cause}");
        }
    }

    #[test]
    fn concurrent_checks_succeed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("new/checkpoints");
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        local::run(1, |group| check_writable(&dir, &group).unwrap());
                    }
                });
            }
        });
        // Two runs that end at once may each leave a directory to the other.
        assert!(!dir.exists() || std::fs::read_dir(dir).unwrap().next().is_none());
    }

    #[test]
    fn removes_only_stale_entries() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(".step-1.tmp-host-1-1f")).unwrap();
        std::fs::create_dir(root.path().join("runs")).unwrap();
        for dir in ["runs", "runs/new/one", "."] {
            local::run(2, |group| check_writable(root.path().join(dir), &group).unwrap());
        }
        let left: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!((left, std::fs::read_dir(root.path().join("runs")).unwrap().count()), (vec!["runs".into()], 0));
    }
}
