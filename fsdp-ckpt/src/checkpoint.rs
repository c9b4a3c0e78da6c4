//! Reading a checkpoint: any box of any tensor, whatever mesh wrote it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::MeshLayout;
use fsdp_core::layout::Region;
use serde_json::{Map, Value};

use crate::error::{did_you_mean, io_error};
use crate::manifest::{ChunkEntry, FileEntry, Manifest, TensorEntry};
use crate::region::{Span, check_request};
use crate::safetensors::SafetensorsFile;
use crate::{Error, MANIFEST, Result};

/// A checkpoint on disk, with a manifest that has been checked in itself and against the sizes of the files.
///
/// Files are opened when something is read from them, so that a rank opens those that it needs. Several threads may read at once.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    mesh: MeshLayout,
    open: Mutex<HashMap<String, Arc<SafetensorsFile>>>,
}

/// What [`Checkpoint::verify`] has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The number of files.
    pub files: usize,
    /// The number of chunks, all with the right checksum.
    pub chunks: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in the directory `dir`.
    ///
    /// # Errors
    /// [`Error::Incomplete`] without a manifest; [`Error::Newer`]; [`Error::Manifest`] when it contradicts itself; [`Error::NotFound`] and
    /// [`Error::NotSafetensors`] when a file is missing or of another size; [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self> {
        let (manifest, mesh) = Manifest::read(dir)?;
        for (name, entry) in &manifest.files {
            let path = dir.join(name);
            let status = std::fs::metadata(&path).map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::NotFound {
                    path: dir.to_path_buf(),
                    looked_for: format!("file {name:?}, which its {MANIFEST} names"),
                },
                _ => io_error("open", &path)(error),
            })?;
            if status.len() != entry.bytes {
                let reason = format!("it has {} bytes, {} were written", status.len(), entry.bytes);
                return Err(Error::NotSafetensors { path, reason });
            }
        }
        Ok(Checkpoint { dir: dir.to_path_buf(), manifest, mesh, open: Mutex::default() })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The mesh that wrote it.
    pub fn mesh(&self) -> &MeshLayout {
        &self.mesh
    }

    /// The number of ranks that wrote it.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// The program and version that wrote it.
    pub fn created_by(&self) -> &str {
        &self.manifest.created_by
    }

    /// The non-tensor state.
    pub fn values(&self) -> &Map<String, Value> {
        &self.manifest.values
    }

    /// The tensor files by name.
    pub fn files(&self) -> &BTreeMap<String, FileEntry> {
        &self.manifest.files
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.manifest.tensors
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, fqn: &str) -> Result<&TensorEntry> {
        self.manifest.tensors.get(fqn).ok_or_else(|| Error::MissingTensor {
            path: self.dir.clone(),
            tensor: fqn.to_string(),
            hint: did_you_mean(fqn, self.manifest.tensors.keys().map(String::as_str)),
        })
    }

    /// Reads a box of a tensor into `into`, row-major, from whatever chunks cover it. Only the bytes of the box are read. A chunk that is read as a
    /// whole has its checksum verified on the way; for the rest there is [`Checkpoint::verify`].
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Request`] when the tensor has no such box or `into` not its size in bytes; [`Error::Checksum`];
    /// [`Error::NotSafetensors`], [`Error::Manifest`] when a file is not as the manifest says; [`Error::Io`].
    pub fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        check_request(fqn, &tensor.shape, tensor.dtype.size(), region, into.len())?;
        for chunk in &tensor.chunks {
            let stored = chunk.region();
            let Some(part) = region.intersect(&stored) else { continue };
            let file = self.file(fqn, tensor, chunk)?;
            let parts = [&stored, region, &part];
            if part == stored {
                let mut crc = 0;
                file.read_part(fqn, parts, into, &mut |bytes| crc = crc32c::crc32c_append(crc, bytes))?;
                check_crc(&file, fqn, chunk, crc)?;
            } else {
                file.read_part(fqn, parts, into, &mut |_| ())?;
            }
        }
        Ok(())
    }

    /// Reads everything and checks every checksum.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], for the first chunk that is damaged.
    pub fn verify(&self) -> Result<Verified> {
        self.verify_share(0, 1)
    }

    /// The part of [`Checkpoint::verify`] that falls to one of `ranks` ranks: together they read everything once. [`Checkpoint::read`] checks what it reads whole, but a
    /// load at another world size reads parts.
    ///
    /// # Errors
    /// As [`Checkpoint::verify`].
    pub fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        let mut verified = Verified { files: self.manifest.files.len(), ..Verified::default() };
        let mut position = 0;
        for (fqn, tensor) in &self.manifest.tensors {
            for chunk in &tensor.chunks {
                position += 1;
                if position % ranks.max(1) != rank {
                    continue;
                }
                let file = self.file(fqn, tensor, chunk)?;
                let mut crc = 0;
                file.scan(fqn, &mut |bytes| {
                    crc = crc32c::crc32c_append(crc, bytes);
                    verified.bytes += bytes.len() as u64;
                })?;
                check_crc(&file, fqn, chunk, crc)?;
                verified.chunks += 1;
            }
        }
        Ok(verified)
    }

    /// The file of a chunk, which must hold it as the manifest says.
    fn file(&self, fqn: &str, tensor: &TensorEntry, chunk: &ChunkEntry) -> Result<Arc<SafetensorsFile>> {
        // A panic elsewhere leaves the map as good as it was.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match open.get(&chunk.file) {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(SafetensorsFile::open(&self.dir.join(&chunk.file))?);
                open.insert(chunk.file.clone(), Arc::clone(&file));
                file
            }
        };
        drop(open);
        let info = file.info(fqn)?;
        if (info.dtype, &info.shape) != (tensor.dtype, &chunk.sizes) {
            return Err(Error::Manifest {
                path: self.dir.join(MANIFEST),
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
    if found == chunk.crc32c {
        return Ok(());
    }
    Err(Error::Checksum { path: file.path().to_path_buf(), tensor: fqn.to_string(), expected: chunk.crc32c, found })
}
