//! Reading files of `torch.save`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use fsdp_core::layout::Region;

use crate::escape::escape;
use crate::hf::WeightMap;
use crate::region::check_request;
use crate::source::{ChunkEntry, FileEntry, SourceIndex, TensorEntry};
use crate::store::{BLOCK, ReadAt, found_instead, location, placeholder_in, split};
use crate::torch::archive::{Archive, Storage};
use crate::torch::flatten::{Leaf, flatten};
use crate::torch::not_torch;
use crate::torch::pickle::Pickle;
use crate::torch::tensor::{StoredTensor, from_torch_dtype, read_part, view};
use crate::{Checksums, Error, Format, Result, TensorSource, Verified};

/// File name of a Hugging Face model's weights in one file of `torch.save`.
pub(crate) const BIN: &str = "pytorch_model.bin";
/// File name of the index of a Hugging Face model in several such files.
pub(crate) const BIN_INDEX: &str = "pytorch_model.bin.index.json";
/// First bytes of a zip file.
const ZIP: &[u8] = b"PK\x03\x04";
/// First bytes of a file of PyTorch before 1.6: a pickle of its magic number.
pub(crate) const LEGACY: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

/// A state dict in a file of `torch.save`, or a Hugging Face model in several files.
///
/// Nested dicts become dotted names: `{"model": {"weight": ...}}` has the tensor `model.weight`.
/// [`TensorSource::values`] holds non-tensor values that JSON can hold. Views are read as they appear; tensors may
/// share storages. [`TensorSource::verify`] and reads of whole tensors check CRC-32 checksums.
#[derive(Debug)]
pub struct TorchFile {
    index: SourceIndex,
    stored: BTreeMap<String, (Arc<dyn ReadAt>, StoredTensor)>,
}

impl TorchFile {
    /// Opens a single file of any name.
    ///
    /// # Errors
    /// [`Error::Malformed`] unless it is a file of `torch.save` of PyTorch 1.6 or newer with only tensors and plain
    /// values; [`Error::TooLarge`]; [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (_, name) = split(path)?;
        let mut file = Self::empty(path);
        file.add(&name, Arc::from(location(path)?.open()?))?;
        Ok(file)
    }

    /// Opens the Hugging Face model in the directory `dir`: `pytorch_model.bin`, or the files listed in
    /// `pytorch_model.bin.index.json`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there are none, or a listed file is missing; [`Error::Malformed`] for an invalid index;
    /// the errors of [`TorchFile::open`].
    pub fn open_model(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let store = location(dir)?.store()?;
        let mut model = Self::empty(dir);
        if store.size(BIN)?.is_some() {
            model.add(BIN, Arc::from(store.open(BIN)?))?;
            return Ok(model);
        }
        let Some(map) = WeightMap::read(&*store, BIN_INDEX)? else {
            return Err(Error::NotFound { path: dir.to_path_buf(), looked_for: format!("{BIN} and no {BIN_INDEX}") });
        };
        for name in map.files.keys() {
            model.add(name, Arc::from(store.open(name)?))?;
        }
        map.check(&*store, &model.index)?;
        Ok(model)
    }

    /// Returns whether a file is one of `torch.save`, by its first bytes, or else by its name.
    pub(crate) fn is_one(path: &Path) -> Result<bool> {
        let file = location(path)?.open()?;
        let mut start = [0; LEGACY.len()];
        let count = file.bytes().min(start.len() as u64) as usize;
        file.read_exact_at(&mut start[..count], 0)?;
        // The length of a safetensors header may look like a zip signature.
        let is_safetensors = start[8] == b'{';
        let is_named = path.extension().is_some_and(|ext| ["pt", "pth", "bin"].iter().any(|name| ext == *name));
        Ok(!is_safetensors && (start.starts_with(ZIP) || start == LEGACY || is_named))
    }

    fn empty(path: &Path) -> Self {
        TorchFile { index: SourceIndex::new(path, Format::TorchFile), stored: BTreeMap::new() }
    }

    /// Adds all tensors and values of a file.
    fn add(&mut self, name: &str, file: Arc<dyn ReadAt>) -> Result<()> {
        let path = file.path().to_path_buf();
        let bytes = file.bytes();
        let mut start = vec![0; LEGACY.len().min(bytes as usize)];
        file.read_exact_at(&mut start, 0)?;
        if !start.starts_with(ZIP) {
            if let Some(found) = placeholder_in(&*file) {
                return Err(found_instead(&path, found));
            }
            let reason = if start == LEGACY {
                "it is in the format of PyTorch before 1.6, which is not supported; load it and save it with a newer \
                    one"
            } else {
                "it is not a zip file of torch.save"
            };
            return Err(not_torch(&path, None, reason.into()));
        }
        let mut archive = Archive::open(&*file, None, 0, bytes)?;
        let pickle = archive.pickle()?;
        let pickle = Pickle::parse(&pickle).map_err(|flaw| not_torch(&path, None, flaw.to_string()))?;
        let mut leaves = Vec::new();
        let mut keep = |path: &[String], leaf| {
            leaves.push((if path.is_empty() { vec!["tensor".into()] } else { path.to_vec() }, leaf));
            Ok(())
        };
        flatten(&pickle, pickle.root(), &mut keep).map_err(|reason| not_torch(&path, None, reason))?;
        let mut storages = HashMap::<String, Storage>::new();
        let SourceIndex { tensors, unreadable, values, paths, .. } = &mut self.index;
        for (path_in_dicts, leaf) in leaves {
            let fqn = path_in_dicts.join(".");
            let bad = |reason| not_torch(&path, Some(&fqn), reason);
            if tensors.contains_key(&fqn) || unreadable.contains_key(&fqn) || values.contains_key(&fqn) {
                return Err(bad("this name is there twice".into()));
            }
            paths.insert(fqn.clone(), path_in_dicts);
            let tensor = match leaf {
                Leaf::Plain(value) => {
                    values.insert(fqn, value);
                    continue;
                }
                Leaf::Other(what) => {
                    tracing::warn!(
                        "{}: leaving out \"{}\": it is {}",
                        escape(path.display()),
                        escape(&fqn),
                        escape(&what)
                    );
                    unreadable.insert(fqn, what);
                    continue;
                }
                Leaf::Tensor(value) => view(&pickle, value).map_err(bad)?,
            };
            let Some(dtype) = from_torch_dtype(tensor.dtype) else {
                unreadable.insert(fqn, tensor.dtype.into());
                continue;
            };
            let storage = match storages.get(&tensor.key) {
                Some(storage) => *storage,
                None => {
                    let storage = archive.storage(&tensor.key)?;
                    storages.insert(tensor.key.clone(), storage);
                    storage
                }
            };
            let stored = tensor.within(storage, dtype, bytes).map_err(bad)?;
            let shape = stored.shape.clone();
            let chunk = ChunkEntry::new(name, Region::whole(&shape));
            tensors.insert(fqn.clone(), TensorEntry { dtype, shape, chunks: vec![chunk] });
            self.stored.insert(fqn, (Arc::clone(&file), stored));
        }
        self.index.files.insert(name.to_string(), FileEntry { bytes, header_crc32c: None, host: None });
        Ok(())
    }
}

