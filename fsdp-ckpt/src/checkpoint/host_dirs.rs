//! Checkpoints of hosts that share no file system: each host saves a part to its own directory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use fsdp_core::{ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::checkpoint::agree::{agree, exchange, read_message, to_message};
use crate::checkpoint::hosts::Hosts;
use crate::checkpoint::run_dir::{
    all_resolved, candidates, links_to_nothing, name_before_quarantine, names, remove, resolved, step_of,
};
use crate::checkpoint::writable;
use crate::error::{chain, describe_missing, io_error};
use crate::escape::escape;
use crate::file_names::copy_command;
use crate::store::{as_local, require_local};
use crate::{Checkpoint, Error, Result, Survey, TensorSource, quarantine};

/// Directories of the same path on hosts that share no file system.
///
/// A save with [`crate::SaveOptions::host`] writes the files of a host's ranks, and the manifest of the whole
/// checkpoint, to that host's directory. **Copied into one directory, the parts are an ordinary checkpoint**, for
/// [`Checkpoint::open`] and any number of ranks. Opening one part alone is [`Error::MissingParts`].
///
/// The hosts can also resume from their parts without copying, if the ranks have the same layout: each part has
/// everything that the ranks of its host hold. This type does that. Its methods are collective over the group and have
/// the same outcome on every rank, unless stated otherwise.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_ckpt::{Checkpoint, Error, HostDirs, SaveOptions, SaveState, TensorShard, TensorSource, save_with};
/// use fsdp_core::{Buffer, MeshLayout, layout::Region, process_group::local};
///
/// // Two directories emulate the disks of two hosts, on which the path would be the same.
/// let disks = [tempfile::tempdir()?, tempfile::tempdir()?];
/// let dir = |host: usize| disks[host].path().join("step-00000001");
/// local::try_run(2, |group| {
///     let host = group.rank();
///     HostDirs::new(&group, &format!("node{host}"))?.check_writable(disks[host].path())?;
///     let data = Arc::new(Buffer::F32(vec![host as f32; 6]));
///     let region = Region { offsets: vec![2 * host, 0], sizes: vec![2, 3] };
///     let shard = TensorShard { fqn: "weight".into(), shape: vec![4, 3], region, data };
///     let mesh = MeshLayout::new(&[("dp_shard", 2)])?;
///     let state = SaveState { mesh, tensors: vec![shard], values: Default::default() };
///     let options = SaveOptions { host: Some(format!("node{host}")), ..SaveOptions::default() };
///     save_with(&dir(host), &group, &state, &options)?;
///     // Resume from the parts.
///     let dirs = HostDirs::new(&group, &format!("node{host}"))?;
///     assert!(dirs.survey(disks[host].path())?.newest.is_some());
///     let mut own = vec![0; 24];
///     let region = Region { offsets: vec![2 * host, 0], sizes: vec![2, 3] };
///     dirs.open(&dir(host))?.read("weight", &region, &mut own)
/// })?;
///
/// // The part of one host is not a checkpoint; the parts of both hosts are.
/// assert!(matches!(Checkpoint::open(&dir(0)), Err(Error::MissingParts { .. })));
/// for file in std::fs::read_dir(dir(1))? {
///     let file = file?;
///     std::fs::copy(file.path(), dir(0).join(file.file_name()))?;
/// }
/// assert_eq!(Checkpoint::open(&dir(0))?.verify()?.files, 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HostDirs {
    group: ProcessGroup,
    hosts: Hosts,
}

/// Names that a rank finds in its host's directory of checkpoints.
#[derive(Default, Serialize, Deserialize)]
struct Listing {
    steps: BTreeSet<String>,
    quarantined: BTreeSet<String>,
    /// Links with their targets.
    links: BTreeSet<(String, PathBuf)>,
}

impl HostDirs {
    /// Creates the value from each rank's host name, such as `hostname` prints. Ranks pass the same name if and only if
    /// they share a directory. Manifests and messages contain the names.
    ///
    /// # Errors
    /// [`Error::Argument`] if a name is empty; [`Error::Group`].
    pub fn new(group: &ProcessGroup, host: &str) -> Result<Self> {
        Ok(HostDirs { group: group.clone(), hosts: Hosts::exchange(group, Some(host))? })
    }

    /// Returns this rank's number among the ranks of its host, and their count. Does not communicate.
    pub fn local_rank_and_size(&self) -> (usize, usize) {
        self.hosts.local_rank_and_size(self.group.rank())
    }

    /// Checks that every rank can write to its host's directory `dir`, see [`crate::check_writable`].
    ///
    /// # Errors
    /// As [`crate::check_writable`]; also if two hosts share the directory.
    pub fn check_writable(&self, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        agree(&self.group, "make a directory there", require_local(dir, "a directory of each host"))?;
        writable::check(dir, &self.group, &self.hosts)
    }

