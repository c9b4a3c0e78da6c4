//! Reading Hugging Face weights.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::layout::Region;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{INDEX, SINGLE};
use crate::safetensors::chunked::ChunkedTensors;
use crate::safetensors::{SafetensorsFile, sharding};
use crate::source::{ChunkEntry, FileEntry, Format, TensorEntry, TensorSource, is_plain_file_name};
use crate::store::{Store, split, store};
use crate::{Error, Result};

/// Largest size of an index.
const MAX_INDEX: u64 = 1 << 28;

/// Weights in safetensors files: a Hugging Face model directory, a directory of PyTorch's `HuggingFaceStorageWriter`,
/// or a single file.
///
/// ```
/// use fsdp_ckpt::{TensorSource, hf::HfModel};
/// use fsdp_core::layout::{Region, chunk_range};
/// # use fsdp_ckpt::TensorShard;
/// # use fsdp_core::{Buffer, process_group::local};
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path().join("model");
/// # local::run(1, |group| {
/// #     let data = std::sync::Arc::new(Buffer::F32(vec![0.5; 6]));
/// #     fsdp_ckpt::hf::export(&dir, &group, &[TensorShard::whole("lm_head.weight", &[3, 2], data)], &[]).unwrap();
/// # });
/// let model = HfModel::open(&dir)?;
/// let weight = model.tensor("lm_head.weight")?;
/// // What rank 1 of 2 holds under FSDP; nothing else is read.
/// let rows = chunk_range(weight.shape[0], 2, 1);
/// let region = Region { offsets: vec![rows.start, 0], sizes: vec![rows.len(), weight.shape[1]] };
/// let mut bytes = vec![0; region.elements() * weight.dtype.size()];
/// model.read("lm_head.weight", &region, &mut bytes)?;
/// # assert_eq!(bytes, [0.5f32.to_ne_bytes(); 2].concat());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HfModel {
    path: PathBuf,
    chunked: ChunkedTensors,
    unreadable: BTreeMap<String, String>,
    values: Map<String, Value>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HfModel {
    /// Opens the weights in `dir`: `model.safetensors`, or the files listed in `model.safetensors.index.json`, or the
    /// files of several ranks with chunks.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there are none, or a listed file is missing; [`Error::Malformed`] for an invalid index;
    /// [`Error::Manifest`] if the chunks do not form whole tensors; [`Error::Incomplete`] for a checkpoint of this
    /// crate without its manifest; [`Error::NotSafetensors`]; [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self> {
        let store = store(dir)?;
        if store.size(SINGLE)?.is_some() {
            return Self::with_files(dir, store, &[SINGLE.to_string()]);
        }
        if let Some(text) = store.read(INDEX, MAX_INDEX)? {
            return Self::with_index(dir, store, &text);
        }
        let names: Vec<String> =
            store.list()?.into_iter().filter(|name| name.ends_with(".safetensors") && !name.starts_with('.')).collect();
        if names.is_empty() {
            return Err(Error::NotFound {
                path: dir.to_path_buf(),
                looked_for: format!(
                    "{SINGLE} and no {INDEX}; expected a Hugging Face model directory with safetensors weights"
                ),
            });
        }
        let model = Self::with_files(dir, store, &names)?;
        let open = model.chunked.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.values().any(|file| sharding::has_manifest(file)) {
            return Err(Error::Incomplete { path: dir.to_path_buf() });
        }
        drop(open);
        Ok(model)
    }

    /// Opens a single safetensors file.
    ///
    /// # Errors
    /// [`Error::NotSafetensors`]; [`Error::Io`].
    pub fn open_file(path: &Path) -> Result<Self> {
        let (dir, name) = split(path)?;
        Self::with_files(path, store(&dir)?, &[name])
    }

    /// Collects the tensors of these files and the chunks that their headers list.
    fn with_files(path: &Path, store: Arc<dyn Store>, names: &[String]) -> Result<Self> {
        let mut parts = Parts::default();
        for name in names {
            let file = SafetensorsFile::new(store.open(name)?)?;
            let offsets = sharding::saved_offsets(&file)?;
            let tensors: Vec<String> = file.names().map(str::to_string).collect();
            for fqn in tensors {
                parts.add(&file, name, &fqn, offsets.get(&fqn).cloned())?;
            }
            parts.keep(name, file);
        }
        parts.finish(path, path.to_path_buf(), store)
    }

    /// Collects the tensors that an index lists.
    fn with_index(dir: &Path, store: Arc<dyn Store>, text: &[u8]) -> Result<Self> {
        let path = dir.join(INDEX);
        let bad = |reason| Error::Malformed { path: path.clone(), item: None, reason };
        let index: Index =
            serde_json::from_slice(text).map_err(|error| bad(format!("not the index of a model: {error}")))?;
        let mut by_file = BTreeMap::<String, Vec<String>>::new();
        for (weight, name) in index.weight_map {
            if !is_plain_file_name(&name) {
                return Err(bad(format!("weight \"{weight}\" is in {name:?}, which is not a plain file name")));
            }
            by_file.entry(name).or_default().push(weight);
        }
        let mut parts = Parts::default();
        for (name, weights) in by_file {
            if store.size(&name)?.is_none() {
                let weight = weights.first().map(String::as_str).unwrap_or_default();
                return Err(Error::NotFound {
                    path: dir.to_path_buf(),
                    looked_for: format!("file {name:?}, which {INDEX} lists for weight \"{weight}\""),
                });
            }
            let file = SafetensorsFile::new(store.open(&name)?)?;
            for weight in weights {
                if !file.contains(&weight) {
                    return Err(bad(format!("it lists weight \"{weight}\" in {name}, which has no such tensor")));
                }
                parts.add(&file, &name, &weight, None)?;
            }
            parts.keep(&name, file);
        }
        parts.finish(dir, path, store)
    }

    /// Returns the names of all readable weights, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.chunked.tensors.keys().map(String::as_str)
    }
}