impl TensorSource for TorchFile {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        let (file, stored) = &self.stored[fqn];
        read_checked(&**file, fqn, stored, [&Region::whole(&tensor.shape), region, region], into)
    }

    fn checksums(&self) -> Checksums {
        Checksums::Tensors
    }

    fn has_checksum(&self, _: &ChunkEntry) -> bool {
        true
    }

    /// Reads the whole storage of the tensor.
    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.index.chunk(fqn, chunk)?;
        let (file, stored) = &self.stored[fqn];
        verify(&**file, fqn, stored.storage, seen)
    }

    fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        // A shared storage is verified once.
        let mut storages = BTreeMap::new();
        for (fqn, (file, stored)) in &self.stored {
            storages.entry((file.path(), stored.storage.start)).or_insert((fqn, file, stored.storage));
        }
        let mut verified = Verified { files: self.files().len(), ..Verified::default() };
        for (fqn, file, storage) in storages.into_values().skip(rank).step_by(ranks.max(1)) {
            verify(&**file, fqn, storage, &mut |bytes| verified.bytes += bytes)?;
            verified.chunks += 1;
        }
        Ok(verified)
    }
}

/// Reads `part` of a chunk into the region `region`. Verifies the checksum if the part is a whole storage.
pub(super) fn read_checked(
    file: &dyn ReadAt,
    fqn: &str,
    stored: &StoredTensor,
    [chunk, region, part]: [&Region; 3],
    into: &mut [u8],
) -> Result<()> {
    let is_whole = part == chunk && stored.bytes() as u64 == stored.storage.bytes && stored.is_contiguous();
    if !is_whole {
        return read_part(file, stored, [chunk, region, part], into, &mut |_| ());
    }
    let mut crc = crc32fast::Hasher::new();
    read_part(file, stored, [chunk, region, part], into, &mut |bytes| crc.update(bytes))?;
    check(file, fqn, stored.storage, crc)
}

/// Reads a storage and verifies its checksum. Calls `seen` with the bytes of each read.
pub(super) fn verify(file: &dyn ReadAt, fqn: &str, storage: Storage, seen: &mut dyn FnMut(u64)) -> Result<()> {
    let mut crc = crc32fast::Hasher::new();
    let mut block = vec![0; storage.bytes.min(BLOCK as u64) as usize];
    let mut at = 0;
    while at < storage.bytes {
        let count = (storage.bytes - at).min(BLOCK as u64) as usize;
        file.read_exact_at(&mut block[..count], storage.start + at)?;
        crc.update(&block[..count]);
        at += count as u64;
        seen(count as u64);
    }
    check(file, fqn, storage, crc)
}

fn check(file: &dyn ReadAt, fqn: &str, storage: Storage, crc: crc32fast::Hasher) -> Result<()> {
    let (expected, found) = (storage.crc32, crc.finalize());
    if expected == found {
        return Ok(());
    }
    Err(Error::Checksum { path: file.path().to_path_buf(), tensor: Some(fqn.to_string()), expected, found })
}
