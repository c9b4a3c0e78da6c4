//! Reading Hugging Face weights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::layout::Region;

use super::{INDEX, SINGLE, Shard, WeightMap};
use crate::safetensors::chunked::ChunkedTensors;
use crate::safetensors::{SafetensorsFile, sharding};
use crate::source::{ChunkEntry, FileEntry, Format, SourceIndex, TensorEntry, TensorSource};
use crate::store::{Store, location, split};
use crate::{Error, Result};

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
    chunked: ChunkedTensors,
}

impl HfModel {
    /// Opens the weights in the directory `dir`: `model.safetensors`, or the files listed in
    /// `model.safetensors.index.json`, or the files of several ranks with chunks. Also opens a single safetensors file, or
    /// the index of several files (`*.index.json`), by its own path.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there are none, or a listed file is missing; [`Error::Malformed`] for an invalid index;
    /// [`Error::Manifest`] if the chunks do not form whole tensors; [`Error::Incomplete`] for a checkpoint of this
    /// crate without its manifest; [`Error::NotSafetensors`]; [`Error::Io`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if location(dir)?.is_file()? {
            return Self::open_file(dir);
        }
        let store = location(dir)?.store()?;
        if store.size(SINGLE)?.is_some() {
            return Self::with_files(dir, store, &[SINGLE.to_string()]);
        }
        if let Some(map) = WeightMap::read(&*store, INDEX)? {
            return Self::with_weight_map(dir, store, map);
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
        check_numbers(dir, &names)?;
        let model = Self::with_files(dir, store, &names)?;
        let open = model.chunked.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.values().any(|file| sharding::has_manifest(file)) {
            return Err(Error::Incomplete { path: dir.to_path_buf() });
        }
        drop(open);
        Ok(model)
    }

    /// Opens a single safetensors file, or the index of several files (`*.index.json`).
    ///
    /// # Errors
    /// [`Error::NotSafetensors`]; [`Error::Io`]; for an index, the errors of [`HfModel::open`].
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (dir, name) = split(path)?;
        let store = location(&dir)?.store()?;
        if name.ends_with(".index.json")
            && let Some(map) = WeightMap::read(&*store, &name)?
        {
            return Self::with_weight_map(&dir, store, map);
        }
        Self::with_files(path, store, &[name])
    }

    /// Collects the tensors of these files and the chunks that their headers list.
    fn with_files(path: &Path, store: Arc<dyn Store>, names: &[String]) -> Result<Self> {
        let mut parts = Parts::new(path);
        for name in names {
            let file = SafetensorsFile::new(store.open(name)?)?;
            let offsets = sharding::saved_offsets(&file)?;
            let tensors: Vec<String> = file.names().map(str::to_string).collect();
            for fqn in tensors {
                parts.add(&file, name, &fqn, offsets.get(&fqn).cloned())?;
            }
            parts.keep(name, file);
        }
        parts.finish(path.to_path_buf(), store)
    }

    /// Collects the tensors in the files that an index lists. As transformers, reads whole files: the index may list only
    /// some of their tensors.
    fn with_weight_map(dir: &Path, store: Arc<dyn Store>, map: WeightMap) -> Result<Self> {
        let mut parts = Parts::new(dir);
        for name in map.files.keys() {
            let file = SafetensorsFile::new(store.open(name)?)?;
            let weights: Vec<String> = file.names().map(str::to_string).collect();
            for weight in weights {
                parts.add(&file, name, &weight, None)?;
            }
            parts.keep(name, file);
        }
        map.check(&*store, &parts.index)?;
        parts.finish(map.path, store)
    }

    /// Returns the names of all readable weights, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors().keys().map(String::as_str)
    }
}

/// Fails if the names are of shards, such as `model-00001-of-00003.safetensors`, and some are missing.
fn check_numbers(dir: &Path, names: &[String]) -> Result<()> {
    for (name, shard) in names.iter().filter_map(|name| Some((name, Shard::of(name)?))) {
        let number = (1..=shard.count).find(|number| !names.contains(&shard.name(*number)));
        if let Some(number) = number {
            let looked_for = format!("{}, although it has {name}, and no {INDEX}", shard.name(number));
            return Err(Error::NotFound { path: dir.to_path_buf(), looked_for });
        }
    }
    Ok(())
}

impl TensorSource for HfModel {
    fn index(&self) -> &SourceIndex {
        &self.chunked.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.chunked.read(fqn, region, into)
    }

    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.chunked.verify_chunk(fqn, chunk, seen)
    }
}

/// The contents of the files that were read so far.
struct Parts {
    index: SourceIndex,
    open: HashMap<String, Arc<SafetensorsFile>>,
}

impl Parts {
    fn new(path: &Path) -> Self {
        Parts { index: SourceIndex::new(path, Format::HuggingFace), open: HashMap::new() }
    }

    /// Adds a tensor of a file, or a chunk that starts at `offsets`.
    fn add(&mut self, file: &SafetensorsFile, name: &str, fqn: &str, offsets: Option<Vec<usize>>) -> Result<()> {
        let info = match file.info(fqn) {
            Ok(info) => info,
            Err(Error::UnsupportedDTypes { tensors, .. }) => {
                self.index.unreadable.extend(tensors);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let offsets = offsets.unwrap_or_else(|| vec![0; info.shape.len()]);
        let chunk = ChunkEntry::new(name, Region { offsets, sizes: info.shape.clone() });
        let tensor = self.index.tensors.entry(fqn.to_string()).or_insert_with(|| TensorEntry {
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
        let entry = FileEntry { bytes: file.bytes(), header_crc32c: None, host: None };
        self.index.files.insert(name.to_string(), entry);
        self.open.insert(name.to_string(), Arc::new(file));
    }

    fn finish(self, described_by: PathBuf, store: Arc<dyn Store>) -> Result<HfModel> {
        let Parts { mut index, open } = self;
        for (fqn, tensor) in &mut index.tensors {
            let bad = |reason| Error::Manifest { path: index.path.clone(), tensor: Some(fqn.clone()), reason };
            // A rank without a shard may have written an empty chunk.
            if tensor.shape.iter().all(|&size| size > 0) {
                tensor.chunks.retain(|chunk| !chunk.sizes.contains(&0));
            } else {
                tensor.chunks.truncate(1);
            }
            tensor.check_chunks().map_err(bad)?;
        }
        Ok(HfModel { chunked: ChunkedTensors { index, store, described_by, open: Mutex::new(open) } })
    }
}
