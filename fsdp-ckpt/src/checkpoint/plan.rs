//! Planning a save: which rank writes which chunk. Every rank computes the same plan from the list of all ranks'
//! shards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, ProcessGroup, Readable};
use serde::{Deserialize, Serialize};

use crate::checkpoint::agree::exchange;
use crate::checkpoint::hosts::Hosts;
use crate::region::{Bounds, TilingError, check_tiling, checked_bytes, fits};
use crate::safetensors::{Entry, Sink, WrittenFile, sharding, write_file};
use crate::store::Store;
use crate::{Error, Result};

/// A rank's shard of a global tensor.
#[derive(Clone)]
pub struct TensorShard {
    /// Fully qualified name, the same on every rank, such as `model.layers.0.weight`.
    pub fqn: String,
    /// Shape of the global tensor.
    pub shape: Vec<usize>,
    /// Region of the global tensor that this rank holds; may be empty.
    pub region: Region,
    /// Elements of the region, row-major. They determine the tensor's dtype.
    pub data: Arc<dyn Readable>,
}

impl TensorShard {
    /// Creates the shard of a rank that holds the whole tensor.
    pub fn whole(fqn: impl Into<String>, shape: &[usize], data: Arc<dyn Readable>) -> Self {
        TensorShard { fqn: fqn.into(), shape: shape.to_vec(), region: Region::whole(shape), data }
    }
}

impl std::fmt::Debug for TensorShard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorShard")
            .field("fqn", &self.fqn)
            .field("dtype", &self.data.dtype())
            .field("shape", &self.shape)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// A shard as ranks list it to each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ShardInfo {
    pub(crate) fqn: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) region: Region,
}

/// A chunk and the rank that writes it. A rank writes at most one chunk of each tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedChunk {
    pub(crate) region: Region,
    pub(crate) writer: usize,
    /// Ranks of other hosts that also write it, to the directories of their hosts.
    pub(crate) copiers: Vec<usize>,
}

impl PlannedChunk {
    pub(crate) fn writers(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(self.writer).chain(self.copiers.iter().copied())
    }
}

/// A tensor's chunks, ordered by offset.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedTensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) chunks: Vec<PlannedChunk>,
}

/// Planned tensors by name.
pub(crate) type Plan = BTreeMap<String, PlannedTensor>;

/// A chunk that a rank writes.
pub(crate) struct OwnChunk<'a> {
    pub(crate) fqn: &'a str,
    pub(crate) dtype: DType,
    pub(crate) region: &'a Region,
}

impl OwnChunk<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.region.elements() * self.dtype.size()
    }
}

/// Returns the chunks that a rank writes, in the order of the plan.
pub(crate) fn own_chunks(plan: &Plan, rank: usize) -> Vec<OwnChunk<'_>> {
    let mut own = Vec::new();
    for (fqn, PlannedTensor { dtype, chunks, .. }) in plan {
        let written = chunks.iter().filter(|chunk| chunk.writers().any(|writer| writer == rank));
        own.extend(written.map(|chunk| OwnChunk { fqn, dtype: *dtype, region: &chunk.region }));
    }
    own
}