    /// Opens this host's part of the checkpoint `dir`. Reading a chunk that only other hosts have is
    /// [`Error::MissingParts`].
    ///
    /// # Errors
    /// [`Error::NotFound`] if no host has it. [`Error::InconsistentParts`] if the parts are of different saves, a part
    /// is damaged, no host has some file, or a host has no part.
    pub fn open(&self, dir: impl AsRef<Path>) -> Result<Checkpoint> {
        let dir = dir.as_ref();
        let opened = open_here(dir);
        self.check_parts(dir, &opened)?;
        // Already an error above.
        opened.unwrap_or_else(|| Err(Error::Incomplete { path: dir.to_path_buf() }))
    }

    /// Checks that what the ranks have opened forms a checkpoint. Collective: ranks exchange a byte for each file, and
    /// the reason of a failure.
    fn check_parts(&self, dir: &Path, opened: &Option<Result<Checkpoint>>) -> Result<()> {
        let group = &self.group;
        let inconsistent = |damaged, reason| Err(Error::InconsistentParts { path: dir.to_path_buf(), reason, damaged });
        let host = |rank: usize| self.hosts.name(rank).unwrap_or_default();
        // Report errors that are not damage first: the checkpoint may be whole.
        for damaged in [false, true] {
            let message = match opened {
                Some(Err(error)) if error.is_damage() == damaged => chain(error),
                _ => String::new(),
            };
            if let Some((rank, why)) = group.first_message(message)? {
                return inconsistent(damaged, format!("on {}, {why}", host(rank)));
            }
        }
        let part = opened.as_ref().and_then(|opened| opened.as_ref().ok());
        let Some(first) = group.first_rank(part.is_some())? else {
            let looked_for = "checkpoint on any host: no such directory".into();
            return Err(Error::NotFound { path: dir.to_path_buf(), looked_for });
        };
        let id = to_message(&part.map(|part| (part.id(), part.files().len())))?;
        let (id, files): ((u64, Option<u32>), usize) = read_message(first, &group.broadcast_bytes(first, id)?)?;
        if let Some(other) = group.first_rank(part.is_some_and(|part| part.id() != id))? {
            let (a, b) = (host(first), host(other));
            return inconsistent(
                false,
                format!("{a} and {b} have parts of different saves; move away the unwanted one"),
            );
        }
        // Files that are missing in every part.
        let missing = |part: &Checkpoint| {
            part.files().keys().map(|name| u8::from(part.missing().contains_key(name))).collect::<Vec<_>>()
        };
        let missing = group.all_reduce_values(part.map_or(vec![1; files], missing), ReduceOp::Min)?;
        if missing.contains(&1) {
            let nowhere = part.map(|part| {
                let names = part.files().keys().zip(&missing).filter(|(_, missing)| **missing == 1);
                let host = |name: &String| part.missing().get(name).cloned().unwrap_or_default();
                names.map(|(name, _)| (name.clone(), host(name))).collect::<BTreeMap<_, _>>()
            });
            let nowhere = read_message(first, &group.broadcast_bytes(first, to_message(&nowhere)?)?)?;
            let (damaged, reason) = self.describe_nowhere(dir, &nowhere)?;
            return inconsistent(damaged, reason);
        }
        match group.first_rank(part.is_none())? {
            Some(rank) => {
                let (without, with) = (host(rank), host(first));
                inconsistent(false, format!("{without} has no part; copy the part of {with} there"))
            }
            None => Ok(()),
        }
    }

    /// Describes files that no host has, and returns whether the checkpoint is damaged. `nowhere` has the hosts that
    /// wrote the files.
    fn describe_nowhere(&self, dir: &Path, nowhere: &BTreeMap<String, String>) -> Result<(bool, String)> {
        let absent_hosts: BTreeSet<&str> =
            nowhere.values().map(String::as_str).filter(|name| !self.hosts.contains(name)).collect();
        let what = describe_missing(nowhere);
        Ok(match absent_hosts.first() {
            Some(absent) => {
                let copy = copy_command(absent, as_local(dir)?.unwrap_or(dir));
                let why = format!(
                    "no host has {what}, and {absent} is not among the hosts; start ranks there, or copy its part to \
                     each host: `{copy}`"
                );
                (false, why)
            }
            None => (true, format!("no host has {what}; the save did not finish, or the files were removed")),
        })
    }

