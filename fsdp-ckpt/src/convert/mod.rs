//! Writing what any source holds in another format, with little memory: a [`View`] says what, [`write_fsdp`],
//! [`crate::hf::write`] and [`crate::torch::write_dcp`] write it.
//!
//! The source is never touched. The destination must not exist, and appears as a whole or not at all.

mod fsdp;
mod view;

use std::path::{Path, PathBuf};

pub use fsdp::write_fsdp;
pub use view::View;

pub use crate::written::Written;

use crate::{Error, Result, TensorSource};

/// Checks that everything in `source` can be read and has the checksums that its format keeps, and that writing `dst`
/// does not touch it. `seen` is told the bytes as they are read; nothing is read from a format without checksums.
///
/// # Errors
/// [`Error::Dtypes`] when there are tensors of dtypes that can't be read, unless `skip_unreadable`; [`Error::Exists`]
/// when `dst` is there; [`Error::Argument`] when `dst` is within the source; as [`TensorSource::verify`].
pub fn check(source: &dyn TensorSource, dst: &Path, skip_unreadable: bool, seen: &mut dyn FnMut(u64)) -> Result<()> {
    if !skip_unreadable && !source.unreadable().is_empty() {
        return Err(Error::Dtypes { path: source.path().to_path_buf(), tensors: source.unreadable().clone() });
    }
    if dst.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: dst.to_path_buf() });
    }
    if let (Ok(within), Some(parent)) = (source.path().canonicalize(), existing_parent(dst))
        && parent.starts_with(&within)
    {
        return Err(Error::Argument(format!(
            "{} is within {}, which is not to be touched; choose another place",
            dst.display(),
            source.path().display()
        )));
    }
    for (fqn, tensor) in source.tensors() {
        for (at, _) in tensor.chunks.iter().enumerate().filter(|(_, chunk)| source.has_checksum(chunk)) {
            source.verify_chunk(fqn, at, seen)?;
        }
    }
    Ok(())
}

/// The nearest directory above `path` that exists, resolved.
fn existing_parent(path: &Path) -> Option<PathBuf> {
    path.ancestors().skip(1).find_map(|dir| {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        dir.canonicalize().ok()
    })
}
