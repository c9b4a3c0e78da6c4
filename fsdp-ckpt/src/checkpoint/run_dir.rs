//! The directory of a run: finding the newest checkpoint, quarantining damaged ones, removing old ones.

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::error::{chain, io_error};
use crate::escape::escape;
use crate::store::{MoveOutcome, as_local, location, move_dir, split};
use crate::{Checkpoint, Error, MANIFEST, Result, TensorSource};

/// Finds the newest whole checkpoint in `dir`: the one with the highest number at the end of its name, such as
/// `step-00000010`.
///
/// Opens the candidates, newest first, until one has a valid manifest and all files. Logs the candidates it skips.
/// Returns `None` if there is no whole checkpoint or no directory. A link to another directory in `dir`, or to a name
/// with another number, is not a checkpoint.
///
/// # Errors
/// [`Error::Io`] if `dir` can't be listed; [`Error::Object`] if an object store does not answer.
pub fn latest(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let dir = dir.as_ref();
    let found = survey(dir)?;
    found.warn_about_links();
    for (path, error) in found.skipped {
        tracing::warn!("skipping {}: {}", escape(path.display()), chain(&error));
    }
    Ok(found.newest)
}

/// The checkpoints of a run, found by [`survey`].
#[derive(Debug, Default)]
pub struct Survey {
    /// Newest whole checkpoint.
    pub newest: Option<PathBuf>,
    /// Newer candidates that could not be opened, newest first. [`Error::is_damage`] tells damaged ones.
    pub skipped: Vec<(PathBuf, Error)>,
    /// All candidates by name, newest first, opened or not.
    pub steps: Vec<PathBuf>,
    /// [Quarantined](crate::quarantine) checkpoints.
    pub quarantined: Vec<PathBuf>,
    /// Links that are not checkpoints, with their targets: [aliases](alias_target) of other directories, and links
    /// whose target is missing, such as on a disk that is not mounted.
    pub links: Vec<(PathBuf, PathBuf)>,
}

impl Survey {
    /// Logs a warning for each skipped link.
    pub fn warn_about_links(&self) {
        for (link, target) in &self.links {
            let why = if target.exists() { "which has its own name" } else { "which does not exist" };
            tracing::warn!("skipping {}: it is a link to {}, {why}", escape(link.display()), escape(target.display()));
        }
    }
}

/// Finds the newest whole checkpoint, like [`latest`], and returns the skipped candidates instead of logging them.
/// Unfinished saves in an object store are not listed, since they don't block later saves.
///
/// # Errors
/// As [`latest`].
pub fn survey(dir: impl AsRef<Path>) -> Result<Survey> {
    let dir = dir.as_ref();
    let names = names(dir)?;
    let mut found = Survey::default();
    found
        .quarantined
        .extend(names.iter().filter(|name| name_before_quarantine(name).is_some()).map(|name| dir.join(name)));
    let is_local = as_local(dir)?.is_some();
    let (candidates, links) = candidates(dir, names);
    found.links = links;
    found.links.extend(links_to_nothing(dir)?);
    found.steps.clone_from(&candidates);
    for path in candidates {
        match Checkpoint::open(&path) {
            Ok(_) => {
                found.newest = Some(path);
                break;
            }
            // If a store does not answer, an older checkpoint would be the wrong one.
            Err(error @ Error::Object { .. }) => return Err(error),
            Err(error @ Error::Incomplete { .. }) if !is_local => {
                tracing::warn!("skipping {}: {}", escape(path.display()), chain(&error));
            }
            Err(error) => found.skipped.push((path, error)),
        }
    }
    Ok(found)
}

/// Returns candidate checkpoints in `dir`, newest first; empty if there is no directory.
pub(crate) fn newest_first(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(candidates(dir, names(dir)?).0)
}

/// Returns the names of the directories in `dir`; empty if there is no directory.
pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    match location(dir)?.store()?.dirs() {
        Err(Error::NotFound { .. }) => Ok(Vec::new()),
        names => names,
    }
}

/// Splits names into candidates, newest first, and links that are aliases.
pub(crate) fn candidates(dir: &Path, names: Vec<String>) -> (Vec<PathBuf>, Vec<(PathBuf, PathBuf)>) {
    let (mut candidates, mut links) = (Vec::new(), Vec::new());
    for name in names {
        let Some(step) = step_of_candidate(&name) else { continue };
        let path = dir.join(&name);
        match alias_target(&path) {
            Some(target) => links.push((path, target)),
            None => candidates.push((Reverse(step), path)),
        }
    }
    candidates.sort();
    (candidates.into_iter().map(|(_, path)| path).collect(), links)
}

