//! Tensors in chunks, each chunk in a safetensors file: the reader of this crate's checkpoints and of Hugging Face
//! directories.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::layout::Region;

use crate::checksum::Checksum;
use crate::region::{Bounds, check_request};
use crate::safetensors::SafetensorsFile;
use crate::source::{ChunkEntry, SourceIndex, TensorEntry};
use crate::store::{OPENED, Store};
use crate::{Error, Result};

/// Tensors and the files of their chunks. The first read of a chunk opens its file.
#[derive(Debug)]
pub(crate) struct ChunkedTensors {
    pub(crate) index: SourceIndex,
    pub(crate) store: Arc<dyn Store>,
    /// File that describes the tensors.
    pub(crate) described_by: PathBuf,
    pub(crate) open: Mutex<HashMap<String, Arc<SafetensorsFile>>>,
}

impl ChunkedTensors {
    /// Reads a region from the chunks that cover it. Verifies the checksum of each chunk that is read as a whole.
    pub(crate) fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.index.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        for chunk in &tensor.chunks {
            let stored = chunk.region();
            let Some(part) = region.intersect(&stored) else { continue };
            let file = self.open(fqn, tensor, chunk, self.existing_files(chunk)?[0])?;
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

    /// Reads a chunk and its copies and verifies the checksums. Calls `seen` with the bytes of each read.
    pub(crate) fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        let (tensor, chunk) = (self.index.tensor(fqn)?, self.index.chunk(fqn, chunk)?);
        for (copy, name) in self.existing_files(chunk)?.into_iter().enumerate() {
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

    /// Returns the existing files with a chunk.
    fn existing_files<'a>(&self, chunk: &'a ChunkEntry) -> Result<Vec<&'a String>> {
        let SourceIndex { path, missing, .. } = &self.index;
        let here: Vec<&String> = chunk.files().filter(|name| !missing.contains_key(*name)).collect();
        if here.is_empty() {
            let files = chunk.files().filter_map(|name| Some((name.clone(), missing.get(name)?.clone()))).collect();
            return Err(Error::MissingParts { path: path.clone(), files });
        }
        Ok(here)
    }

    /// Opens a file and checks that it holds the chunk.
    fn open(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry, name: &String) -> Result<Arc<SafetensorsFile>> {
        // A panic leaves the map consistent.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match open.get(name) {
            Some(file) => Arc::clone(file),
            None => {
                let expected = self.index.files.get(name).and_then(|file| file.header_crc32c);
                let file = self.store.open(name)?;
                tracing::trace!(target: OPENED, path = %file.path().display());
                let file = Arc::new(SafetensorsFile::with_header(file, expected)?);
                open.insert(name.clone(), Arc::clone(&file));
                file
            }
        };
        drop(open);
        let info = file.info(fqn)?;
        if (info.dtype, &info.shape) != (tensor.dtype, &chunk.sizes) {
            return Err(Error::Manifest {
                path: self.described_by.clone(),
                tensor: Some(fqn.to_string()),
                reason: format!(
                    "its chunk {} in {:?} should be {} {:?}, but the file has {} {:?}",
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
