//! Tensors in chunks, each chunk in a safetensors file: the reader of this crate's checkpoints and of Hugging Face
//! directories.

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

/// Tensors and the files of their chunks. The first read of a chunk opens its file.
#[derive(Debug)]
pub(crate) struct ChunkedTensors {
    pub(crate) store: Arc<dyn Store>,
    /// File that describes the tensors.
    pub(crate) described_by: PathBuf,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) files: BTreeMap<String, FileEntry>,
    /// Missing files, each with the host that wrote it.
    pub(crate) missing: BTreeMap<String, String>,
    pub(crate) open: Mutex<HashMap<String, Arc<SafetensorsFile>>>,
}

impl ChunkedTensors {
    /// Reads a region from the chunks that cover it. Verifies the checksum of each chunk that is read as a whole.
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

    /// Reads a chunk and its copies and verifies the checksums. Calls `seen` with the bytes of each read.
    pub(crate) fn verify_chunk(
        &self,
        fqn: &str,
        tensor: &TensorEntry,
        chunk: usize,
        seen: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let Some(chunk) = tensor.chunks.get(chunk) else {
            let reason = format!("it has {} chunks, but chunk {chunk} was requested", tensor.chunks.len());
            return Err(Error::InvalidRead { tensor: fqn.to_string(), reason });
        };
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

    /// Returns whether a file with the chunk exists here.
    pub(crate) fn has_chunk(&self, chunk: &ChunkEntry) -> bool {
        chunk.files().any(|name| !self.missing.contains_key(name))
    }

    /// Returns the existing files with a chunk.
    fn existing_files<'a>(&self, chunk: &'a ChunkEntry) -> Result<Vec<&'a String>> {
        let here: Vec<&String> = chunk.files().filter(|name| !self.missing.contains_key(*name)).collect();
        if here.is_empty() { Err(self.missing_parts(chunk.files())) } else { Ok(here) }
    }

    /// Returns the error that these files are missing.
    pub(crate) fn missing_parts<'a>(&self, names: impl Iterator<Item = &'a String>) -> Error {
        let files = names.filter_map(|name| Some((name.clone(), self.missing.get(name)?.clone()))).collect();
        Error::MissingParts { path: self.store.path().to_path_buf(), files }
    }

    /// Opens a file with a chunk.
    fn file(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry) -> Result<Arc<SafetensorsFile>> {
        self.open(fqn, tensor, chunk, self.existing_files(chunk)?[0])
    }

    /// Opens a file and checks that it holds the chunk.
    fn open(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry, name: &String) -> Result<Arc<SafetensorsFile>> {
        // A panic leaves the map consistent.
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
