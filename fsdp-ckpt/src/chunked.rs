//! Tensors in boxes, each box in a safetensors file under its tensor's name: what our checkpoints and Hugging Face's
//! directories have in common.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::layout::Region;

use crate::checksum::Checksum;
use crate::manifest::{ChunkEntry, FileEntry, TensorEntry};
use crate::region::{Span, check_request};
use crate::safetensors::SafetensorsFile;
use crate::store::Store;
use crate::{Error, Result};

/// The tensors and their files. Files are opened when something is read from them: a rank opens those that it needs.
#[derive(Debug)]
pub(crate) struct Chunked {
    pub(crate) store: Arc<dyn Store>,
    /// What says that the tensors are so.
    pub(crate) according_to: PathBuf,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) files: BTreeMap<String, FileEntry>,
    pub(crate) open: Mutex<HashMap<String, Arc<SafetensorsFile>>>,
}

impl Chunked {
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
            return Err(Error::Request { tensor: fqn.to_string(), reason });
        };
        let file = self.file(fqn, tensor, chunk)?;
        let mut checksum = Checksum::new();
        file.scan(fqn, &mut |bytes| {
            checksum.update(bytes);
            seen(bytes.len() as u64);
        })?;
        check_crc(&file, fqn, chunk, checksum.value())
    }

    /// The file of a chunk, which must hold it as the tensor's entry says.
    fn file(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry) -> Result<Arc<SafetensorsFile>> {
        // A panic elsewhere leaves the map as good as it was.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match open.get(&chunk.file) {
            Some(file) => Arc::clone(file),
            None => {
                let expected = self.files.get(&chunk.file).and_then(|file| file.header_crc32c);
                let file = Arc::new(SafetensorsFile::with_header(self.store.open(&chunk.file)?, expected)?);
                open.insert(chunk.file.clone(), Arc::clone(&file));
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
                    Span(&chunk.region()),
                    chunk.file,
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
            Err(Error::Checksum { path: file.path().to_path_buf(), tensor: fqn.to_string(), expected, found })
        }
        _ => Ok(()),
    }
}
