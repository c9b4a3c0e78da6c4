//! TODO

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::error::{chain, io_error};
use crate::escape::escape;
use crate::store::{MoveOutcome, as_local, move_dir, remove_dir, split, store};
use crate::{Checkpoint, Error, MANIFEST, Result, TensorSource};

/// The newest whole checkpoint under `dir`: the one with the highest number at the end of its name, as in
/// `step-00000010`.
///
/// Every candidate is opened, so that what is returned has a valid manifest and all of its files; what does not open is
/// skipped with a warning. `None` when there is no whole checkpoint, or no directory `dir`: a run that starts from
/// nothing. A link is no checkpoint of its own: it is skipped with a warning when it leads to another directory in
/// `dir`, or to one whose name ends in another number.
///
/// # Errors
/// [`Error::Io`] when `dir` can't be listed; [`Error::Object`] when an object store does not answer.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>> {
    let found = survey(dir)?;
    found.warn_about_links();
    for (path, error) in found.skipped {
        tracing::warn!("skipping {}: {}", escape(path.display()), chain(&error));
    }
    Ok(found.newest)
}

/// What [`survey`] has found under a directory.
#[derive(Debug, Default)]
pub struct Survey {
    /// The newest whole checkpoint.
    pub newest: Option<PathBuf>,
    /// What has a higher number and is none, with what is wrong with it ([`Error::is_damage`] tells whether it was
    /// one). Newest first.
    pub skipped: Vec<(PathBuf, Error)>,
    /// All that may be checkpoints by their names, newest first, whether they were looked at or not.
    pub steps: Vec<PathBuf>,
    /// What was [set aside](crate::set_aside).
    pub quarantined: Vec<PathBuf>,
    /// Links that are no checkpoints, with what they lead to: a directory that has a [name of its
    /// own](alias_target), or nothing, as when a disk is not mounted.
    pub links: Vec<(PathBuf, PathBuf)>,
}

impl Survey {
    /// Warns of the links that were passed over.
    pub fn warn_about_links(&self) {
        for (link, target) in &self.links {
            let why = if target.exists() { "which has a name of its own" } else { "which is not there" };
            tracing::warn!("skipping {}: it is a link to {}, {why}", escape(link.display()), escape(target.display()));
        }
    }
}

/// As [`latest`], with what it has skipped, for programs that want to do something about that. A save to an object
/// store that has not finished, yet or ever, is no part of it: it is in nobody's way.
///
/// # Errors
/// As [`latest`].
pub fn survey(dir: &Path) -> Result<Survey> {
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
            // A store that does not answer says nothing about the checkpoint: an older one would be the wrong one.
            Err(error @ Error::Object { .. }) => return Err(error),
            Err(error @ Error::Incomplete { .. }) if !is_local => {
                tracing::warn!("skipping {}: {}", escape(path.display()), chain(&error));
            }
            Err(error) => found.skipped.push((path, error)),
        }
    }
    Ok(found)
}

/// What may be checkpoints under `dir`, by its names. Nothing when there is no directory `dir`.
pub(crate) fn newest_first(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(candidates(dir, names(dir)?).0)
}

/// The names of the directories in `dir`, none when there is no such directory.
pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    match store(dir)?.dirs() {
        Err(Error::NotFound { .. }) => Ok(Vec::new()),
        names => names,
    }
}

/// What may be checkpoints, newest first, and the links that are other names of some.
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

/// Links by the names of checkpoints under `dir` that lead to nothing, and to what.
pub(crate) fn links_to_nothing(dir: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let Some(dir) = as_local(dir)? else { return Ok(Vec::new()) };
    // Whether `dir` can be listed, others have found out.
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut links: Vec<(PathBuf, PathBuf)> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| step_of_candidate(name).is_some()))
        .filter(|entry| entry.path().metadata().is_err())
        .filter_map(|entry| Some((entry.path(), dir.join(entry.path().read_link().ok()?))))
        .collect();
    links.sort();
    Ok(links)
}

/// The directory that a link is only another name of: it lies beside the link, or its name ends in another number.
/// `None` for what is no link, and for a link to where a checkpoint was moved.
pub fn alias_target(link: &Path) -> Option<PathBuf> {
    let link = as_local(link).ok()??;
    link.read_link().ok()?;
    let target = link.canonicalize().ok()?;
    let number = |path: &Path| path.file_name().and_then(|name| step_of(name.to_str()?));
    let is_beside = link.parent()?.canonicalize().is_ok_and(|dir| target.parent() == Some(&dir));
    let is_other = number(&target).is_some() && number(&target) != number(link);
    (is_beside || is_other).then_some(target)
}

