//! The interface to checkpoints and models of all formats: tensors by name, of which any region can be read.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display, Formatter};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, MeshLayout};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::did_you_mean;
use crate::region::{Bounds, TilingError, check_tiling, checked_bytes, fits};
use crate::{Error, Result};

/// Bytes to read at once.
const BLOCK: usize = 8 << 20;

/// Format of a checkpoint or model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// This crate's format: safetensors files of each rank and a `checkpoint.json`.
    Fsdp,
    /// Safetensors files: a Hugging Face model directory, a directory of PyTorch's `HuggingFaceStorageWriter`, or a
    /// single file.
    HuggingFace,
    /// Files of `torch.save`: a `.pt`, `.pth` or `.bin` file, or a Hugging Face model directory with
    /// `pytorch_model.bin`.
    TorchFile,
    /// The classic format of PyTorch DCP: `.metadata` and `.distcp` files.
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

/// The parts of a checkpoint or model that have checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksums {
    /// Nothing; only file sizes can be checked.
    Nothing,
    /// The bytes of tensors, but not their names, shapes and places, nor the values.
    Tensors,
    /// Every byte.
    Everything,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size of the file.
    pub bytes: u64,
    /// CRC-32C of everything before the tensors' bytes. Only this crate's format has it, since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header_crc32c: Option<u32>,
    /// Host that wrote it, if each host wrote to its own directory ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Element type.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Chunks that form the tensor, each in another file.
    pub chunks: Vec<ChunkEntry>,
}

impl TensorEntry {
    /// Returns the size of all elements in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }

    /// Checks that the chunks cover each element exactly once.
    pub(crate) fn check_chunks(&self) -> Result<(), String> {
        let shape = &self.shape;
        if checked_bytes(shape, self.dtype.size()).is_none() {
            return Err(format!("the bytes of its shape {shape:?} overflow"));
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

/// A chunk: a region of a tensor in a file, stored under the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkEntry {
    /// Offsets of the region in the global tensor.
    pub offsets: Vec<usize>,
    /// Shape of the region.
    pub sizes: Vec<usize>,
    /// Name of the file in the checkpoint's directory.
    pub file: String,
    /// Other files with the same bytes, in the directories of other hosts ([`crate::HostDirs`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// CRC-32C of the bytes, if the format has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crc32c: Option<u32>,
}

impl ChunkEntry {
    /// Creates the entry of a region in a file, without copies and without a checksum.
    pub fn new(file: impl Into<String>, region: Region) -> Self {
        let Region { offsets, sizes } = region;
        ChunkEntry { offsets, sizes, file: file.into(), copies: Vec::new(), crc32c: None }
    }

    /// Returns the region.
    pub fn region(&self) -> Region {
        Region { offsets: self.offsets.clone(), sizes: self.sizes.clone() }
    }

    /// Returns the names of the file and its copies.
    pub fn files(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.file).chain(&self.copies)
    }
}

/// Returns whether a name from a file is a plain file name, which can't leave the directory that it is joined to.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains('\0')
}

/// Summary of [`TensorSource::verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Number of files.
    pub files: usize,
    /// Number of verified chunks.
    pub chunks: usize,
    /// Bytes of these chunks.
    pub bytes: u64,
}

/// Contents of a checkpoint or model, without the bytes of its tensors.
#[derive(Clone, Debug)]
pub struct SourceIndex {
    /// Path.
    pub path: PathBuf,
    /// Format.
    pub format: Format,
    /// Mesh that saved it, if the format records it.
    pub mesh: Option<MeshLayout>,
    /// Tensors of dtypes that [`fsdp_core::DType`] has, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Dtypes of tensors that can't be read, by name.
    pub unreadable: BTreeMap<String, String>,
    /// Files by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Files that are missing here, each with the host that wrote it ([`crate::HostDirs`]).
    pub missing: BTreeMap<String, String>,
    /// Non-tensor state.
    pub values: Map<String, Value>,
    /// The keys of nested dicts that lead to each tensor and value, such as `["model", "layers.0.weight"]`, if the format
    /// records them.
    pub(crate) paths: BTreeMap<String, Vec<String>>,
    /// Whether the parameters' names begin with `model.`, if it is known.
    pub(crate) has_prefix: Option<bool>,
}

