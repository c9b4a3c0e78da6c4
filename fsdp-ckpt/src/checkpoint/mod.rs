//! TODO

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use fsdp_core::MeshLayout;
use fsdp_core::layout::Region;
use serde_json::{Map, Value};

use self::manifest::Manifest;
use crate::error::io_error;
use crate::safetensors::chunked::ChunkedTensors;
use crate::source::{FileEntry, TensorEntry};
use crate::store::store;
use crate::{Checksums, Error, Format, MANIFEST, Result, TensorSource, Verified};

pub(crate) mod agree;
pub(crate) mod async_save;
pub(crate) mod hosts;
pub(crate) mod manifest;
pub(crate) mod plan;
pub(crate) mod run_dir;
pub(crate) mod save;
pub(crate) mod writable;

/// A checkpoint on disk, with a manifest that has been checked in itself, by its checksum and against the sizes of the
/// files.
///
/// Files are opened, and their headers checked by their checksums, when something is read from them, so that a rank
/// opens those that it needs. Several threads may read at once.
#[derive(Debug)]
pub struct Checkpoint {
    chunked: ChunkedTensors,
    values: Map<String, Value>,
    world_size: usize,
    created_by: String,
    is_finite: bool,
    checksums: Checksums,
    mesh: MeshLayout,
    seal: (u64, Option<u32>),
}

impl Checkpoint {
    /// Opens the checkpoint in the directory `dir`.
    ///
    /// # Errors
    /// [`Error::Incomplete`] without a manifest; [`Error::UnsupportedVersion`]; [`Error::Manifest`] when it contradicts itself;
    /// [`Error::NotFound`] and [`Error::NotSafetensors`] when a file is missing or of another size;
    /// [`Error::MissingParts`] when files are missing that another host wrote to its own directory; [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self> {
        let checkpoint = Self::open_part(dir)?;
        match checkpoint.missing().is_empty() {
            true => Ok(checkpoint),
            false => Err(checkpoint.chunked.elsewhere(checkpoint.missing().keys())),
        }
    }

    /// The same where files of other hosts may be missing.
    pub(crate) fn open_part(dir: &Path) -> Result<Self> {
        let store = store(dir)?;
        let (manifest, mesh, seal) = Manifest::read(&*store)?;
        let mut missing = BTreeMap::new();
        for (name, entry) in &manifest.files {
            if store.link(name).is_some() {
                let reason =
                    "it is a symbolic link, and the files of a checkpoint are its own; put a copy in its place";
                return Err(io_error("open", &dir.join(name))(std::io::Error::other(reason)));
            }
            let Some(bytes) = store.size(name)? else {
                if let Some(host) = &entry.host {
                    missing.insert(name.clone(), host.clone());
                    continue;
                }
                return Err(Error::NotFound {
                    path: dir.to_path_buf(),
                    looked_for: format!("file {name:?}, which its {MANIFEST} names"),
                });
            };
            if bytes != entry.bytes {
                let reason = format!("it has {bytes} bytes, {} were written", entry.bytes);
                return Err(Error::NotSafetensors { path: dir.join(name), reason });
            }
        }
        let checksums = if manifest.covers_everything() { Checksums::Everything } else { Checksums::Tensors };
        let Manifest { created_by, world_size, finite: is_finite, values, files, tensors, .. } = manifest;
        let according_to = dir.join(MANIFEST);
        let chunked = ChunkedTensors { store, according_to, tensors, files, missing, open: Mutex::default() };
        Ok(Checkpoint { chunked, values, world_size, created_by, is_finite, checksums, mesh, seal })
    }

    /// Files that are not here, each with the host that wrote it.
    pub(crate) fn missing(&self) -> &BTreeMap<String, String> {
        &self.chunked.missing
    }

    /// What tells its manifest from others: its length and the checksum at its end.
    pub(crate) fn seal(&self) -> (u64, Option<u32>) {
        self.seal
    }

    /// The number of ranks that wrote it.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The program and version that wrote it.
    pub fn created_by(&self) -> &str {
        &self.created_by
    }

    /// Whether those who saved it had found all of its floating point numbers finite ([`crate::SaveOptions::finite`]).
    /// Where they have not looked, it may be so all the same: [`crate::non_finite`] looks.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }
}

impl TensorSource for Checkpoint {
    fn path(&self) -> &Path {
        self.chunked.store.path()
    }

    fn format(&self) -> Format {
        Format::Fsdp
    }

    fn mesh(&self) -> Option<&MeshLayout> {
        Some(&self.mesh)
    }

    fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.chunked.tensors
    }

    fn files(&self) -> &BTreeMap<String, FileEntry> {
        &self.chunked.files
    }

    fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// From whatever chunks cover the box. A chunk that is read as a whole has its checksum verified on the way; for
    /// the rest there is [`TensorSource::verify_share`].
    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        self.chunked.read(fqn, self.tensor(fqn)?, region, into)
    }

    fn checksums(&self) -> Checksums {
        self.checksums
    }

    /// Of a part, what is here: together the hosts read everything once, and each copy of it.
    fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        let mut verified = Verified { files: self.files().len() - self.missing().len(), ..Verified::default() };
        let chunks = self.tensors().iter().flat_map(|(fqn, tensor)| {
            let here = tensor.chunks.iter().enumerate().filter(|(_, chunk)| self.chunked.has(chunk));
            here.map(move |(at, _)| (fqn, at))
        });
        for (fqn, chunk) in chunks.skip(rank).step_by(ranks.max(1)) {
            self.verify_chunk(fqn, chunk, &mut |bytes| verified.bytes += bytes)?;
            verified.chunks += 1;
        }
        Ok(verified)
    }

    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        self.chunked.verify_chunk(fqn, self.tensor(fqn)?, chunk, seen)
    }
}
