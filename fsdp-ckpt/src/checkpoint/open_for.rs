//! Opening a checkpoint on all ranks at once: rank 0 reads the manifest, which lists a chunk of each tensor for each rank
//! that saved it, and sends each rank the chunks that the rank reads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use fsdp_core::layout::Region;
use fsdp_core::{MeshLayout, ProcessGroup};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::checkpoint::agree::{agree, gather_on_rank_0, read_message, to_message};
use crate::checkpoint::plan::TensorInfo;
use crate::safetensors::chunked::ChunkedTensors;
use crate::source::{ChunkEntry, FileEntry, SourceIndex, TensorEntry, Verified};
use crate::store::location;
use crate::{Checkpoint, Checksums, Error, Format, MANIFEST, ModelPrefix, Result, TensorShard, TensorSource};

/// Part of a checkpoint's manifest that every rank needs.
#[derive(Serialize, Deserialize)]
struct Common {
    world_size: usize,
    created_by: String,
    is_finite: bool,
    has_all_checksums: bool,
    id: (u64, Option<u32>),
    mesh: Option<(Vec<String>, Vec<usize>)>,
    values: Map<String, Value>,
    /// Number of files.
    files: usize,
    tensors: Vec<TensorInfo>,
}

/// Part of a checkpoint's manifest that one rank needs.
#[derive(Serialize, Deserialize)]
struct Part {
    files: Vec<(String, FileEntry)>,
    chunks: Vec<PartChunk>,
}

/// A chunk that a rank reads or verifies.
#[derive(Serialize, Deserialize)]
struct PartChunk {
    /// Position of the tensor.
    #[serde(rename = "t")]
    tensor: usize,
    #[serde(rename = "o")]
    offsets: Vec<usize>,
    #[serde(rename = "s")]
    sizes: Vec<usize>,
    /// Positions of the file and its copies in [`Part::files`].
    #[serde(rename = "f")]
    files: Vec<usize>,
    #[serde(rename = "c")]
    crc32c: Option<u32>,
    /// Whether the rank verifies it.
    #[serde(rename = "v")]
    is_verified: bool,
}

/// The region of a tensor that a rank reads: position of the tensor, offsets, sizes.
type Wanted = (usize, Vec<usize>, Vec<usize>);

/// The limits of a checkpoint that knows only the chunks that its rank reads.
#[derive(Debug)]
pub(crate) struct Limits {
    rank: usize,
    ranks: usize,
    /// Chunks that this rank verifies, as name and position in [`TensorEntry::chunks`].
    share: Vec<(String, usize)>,
    /// Number of files of the checkpoint.
    files: usize,
    /// The checkpoint without limits, once it was needed.
    whole: OnceLock<Box<Checkpoint>>,
}

/// Opens the checkpoint in the directory `dir` for the ranks of a group, whose rank 0 has opened it.
pub(crate) fn open_for(
    dir: &Path,
    group: &ProcessGroup,
    opened: Option<Checkpoint>,
    tensors: &[TensorShard],
) -> Result<Checkpoint> {
    const PHASE: &str = "open the checkpoint";
    let common = opened.as_ref().map_or(Ok(Vec::new()), |checkpoint| to_message(&Common::of(checkpoint)));
    let common: Common = read_message(0, &group.broadcast_bytes(0, agree(group, PHASE, common)?)?)?;
    let mut part = agree(group, PHASE, common.without_chunks(dir, group))?;
    let wanted = gather_on_rank_0(group, PHASE, Ok(wanted(&part, tensors)))?;
    let parts = match (opened, wanted) {
        (Some(whole), Some(wanted)) => parts(&whole, &wanted),
        _ => Ok(Vec::new()),
    };
    let own: Part = read_message(0, &group.scatter_bytes(0, agree(group, PHASE, parts)?)?)?;
    part.add(own);
    Ok(part)
}

impl Common {
    fn of(checkpoint: &Checkpoint) -> Self {
        let SourceIndex { mesh, tensors, files, values, .. } = &checkpoint.chunked.index;
        let info = |(fqn, tensor): (&String, &TensorEntry)| TensorInfo {
            fqn: fqn.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
        };
        Common {
            world_size: checkpoint.world_size,
            created_by: checkpoint.created_by.clone(),
            is_finite: checkpoint.is_finite,
            has_all_checksums: checkpoint.checksums == Checksums::Everything,
            id: checkpoint.id,
            mesh: mesh.as_ref().map(|mesh| (mesh.names().to_vec(), mesh.shape().to_vec())),
            values: values.clone(),
            files: files.len(),
            tensors: tensors.iter().map(info).collect(),
        }
    }

