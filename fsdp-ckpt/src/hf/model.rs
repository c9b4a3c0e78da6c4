//! Reading weights, a slice at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fsdp_core::layout::Region;
use serde::Deserialize;

use super::{INDEX, SINGLE};
use crate::error::{did_you_mean, io_error};
use crate::manifest::is_plain_file_name;
use crate::safetensors::SafetensorsFile;
use crate::{Error, Result, TensorInfo};

/// The weights of a Hugging Face model directory, in one file or several.
///
/// ```
/// use fsdp_ckpt::hf::HfModel;
/// use fsdp_core::layout::{Region, chunk_range};
/// # use fsdp_ckpt::TensorShard;
/// # use fsdp_core::{Buffer, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32(vec![0.5; 6]));
/// #     fsdp_ckpt::hf::export(&dir, &*group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let model = HfModel::open(&dir)?;
/// let info = model.info("lm_head.weight")?;
/// // What rank 1 of 2 holds under FSDP; nothing else is read.
/// let rows = chunk_range(info.shape[0], 2, 1);
/// let region = Region { offsets: vec![rows.start, 0], sizes: vec![rows.len(), info.shape[1]] };
/// let mut bytes = vec![0; region.elements() * info.dtype.size()];
/// model.read("lm_head.weight", &region, &mut bytes)?;
/// # assert_eq!(bytes, [0.5f32.to_ne_bytes(); 2].concat());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HfModel {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Each weight's file, by position in `files`.
    weights: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HfModel {
    /// Opens the weights in `dir`: `model.safetensors`, or else the files that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`Error::NotFound`] when neither is there or the index names a missing file; [`Error::Index`] when the index is damaged, names a file outside
    /// of `dir`, or a weight that its file has not; [`Error::NotSafetensors`]; [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE);
        if single.exists() {
            let file = SafetensorsFile::open(&single)?;
            let weights = file.names().map(|name| (name.to_string(), 0)).collect();
            return Ok(HfModel { dir: dir.to_path_buf(), files: vec![file], weights });
        }
        let path = dir.join(INDEX);
        let text = std::fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                let looked_for = if dir.is_dir() {
                    format!(
                        "{SINGLE} and no {INDEX}; it should be a Hugging Face model directory with safetensors weights"
                    )
                } else {
                    "model: there is no such directory".to_string()
                };
                Error::NotFound { path: dir.to_path_buf(), looked_for }
            }
            _ => io_error("read", &path)(error),
        })?;
        let bad = |reason| Error::Index { path: path.clone(), reason };
        let index: Index =
            serde_json::from_slice(&text).map_err(|error| bad(format!("not the index of a model: {error}")))?;
        let mut files = Vec::new();
        let mut positions = BTreeMap::new();
        let mut weights = BTreeMap::new();
        for (weight, name) in index.weight_map {
            let position = match positions.get(&name) {
                Some(&position) => position,
                None => {
                    files.push(open_named(dir, &name, &weight, &bad)?);
                    positions.insert(name.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if !files[position].contains(&weight) {
                return Err(bad(format!("it says that weight \"{weight}\" is in {name}, which has no such tensor")));
            }
            weights.insert(weight, position);
        }
        Ok(HfModel { dir: dir.to_path_buf(), files, weights })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The names of all weights, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// Whether there is a weight of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }

    /// A weight's dtype, shape and file.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::DType`] for a dtype that [`fsdp_core::DType`] has not.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        self.file(name)?.info(name)
    }

    /// Reads a box of a weight into `into`, row-major. Only the bytes of the box are read.
    ///
    /// # Errors
    /// As [`HfModel::info`]; [`Error::Request`] when the weight has no such box or `into` not its size in bytes; [`Error::Io`].
    pub fn read(&self, name: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.file(name)?.read(name, region, into)
    }

    fn file(&self, name: &str) -> Result<&SafetensorsFile> {
        match self.weights.get(name) {
            Some(&position) => Ok(&self.files[position]),
            None => Err(Error::MissingTensor {
                path: self.dir.clone(),
                tensor: name.to_string(),
                hint: did_you_mean(name, self.names()),
            }),
        }
    }
}

fn open_named(dir: &Path, name: &str, weight: &str, bad: &dyn Fn(String) -> Error) -> Result<SafetensorsFile> {
    if !is_plain_file_name(name) {
        return Err(bad(format!("weight \"{weight}\" is in {name:?}, which is not a plain file name")));
    }
    match SafetensorsFile::open(&dir.join(name)) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Err(Error::NotFound {
            path: dir.to_path_buf(),
            looked_for: format!("file {name:?}, in which {INDEX} says that weight \"{weight}\" is"),
        }),
        other => other,
    }
}
