//! The all-gathers of a unit over its shard ranks.
//!
//! Parameters on the same ranks share one collective. Nearly always that is one collective for a unit, but a placement
//! may put a parameter on another mesh. Every collective is signed with the unit and the positions of its parameters.
//! Ranks whose signatures differ all get an error that names the parameters.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::layout::chunk_range;
use fsdp_core::{Allocator, Buffer, DType, GatherPart, ProcessGroup, Work, heartbeat};
use parking_lot::Mutex;

use super::comm::AllGather;
use super::param::FsdpParam;
use super::replica_shards::ReplicaShards;
use super::shard::SentShard;
use super::shard_inputs::ShardInputs;
use super::unit_params::UnitParams;
use super::unsharded_memory::{FullBuffer, UnshardMemory};
use crate::error::Error;
use crate::storage::{Pool, PooledBuffer, copy, to_core_dtype};

/// Advice for ranks that unshard different parameters.
const ALL_GATHER_ADVICE: &str = "Ranks must call the same units in the same order, and use units by name alike. Before \
     forwards on some ranks only, hold the model on all: `let held = model.unshard_all()?`. To train different units, \
     `set_reduce_scatter_unused_params(true, Recurse::Yes)`";

/// The pending all-gathers of a unit: PyTorch's `AllGatherResult`.
pub(super) struct AllGatherResult(Vec<PendingAllGather>);

/// One all-gather over the same ranks, before it is issued.
struct AllGatherRequest {
    ranks: ProcessGroup,
    /// Positions of the parameters in the unit.
    positions: Vec<usize>,
    parts: Vec<GatherPart>,
    params: Vec<(Arc<FsdpParam>, Gathered)>,
}

/// One all-gather in flight.
struct PendingAllGather {
    work: Work,
    params: Vec<(Arc<FsdpParam>, Gathered)>,
    /// Whether whole parameters are gathered into the buffers that they keep.
    in_place: bool,
}

/// Form in which the all-gather returns a parameter.
#[derive(Clone, Copy)]
enum Gathered {
    /// One buffer with the full values.
    Full,
    /// One buffer with the shards one after another, which is not the order of the full values.
    Concatenated,
    /// This many buffers with the encoded shards one after another.
    Encoded(usize),
}

impl Gathered {
    /// Returns the number of the all-gather's outputs.
    fn buffers(self) -> usize {
        match self {
            Gathered::Full | Gathered::Concatenated => 1,
            Gathered::Encoded(count) => count,
        }
    }
}

impl AllGatherResult {
    /// Issues the all-gathers of the parameters at the positions `missing`.
    pub(super) fn start(
        unit: &UnitParams,
        replica_shards: &ReplicaShards,
        missing: &[usize],
        memory: &UnshardMemory,
        custom: Option<&Arc<dyn AllGather>>,
    ) -> Result<Self> {
        tracing::debug!(unit = unit.name(), parameters = missing.len(), "unshard");
        let mut pending = vec![];
        let mut start = |AllGatherRequest { ranks, positions, parts, params }: AllGatherRequest| {
            // A custom all-gather may take its outputs in any order.
            let in_place = memory.keep && custom.is_none();
            let ranks =
                if memory.from_process_group { ranks.with_registered_memory().map_err(Error::from)? } else { ranks };
            let ranks = ranks.signed(unit.signature(positions).with_advice(ALL_GATHER_ADVICE));
            let work = match custom {
                Some(custom) => custom.all_gather(&ranks, parts, memory.allocator.clone()),
                None if in_place => ranks.all_gather(parts, KeptBuffers::of(&params, unit.pool())?),
                None => ranks.all_gather(parts, memory.allocator.clone()),
            };
            pending.push(PendingAllGather { work, params, in_place });
            Ok(())
        };
        let outcome = AllGatherRequest::of(unit, replica_shards, missing)?.into_iter().try_for_each(&mut start);
        let result = AllGatherResult(pending);
        match outcome {
            Ok(()) => Ok(result),
            Err(error) => {
                result.discard(memory);
                Err(error)
            }
        }
    }

