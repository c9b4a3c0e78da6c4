//! Opening what a path holds, whatever its format.

use std::path::Path;

use crate::hf::HfModel;
use crate::store::store;
use crate::torch::{BIN, BIN_INDEX, METADATA, TorchDcp, TorchFile};
use crate::{Checkpoint, MANIFEST, Result, TensorSource};

/// Opens a checkpoint or model whose format is found out: a directory with a `checkpoint.json`, one with the `.metadata` of PyTorch's DCP, a directory of
/// safetensors files (see [`HfModel::open`]), one with a `pytorch_model.bin` or its index, a single file of `torch.save`, or a single safetensors file.
///
/// # Errors
/// [`crate::Error::NotFound`] when nothing there is of a known format; those of the format.
pub fn open(path: &Path) -> Result<Box<dyn TensorSource>> {
    if path.is_file() {
        return Ok(if TorchFile::is_one(path)? {
            Box::new(TorchFile::open(path)?)
        } else {
            Box::new(HfModel::open_file(path)?)
        });
    }
    let store = store(path)?;
    if store.size(MANIFEST)?.is_some() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    if store.size(METADATA)?.is_some() {
        return Ok(Box::new(TorchDcp::open(path)?));
    }
    let has_bin = store.size(BIN)?.is_some() || store.size(BIN_INDEX)?.is_some();
    if has_bin && !store.list()?.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(Box::new(TorchFile::open_model(path)?));
    }
    Ok(Box::new(HfModel::open(path)?))
}