    /// Lists the checkpoints in the hosts' directories `dir` and finds the newest one that the parts form together,
    /// like [`crate::survey`]. The result includes what any host skipped.
    ///
    /// # Errors
    /// [`Error::Rank`] if a rank can't list its directory; [`Error::Group`].
    pub fn survey(&self, dir: impl AsRef<Path>) -> Result<Survey> {
        let dir = dir.as_ref();
        let Listing { steps, quarantined, links } = self.list(dir)?;
        let steps = newest_first(dir, &steps);
        let quarantined = quarantined.iter().map(|name| dir.join(name)).collect();
        let links = links.into_iter().map(|(name, target)| (dir.join(name), target)).collect();
        let mut found = Survey { steps: steps.clone(), quarantined, links, ..Survey::default() };
        for path in steps {
            match self.open(&path) {
                Ok(_) => {
                    found.newest = Some(path);
                    break;
                }
                Err(error @ Error::Group(_)) => return Err(error),
                Err(error) => found.skipped.push((path, error)),
            }
        }
        Ok(found)
    }

    /// Quarantines the part of every host that has one, like [`crate::quarantine`]. Returns the new path on the first
    /// rank of each of these hosts.
    ///
    /// # Errors
    /// [`Error::Rank`] if a rank fails; [`Error::Group`].
    pub fn quarantine(&self, dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
        let dir = dir.as_ref();
        let moved = if self.is_first() { quarantine(dir) } else { Ok(None) };
        agree(&self.group, "quarantine its part of a checkpoint", moved)
    }

    /// Removes old checkpoints from each host's directory `dir`, like [`crate::keep_newest`]. Counts and removes only
    /// checkpoints of which all parts exist. Returns this host's removed paths on its first rank.
    ///
    /// # Errors
    /// [`Error::Rank`] if a rank can't list its directory or remove from it; [`Error::Group`].
    pub fn keep_newest(&self, dir: impl AsRef<Path>, keep: NonZeroUsize, spare: &[&Path]) -> Result<Vec<PathBuf>> {
        let dir = dir.as_ref();
        let mut going = Vec::new();
        let mut whole = 0;
        for path in newest_first(dir, &self.list(dir)?.steps) {
            match self.open(&path) {
                Ok(part) => {
                    whole += 1;
                    if whole > keep.get() {
                        going.push((part, path));
                    }
                }
                Err(error @ Error::Group(_)) => return Err(error),
                Err(error) if self.group.rank() == 0 => {
                    tracing::warn!("leaving {}: {}", escape(path.display()), chain(&error));
                }
                Err(_) => {}
            }
        }
        // Every rank has opened all parts before any is removed.
        let mut remove_all = || -> Result<Vec<PathBuf>> {
            let (spared, mut removed) = (all_resolved(spare)?, Vec::new());
            for (part, path) in going.drain(..).filter(|_| self.is_first()) {
                if !spared.contains(&resolved(&path)?) && remove(&part, &path)? {
                    removed.push(path);
                }
            }
            Ok(removed)
        };
        agree(&self.group, "remove older checkpoints", remove_all())
    }

    fn is_first(&self) -> bool {
        self.hosts.is_first(self.group.rank())
    }

    /// Lists candidate checkpoints of all hosts.
    fn list(&self, dir: &Path) -> Result<Listing> {
        let own = || -> Result<Listing> {
            let names = names(require_local(dir, "a directory of each host")?)?;
            let quarantined = names.iter().filter(|name| name_before_quarantine(name).is_some()).cloned().collect();
            let (steps, mut links) = candidates(dir, names);
            links.extend(links_to_nothing(dir)?);
            // The names were read as UTF-8.
            let name = |path: &Path| Some(path.file_name()?.to_str()?.to_string());
            let steps = steps.iter().filter_map(|path| name(path)).collect();
            Ok(Listing {
                steps,
                quarantined,
                links: links.into_iter().filter_map(|(link, to)| Some((name(&link)?, to))).collect(),
            })
        };
        let mut all = Listing::default();
        // The ranks of a host see the same names.
        let own = if self.is_first() { own() } else { Ok(Listing::default()) };
        for Listing { steps, quarantined, links } in exchange(&self.group, "list its checkpoints", own)? {
            all.steps.extend(steps);
            all.quarantined.extend(quarantined);
            all.links.extend(links);
        }
        Ok(all)
    }
}

/// Opens this host's directory, or returns `None` if it has no such directory.
fn open_here(dir: &Path) -> Option<Result<Checkpoint>> {
    if let Ok(Some(path)) = as_local(dir)
        && let Err(error) = path.symlink_metadata()
    {
        // An I/O error says nothing about the checkpoint.
        return (error.kind() != ErrorKind::NotFound).then(|| Err(io_error("open", path)(error)));
    }
    Some(Checkpoint::open_part(dir))
}

/// Sorts by the numbers at the end of the names.
fn newest_first(dir: &Path, names: &BTreeSet<String>) -> Vec<PathBuf> {
    let mut names: Vec<&String> = names.iter().collect();
    names.sort_by_key(|name| Reverse(step_of(name)));
    names.into_iter().map(|name| dir.join(name)).collect()
}
