//! Finding the checkpoint to go on from.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use crate::error::{chain, io_error};
use crate::{Checkpoint, Result};

/// The newest whole checkpoint under `dir`: the one with the highest number at the end of its name, as in `step-00000010`.
///
/// Every candidate is opened, so that what is returned has a valid manifest and all of its files; what does not open is skipped with a warning.
/// `None` when there is no whole checkpoint, or no directory `dir`: a run that starts from nothing.
///
/// # Errors
/// [`crate::Error::Io`] when `dir` can't be listed.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>> {
    for path in newest_first(dir)? {
        match Checkpoint::open(&path) {
            Ok(_) => return Ok(Some(path)),
            Err(error) => tracing::warn!("skipping {}: {}", path.display(), chain(&error)),
        }
    }
    Ok(None)
}

/// What may be checkpoints under `dir`, by its names. Nothing when there is no directory `dir`.
pub(crate) fn newest_first(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("list", dir))?,
    };
    let mut candidates = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error("list", dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        // Names with a dot in front are saves in progress.
        if let Some(name) = name.filter(|name| !name.starts_with('.'))
            && let Some(step) = step_of(name)
            && path.is_dir()
        {
            candidates.push((Reverse(step), path));
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
