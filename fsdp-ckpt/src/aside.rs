//! Damaged checkpoints, moved out of the way to names that nothing looks at.

use std::path::{Path, PathBuf};

use crate::Result;
use crate::store::{Moved, move_dir, split};

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
/// assert_eq!(fsdp_ckpt::set_aside(&step)?, Some(root.path().join("step-00000010.damaged")));
/// assert_eq!(fsdp_ckpt::set_aside(&step)?, None);
/// assert_eq!(fsdp_ckpt::name_before_aside("step-00000010.damaged"), Some("step-00000010"));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub fn set_aside(dir: &Path) -> Result<Option<PathBuf>> {
    let (parent, name) = split(dir)?;
    let mut number = 1_u64;
    loop {
        let target = match number {
            1 => parent.join(format!("{name}{MARK}")),
            _ => parent.join(format!("{name}{MARK}-{number}")),
        };
        match move_dir(dir, &target)? {
            Moved::Done => return Ok(Some(target)),
            Moved::Gone => return Ok(None),
            Moved::Taken => number += 1,
        }
    }
}

/// The name that a directory had before [`set_aside`] gave it this one; `None` for a name that it does not give.
pub fn name_before_aside(name: &str) -> Option<&str> {
    let (before, after) = name.rsplit_once(MARK)?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (!before.is_empty() && (after.is_empty() || after.strip_prefix('-').is_some_and(is_number))).then_some(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_given_are_known_again() {
        assert_eq!(name_before_aside("step-1.damaged"), Some("step-1"));
        assert_eq!(name_before_aside("step-1.damaged-12"), Some("step-1"));
        assert_eq!(name_before_aside("a.damaged.damaged"), Some("a.damaged"));
        for other in ["step-1", ".damaged", "step-1.damaged-", "step-1.damaged2", "step-1.damaged-x", "step.damaged/1"]
        {
            assert_eq!(name_before_aside(other), None, "{other}");
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
            assert_eq!(set_aside(&step).unwrap(), Some(root.path().join(name)));
            assert_eq!(std::fs::read_to_string(root.path().join(name).join("file")).unwrap(), round.to_string());
        }
    }
}