    fn without_chunks(self, dir: &Path, group: &ProcessGroup) -> Result<Checkpoint> {
        let mesh = self.mesh.map(|(names, shape)| {
            let dims: Vec<(&str, usize)> = names.iter().map(String::as_str).zip(shape).collect();
            MeshLayout::new(&dims).map_err(Error::Group)
        });
        let tensor = |TensorInfo { fqn, dtype, shape }| (fqn, TensorEntry { dtype, shape, chunks: Vec::new() });
        let mut index = SourceIndex::new(dir, Format::Fsdp);
        index.mesh = mesh.transpose()?;
        index.values = self.values;
        index.tensors = self.tensors.into_iter().map(tensor).collect();
        let (store, described_by) = (location(dir)?.store()?, dir.join(MANIFEST));
        let limits = Limits {
            rank: group.rank(),
            ranks: group.size(),
            share: Vec::new(),
            files: self.files,
            whole: OnceLock::new(),
        };
        Ok(Checkpoint {
            chunked: ChunkedTensors { index, store, described_by, open: Mutex::default() },
            world_size: self.world_size,
            created_by: self.created_by,
            is_finite: self.is_finite,
            checksums: if self.has_all_checksums { Checksums::Everything } else { Checksums::Tensors },
            id: self.id,
            limits: Some(limits),
        })
    }
}

/// Returns the regions to read.
fn wanted(checkpoint: &Checkpoint, tensors: &[TensorShard]) -> Vec<Wanted> {
    let names = ModelPrefix::of(checkpoint, tensors.iter().map(|tensor| tensor.fqn.as_str()));
    let stored = checkpoint.tensors().keys().enumerate().map(|(position, name)| (name.as_str(), position));
    let positions: BTreeMap<&str, usize> = stored.collect();
    let position = |tensor: &TensorShard| positions.get(names.stored_name(&tensor.fqn)).copied();
    let wanted = |tensor: &TensorShard| {
        let Region { offsets, sizes } = &tensor.region;
        Some((position(tensor)?, offsets.clone(), sizes.clone()))
    };
    tensors.iter().filter_map(wanted).collect()
}

/// Returns the part of each rank, as messages.
fn parts(whole: &Checkpoint, wanted: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
    let SourceIndex { tensors, files, .. } = &whole.chunked.index;
    let tensors: Vec<&TensorEntry> = tensors.values().collect();
    let overlaps: Vec<Overlaps<'_>> = tensors.iter().map(|tensor| Overlaps::new(tensor)).collect();
    // Each rank verifies the same number of chunks, in few files.
    let of_tensor = |at: usize| (0..tensors[at].chunks.len()).map(move |chunk| (at, chunk));
    let mut chunks: Vec<(usize, usize)> = (0..tensors.len()).flat_map(of_tensor).collect();
    chunks.sort_by_key(|&(at, chunk)| &tensors[at].chunks[chunk].file);
    let of_rank = |rank: usize| rank * chunks.len() / wanted.len()..(rank + 1) * chunks.len() / wanted.len();
    let mut parts = Vec::with_capacity(wanted.len());
    for (rank, message) in wanted.iter().enumerate() {
        let mut known: BTreeMap<(usize, usize), bool> =
            chunks[of_rank(rank)].iter().map(|&chunk| (chunk, true)).collect();
        for (at, offsets, sizes) in read_message::<Vec<Wanted>>(rank, message)? {
            let region = Region { offsets, sizes };
            for chunk in overlaps.get(at).into_iter().flat_map(|overlaps| overlaps.with(&region)) {
                known.entry((at, chunk)).or_insert(false);
            }
        }
        let mut part = Part { files: Vec::new(), chunks: Vec::with_capacity(known.len()) };
        let mut positions = BTreeMap::new();
        for ((tensor, chunk), is_verified) in known {
            let ChunkEntry { offsets, sizes, crc32c, .. } = tensors[tensor].chunks[chunk].clone();
            let mut position = |name: &String| {
                *positions.entry(name.clone()).or_insert_with(|| {
                    part.files.extend(files.get(name).map(|file| (name.clone(), file.clone())));
                    part.files.len() - 1
                })
            };
            let files = tensors[tensor].chunks[chunk].files().map(&mut position).collect();
            part.chunks.push(PartChunk { tensor, offsets, sizes, files, crc32c, is_verified });
        }
        parts.push(to_message(&part)?);
    }
    Ok(parts)
}

/// The chunks of a tensor, ordered along the dimension in which most of them differ.
struct Overlaps<'a> {
    tensor: &'a TensorEntry,
    dim: usize,
    /// Positions of the chunks by their offsets.
    order: Vec<usize>,
    /// Longest size of a chunk.
    longest: usize,
}

