//! What checkpoints and models of every format have in common: tensors by name, of which any box can be read.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display, Formatter};
use std::path::Path;

use fsdp_core::MeshLayout;
use fsdp_core::layout::Region;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::blocks::blocks;
use crate::error::did_you_mean;
use crate::manifest::{ChunkEntry, FileEntry, TensorEntry};
use crate::{Error, Result};

/// The most bytes that are read at once.
const BLOCK: usize = 8 << 20;

/// A kind of checkpoint or model on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// This project's: safetensors files of each rank and a `checkpoint.json`.
    Fsdp,
    /// Safetensors files: a Hugging Face model directory, the directory of PyTorch's `HuggingFaceStorageWriter`, or a
    /// single file.
    HuggingFace,
    /// State dicts of PyTorch's `torch.save`: a `.pt`, `.pth` or `.bin` file, or a Hugging Face model directory with
    /// `pytorch_model.bin`.
    TorchFile,
    /// The classic format of PyTorch's DCP: `.metadata` and `.distcp` files.
    TorchDcp,
}

impl Display for Format {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Format::Fsdp => "fsdp",
            Format::HuggingFace => "hf",
            Format::TorchFile => "torch",
            Format::TorchDcp => "torch-dcp",
        })
    }
}

/// What of a checkpoint or model its format keeps checksums of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksums {
    /// Nothing: files are known to be whole, their bytes may be others.
    Nothing,
    /// The tensors' bytes, and not what says which tensors there are, where they lie and what the values are.
    Tensors,
    /// Every byte.
    Everything,
}

/// What [`TensorSource::verify`] has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The number of files.
    pub files: usize,
    /// The number of chunks, all as they were written as far as the format can tell.
    pub chunks: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Tensors by name in a checkpoint or model, whatever its format. Several threads may read at once.
pub trait TensorSource: Debug + Send + Sync {
    /// Where it is.
    fn path(&self) -> &Path;

    /// Its format.
    fn format(&self) -> Format;

    /// The mesh that wrote it, where the format says.
    fn mesh(&self) -> Option<&MeshLayout> {
        None
    }

    /// All tensors of dtypes that [`fsdp_core::DType`] has, by name.
    fn tensors(&self) -> &BTreeMap<String, TensorEntry>;

    /// The bytes of all tensors.
    fn bytes(&self) -> u64 {
        self.tensors().values().map(TensorEntry::bytes).fold(0, u64::saturating_add)
    }

    /// The names and dtypes of tensors that can't be read, for their dtypes.
    fn unreadable(&self) -> &BTreeMap<String, String> {
        const { &BTreeMap::new() }
    }

    /// The files that hold the tensors, by name.
    fn files(&self) -> &BTreeMap<String, FileEntry>;

    /// The non-tensor state.
    fn values(&self) -> &Map<String, Value>;

    /// Reads a box of a tensor into `into`, row-major. Only the bytes of the box are read.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Request`] when the tensor has no such box or `into` not its size in bytes;
    /// what the format finds wrong.
    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()>;

    /// What checksums are kept of it.
    fn checksums(&self) -> Checksums {
        Checksums::Nothing
    }

    /// Whether the format keeps a checksum of a chunk.
    fn has_checksum(&self, chunk: &ChunkEntry) -> bool {
        chunk.crc32c.is_some()
    }

    /// Reads one chunk of a tensor, by its position in [`TensorEntry::chunks`], and checks its checksum where the
    /// format keeps one. `seen` is told the bytes as they are read. Memory stays bounded, however large the chunk is.
    ///
    /// # Errors
    /// As [`TensorSource::read`]; [`Error::Request`] when there is no such chunk.
    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        let Some(chunk) = tensor.chunks.get(chunk) else {
            let reason = format!("it has {} chunks, none at {chunk}", tensor.chunks.len());
            return Err(Error::Request { tensor: fqn.to_string(), reason });
        };
        stream(self, fqn, &chunk.region(), &mut |bytes| {
            seen(bytes.len() as u64);
            Ok(())
        })
    }

    /// The part of [`TensorSource::verify`] that falls to one of `ranks` ranks: together they read everything once.
    ///
    /// # Errors
    /// As [`TensorSource::verify`].
    fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        let mut verified = Verified { files: self.files().len(), ..Verified::default() };
        let chunks =
            self.tensors().iter().flat_map(|(fqn, tensor)| (0..tensor.chunks.len()).map(move |chunk| (fqn, chunk)));
        for (fqn, chunk) in chunks.skip(rank).step_by(ranks.max(1)) {
            self.verify_chunk(fqn, chunk, &mut |bytes| verified.bytes += bytes)?;
            verified.chunks += 1;
        }
        Ok(verified)
    }

    /// Reads everything and checks every checksum that the format keeps.
    ///
    /// # Errors
    /// As [`TensorSource::read`], for the first chunk that is damaged.
    fn verify(&self) -> Result<Verified> {
        self.verify_share(0, 1)
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::DType`] when it is there and can't be read.
    fn tensor(&self, fqn: &str) -> Result<&TensorEntry> {
        if let Some(tensor) = self.tensors().get(fqn) {
            return Ok(tensor);
        }
        let (path, tensor) = (self.path().to_path_buf(), fqn.to_string());
        Err(match self.unreadable().get(fqn) {
            Some(dtype) => Error::DType { path, tensor, dtype: dtype.clone() },
            None => {
                let hint = did_you_mean(fqn, self.tensors().keys().map(String::as_str));
                Error::MissingTensor { path, tensor, hint }
            }
        })
    }
}

/// Passes the bytes of a box of a tensor to `sink`, row-major, in pieces of some MiB.
///
/// # Errors
/// As [`TensorSource::read`]; the sink's.
pub fn stream<S: TensorSource + ?Sized>(
    source: &S,
    fqn: &str,
    region: &Region,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let size = source.tensor(fqn)?.dtype.size();
    let mut buffer = Vec::new();
    for block in blocks(region, size, BLOCK) {
        buffer.resize(block.elements() * size, 0);
        source.read(fqn, &block, &mut buffer)?;
        sink(&buffer)?;
    }
    Ok(())
}