/// The number of what may be a checkpoint by its name. Those with a dot in front are saves in progress.
fn step_of_candidate(name: &str) -> Option<u64> {
    step_of(name).filter(|_| !name.starts_with('.') && name_before_quarantine(name).is_none())
}

/// The number at the end of a name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
}

/// What follows the name that it had; of several that had the same, `-2` and so on follow this.
const MARK: &str = ".damaged";

/// Gives a damaged checkpoint another name beside its own, which [`crate::latest`] and [`crate::keep_newest`] never
/// look at: `step-00000010.damaged`, or `step-00000010.damaged-2` where there is one already. Nothing is deleted.
/// Returns the new path; `None` when `dir` is not there (any more). One process calls it.
///
/// In an object store, which has no rename, the objects are copied by the store, and when all are there the old ones
/// go, the manifest first.
///
/// # Errors
/// [`crate::Error::Io`] and [`crate::Error::Object`] when it can't be moved.
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
pub fn quarantine(dir: &Path) -> Result<Option<PathBuf>> {
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

/// The name that a directory had before [`quarantine`] gave it this one; `None` for a name that it does not give.
pub fn name_before_quarantine(name: &str) -> Option<&str> {
    let (before, after) = name.rsplit_once(MARK)?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (!before.is_empty() && (after.is_empty() || after.strip_prefix('-').is_some_and(is_number))).then_some(before)
}

/// Removes all whole checkpoints under `dir` but the `keep` newest, by the number at the end of their names, and those
/// in `spare` (what was just written, and what the run went on from: neither has the highest number after a step back).
/// Returns what was removed. One process calls it, after a save.
///
/// Only what [`Checkpoint::open`] accepts counts, and only that is removed, and only when nothing else has been put
/// into its directory. Links are never removed, nor what they lead to. A directory is renamed out of sight before its
/// files go: a crash leaves it as a whole, or with no name that [`crate::latest`] looks at, and the next save sweeps
/// it.
///
/// # Errors
/// [`crate::Error::Io`] when `dir` can't be listed, or a checkpoint not be renamed or removed.
///
/// ```
/// use std::num::NonZeroUsize;
/// let root = tempfile::tempdir()?;
/// assert!(fsdp_ckpt::keep_newest(root.path(), NonZeroUsize::MIN, &[])?.is_empty());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn keep_newest(dir: &Path, keep: NonZeroUsize, spare: &[&Path]) -> Result<Vec<PathBuf>> {
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

/// Removes a checkpoint, if nothing else is in its directory. Whether it did.
pub(crate) fn remove(checkpoint: &Checkpoint, path: &Path) -> Result<bool> {
    if let Some(other) = other_than(checkpoint, path)? {
        tracing::warn!("leaving {}: it holds {other:?}, which is not the checkpoint's", escape(path.display()));
        return Ok(false);
    }
    let removed = remove_dir(path)?;
    if removed {
        tracing::info!("removed {}", escape(path.display()));
    }
    Ok(removed)
}

/// The places of those that are there.
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

/// One path for each place. A URL is the only one of its place, but for slashes at its end.
pub(crate) fn resolved(path: &Path) -> Result<PathBuf> {
    match as_local(path)? {
        Some(path) => path.canonicalize().map_err(io_error("open", path)),
        None => Ok(path.components().collect()),
    }
}

/// Something in the directory that no save has put there; the directory itself when it is a link.
fn other_than(checkpoint: &Checkpoint, path: &Path) -> Result<Option<PathBuf>> {
    let Some(path) = as_local(path)? else {
        let store = store(path)?;
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
    fn steps_are_the_numbers_at_the_end() {
        assert_eq!(step_of("step-00000010"), Some(10));
        assert_eq!(step_of("7"), Some(7));
        assert_eq!(step_of("step"), None);
        assert_eq!(step_of("step-99999999999999999999999"), None);
    }

    #[test]
    fn what_was_set_aside_is_looked_at_by_nothing() {
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
    fn names_that_are_given_are_known_again() {
        assert_eq!(name_before_quarantine("step-1.damaged"), Some("step-1"));
        assert_eq!(name_before_quarantine("step-1.damaged-12"), Some("step-1"));
        assert_eq!(name_before_quarantine("a.damaged.damaged"), Some("a.damaged"));
        for other in ["step-1", ".damaged", "step-1.damaged-", "step-1.damaged2", "step-1.damaged-x", "step.damaged/1"]
        {
            assert_eq!(name_before_quarantine(other), None, "{other}");
        }
    }

    #[test]
    fn what_was_set_aside_stays() {
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