impl<'a> Overlaps<'a> {
    fn new(tensor: &'a TensorEntry) -> Self {
        let distinct = |dim: usize| {
            let mut offsets: Vec<usize> = tensor.chunks.iter().map(|chunk| chunk.offsets[dim]).collect();
            offsets.sort_unstable();
            offsets.dedup();
            offsets.len()
        };
        let dim = (0..tensor.shape.len()).max_by_key(|&dim| distinct(dim)).unwrap_or(0);
        let mut order: Vec<usize> = (0..tensor.chunks.len()).collect();
        order.sort_by_key(|&chunk| tensor.chunks[chunk].offsets.get(dim).copied());
        let longest = tensor.chunks.iter().filter_map(|chunk| chunk.sizes.get(dim)).copied().max().unwrap_or(0);
        Overlaps { tensor, dim, order, longest }
    }

    /// Returns the positions of the chunks that overlap with a region.
    fn with(&self, region: &Region) -> impl Iterator<Item = usize> {
        let (offset, size) = (region.offsets.get(self.dim).copied(), region.sizes.get(self.dim).copied());
        let within = match (offset, size) {
            (Some(offset), Some(size)) => {
                let start = |chunk: &usize| self.tensor.chunks[*chunk].offsets.get(self.dim).copied().unwrap_or(0);
                let first = self.order.partition_point(|chunk| start(chunk) + self.longest <= offset);
                let end = self.order.partition_point(|chunk| start(chunk) < offset.saturating_add(size));
                &self.order[first.min(end)..end]
            }
            // A scalar.
            _ => &self.order[..],
        };
        let fits = region.offsets.len() == self.tensor.shape.len() && region.sizes.len() == self.tensor.shape.len();
        within
            .iter()
            .copied()
            .filter(move |&chunk| fits && self.tensor.chunks[chunk].region().intersect(region).is_some())
    }
}

impl Checkpoint {
    /// Adds the chunks of this rank.
    fn add(&mut self, part: Part) {
        let index = &mut self.chunked.index;
        let names: Vec<String> = index.tensors.keys().cloned().collect();
        let mut share = Vec::new();
        for PartChunk { tensor, offsets, sizes, files, crc32c, is_verified } in part.chunks {
            let file = |position: &usize| part.files.get(*position).map(|(name, _)| name.clone());
            let mut files = files.iter().filter_map(file);
            if let (Some(name), Some(file)) = (names.get(tensor), files.next())
                && let Some(TensorEntry { chunks, .. }) = index.tensors.get_mut(name)
            {
                if is_verified {
                    share.push((name.clone(), chunks.len()));
                }
                chunks.push(ChunkEntry { offsets, sizes, file, copies: files.collect(), crc32c });
            }
        }
        index.files = part.files.into_iter().collect();
        if let Some(limits) = &mut self.limits {
            limits.share = share;
        }
    }

    /// Returns the whole checkpoint, if this one lacks chunks of a region.
    pub(super) fn beyond_limits(&self, fqn: &str, region: &Region) -> Result<Option<&Checkpoint>> {
        let (Some(limits), Some(tensor)) = (&self.limits, self.tensors().get(fqn)) else { return Ok(None) };
        let overlap = |chunk: &ChunkEntry| region.intersect(&chunk.region()).map_or(0, |part| part.elements());
        let known: usize = tensor.chunks.iter().map(overlap).sum();
        if known == region.elements() { Ok(None) } else { self.whole(limits).map(Some) }
    }

    /// Verifies one rank's share of the chunks; `None` if this checkpoint has no limits.
    pub(super) fn verify_within_limits(&self, rank: usize, ranks: usize) -> Option<Result<Verified>> {
        let limits = self.limits.as_ref()?;
        if (rank, ranks) != (limits.rank, limits.ranks) {
            return Some(self.whole(limits).and_then(|whole| whole.verify_share(rank, ranks)));
        }
        let mut verified = Verified { files: limits.files, ..Verified::default() };
        for (fqn, chunk) in &limits.share {
            if let Err(error) = self.chunked.verify_chunk(fqn, *chunk, &mut |bytes| verified.bytes += bytes) {
                return Some(Err(error));
            }
            verified.chunks += 1;
        }
        Some(Ok(verified))
    }

    fn whole<'a>(&self, limits: &'a Limits) -> Result<&'a Checkpoint> {
        if let Some(whole) = limits.whole.get() {
            return Ok(whole);
        }
        let opened = Box::new(Checkpoint::open(&self.chunked.index.path)?);
        if opened.id != self.id {
            let reason = "another checkpoint has replaced it since it was opened; open it again".into();
            return Err(Error::Manifest { path: self.chunked.described_by.clone(), tensor: None, reason });
        }
        Ok(limits.whole.get_or_init(|| opened))
    }
}
