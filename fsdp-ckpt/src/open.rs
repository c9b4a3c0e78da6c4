//! Opening what a path holds, whatever its format.

use std::path::Path;

use crate::hf::HfModel;
use crate::store::store;
use crate::{Checkpoint, MANIFEST, Result, TensorSource};

/// Opens a checkpoint or model whose format is found out: a directory with a `checkpoint.json`, a directory of safetensors files (see [`HfModel::open`]),
/// or a single safetensors file.
///
/// # Errors
/// [`crate::Error::NotFound`] when nothing there is of a known format; those of the format.
pub fn open(path: &Path) -> Result<Box<dyn TensorSource>> {
    if path.is_file() {
        return Ok(Box::new(HfModel::open_file(path)?));
    }
    if store(path)?.size(MANIFEST)?.is_some() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    Ok(Box::new(HfModel::open(path)?))
}
