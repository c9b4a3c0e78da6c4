//! `DCP_SHARDING_INFO`: metadata of a safetensors file in which PyTorch DCP stores the offsets of chunks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::safetensors::SafetensorsFile;
use crate::{Error, MANIFEST, Result};

const KEY: &str = "DCP_SHARDING_INFO";
/// Key of this crate: the manifest without which the file is not a checkpoint.
const MANIFEST_KEY: &str = "candle_fsdp_manifest";

#[derive(Serialize, Deserialize)]
struct Saved {
    saved_offsets: Vec<usize>,
}

/// Returns the metadata of a file with these chunks, like PyTorch's `HuggingFaceStorageWriter`, with the name of the
/// manifest.
pub(crate) fn metadata<'a>(parts: impl Iterator<Item = (&'a str, &'a [usize])>) -> Result<BTreeMap<String, String>> {
    let saved: BTreeMap<&str, Saved> =
        parts.map(|(fqn, offsets)| (fqn, Saved { saved_offsets: offsets.to_vec() })).collect();
    let saved = serde_json::to_string(&saved)
        .map_err(|error| Error::Argument(format!("can't write the offsets of chunks: {error}")))?;
    Ok(BTreeMap::from([
        (KEY.to_string(), saved),
        ("DCP_VERSION".to_string(), "1.0".to_string()),
        ("format".to_string(), "pt".to_string()),
        (MANIFEST_KEY.to_string(), MANIFEST.to_string()),
    ]))
}

/// Returns whether the file belongs to a checkpoint with a manifest.
pub(crate) fn has_manifest(file: &SafetensorsFile) -> bool {
    file.metadata().contains_key(MANIFEST_KEY)
}

/// Returns the offsets of each chunk in the file; empty for a file of whole tensors.
pub(crate) fn saved_offsets(file: &SafetensorsFile) -> Result<BTreeMap<String, Vec<usize>>> {
    let Some(text) = file.metadata().get(KEY) else { return Ok(BTreeMap::new()) };
    let saved: BTreeMap<String, Saved> = serde_json::from_str(text).map_err(|error| Error::NotSafetensors {
        path: file.path().to_path_buf(),
        reason: format!("its {KEY} can't be read: {error}"),
    })?;
    Ok(saved.into_iter().map(|(fqn, saved)| (fqn, saved.saved_offsets)).collect())
}