impl SourceIndex {
    /// Creates the index of a source without contents.
    pub fn new(path: impl AsRef<Path>, format: Format) -> Self {
        let path = path.as_ref();
        SourceIndex {
            path: path.to_path_buf(),
            format,
            mesh: None,
            tensors: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            files: BTreeMap::new(),
            missing: BTreeMap::new(),
            values: Map::new(),
            paths: BTreeMap::new(),
            has_prefix: None,
        }
    }

    /// Returns a tensor's entry.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::UnsupportedDTypes`].
    pub fn tensor(&self, fqn: &str) -> Result<&TensorEntry> {
        if let Some(tensor) = self.tensors.get(fqn) {
            return Ok(tensor);
        }
        let (path, tensor) = (self.path.clone(), fqn.to_string());
        Err(match self.unreadable.get(fqn) {
            Some(dtype) => Error::UnsupportedDTypes { path, tensors: [(tensor, dtype.clone())].into() },
            None => {
                let hint = did_you_mean(fqn, self.tensors.keys().map(String::as_str));
                Error::MissingTensor { path, tensor, hint }
            }
        })
    }

    /// Returns the chunk of a tensor at an index of [`TensorEntry::chunks`].
    ///
    /// # Errors
    /// The errors of [`SourceIndex::tensor`]; [`Error::InvalidRead`] if the tensor has fewer chunks.
    pub fn chunk(&self, fqn: &str, at: usize) -> Result<&ChunkEntry> {
        let chunks = &self.tensor(fqn)?.chunks;
        chunks.get(at).ok_or_else(|| {
            let reason = format!("chunk {at} was requested, but it has only {}", chunks.len());
            Error::InvalidRead { tensor: fqn.to_string(), reason }
        })
    }
}

/// Tensors by name in a checkpoint or model of any format. Threads may read concurrently.
pub trait TensorSource: Debug + Send + Sync {
    /// Returns the contents.
    fn index(&self) -> &SourceIndex;

    /// Returns the path.
    fn path(&self) -> &Path {
        &self.index().path
    }

    /// Returns the format.
    fn format(&self) -> Format {
        self.index().format
    }

    /// Returns the mesh that saved it, if the format records it.
    fn mesh(&self) -> Option<&MeshLayout> {
        self.index().mesh.as_ref()
    }

    /// Returns all tensors of dtypes that [`fsdp_core::DType`] has, by name.
    fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.index().tensors
    }

    /// Returns the bytes of all tensors.
    fn bytes(&self) -> u64 {
        self.tensors().values().map(TensorEntry::bytes).fold(0, u64::saturating_add)
    }

    /// Returns the dtypes of tensors that can't be read, by name.
    fn unreadable(&self) -> &BTreeMap<String, String> {
        &self.index().unreadable
    }

    /// Returns the files by name.
    fn files(&self) -> &BTreeMap<String, FileEntry> {
        &self.index().files
    }

    /// Returns the non-tensor state.
    fn values(&self) -> &Map<String, Value> {
        &self.index().values
    }

    /// Reads a region of a tensor into `into`, row-major. Reads only the bytes of the region.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::InvalidRead`] for a region outside the tensor or a buffer of another size;
    /// errors of the format.
    fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()>;

    /// Returns which parts have checksums.
    fn checksums(&self) -> Checksums {
        Checksums::Nothing
    }

    /// Returns whether the format has a checksum of a chunk.
    fn has_checksum(&self, chunk: &ChunkEntry) -> bool {
        chunk.crc32c.is_some()
    }

    /// Reads the chunk at an index of [`TensorEntry::chunks`] and verifies its checksum, if it has one. Calls `seen`
    /// with the bytes of each read. Needs bounded memory.
    ///
    /// # Errors
    /// The errors of [`TensorSource::read`]; [`Error::InvalidRead`] if the tensor has fewer chunks.
    fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
        stream(self, fqn, &self.index().chunk(fqn, chunk)?.region(), &mut |bytes| {
            seen(bytes.len() as u64);
            Ok(())
        })
    }

    /// Verifies one rank's share of the chunks, except those of [missing](SourceIndex::missing) files. All `ranks`
    /// together verify each chunk once.
    ///
    /// # Errors
    /// The errors of [`TensorSource::verify`].
    fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
        verify_share(self, rank, ranks)
    }

    /// Verifies every checksum.
    ///
    /// # Errors
    /// The errors of [`TensorSource::read`], for the first damaged chunk.
    fn verify(&self) -> Result<Verified> {
        self.verify_share(0, 1)
    }

    /// Returns a tensor's entry.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::UnsupportedDTypes`].
    fn tensor(&self, fqn: &str) -> Result<&TensorEntry> {
        self.index().tensor(fqn)
    }
}