    /// Waits for the all-gathers. Returns the full parameters.
    pub(super) fn wait(self, unit: &UnitParams, memory: &UnshardMemory) -> Result<Vec<(Arc<FsdpParam>, FullBuffer)>> {
        let _span = tracing::debug_span!("wait for all-gather", unit = unit.name()).entered();
        let _heartbeat = heartbeat::span("wait for all-gather", unit.name());
        let (mut full, mut outcome) = (vec![], Ok(()));
        for pending in self.0 {
            match outcome {
                Ok(()) => outcome = pending.wait(unit, memory, &mut full),
                // The others are waited for as well, so that none stays in flight.
                Err(_) => drop(pending.work.wait()),
            }
        }
        outcome.map(|()| full)
    }

    /// Waits for the all-gathers and returns their outputs to the allocator: peers still need this rank's inputs.
    pub(super) fn discard(self, memory: &UnshardMemory) {
        for PendingAllGather { work, in_place, .. } in self.0 {
            let outputs = work.wait().unwrap_or_default();
            // Buffers that parameters keep are not the allocator's.
            if !in_place {
                outputs.into_iter().for_each(|buffer| memory.allocator.give(buffer));
            }
        }
    }
}

impl AllGatherRequest {
    fn of(unit: &UnitParams, replica_shards: &ReplicaShards, missing: &[usize]) -> Result<Vec<Self>> {
        let mut requests: Vec<AllGatherRequest> = vec![];
        let inputs = ShardInputs::new(unit.pool());
        for &position in missing {
            let param = &unit.params()[position];
            let kept = match param.full.take_post_forward_shard() {
                Some(part) => Some((param.spec.ranks.post_forward_group(part.ranks)?, part.buffer)),
                None => None,
            };
            let ranks = kept.as_ref().map_or(&param.spec.ranks.shard, |(fewer, _)| fewer).clone();
            let at = match requests.iter().position(|other| other.ranks.is(&ranks)) {
                Some(at) => at,
                None => {
                    requests.push(AllGatherRequest { ranks, positions: vec![], parts: vec![], params: vec![] });
                    requests.len() - 1
                }
            };
            let AllGatherRequest { ranks, positions, parts, params } = &mut requests[at];
            positions.push(position);
            let gathered = match kept {
                Some((_, buffer)) => {
                    let elements = param.unsharded_shape().elem_count();
                    let count = |rank| chunk_range(elements, ranks.size(), rank).len();
                    let counts = (0..ranks.size()).map(count).collect();
                    let input = Arc::new(PooledBuffer::new(buffer, unit.pool()));
                    parts.push(GatherPart { input, counts });
                    Gathered::Full
                }
                None => {
                    let shard = match param.spec.over_replicas {
                        Some(_) => SentShard::OfReplicas(replica_shards.shard(unit, position)?),
                        None => SentShard::Own { shard: &param.shard, inputs: &inputs },
                    };
                    let layout = &param.spec.layout;
                    let encoded = param.spec.encoding.encode(&shard, layout.counts(), param.compute_dtype())?;
                    let buffers = encoded.len();
                    parts.extend(encoded);
                    match param.spec.encoding.needs_decoding(param.compute_dtype()) {
                        true => Gathered::Encoded(buffers),
                        false if layout.is_concatenation() => Gathered::Full,
                        false => Gathered::Concatenated,
                    }
                }
            };
            params.push((param.clone(), gathered));
        }
        Ok(requests)
    }
}

