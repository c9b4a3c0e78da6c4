//! TODO

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::safetensors::SafetensorsFile;
use crate::{Error, MANIFEST, Result};

const KEY: &str = "DCP_SHARDING_INFO";
/// The key of this project, which names the file that says that all others are there.
const OURS: &str = "candle_fsdp_manifest";

#[derive(Serialize, Deserialize)]
struct Saved {
    saved_offsets: Vec<usize>,
}

/// The metadata of a file that holds these parts, as PyTorch's `HuggingFaceStorageWriter` writes it, and that there is
/// a manifest.
pub(crate) fn metadata<'a>(parts: impl Iterator<Item = (&'a str, &'a [usize])>) -> Result<BTreeMap<String, String>> {
    let saved: BTreeMap<&str, Saved> =
        parts.map(|(fqn, offsets)| (fqn, Saved { saved_offsets: offsets.to_vec() })).collect();
    let saved = serde_json::to_string(&saved)
        .map_err(|error| Error::Argument(format!("can't write where the parts of tensors start: {error}")))?;
    Ok(BTreeMap::from([
        (KEY.to_string(), saved),
        ("DCP_VERSION".to_string(), "1.0".to_string()),
        ("format".to_string(), "pt".to_string()),
        (OURS.to_string(), MANIFEST.to_string()),
    ]))
}

/// Whether a file is one of a checkpoint with a manifest, which is not whole without.
pub(crate) fn has_manifest(file: &SafetensorsFile) -> bool {
    file.metadata().contains_key(OURS)
}

/// Where in its tensor each part in a file starts; nothing for a file with whole tensors.
pub(crate) fn saved_offsets(file: &SafetensorsFile) -> Result<BTreeMap<String, Vec<usize>>> {
    let Some(text) = file.metadata().get(KEY) else { return Ok(BTreeMap::new()) };
    let saved: BTreeMap<String, Saved> = serde_json::from_str(text).map_err(|error| Error::NotSafetensors {
        path: file.path().to_path_buf(),
        reason: format!("its {KEY} can't be read: {error}"),
    })?;
    Ok(saved.into_iter().map(|(fqn, saved)| (fqn, saved.saved_offsets)).collect())
}