/// Implements [`TensorSource`] for a pointer to a source.
macro_rules! pointer {
    ($pointer:ty) => {
        impl<S: TensorSource + ?Sized> TensorSource for $pointer {
            fn index(&self) -> &SourceIndex {
                (**self).index()
            }

            fn read(&self, fqn: &str, region: &Region, into: &mut [u8]) -> Result<()> {
                (**self).read(fqn, region, into)
            }

            fn checksums(&self) -> Checksums {
                (**self).checksums()
            }

            fn has_checksum(&self, chunk: &ChunkEntry) -> bool {
                (**self).has_checksum(chunk)
            }

            fn verify_chunk(&self, fqn: &str, chunk: usize, seen: &mut dyn FnMut(u64)) -> Result<()> {
                (**self).verify_chunk(fqn, chunk, seen)
            }

            fn verify_share(&self, rank: usize, ranks: usize) -> Result<Verified> {
                (**self).verify_share(rank, ranks)
            }

            fn verify(&self) -> Result<Verified> {
                (**self).verify()
            }
        }
    };
}

pointer!(&S);
pointer!(Box<S>);
pointer!(Arc<S>);

/// Verifies one rank's share of the chunks in a source's index.
pub(crate) fn verify_share<S: TensorSource + ?Sized>(source: &S, rank: usize, ranks: usize) -> Result<Verified> {
    let SourceIndex { tensors, files, missing, .. } = source.index();
    let mut verified = Verified { files: files.len() - missing.len(), ..Verified::default() };
    let is_here = |chunk: &ChunkEntry| chunk.files().any(|name| !missing.contains_key(name));
    let chunks = tensors.iter().flat_map(|(fqn, tensor)| {
        let here = tensor.chunks.iter().enumerate().filter(|(_, chunk)| is_here(chunk));
        here.map(move |(at, _)| (fqn, at))
    });
    for (fqn, chunk) in chunks.skip(rank).step_by(ranks.max(1)) {
        source.verify_chunk(fqn, chunk, &mut |bytes| verified.bytes += bytes)?;
        verified.chunks += 1;
    }
    Ok(verified)
}

/// Passes the bytes of a region to `sink`, row-major, in pieces of some MiB.
///
/// # Errors
/// The errors of [`TensorSource::read`] and of the sink.
pub fn stream<S: TensorSource + ?Sized>(
    source: &S,
    fqn: &str,
    region: &Region,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let size = source.tensor(fqn)?.dtype.size();
    let mut buffer = Vec::new();
    for block in region.pieces(BLOCK / size) {
        buffer.resize(block.elements() * size, 0);
        source.read(fqn, &block, &mut buffer)?;
        sink(&buffer)?;
    }
    Ok(())
}

/// Summary of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteSummary {
    /// Path of the new directory.
    pub path: PathBuf,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of files with tensors.
    pub files: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}