/// Writes a rank's chunks as the file `name`. `data` passes the bytes of a chunk to a sink.
pub(crate) fn write_chunks(
    store: &dyn Store,
    name: &str,
    own: &[OwnChunk<'_>],
    mut data: impl FnMut(&OwnChunk<'_>, &mut Sink<'_>) -> Result<()>,
) -> Result<WrittenFile> {
    let entry = |own: &OwnChunk<'_>| Entry { name: own.fqn.into(), dtype: own.dtype, shape: own.region.sizes.clone() };
    let entries: Vec<Entry> = own.iter().map(entry).collect();
    let metadata = sharding::metadata(own.iter().map(|own| (own.fqn, &own.region.offsets[..])))?;
    write_file(store, name, &entries, &metadata, &mut |index, sink| data(&own[index], sink))
}

/// Exchanges the ranks' lists of shards and plans the save. Collective. `subject` describes the save and must be the
/// same on every rank.
pub(crate) fn exchange_plan(
    group: &ProcessGroup,
    hosts: &Hosts,
    subject: &str,
    shards: &[TensorShard],
) -> Result<Plan> {
    let own = claims(shards).map(|claims| (subject.to_string(), claims));
    let (subjects, claims): (Vec<String>, Vec<_>) = exchange(group, "list its shards", own)?.into_iter().unzip();
    let first = &subjects[0];
    if let Some(rank) = subjects.iter().position(|subject| subject != first) {
        return Err(Error::Argument(format!(
            "the ranks save different things: rank 0 saves {first}, rank {rank} saves {}",
            subjects[rank]
        )));
    }
    plan(&claims, hosts)
}

/// Lists this rank's shards and checks what needs no other rank.
fn claims(shards: &[TensorShard]) -> Result<Vec<ShardInfo>> {
    let mut seen = BTreeSet::new();
    shards
        .iter()
        .map(|shard| {
            let fail = |reason| Err(Error::InvalidShards { tensor: shard.fqn.clone(), reason });
            let dtype = shard.data.dtype();
            if shard.fqn.is_empty() || shard.fqn == "__metadata__" {
                return fail("this name can't be used in a safetensors file; choose another".to_string());
            }
            if !seen.insert(shard.fqn.as_str()) {
                return fail("this rank has it twice; pass each tensor once".to_string());
            }
            if checked_bytes(&shard.shape, dtype.size()).is_none() {
                return fail(format!("its shape {:?} is too large to count its bytes", shard.shape));
            }
            if !fits(&shard.region, &shard.shape) {
                return fail(format!("{} is not within its shape {:?}", Bounds(&shard.region), shard.shape));
            }
            if shard.data.len() != shard.region.elements() {
                let (span, need, have) = (Bounds(&shard.region), shard.region.elements(), shard.data.len());
                return fail(format!("{span} has {need} elements, its data has {have}"));
            }
            let (fqn, shape, region) = (shard.fqn.clone(), shard.shape.clone(), shard.region.clone());
            Ok(ShardInfo { fqn, dtype, shape, region })
        })
        .collect()
}

/// Plans a save. Each region is written once in each directory, by the rank that holds it and has the fewest bytes to
/// write so far.
pub(crate) fn plan(claims: &[Vec<ShardInfo>], hosts: &Hosts) -> Result<Plan> {
    let mut tensors = BTreeMap::<&str, TensorHolders<'_>>::new();
    for (rank, claims) in claims.iter().enumerate() {
        for claim in claims {
            let known =
                tensors.entry(&claim.fqn).or_insert_with(|| TensorHolders { rank, claim, held: BTreeMap::new() });
            known.add(rank, claim)?;
        }
    }
    let mut chunks = Vec::new();
    for (&fqn, holders) in &tensors {
        holders.check(fqn)?;
        let size = holders.claim.dtype.size();
        let of_tensor = holders.held.iter();
        chunks.extend(of_tensor.map(|(region, ranks)| ChunkToWrite {
            fqn,
            region,
            ranks,
            bytes: region.elements() * size,
        }));
    }
    // Assign regions with a single holder first, then larger ones first, so that the rest evens out the load.
    chunks.sort_by(|a, b| {
        (a.ranks.len() > 1, b.bytes, a.fqn, a.region).cmp(&(b.ranks.len() > 1, a.bytes, b.fqn, b.region))
    });
    let mut load = vec![0usize; claims.len()];
    let mut plan = Plan::new();
    for chunk in chunks {
        let mut writers = BTreeMap::new();
        for &rank in chunk.ranks {
            let writer = writers.entry(hosts.of(rank)).or_insert(rank);
            if (load[rank], rank) < (load[*writer], *writer) {
                *writer = rank;
            }
        }
        let mut writers = writers.into_values();
        let Some(writer) = writers.next() else { continue };
        let copiers: Vec<usize> = writers.collect();
        for &writer in std::iter::once(&writer).chain(&copiers) {
            load[writer] = load[writer].saturating_add(chunk.bytes);
        }
        let claim = tensors[chunk.fqn].claim;
        let planned = plan.entry(chunk.fqn.to_string()).or_insert_with(|| PlannedTensor {
            dtype: claim.dtype,
            shape: claim.shape.clone(),
            chunks: Vec::new(),
        });
        planned.chunks.push(PlannedChunk { region: chunk.region.clone(), writer, copiers });
    }
    for tensor in plan.values_mut() {
        tensor.chunks.sort_by(|a, b| a.region.offsets.cmp(&b.region.offsets));
    }
    Ok(plan)
}

/// A region to assign to a writer.
struct ChunkToWrite<'a> {
    fqn: &'a str,
    region: &'a Region,
    ranks: &'a [usize],
    bytes: usize,
}

