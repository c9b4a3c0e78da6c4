//! TODO

use std::collections::BTreeMap;
use std::fmt::{Debug, Display, Formatter};
use std::path::{Component, Path, PathBuf};

use fsdp_core::layout::Region;
use fsdp_core::{DType, MeshLayout};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::did_you_mean;
use crate::region::{Bounds, TilingError, blocks, check_tiling, checked_bytes, fits};
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

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its size.
    pub bytes: u64,
    /// The CRC-32C of all that comes before the tensors' bytes: the header with its length and padding. Only our own
    /// format keeps one, since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header_crc32c: Option<u32>,
    /// The host that wrote it, where each host wrote to a directory of its own ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The boxes that together make the tensor, each in a file of its own.
    pub chunks: Vec<ChunkEntry>,
}

impl TensorEntry {
    /// The bytes of all its elements.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }

    /// Checks that the chunks make the whole tensor, each element once.
    pub(crate) fn check_chunks(&self) -> Result<(), String> {
        let shape = &self.shape;
        if checked_bytes(shape, self.dtype.size()).is_none() {
            return Err(format!("its shape {shape:?} is too large to count its bytes"));
        }
        let mut regions = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let region = chunk.region();
            if !fits(&region, shape) {
                return Err(format!(
                    "its chunk {} in {:?} is outside its shape {shape:?}",
                    Bounds(&region),
                    chunk.file
                ));
            }
            if region.is_empty() && !shape.contains(&0) {
                return Err(format!("its chunk {} in {:?} is empty", Bounds(&region), chunk.file));
            }
            regions.push(region);
        }
        check_tiling(shape, &regions.iter().collect::<Vec<_>>()).map_err(|flaw| match flaw {
            TilingError::Overlap(a, b) => format!(
                "its chunks {} in {:?} and {} in {:?} overlap",
                Bounds(&regions[a]),
                self.chunks[a].file,
                Bounds(&regions[b]),
                self.chunks[b].file
            ),
            TilingError::Gap(missing) => format!("its chunks leave out {missing} elements of its shape {shape:?}"),
        })
    }
}

/// A box of a tensor in a file, stored there under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkEntry {
    /// Where the box starts in the global tensor.
    pub offsets: Vec<usize>,
    /// The shape of the box.
    pub sizes: Vec<usize>,
    /// The name of the file, in the checkpoint's directory.
    pub file: String,
    /// Other files that hold the same bytes: each host's directory has its own ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// The CRC-32C of the chunk's bytes, where the format keeps one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crc32c: Option<u32>,
}

impl ChunkEntry {
    /// The box.
    pub fn region(&self) -> Region {
        Region { offsets: self.offsets.clone(), sizes: self.sizes.clone() }
    }

    /// The names of the files that hold it: one, and its copies.
    pub fn files(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.file).chain(&self.copies)
    }
}

/// Whether a name from a file may be joined to a directory: it can't leave it, or name another directory in it.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains('\0')
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
    /// [`Error::MissingTensor`]; [`Error::InvalidRead`] when the tensor has no such box or `into` not its size in bytes;
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
    /// As [`TensorSource::read`]; [`Error::InvalidRead`] when there is no such chunk.
    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        let tensor = self.tensor(fqn)?;
        let Some(chunk) = tensor.chunks.get(chunk) else {
            let reason = format!("it has {} chunks, none at {chunk}", tensor.chunks.len());
            return Err(Error::InvalidRead { tensor: fqn.to_string(), reason });
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
    /// [`Error::MissingTensor`]; [`Error::UnsupportedDTypes`] when it is there and can't be read.
    fn tensor(&self, fqn: &str) -> Result<&TensorEntry> {
        if let Some(tensor) = self.tensors().get(fqn) {
            return Ok(tensor);
        }
        let (path, tensor) = (self.path().to_path_buf(), fqn.to_string());
        Err(match self.unreadable().get(fqn) {
            Some(dtype) => Error::UnsupportedDTypes { path, tensors: [(tensor, dtype.clone())].into() },
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

/// What has been written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteSummary {
    /// Where.
    pub path: PathBuf,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of files that hold them.
    pub files: usize,
    /// The bytes of the tensors.
    pub bytes: u64,
}
