//! Reading checkpoints of PyTorch DCP in the classic format.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fsdp_core::layout::Region;
use serde_json::Value;

use crate::error::io_error;
use crate::escape::escape;
use crate::region::{Bounds, check_request};
use crate::source::{ChunkEntry, FileEntry, SourceIndex};
use crate::store::{ReadAt, Store, location};
use crate::torch::archive::{Archive, MAX_PICKLE};
use crate::torch::dcp_metadata::{ByteRange, ValueItem};
use crate::torch::file::{read_checked, verify};
use crate::torch::pickle::{Flaw, Pickle};
use crate::torch::tensor::{StoredTensor, read_single_tensor};
use crate::torch::{dcp_metadata, flatten, not_torch};
use crate::{Checksums, Error, Format, Result, TensorSource};

/// File that makes a directory a checkpoint.
pub(crate) const METADATA: &str = ".metadata";

/// A directory that `torch.distributed.checkpoint.save` wrote with `FileSystemWriter`: `.metadata` and `.distcp` files.
///
/// [`TensorSource::values`] holds non-tensor values under flattened names, such as `optim.param_groups.<fqn>.lr`.
/// Values that JSON can't hold, and objects of Python classes, are in [`TensorSource::unreadable`].
///
/// Each item has a CRC-32, which [`TensorSource::verify`] and reads of whole chunks check.
#[derive(Debug)]
pub struct TorchDcp {
    index: SourceIndex,
    store: Arc<dyn Store>,
    /// Place of each chunk, in the order of the tensor's entry.
    places: BTreeMap<String, Vec<Chunk>>,
    open: Mutex<HashMap<String, Arc<dyn ReadAt>>>,
}

/// A chunk in its file.
#[derive(Debug)]
struct Chunk {
    place: ByteRange,
    /// Place of its elements, once it was looked up.
    stored: OnceLock<StoredTensor>,
}

