//! Opening a path of any format.

use std::path::Path;

use crate::hf::{HfModel, INDEX};
use crate::store::location;
use crate::torch::{BIN, BIN_INDEX, METADATA, TorchDcp, TorchFile};
use crate::{Checkpoint, Error, MANIFEST, Result, TensorSource, latest};

/// Opens a checkpoint or model and detects its format: a directory with a `checkpoint.json`, with the `.metadata` of
/// PyTorch DCP, with safetensors files (see [`HfModel::open`]), or with a `pytorch_model.bin` or its index; a single
/// file of `torch.save` or a single safetensors file.
///
/// # Errors
/// [`Error::NotFound`] if no format is detected; errors of the format.
pub fn open(path: &Path) -> Result<Box<dyn TensorSource>> {
    if location(path)?.is_file()? {
        return Ok(if TorchFile::is_one(path)? {
            Box::new(TorchFile::open(path)?)
        } else {
            Box::new(HfModel::open_file(path)?)
        });
    }
    let store = location(path)?.store()?;
    if store.size(MANIFEST)?.is_some() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    if store.size(METADATA)?.is_some() {
        return Ok(Box::new(TorchDcp::open(path)?));
    }
    if store.list()?.iter().any(|name| name.ends_with(".safetensors") || name == INDEX) {
        return Ok(Box::new(HfModel::open(path)?));
    }
    if store.size(BIN)?.is_some() || store.size(BIN_INDEX)?.is_some() {
        return Ok(Box::new(TorchFile::open_model(path)?));
    }
    Err(nothing(path))
}

/// Returns the error for a directory of no known format. It may be the directory of a run.
fn nothing(path: &Path) -> Error {
    let hint = match latest(path) {
        Ok(Some(step)) => format!("; its newest checkpoint is {}: pass this path", step.display()),
        _ => String::new(),
    };
    let looked_for = format!(
        "checkpoint and no model: no {MANIFEST} (did the save finish?), no {METADATA}, no file of safetensors, no \
            {BIN}{hint}"
    );
    Error::NotFound { path: path.to_path_buf(), looked_for }
}
