//! Finding the checkpoint to go on from.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use crate::error::chain;
use crate::store::store;
use crate::{Checkpoint, Error, Result};

/// The newest whole checkpoint under `dir`: the one with the highest number at the end of its name, as in `step-00000010`.
///
/// Every candidate is opened, so that what is returned has a valid manifest and all of its files; what does not open is skipped with a warning.
/// `None` when there is no whole checkpoint, or no directory `dir`: a run that starts from nothing.
///
/// # Errors
/// [`Error::Io`] when `dir` can't be listed; [`Error::Object`] when an object store does not answer.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>> {
    for path in newest_first(dir)? {
        match Checkpoint::open(&path) {
            Ok(_) => return Ok(Some(path)),
            // A store that does not answer says nothing about the checkpoint: an older one would be the wrong one.
            Err(error @ Error::Object { .. }) => return Err(error),
            Err(error) => tracing::warn!("skipping {}: {}", path.display(), chain(&error)),
        }
    }
    Ok(None)
}

/// What may be checkpoints under `dir`, by its names. Nothing when there is no directory `dir`.
pub(crate) fn newest_first(dir: &Path) -> Result<Vec<PathBuf>> {
    let names = match store(dir)?.dirs() {
        Err(Error::NotFound { .. }) => return Ok(Vec::new()),
        names => names?,
    };
    let mut candidates = Vec::new();
    for name in names {
        // Names with a dot in front are saves in progress.
        if let Some(step) = step_of(&name).filter(|_| !name.starts_with('.')) {
            candidates.push((Reverse(step), dir.join(name)));
        }
    }
    candidates.sort();
    Ok(candidates.into_iter().map(|(_, path)| path).collect())
}

/// The number at the end of a name.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
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
}