impl TensorSource for HfModel {
    fn path(&self) -> &Path {
        &self.path
    }

    fn format(&self) -> Format {
        Format::HuggingFace
    }

    fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.chunked.tensors
    }

    fn unreadable(&self) -> &BTreeMap<String, String> {
        &self.unreadable
    }

    fn files(&self) -> &BTreeMap<String, FileEntry> {
        &self.chunked.files
    }

    fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.chunked.read(fqn, self.tensor(fqn)?, region, into)
    }

    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.chunked.verify_chunk(fqn, self.tensor(fqn)?, chunk, seen)
    }
}

/// The contents of the files that were read so far.
#[derive(Default)]
struct Parts {
    tensors: BTreeMap<String, TensorEntry>,
    unreadable: BTreeMap<String, String>,
    files: BTreeMap<String, FileEntry>,
    open: HashMap<String, Arc<SafetensorsFile>>,
}

impl Parts {
    /// Adds a tensor of a file, or a chunk that starts at `offsets`.
    fn add(&mut self, file: &SafetensorsFile, name: &str, fqn: &str, offsets: Option<Vec<usize>>) -> Result<()> {
        let info = match file.info(fqn) {
            Ok(info) => info,
            Err(Error::UnsupportedDTypes { tensors, .. }) => {
                self.unreadable.extend(tensors);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let offsets = offsets.unwrap_or_else(|| vec![0; info.shape.len()]);
        let chunk =
            ChunkEntry { offsets, sizes: info.shape.clone(), file: name.to_string(), copies: Vec::new(), crc32c: None };
        let tensor = self.tensors.entry(fqn.to_string()).or_insert_with(|| TensorEntry {
            dtype: info.dtype,
            shape: vec![0; info.shape.len()],
            chunks: Vec::new(),
        });
        let bad = |reason| Error::Manifest { path: file.path().to_path_buf(), tensor: Some(fqn.to_string()), reason };
        if tensor.dtype != info.dtype || tensor.shape.len() != info.shape.len() {
            return Err(bad(format!(
                "it has {} {:?}, but {:?} has a chunk of {}",
                info.dtype, info.shape, tensor.chunks[0].file, tensor.dtype
            )));
        }
        if chunk.offsets.len() != chunk.sizes.len() {
            return Err(bad(format!("a chunk of shape {:?} has the offsets {:?}", chunk.sizes, chunk.offsets)));
        }
        // Headers do not hold the global shape: it extends to the end of the last chunk.
        for (dim, (&offset, &size)) in chunk.offsets.iter().zip(&chunk.sizes).enumerate() {
            let end = offset.checked_add(size);
            let end =
                end.ok_or_else(|| bad(format!("a chunk of shape {:?} starts at {:?}", chunk.sizes, chunk.offsets)))?;
            tensor.shape[dim] = tensor.shape[dim].max(end);
        }
        tensor.chunks.push(chunk);
        Ok(())
    }

    fn keep(&mut self, name: &str, file: SafetensorsFile) {
        self.files.insert(name.to_string(), FileEntry { bytes: file.bytes(), header_crc32c: None, host: None });
        self.open.insert(name.to_string(), Arc::new(file));
    }

    fn finish(mut self, path: &Path, described_by: PathBuf, store: Arc<dyn Store>) -> Result<HfModel> {
        for (fqn, tensor) in &mut self.tensors {
            let bad = |reason| Error::Manifest { path: path.to_path_buf(), tensor: Some(fqn.clone()), reason };
            // A rank without a shard may have written an empty chunk.
            if tensor.shape.iter().all(|&size| size > 0) {
                tensor.chunks.retain(|chunk| !chunk.sizes.contains(&0));
            } else {
                tensor.chunks.truncate(1);
            }
            tensor.check_chunks().map_err(bad)?;
        }
        let Parts { tensors, unreadable, files, open } = self;
        let chunked =
            ChunkedTensors { store, described_by, tensors, files, missing: BTreeMap::new(), open: Mutex::new(open) };
        Ok(HfModel { path: path.to_path_buf(), chunked, unreadable, values: Map::new() })
    }
}