/// Returns links with the name of a checkpoint whose target is missing.
pub(crate) fn links_to_nothing(dir: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let Some(dir) = as_local(dir)? else { return Ok(Vec::new()) };
    // Listing errors were reported earlier.
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut links: Vec<(PathBuf, PathBuf)> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| step_of_candidate(name).is_some()))
        .filter(|entry| entry.path().metadata().is_err())
        .filter_map(|entry| Some((entry.path(), dir.join(entry.path().read_link().ok()?))))
        .collect();
    links.sort();
    Ok(links)
}

/// Returns the target of a link that is only an alias of another checkpoint: the target is in the same directory, or
/// its name ends in another number. Returns `None` for other paths, such as a link to a moved checkpoint.
pub fn alias_target(link: impl AsRef<Path>) -> Option<PathBuf> {
    let link = link.as_ref();
    let link = as_local(link).ok()??;
    link.read_link().ok()?;
    let target = link.canonicalize().ok()?;
    let number = |path: &Path| path.file_name().and_then(|name| step_of(name.to_str()?));
    let is_beside = link.parent()?.canonicalize().is_ok_and(|dir| target.parent() == Some(&dir));
    let is_other = number(&target).is_some() && number(&target) != number(link);
    (is_beside || is_other).then_some(target)
}

/// Returns the number of a candidate's name. Names with a leading dot are saves in progress.
fn step_of_candidate(name: &str) -> Option<u64> {
    step_of(name).filter(|_| !name.starts_with('.') && name_before_quarantine(name).is_none())
}

/// Returns the number at the end of a name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
}

/// Suffix of a quarantined checkpoint; a number may follow.
const MARK: &str = ".damaged";

/// Renames a damaged checkpoint to `step-00000010.damaged`, or `step-00000010.damaged-2` if that exists.
/// [`crate::latest`] and [`crate::keep_newest`] ignore such names. Returns the new path; `None` if `dir` does not
/// exist. Call it from one process.
///
/// In an object store, the objects are copied, then the old ones are deleted, the manifest first.
///
/// # Errors
/// [`crate::Error::Io`] and [`crate::Error::Object`] if it can't be moved.
///
/// ```
/// let root = tempfile::tempdir()?;
/// let step = root.path().join("step-00000010");
/// std::fs::create_dir(&step)?;
/// assert_eq!(fsdp_ckpt::quarantine(&step)?, Some(root.path().join("step-00000010.damaged")));
/// assert_eq!(fsdp_ckpt::quarantine(&step)?, None);
/// assert_eq!(fsdp_ckpt::name_before_quarantine("step-00000010.damaged"), Some("step-00000010"));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn quarantine(dir: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let dir = dir.as_ref();
    let (parent, name) = split(dir)?;
    let mut number = 1_u64;
    loop {
        let target = match number {
            1 => parent.join(format!("{name}{MARK}")),
            _ => parent.join(format!("{name}{MARK}-{number}")),
        };
        match move_dir(dir, &target)? {
            MoveOutcome::Moved => return Ok(Some(target)),
            MoveOutcome::SourceMissing => return Ok(None),
            MoveOutcome::TargetExists => number += 1,
        }
    }
}

/// Returns the name that a directory had before [`quarantine`]; `None` for other names.
pub fn name_before_quarantine(name: &str) -> Option<&str> {
    let (before, after) = name.rsplit_once(MARK)?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (!before.is_empty() && (after.is_empty() || after.strip_prefix('-').is_some_and(is_number))).then_some(before)
}