impl TorchDcp {
    /// Opens the checkpoint in the directory `dir` and reads its values.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a `.metadata`, or if a file is missing; [`Error::Malformed`] for invalid metadata,
    /// disallowed names or a truncated file; [`Error::TooLarge`]; [`Error::Io`], also for a link that leads out of
    /// `dir`.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let store = location(dir)?.store()?;
        check_stays(&*store, METADATA)?;
        let Some(bytes) = store.read(METADATA, MAX_PICKLE)? else {
            store.list()?;
            return Err(Error::NotFound {
                path: dir.to_path_buf(),
                looked_for: format!("{METADATA}: it is not a DCP checkpoint, or its save did not finish"),
            });
        };
        let described_by = dir.join(METADATA);
        let dcp_metadata::Metadata { tensors, unreadable, values, files, paths } =
            dcp_metadata::parse(&bytes).map_err(|bad| not_torch(&described_by, bad.item.as_deref(), bad.reason))?;
        let mut index = SourceIndex { unreadable, paths, ..SourceIndex::new(dir, Format::TorchDcp) };
        for (name, end) in files {
            check_stays(&*store, &name)?;
            let Some(bytes) = store.size(&name)? else {
                return Err(Error::NotFound {
                    path: dir.to_path_buf(),
                    looked_for: format!("file {name:?}, which its {METADATA} names"),
                });
            };
            if bytes < end {
                let reason =
                    format!("it has {bytes} bytes, but {METADATA} has items up to byte {end}; is it truncated?");
                return Err(not_torch(&dir.join(name), None, reason));
            }
            index.files.insert(name, FileEntry { bytes, header_crc32c: None, host: None });
        }
        let mut places = BTreeMap::new();
        for (fqn, (entry, at)) in tensors {
            let chunks = at.into_iter().map(|place| Chunk { place, stored: OnceLock::new() }).collect();
            places.insert(fqn.clone(), chunks);
            index.tensors.insert(fqn, entry);
        }
        let mut checkpoint = TorchDcp { index, store, places, open: Mutex::default() };
        for (fqn, item) in values {
            match checkpoint.value(&fqn, &item)? {
                Ok(value) => drop(checkpoint.index.values.insert(fqn, value)),
                Err(what) => {
                    tracing::warn!(
                        "{}: leaving out \"{}\": it is {}",
                        escape(dir.display()),
                        escape(&fqn),
                        escape(&what)
                    );
                    checkpoint.index.unreadable.insert(fqn, what);
                }
            }
        }
        Ok(checkpoint)
    }

    /// Returns a value as JSON, or a description of what it is instead.
    fn value(&self, fqn: &str, item: &ValueItem) -> Result<Result<Value, String>> {
        let file = self.file(&item.file)?;
        let mut archive = Archive::open(&*file, Some(fqn), item.place.offset, item.place.bytes)?;
        let bytes = archive.pickle()?;
        match Pickle::parse(&bytes) {
            Ok(pickle) => Ok(flatten::json(&pickle, pickle.root())),
            Err(Flaw::Refused { name }) => Ok(Err(format!("a pickle that uses {name}"))),
            Err(flaw) => Err(not_torch(file.path(), Some(fqn), flaw.to_string())),
        }
    }

    fn file(&self, name: &str) -> Result<Arc<dyn ReadAt>> {
        // A panic leaves the map consistent.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(name) {
            return Ok(Arc::clone(file));
        }
        let file: Arc<dyn ReadAt> = Arc::from(self.store.open(name)?);
        open.insert(name.to_string(), Arc::clone(&file));
        Ok(file)
    }

    /// Returns the file of a chunk and the place of its elements.
    fn chunk<'a>(&'a self, fqn: &str, at: usize) -> Result<(Arc<dyn ReadAt>, &'a StoredTensor)> {
        let (tensor, chunk) = (&self.index.tensors[fqn], &self.places[fqn][at]);
        let entry = &tensor.chunks[at];
        let file = self.file(&entry.file)?;
        if let Some(stored) = chunk.stored.get() {
            return Ok((file, stored));
        }
        let mut archive = Archive::open(&*file, Some(fqn), chunk.place.offset, chunk.place.bytes)?;
        let stored = read_single_tensor(file.path(), fqn, &mut archive, tensor.dtype, file.bytes())?;
        if stored.shape != entry.sizes {
            let reason = format!(
                "{METADATA} has its chunk {} there, but its shape is {:?}",
                Bounds(&entry.region()),
                stored.shape
            );
            return Err(not_torch(file.path(), Some(fqn), reason));
        }
        drop(archive);
        Ok((file, chunk.stored.get_or_init(|| stored)))
    }
}

/// Refuses a link that leads out of the directory: it could make this host read any file.
fn check_stays(store: &dyn Store, name: &str) -> Result<()> {
    let Some(target) = store.link(name) else { return Ok(()) };
    if store.size(name)?.is_none() {
        return Ok(());
    }
    if store.path().canonicalize().is_ok_and(|dir| target.parent() == Some(&dir)) {
        return Ok(());
    }
    let reason = format!(
        "it is a symbolic link that leads out of the checkpoint, to {}; replace it by a copy",
        escape(target.display())
    );
    Err(io_error("open", &store.path().join(name))(std::io::Error::other(reason)))
}

impl TensorSource for TorchDcp {
    fn index(&self) -> &SourceIndex {
        &self.index
    }

    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        for (at, chunk) in tensor.chunks.iter().enumerate() {
            let held = chunk.region();
            let Some(part) = region.intersect(&held) else { continue };
            let (file, stored) = self.chunk(fqn, at)?;
            read_checked(&*file, fqn, stored, [&held, region, &part], into)?;
        }
        Ok(())
    }

    fn checksums(&self) -> Checksums {
        Checksums::Tensors
    }

    fn has_checksum(&self, _: &ChunkEntry) -> bool {
        true
    }

    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.index.chunk(fqn, chunk)?;
        let (file, stored) = self.chunk(fqn, chunk)?;
        verify(&*file, fqn, stored.storage, seen)
    }
}
