//! What the user names, opened.

use std::path::Path;

use fsdp_ckpt::TensorSource;

use crate::inspect::newest_step;

/// Opens what a path holds. That a run is no checkpoint is told in the words of whoever gave its path.
pub(crate) fn open(path: &Path) -> anyhow::Result<Box<dyn TensorSource>> {
    fsdp_ckpt::open(path).map_err(|error| match newest_step(path) {
        Some(step) => anyhow::anyhow!(
            "{} holds the steps of a run; name one of them, as in {}",
            path.display(),
            path.join(step).display()
        ),
        None => error.into(),
    })
}