/// Removes all whole checkpoints in `dir` except the `keep` newest, by the number at the end of their names, and those
/// in `spare`. Pass in `spare` the checkpoint just written and the one that the run resumed from. Returns the removed
/// paths. Call it from one process, after a save.
///
/// Counts and removes only checkpoints that [`Checkpoint::open`] accepts, and only if their directory holds no other
/// files. Never removes links or their targets. Renames a directory to a temporary name before it removes the files, so
/// a crash never leaves a partial checkpoint; the next save removes the rest.
///
/// # Errors
/// [`crate::Error::Io`] if `dir` can't be listed, or a checkpoint can't be renamed or removed.
///
/// ```
/// use std::num::NonZeroUsize;
/// let root = tempfile::tempdir()?;
/// assert!(fsdp_ckpt::keep_newest(root.path(), NonZeroUsize::MIN, &[])?.is_empty());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn keep_newest(dir: impl AsRef<Path>, keep: NonZeroUsize, spare: &[&Path]) -> Result<Vec<PathBuf>> {
    let dir = dir.as_ref();
    let spared = all_resolved(spare)?;
    let mut whole = 0;
    let mut removed = Vec::new();
    for path in newest_first(dir)? {
        let checkpoint = match Checkpoint::open(&path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                tracing::warn!("leaving {}: {}", escape(path.display()), chain(&error));
                continue;
            }
        };
        whole += 1;
        if whole <= keep.get() || spared.contains(&resolved(&path)?) {
            continue;
        }
        if remove(&checkpoint, &path)? {
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Removes a checkpoint unless its directory holds other files. Returns whether it was removed.
pub(crate) fn remove(checkpoint: &Checkpoint, path: &Path) -> Result<bool> {
    if let Some(other) = other_than(checkpoint, path)? {
        tracing::warn!("keeping {}: it holds {other:?}, which is not part of the checkpoint", escape(path.display()));
        return Ok(false);
    }
    let removed = location(path)?.remove_dir()?;
    if removed {
        tracing::info!("removed {}", escape(path.display()));
    }
    Ok(removed)
}

/// Resolves the paths that exist.
pub(crate) fn all_resolved(paths: &[&Path]) -> Result<Vec<PathBuf>> {
    let mut places = Vec::with_capacity(paths.len());
    for path in paths {
        match resolved(path) {
            Ok(place) => places.push(place),
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(places)
}

/// Returns the canonical path. A URL is canonical except for trailing slashes.
pub(crate) fn resolved(path: &Path) -> Result<PathBuf> {
    match as_local(path)? {
        Some(path) => path.canonicalize().map_err(io_error("open", path)),
        None => Ok(path.components().collect()),
    }
}

/// Returns a file in the directory that does not belong to the checkpoint, or the path itself if it is a link.
fn other_than(checkpoint: &Checkpoint, path: &Path) -> Result<Option<PathBuf>> {
    let Some(path) = as_local(path)? else {
        let store = location(path)?.store()?;
        let ours = |name: &String| name == MANIFEST || checkpoint.files().contains_key(name);
        return Ok(store.dirs()?.into_iter().chain(store.list()?).find(|name| !ours(name)).map(PathBuf::from));
    };
    if path.is_symlink() {
        return Ok(Some(path.to_path_buf()));
    }
    for entry in std::fs::read_dir(path).map_err(io_error("list", path))? {
        let name = entry.map_err(io_error("list", path))?.file_name();
        let ours = name.to_str().is_some_and(|name| name == MANIFEST || checkpoint.files().contains_key(name));
        if !ours {
            return Ok(Some(name.into()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_is_the_number_at_the_end() {
        assert_eq!(step_of("step-00000010"), Some(10));
        assert_eq!(step_of("7"), Some(7));
        assert_eq!(step_of("step"), None);
        assert_eq!(step_of("step-99999999999999999999999"), None);
    }

    #[test]
    fn survey_ignores_quarantined_checkpoints() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            let step = root.path().join("step-00000006");
            std::fs::create_dir(&step).unwrap();
            quarantine(&step).unwrap().unwrap();
        }
        assert!(newest_first(root.path()).unwrap().is_empty());
        let found = survey(root.path()).unwrap();
        assert!(found.newest.is_none() && found.skipped.is_empty() && found.quarantined.len() == 3, "{found:?}");
    }

    #[test]
    fn recognizes_quarantined_names() {
        assert_eq!(name_before_quarantine("step-1.damaged"), Some("step-1"));
        assert_eq!(name_before_quarantine("step-1.damaged-12"), Some("step-1"));
        assert_eq!(name_before_quarantine("a.damaged.damaged"), Some("a.damaged"));
        for other in ["step-1", ".damaged", "step-1.damaged-", "step-1.damaged2", "step-1.damaged-x", "step.damaged/1"]
        {
            assert_eq!(name_before_quarantine(other), None, "{other}");
        }
    }

    #[test]
    fn quarantine_keeps_earlier_ones() {
        let root = tempfile::tempdir().unwrap();
        let step = root.path().join("step-00000006");
        for (round, name) in
            ["step-00000006.damaged", "step-00000006.damaged-2", "step-00000006.damaged-3"].iter().enumerate()
        {
            std::fs::create_dir(&step).unwrap();
            std::fs::write(step.join("file"), round.to_string()).unwrap();
            assert_eq!(quarantine(&step).unwrap(), Some(root.path().join(name)));
            assert_eq!(std::fs::read_to_string(root.path().join(name).join("file")).unwrap(), round.to_string());
        }
    }
}
