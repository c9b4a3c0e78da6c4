//! TODO

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::layout::Region;

use crate::checksum::Checksum;
use crate::region::{Bounds, check_request};
use crate::safetensors::SafetensorsFile;
use crate::source::{ChunkEntry, FileEntry, TensorEntry};
use crate::store::Store;
use crate::{Error, Result};

/// The tensors and their files. Files are opened when something is read from them: a rank opens those that it needs.
#[derive(Debug)]
pub(crate) struct ChunkedTensors {
    pub(crate) store: Arc<dyn Store>,
    /// What says that the tensors are so.
    pub(crate) according_to: PathBuf,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) files: BTreeMap<String, FileEntry>,
    /// Files that are not here, each with the host that wrote it.
    pub(crate) missing: BTreeMap<String, String>,
    pub(crate) open: Mutex<HashMap<String, Arc<SafetensorsFile>>>,
}

impl ChunkedTensors {
    /// Reads a box of a tensor from whatever chunks cover it. A chunk that is read as a whole has its checksum verified
    /// on the way.
    pub(crate) fn read(&self, fqn: &str, tensor: &TensorEntry, region: &Region, into: &mut [u8]) -> Result<()> {
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        for chunk in &tensor.chunks {
            let stored = chunk.region();
            let Some(part) = region.intersect(&stored) else { continue };
            let file = self.file(fqn, tensor, chunk)?;
            let parts = [&stored, region, &part];
            if part == stored && chunk.crc32c.is_some() {
                let mut checksum = Checksum::new();
                file.read_part(fqn, parts, into, &mut |bytes| checksum.update(bytes))?;
                check_crc(&file, fqn, chunk, checksum.value())?;
            } else {
                file.read_part(fqn, parts, into, &mut |_| ())?;
            }
        }
        Ok(())
    }

    /// Reads a chunk, by its position, and checks it if it has a checksum. `seen` is told the bytes.
    pub(crate) fn verify_chunk(
        &self,
        fqn: &str,
        tensor: &TensorEntry,
        chunk: usize,
        seen: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let Some(chunk) = tensor.chunks.get(chunk) else {
            let reason = format!("it has {} chunks, none at {chunk}", tensor.chunks.len());
            return Err(Error::InvalidRead { tensor: fqn.to_string(), reason });
        };
        for (copy, name) in self.here(chunk)?.into_iter().enumerate() {
            let file = self.open(fqn, tensor, chunk, name)?;
            let mut checksum = Checksum::new();
            file.scan(fqn, &mut |bytes| {
                checksum.update(bytes);
                if copy == 0 {
                    seen(bytes.len() as u64);
                }
            })?;
            check_crc(&file, fqn, chunk, checksum.value())?;
        }
        Ok(())
    }

    /// Whether a file that holds a chunk is here.
    pub(crate) fn has(&self, chunk: &ChunkEntry) -> bool {
        chunk.files().any(|name| !self.missing.contains_key(name))
    }

    /// The files here that hold a chunk.
    fn here<'a>(&self, chunk: &'a ChunkEntry) -> Result<Vec<&'a String>> {
        let here: Vec<&String> = chunk.files().filter(|name| !self.missing.contains_key(*name)).collect();
        if here.is_empty() { Err(self.elsewhere(chunk.files())) } else { Ok(here) }
    }

    /// The error that these files are missing.
    pub(crate) fn elsewhere<'a>(&self, names: impl Iterator<Item = &'a String>) -> Error {
        let files = names.filter_map(|name| Some((name.clone(), self.missing.get(name)?.clone()))).collect();
        Error::MissingParts { path: self.store.path().to_path_buf(), files }
    }

    /// A file of a chunk.
    fn file(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry) -> Result<Arc<SafetensorsFile>> {
        self.open(fqn, tensor, chunk, self.here(chunk)?[0])
    }

    /// The file `name`, which must hold a chunk as the tensor's entry says.
    fn open(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry, name: &String) -> Result<Arc<SafetensorsFile>> {
        // A panic elsewhere leaves the map as good as it was.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match open.get(name) {
            Some(file) => Arc::clone(file),
            None => {
                let expected = self.files.get(name).and_then(|file| file.header_crc32c);
                let file = Arc::new(SafetensorsFile::with_header(self.store.open(name)?, expected)?);
                open.insert(name.clone(), Arc::clone(&file));
                file
            }
        };
        drop(open);
        let info = file.info(fqn)?;
        if (info.dtype, &info.shape) != (tensor.dtype, &chunk.sizes) {
            return Err(Error::Manifest {
                path: self.according_to.clone(),
                tensor: Some(fqn.to_string()),
                reason: format!(
                    "its chunk {} in {:?} should be {} {:?}, the file has {} {:?}",
                    Bounds(&chunk.region()),
                    name,
                    tensor.dtype,
                    chunk.sizes,
                    info.dtype,
                    info.shape
                ),
            });
        }
        Ok(file)
    }
}

fn check_crc(file: &SafetensorsFile, fqn: &str, chunk: &ChunkEntry, found: u32) -> Result<()> {
    match chunk.crc32c {
        Some(expected) if expected != found => {
            Err(Error::Checksum { path: file.path().to_path_buf(), tensor: Some(fqn.to_string()), expected, found })
        }
        _ => Ok(()),
    }
}
