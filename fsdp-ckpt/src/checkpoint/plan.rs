//! Planning a save: which rank writes which chunk. Rank 0 plans it from the lists of all ranks' shards, and tells each
//! rank which of its shards to write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fsdp_core::layout::Region;
use fsdp_core::{DType, ProcessGroup, Readable};
use serde::{Deserialize, Serialize};

use crate::checkpoint::agree::{agree, read_message, read_messages, to_message};
use crate::checkpoint::hosts::Hosts;
use crate::checksum::Checksum;
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

/// A tensor as ranks list it to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorInfo {
    pub(crate) fqn: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// The shards of a rank, by the names of their tensors.
#[derive(Clone, Debug)]
pub(crate) struct Claims {
    /// Usually the same on all ranks, and then in memory once.
    pub(crate) tensors: Arc<[TensorInfo]>,
    /// The rank's region of each tensor.
    pub(crate) regions: Vec<Region>,
}

/// A rank's list of its shards, as it sends the list to rank 0.
#[derive(Serialize, Deserialize)]
struct ClaimsMessage<'a> {
    /// Description of the save.
    subject: String,
    /// The tensors, unless they are those of rank 0.
    tensors: Option<Vec<TensorInfo>>,
    regions: std::borrow::Cow<'a, [Region]>,
}

/// Message from rank 0 to one rank.
#[derive(Clone, Serialize, Deserialize)]
enum Answer {
    /// Indices of the rank's claims to write, and the number and bytes of all ranks' tensors.
    Write { claims: Vec<usize>, tensors: usize, bytes: u64 },
    /// [`Error::InvalidShards`], on every rank.
    InvalidShards { tensor: String, reason: String },
    /// [`Error::Argument`], on every rank.
    Argument(String),
}

/// A plan as a rank knows it.
pub(crate) struct Planned {
    /// The whole plan, on rank 0.
    pub(crate) whole: Option<Plan>,
    /// Number of tensors.
    pub(crate) tensors: usize,
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Indices of the shards that this rank writes, in the order of their names.
    own: Vec<usize>,
}

impl Planned {
    /// Returns the chunks that this rank writes, in the order of their names. `shards` are those of the plan.
    pub(crate) fn own_chunks<'a>(&self, shards: &'a [TensorShard]) -> Vec<OwnChunk<'a>> {
        let own = self.own.iter().map(|&index| &shards[index]);
        own.map(|shard| OwnChunk { fqn: &shard.fqn, dtype: shard.data.dtype(), region: claimed(shard) }).collect()
    }
}

