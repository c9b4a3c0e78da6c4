//! Checkpoints: a directory with a manifest and one safetensors file for each rank.
//!
//! [`Checkpoint`] reads one. [`save`] writes one, in phases:
//!
//! 1. The ranks send lists of their shards to rank 0, which makes the [`plan`]: which rank writes which chunk. Rank 0
//!    tells each rank its chunks.
//! 2. Rank 0 creates a temporary directory beside the final one.
//! 3. Each rank writes its file.
//! 4. Rank 0 writes the [`manifest`] with the checksums of all ranks, and renames the directory to its final name.
//!
//! All ranks agree on the outcome of each phase ([`agree`]). If one rank fails, every rank returns its error, and no
//! rank waits for a rank that has given up. An object store has no rename; `store/object` explains what replaces it.
//!
//! With [`SaveOptions::host`](crate::SaveOptions::host), the first rank of each host takes the part of rank 0 in a
//! directory of that host ([`hosts`]). [`open_for`](mod@open_for) opens a checkpoint on all ranks at once. [`async_save`] runs the same phases on a thread. [`writable`] tests before
//! training that a save would succeed. [`run_dir`] finds, quarantines and removes the checkpoints of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use fsdp_core::layout::Region;

use self::manifest::Manifest;
use self::open_for::Limits;
use crate::error::io_error;
use crate::safetensors::chunked::ChunkedTensors;
use crate::source::{SourceIndex, Verified, verify_share};
use crate::store::{LOOKED_UP, location};
use crate::{Checksums, Error, Format, MANIFEST, Result, TensorSource};

pub(crate) mod agree;
pub(crate) mod async_save;
pub(crate) mod host_dirs;
pub(crate) mod hosts;
pub(crate) mod manifest;
pub(crate) mod open_for;
pub(crate) mod plan;
pub(crate) mod run_dir;
pub(crate) mod save;
pub(crate) mod writable;

/// A checkpoint on disk.
///
/// Opening checks the manifest and the sizes of the files. A file is opened, and its header verified, by the first read
/// from it, so a rank opens only the files that it needs. Threads may read concurrently.
#[derive(Debug)]
pub struct Checkpoint {
    chunked: ChunkedTensors,
    world_size: usize,
    created_by: String,
    is_finite: bool,
    checksums: Checksums,
    id: (u64, Option<u32>),
    /// Set if it knows only the chunks that its rank reads.
    limits: Option<Limits>,
}

impl Checkpoint {
    /// Opens the checkpoint in the directory `dir`.
    ///
    /// # Errors
    /// [`Error::Incomplete`] without a manifest; [`Error::UnsupportedVersion`]; [`Error::Manifest`] for an invalid
    /// manifest; [`Error::NotFound`] and [`Error::NotSafetensors`] for a missing or truncated file;
    /// [`Error::MissingParts`] when files are missing that another host wrote; [`Error::Io`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let checkpoint = Self::open_part(dir)?;
        match checkpoint.missing() {
            none if none.is_empty() => Ok(checkpoint),
            files => Err(Error::MissingParts { path: dir.to_path_buf(), files: files.clone() }),
        }
    }

    /// Opens a checkpoint of which files of other hosts may be missing.
    pub(crate) fn open_part(dir: &Path) -> Result<Self> {
        let store = location(dir)?.store()?;
        let (manifest, mesh, id) = Manifest::read(&*store)?;
        let mut index = SourceIndex::new(dir, Format::Fsdp);
        for (name, entry) in &manifest.files {
            tracing::trace!(target: LOOKED_UP, path = %dir.join(name).display());
            if store.link(name).is_some() {
                let reason = "it is a symbolic link; replace it by a copy of the file";
                return Err(io_error("open", &dir.join(name))(std::io::Error::other(reason)));
            }
            let Some(bytes) = store.size(name)? else {
                if let Some(host) = &entry.host {
                    index.missing.insert(name.clone(), host.clone());
                    continue;
                }
                return Err(Error::NotFound {
                    path: dir.to_path_buf(),
                    looked_for: format!("file {name:?}, which its {MANIFEST} names"),
                });
            };
            if bytes != entry.bytes {
                let reason = format!("it has {bytes} bytes, expected {}", entry.bytes);
                return Err(Error::NotSafetensors { path: dir.join(name), reason });
            }
        }
        let checksums = if manifest.covers_everything() { Checksums::Everything } else { Checksums::Tensors };
        let Manifest { created_by, world_size, finite: is_finite, values, files, tensors, .. } = manifest;
        let index = SourceIndex { mesh: Some(mesh), tensors, files, values, ..index };
        let chunked = ChunkedTensors { index, store, described_by: dir.join(MANIFEST), open: Mutex::default() };
        Ok(Checkpoint { chunked, world_size, created_by, is_finite, checksums, id, limits: None })
    }

    /// Returns the missing files, each with the host that wrote it.
    pub(crate) fn missing(&self) -> &BTreeMap<String, String> {
        &self.chunked.index.missing
    }

    /// Returns the length and the checksum of the manifest, which identify the save.
    pub(crate) fn id(&self) -> (u64, Option<u32>) {
        self.id
    }

    /// Returns the number of ranks that saved it.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the program and version that wrote it.
    pub fn created_by(&self) -> &str {
        &self.created_by
    }

    /// Returns whether every rank declared its floating point numbers finite when it saved
    /// ([`crate::SaveOptions::finite`]). Use [`crate::non_finite`] to look for NaN and infinity.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }
}

impl TensorSource for Checkpoint {
    fn index(&self) -> &SourceIndex {
        &self.chunked.index
    }

    /// Verifies the checksum of each chunk that is read as a whole. [`TensorSource::verify_share`] verifies all chunks.
    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.beyond_limits(fqn, region)?.unwrap_or(self).chunked.read(fqn, region, into)
    }

    fn checksums(&self) -> Checksums {
        self.checksums
    }

    fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        self.verify_within_limits(rank, ranks).unwrap_or_else(|| verify_share(self, rank, ranks))
    }

    /// Verifies the existing copies of the chunk.
    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.chunked.verify_chunk(fqn, chunk, seen)
    }
}
