//! Removing checkpoints that are not needed any more.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::error::{chain, io_error};
use crate::latest::newest_first;
use crate::shown::shown;
use crate::store::{discard, on_this_host, store};
use crate::{Checkpoint, Error, MANIFEST, Result, TensorSource};

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
                tracing::warn!("leaving {}: {}", shown(path.display()), chain(&error));
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
        tracing::warn!("leaving {}: it holds {other:?}, which is not the checkpoint's", shown(path.display()));
        return Ok(false);
    }
    let removed = discard(path)?;
    if removed {
        tracing::info!("removed {}", shown(path.display()));
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
    match on_this_host(path)? {
        Some(path) => path.canonicalize().map_err(io_error("open", path)),
        None => Ok(path.components().collect()),
    }
}

/// Something in the directory that no save has put there; the directory itself when it is a link.
fn other_than(checkpoint: &Checkpoint, path: &Path) -> Result<Option<PathBuf>> {
    let Some(path) = on_this_host(path)? else {
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