impl PendingAllGather {
    /// Waits, and adds the full parameters to `full`.
    fn wait(
        self,
        unit: &UnitParams,
        memory: &UnshardMemory,
        full: &mut Vec<(Arc<FsdpParam>, FullBuffer)>,
    ) -> Result<()> {
        let buffers = self.work.wait().map_err(|source| unit.communication_failed("all-gather", source))?;
        let allocator = memory.allocator.as_ref();
        let mut buffers = buffers.into_iter();
        let mut next = || match buffers.next() {
            Some(buffer) => Ok(buffer),
            None => bail!("FSDP unit `{}`: the all-gather returned too few buffers", unit.name()),
        };
        for (param, gathered) in self.params {
            let elements = param.unsharded_shape().elem_count();
            let layout = &param.spec.layout;
            let scratch = || -> Result<FullBuffer> {
                let buffer = allocator.take(to_core_dtype(param.compute_dtype())?, elements).map_err(Error::from)?;
                Ok(FullBuffer { buffer, is_kept: false })
            };
            // The destination of values that were not gathered in place.
            let destination = || match memory.keep {
                true => Ok(FullBuffer { buffer: param.full.take_kept_buffer()?, is_kept: true }),
                false => scratch(),
            };
            let unpack = |shards: Buffer| -> Result<FullBuffer> {
                let mut full = destination()?;
                layout.unpack(&shards, &mut full.buffer)?;
                allocator.give(shards);
                Ok(full)
            };
            let values = match gathered {
                Gathered::Full if self.in_place => FullBuffer { buffer: next()?, is_kept: true },
                Gathered::Full if memory.keep => {
                    let values = next()?;
                    check_output(unit, &param, &values)?;
                    let mut full = destination()?;
                    copy(&values, &mut full.buffer)?;
                    allocator.give(values);
                    full
                }
                Gathered::Full => FullBuffer { buffer: next()?, is_kept: false },
                Gathered::Concatenated => {
                    let shards = next()?;
                    check_output(unit, &param, &shards)?;
                    unpack(shards)?
                }
                Gathered::Encoded(buffers) => {
                    let encoded = (0..buffers).map(|_| next()).collect::<Result<Vec<_>>>()?;
                    let is_full = layout.is_concatenation();
                    let mut decoded = if is_full { destination()? } else { scratch()? };
                    param.spec.encoding.decode(&encoded, &layout.counts(), &mut decoded.buffer)?;
                    encoded.into_iter().for_each(|buffer| allocator.give(buffer));
                    if is_full { decoded } else { unpack(decoded.buffer)? }
                }
            };
            check_output(unit, &param, &values.buffer)?;
            full.push((param, values));
        }
        Ok(())
    }
}

fn check_output(unit: &UnitParams, param: &FsdpParam, buffer: &Buffer) -> Result<()> {
    let (elements, dtype) = (param.unsharded_shape().elem_count(), to_core_dtype(param.compute_dtype())?);
    if (buffer.len(), buffer.dtype()) == (elements, dtype) {
        return Ok(());
    }
    bail!(
        "FSDP unit `{}`: the all-gather returned {} elements of {} of parameter `{}`, which has {elements} of {dtype}",
        unit.name(),
        buffer.len(),
        buffer.dtype(),
        param.name()
    )
}

/// Allocates the outputs of one all-gather: the buffers that parameters keep, or else buffers of the pool. The backend
/// takes one output for each part, in order.
struct KeptBuffers {
    /// One for each part, the last part first.
    kept: Mutex<Vec<Option<Buffer>>>,
    pool: Arc<Pool>,
}

impl KeptBuffers {
    fn of(params: &[(Arc<FsdpParam>, Gathered)], pool: &Arc<Pool>) -> Result<Arc<Self>> {
        let mut kept = vec![];
        for (param, gathered) in params {
            match gathered {
                Gathered::Full => kept.push(Some(param.full.take_kept_buffer()?)),
                other => kept.extend((0..other.buffers()).map(|_| None)),
            }
        }
        kept.reverse();
        Ok(Arc::new(KeptBuffers { kept: Mutex::new(kept), pool: pool.clone() }))
    }
}

impl Allocator for KeptBuffers {
    fn take(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        let kept = self.kept.lock().pop();
        kept.flatten().map_or_else(|| self.pool.take(dtype, len), Ok)
    }
    fn give(&self, buffer: Buffer) {
        self.pool.give(buffer);
    }
}
