//! The index of a model in several files: `model.safetensors.index.json`, and `pytorch_model.bin.index.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::hf::tied;
use crate::source::{SourceIndex, is_plain_file_name};
use crate::store::Store;
use crate::{Error, Result};

/// Largest size of an index.
const MAX_INDEX: u64 = 1 << 28;

/// The weights of each file.
pub(crate) struct WeightMap {
    /// Path of the index.
    pub(crate) path: PathBuf,
    pub(crate) files: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightMap {
    /// Reads the index `name` and checks that the files exist. Returns `None` without an index of this name.
    pub(crate) fn read(store: &dyn Store, name: &str) -> Result<Option<Self>> {
        let Some(text) = store.read(name, MAX_INDEX)? else { return Ok(None) };
        let mut map = WeightMap { path: store.path().join(name), files: BTreeMap::new() };
        let index: Index =
            serde_json::from_slice(&text).map_err(|error| map.bad(format!("not the index of a model: {error}")))?;
        for (weight, file) in index.weight_map {
            if !is_plain_file_name(&file) {
                return Err(map.bad(format!("weight \"{weight}\" is in {file:?}, which is not a plain file name")));
            }
            map.files.entry(file).or_default().push(weight);
        }
        for (file, weights) in &map.files {
            if store.size(file)?.is_none() {
                let looked_for = format!("file {file:?}, which {name} lists for weight \"{}\"", weights[0]);
                return Err(Error::NotFound { path: store.path().to_path_buf(), looked_for });
            }
        }
        Ok(Some(map))
    }

    /// Checks that the files have the weights that the index lists. They may have more, which transformers reads, too.
    /// They may lack one of two tied weights.
    pub(crate) fn check(&self, store: &dyn Store, index: &SourceIndex) -> Result<()> {
        let has = |weight: &str| index.tensors.contains_key(weight) || index.unreadable.contains_key(weight);
        let mut tied = None;
        for (file, weights) in &self.files {
            for weight in weights.iter().filter(|weight| !has(weight)) {
                let is_tied = match tied {
                    Some(tied) => tied,
                    None => *tied.insert(tied::is_tied(store)?),
                };
                if !(is_tied && tied::others(weight).any(has)) {
                    let reason = format!("it lists weight \"{weight}\" in {file}, which has no such tensor");
                    return Err(self.bad(reason));
                }
            }
        }
        Ok(())
    }

    fn bad(&self, reason: String) -> Error {
        Error::Malformed { path: self.path.clone(), item: None, reason }
    }
}