/// The ranks that hold each region of one tensor.
struct TensorHolders<'a> {
    /// First rank that has the tensor.
    rank: usize,
    claim: &'a ShardInfo,
    held: BTreeMap<Region, Vec<usize>>,
}

impl<'a> TensorHolders<'a> {
    fn add(&mut self, rank: usize, claim: &'a ShardInfo) -> Result<()> {
        if (claim.dtype, &claim.shape) != (self.claim.dtype, &self.claim.shape) {
            return Err(Error::InvalidShards {
                tensor: claim.fqn.clone(),
                reason: format!(
                    "rank {} has it as {} {:?}, rank {rank} as {} {:?}; all ranks must agree",
                    self.rank, self.claim.dtype, self.claim.shape, claim.dtype, claim.shape
                ),
            });
        }
        // One rank writes a tensor without elements, so that it exists. Other empty shards are not written.
        if claim.shape.contains(&0) {
            self.held.entry(Region::whole(&claim.shape)).or_default().push(rank);
        } else if !claim.region.is_empty() {
            self.held.entry(claim.region.clone()).or_default().push(rank);
        }
        Ok(())
    }

    fn check(&self, fqn: &str) -> Result<()> {
        let shape = &self.claim.shape;
        let fail = |reason| Err(Error::InvalidShards { tensor: fqn.to_string(), reason });
        let regions: Vec<&Region> = self.held.keys().collect();
        let holder = |region: &Region| self.held[region][0];
        match check_tiling(shape, &regions) {
            Ok(()) => Ok(()),
            Err(TilingError::Overlap(a, b)) => {
                let (left, right) = (regions[a], regions[b]);
                let (rank_a, rank_b) = (holder(left), holder(right));
                fail(format!(
                    "rank {rank_a} holds {} and rank {rank_b} holds {} of shape {shape:?}: they overlap in part; \
                        shards must be equal or disjoint",
                    Bounds(left),
                    Bounds(right)
                ))
            }
            Err(TilingError::Gap(missing)) => {
                let held = regions.iter().take(8).map(|region| format!("rank {} {}", holder(region), Bounds(region)));
                let held: Vec<String> = held.collect();
                let more = regions.len().saturating_sub(8);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let held = if held.is_empty() { "nothing".to_string() } else { held.join(", ") };
                fail(format!("no rank holds {missing} of the elements of shape {shape:?}; the ranks hold {held}{more}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(fqn: &str, shape: &[usize], offsets: &[usize], sizes: &[usize]) -> ShardInfo {
        ShardInfo {
            fqn: fqn.into(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            region: Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() },
        }
    }

    #[test]
    fn spreads_replicas_by_bytes() {
        let names = ["a", "b", "c", "d"];
        let rank: Vec<ShardInfo> = names.iter().map(|name| claim(name, &[4], &[0], &[4])).collect();
        let plan = plan(&[rank.clone(), rank], &Hosts::shared(2)).unwrap();
        let writers: Vec<usize> = plan.values().map(|tensor| tensor.chunks[0].writer).collect();
        assert!(plan.values().all(|tensor| tensor.chunks.len() == 1));
        assert_eq!(writers.iter().filter(|&&writer| writer == 0).count(), 2, "{writers:?}");
    }

    #[test]
    fn rejects_incomplete_shards() {
        let part = |offset, size| vec![claim("w", &[4], &[offset], &[size])];
        let text = |claims: &[Vec<ShardInfo>]| plan(claims, &Hosts::shared(claims.len())).unwrap_err().to_string();
        let overlap = text(&[part(0, 3), part(2, 2)]);
        assert!(overlap.contains("\"w\": rank 0 holds [0..3] and rank 1 holds [2..4]"), "{overlap}");
        let gap = text(&[part(0, 1), part(2, 2)]);
        assert!(gap.contains("no rank holds 1 of the elements") && gap.contains("rank 1 [2..4]"), "{gap}");
        let nothing = text(&[part(0, 0)]);
        assert!(nothing.contains("the ranks hold nothing"), "{nothing}");
        let shapes = text(&[part(0, 4), vec![claim("w", &[5], &[0], &[5])]]);
        assert!(shapes.contains("rank 1 as F32 [5]"), "{shapes}");
    }
}