/// Returns the region that a rank claims. One rank writes a tensor without elements as a whole, so that it exists.
fn claimed(shard: &TensorShard) -> Region {
    if shard.shape.contains(&0) { Region::whole(&shard.shape) } else { shard.region.clone() }
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
    pub(crate) region: Region,
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
        own.extend(written.map(|chunk| OwnChunk { fqn, dtype: *dtype, region: chunk.region.clone() }));
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

/// Sends the ranks' lists of shards to rank 0, which plans the save. Collective. `subject` describes the save and must
/// be the same on every rank.
pub(crate) fn plan_on_rank_0(
    group: &ProcessGroup,
    hosts: &Hosts,
    subject: &str,
    shards: &[TensorShard],
) -> Result<Planned> {
    let (order, own) = agree(group, "list its shards", claims(shards))?;
    // Ranks usually have parts of the same tensors, whose list is needed once.
    let list = agree(group, "list its shards", to_message(&&own.tensors[..]))?;
    let digest = [list.len().to_le_bytes().to_vec(), Checksum::of(&[&list]).to_le_bytes().to_vec()].concat();
    let is_of_rank_0 = group.broadcast_bytes(0, digest.clone())? == digest && group.rank() != 0;
    let message = to_message(&ClaimsMessage {
        subject: subject.into(),
        tensors: (!is_of_rank_0).then(|| own.tensors.to_vec()),
        regions: own.regions.as_slice().into(),
    });
    let messages = group.gather_bytes_to(0, agree(group, "list its shards", message)?)?;
    let planned =
        messages.map(|messages| read_claims(&messages).and_then(|claims| Ok((plan(&claims, hosts)?, claims))));
    let (whole, answers) = match planned {
        None => (None, Vec::new()),
        Some(Ok((plan, claims))) => {
            let answers = answers(&plan, &claims);
            (Some(plan), answers)
        }
        Some(Err(Error::InvalidShards { tensor, reason })) => {
            (None, vec![Answer::InvalidShards { tensor, reason }; group.size()])
        }
        Some(Err(error)) => (None, vec![Answer::Argument(error.to_string()); group.size()]),
    };
    let answers = agree(group, "plan the save", answers.iter().map(to_message).collect())?;
    match read_message(0, &group.scatter_bytes(0, answers)?)? {
        Answer::Write { claims, tensors, bytes } => {
            let own = claims.into_iter().filter_map(|claim| order.get(claim).copied()).collect();
            Ok(Planned { whole, tensors, bytes, own })
        }
        Answer::InvalidShards { tensor, reason } => Err(Error::InvalidShards { tensor, reason }),
        Answer::Argument(text) => Err(Error::Argument(text)),
    }
}

/// Reads the lists of all ranks, which must describe the same save.
fn read_claims(messages: &[Vec<u8>]) -> Result<Vec<Claims>> {
    let messages: Vec<ClaimsMessage<'_>> = read_messages(messages)?;
    if let Some(rank) = messages.iter().position(|message| message.subject != messages[0].subject) {
        return Err(Error::Argument(format!(
            "the ranks save different things: rank 0 saves {}, rank {rank} saves {}",
            messages[0].subject, messages[rank].subject
        )));
    }
    let mut of_rank_0: Arc<[TensorInfo]> = Arc::from([]);
    let claims = messages.into_iter().enumerate().map(|(rank, message)| {
        let tensors = message.tensors.map_or_else(|| Arc::clone(&of_rank_0), Arc::from);
        if rank == 0 {
            of_rank_0 = Arc::clone(&tensors);
        }
        let regions = message.regions.into_owned();
        if tensors.len() != regions.len() {
            let (tensors, regions) = (tensors.len(), regions.len());
            return Err(Error::Argument(format!(
                "rank {rank} lists {regions} shards of {tensors} tensors; do all ranks run the same program?"
            )));
        }
        Ok(Claims { tensors, regions })
    });
    claims.collect()
}

/// Returns what each rank is told of a plan.
fn answers(plan: &Plan, claims: &[Claims]) -> Vec<Answer> {
    let bytes = plan.values().map(|tensor| tensor.shape.iter().product::<usize>() as u64 * tensor.dtype.size() as u64);
    let bytes = bytes.sum();
    let mut of_ranks = vec![Vec::new(); claims.len()];
    for (fqn, tensor) in plan {
        for rank in tensor.chunks.iter().flat_map(PlannedChunk::writers) {
            of_ranks[rank].extend(claims[rank].tensors.binary_search_by(|info| info.fqn.as_str().cmp(fqn)));
        }
    }
    of_ranks.into_iter().map(|claims| Answer::Write { claims, tensors: plan.len(), bytes }).collect()
}

/// Lists this rank's shards by name, with their indices in `shards`, and checks what needs no other rank.
fn claims(shards: &[TensorShard]) -> Result<(Vec<usize>, Claims)> {
    let mut seen = BTreeSet::new();
    for shard in shards {
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
    }
    let mut order: Vec<usize> = (0..shards.len()).collect();
    order.sort_by_key(|&index| &shards[index].fqn);
    let info = |shard: &TensorShard| TensorInfo {
        fqn: shard.fqn.clone(),
        dtype: shard.data.dtype(),
        shape: shard.shape.clone(),
    };
    let tensors = order.iter().map(|&index| info(&shards[index])).collect();
    let regions = order.iter().map(|&index| claimed(&shards[index])).collect();
    Ok((order, Claims { tensors, regions }))
}

/// Largest chunk that its first holder writes: a scalar, such as a step count. All scalars are then in one file, which
/// every rank opens to load them.
const SMALL: usize = 16;

/// Plans a save. Each region is written once in each directory, by the rank that holds it and has the fewest bytes to
/// write so far, or by the first holder if it is small.
pub(crate) fn plan(claims: &[Claims], hosts: &Hosts) -> Result<Plan> {
    let mut tensors = BTreeMap::<&str, TensorHolders<'_>>::new();
    for (rank, Claims { tensors: infos, regions }) in claims.iter().enumerate() {
        for (info, region) in infos.iter().zip(regions) {
            let known = tensors.entry(&info.fqn).or_insert_with(|| TensorHolders { rank, info, held: BTreeMap::new() });
            known.add(rank, info, region)?;
        }
    }
    let mut chunks = Vec::new();
    for (&fqn, holders) in &tensors {
        holders.check(fqn)?;
        let size = holders.info.dtype.size();
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
            if chunk.bytes > SMALL && (load[rank], rank) < (load[*writer], *writer) {
                *writer = rank;
            }
        }
        let mut writers = writers.into_values();
        let Some(writer) = writers.next() else { continue };
        let copiers: Vec<usize> = writers.collect();
        for &writer in std::iter::once(&writer).chain(&copiers) {
            load[writer] = load[writer].saturating_add(chunk.bytes);
        }
        let info = tensors[chunk.fqn].info;
        let planned = plan.entry(chunk.fqn.to_string()).or_insert_with(|| PlannedTensor {
            dtype: info.dtype,
            shape: info.shape.clone(),
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
    info: &'a TensorInfo,
    held: BTreeMap<&'a Region, Vec<usize>>,
}

impl<'a> TensorHolders<'a> {
    fn add(&mut self, rank: usize, info: &'a TensorInfo, region: &'a Region) -> Result<()> {
        if info != self.info {
            return Err(Error::InvalidShards {
                tensor: info.fqn.clone(),
                reason: format!(
                    "rank {} has it as {} {:?}, rank {rank} as {} {:?}; all ranks must agree",
                    self.rank, self.info.dtype, self.info.shape, info.dtype, info.shape
                ),
            });
        }
        // Empty shards are not written, unless the whole tensor is empty.
        if !region.is_empty() || info.shape.contains(&0) {
            self.held.entry(region).or_default().push(rank);
        }
        Ok(())
    }

    fn check(&self, fqn: &str) -> Result<()> {
        let shape = &self.info.shape;
        let fail = |reason| Err(Error::InvalidShards { tensor: fqn.to_string(), reason });
        let regions: Vec<&Region> = self.held.keys().copied().collect();
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

    /// Name, shape, offsets and sizes.
    type Shard<'a> = (&'a str, &'a [usize], &'a [usize], &'a [usize]);

    /// Returns the claims of a rank.
    fn claims_of(shards: &[Shard<'_>]) -> Claims {
        let info =
            |&(fqn, shape, ..): &Shard<'_>| TensorInfo { fqn: fqn.into(), dtype: DType::F32, shape: shape.to_vec() };
        let region = |&(_, _, offsets, sizes): &Shard<'_>| Region { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
        Claims { tensors: shards.iter().map(info).collect(), regions: shards.iter().map(region).collect() }
    }

    #[test]
    fn spreads_large_replicas_by_bytes() {
        for (rows, of_rank_0) in [(SMALL / 4, 4), (SMALL / 4 + 1, 2)] {
            let shape = [rows];
            let rank = claims_of(&["a", "b", "c", "d"].map(|name| (name, &shape[..], &[0][..], &shape[..])));
            let plan = plan(&[rank.clone(), rank], &Hosts::shared(2)).unwrap();
            let writers: Vec<usize> = plan.values().map(|tensor| tensor.chunks[0].writer).collect();
            assert!(plan.values().all(|tensor| tensor.chunks.len() == 1));
            assert_eq!(writers.iter().filter(|&&writer| writer == 0).count(), of_rank_0, "{writers:?}");
        }
    }

    #[test]
    fn rejects_incomplete_shards() {
        let part = |offset, size| claims_of(&[("w", &[4], &[offset], &[size])]);
        let text = |claims: &[Claims]| plan(claims, &Hosts::shared(claims.len())).unwrap_err().to_string();
        let overlap = text(&[part(0, 3), part(2, 2)]);
        assert!(overlap.contains("\"w\": rank 0 holds [0..3] and rank 1 holds [2..4]"), "{overlap}");
        let gap = text(&[part(0, 1), part(2, 2)]);
        assert!(gap.contains("no rank holds 1 of the elements") && gap.contains("rank 1 [2..4]"), "{gap}");
        let nothing = text(&[part(0, 0)]);
        assert!(nothing.contains("the ranks hold nothing"), "{nothing}");
        let shapes = text(&[part(0, 4), claims_of(&[("w", &[5], &[0], &[5])])]);
        assert!(shapes.contains("rank 1 as F32 [5]"), "{shapes}");
    }
}
