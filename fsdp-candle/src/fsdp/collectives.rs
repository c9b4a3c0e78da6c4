//! The collectives of a unit: all-gather, gather over replicas, and the reduction of gradients.
//!
//! Parameters on the same ranks share one collective. Nearly always that is one collective for a unit, but a placement
//! may put a parameter on another mesh. Every collective is signed with the unit, the positions of its parameters, and
//! the number of backwards whose gradients it reduces. Ranks whose signatures differ all get an error that names the
//! parameters.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::layout::chunk_range;
use fsdp_core::process_group::Signature;
use fsdp_core::{
    Allocator, Buffer, DType, DeviceId, GatherPart, ProcessGroup, Readable, ReduceOp, ScatterPart, View, Work,
    heartbeat,
};
use parking_lot::Mutex;

use super::comm::AllGather;
use super::gradient::Stage;
use super::param::{FsdpParam, FullBuffer, UnshardMemory};
use super::param_group::FsdpParamGroup;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::error::Error;
use crate::storage::{Pool, TensorMemory, cast, copy, from_numbers, scale, to_core_dtype, to_numbers, to_tensor};
use crate::tensor_parallel::Parallel;

/// Advice for ranks that unshard different parameters.
const ALL_GATHER_ADVICE: &str = "Units are gathered as they are called, and units by name as their layers are used: \
     every rank must call the same units in the same order, or `unshard()` all of them first. Where ranks use \
     different units by name, call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the root on every rank";

/// Advice for ranks that gather different shards over replicas.
const REPLICA_GATHER_ADVICE: &str = "Shards are gathered over replicas when a root's forward begins: every rank must \
     call the same roots in the same order";

/// Advice for ranks that reduce different gradients.
const REDUCE_ADVICE: &str = "Ranks reduce the gradients of the same parameters, of as many backwards. Where ranks may \
     use different parameters, call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the root on every rank";

/// Advice for ranks that compare different numbers of units.
const COMPARE_ADVICE: &str = "Ranks that may use different parameters compare what their losses reach when a backward \
     begins: every rank must call backward as often, of a model with the same units";

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

/// How the all-gather returns a parameter.
#[derive(Clone, Copy)]
enum Gathered {
    /// In one buffer with the full values.
    Whole,
    /// In one buffer with the shards one after another, which is not the order of the full values.
    Concatenated,
    /// In this many buffers that the parameter's extension decodes.
    Encoded(usize),
}

impl AllGatherResult {
    /// Issues the all-gathers of the parameters at the positions `missing`.
    pub(super) fn start(
        unit: &FsdpParamGroup,
        missing: &[usize],
        memory: &UnshardMemory,
        custom: Option<&Arc<dyn AllGather>>,
    ) -> Result<Self> {
        tracing::debug!(unit = unit.name(), parameters = missing.len(), "unshard");
        let mut pending = vec![];
        let mut start = |AllGatherRequest { ranks, positions, parts, params }: AllGatherRequest| {
            // A custom all-gather may take its outputs in any order.
            let in_place = memory.keep && custom.is_none();
            let ranks = ranks.signed(unit.signature(positions).with_advice(ALL_GATHER_ADVICE));
            let work = match custom {
                Some(custom) => custom.all_gather(&ranks, parts, memory.allocator.clone()),
                None if in_place => ranks.all_gather(parts, KeptBuffers::of(&params, &unit.pool)?),
                None => ranks.all_gather(parts, memory.allocator.clone()),
            };
            pending.push(PendingAllGather { work, params, in_place });
            Ok(())
        };
        let outcome = AllGatherRequest::of(unit, missing)?.into_iter().try_for_each(&mut start);
        let result = AllGatherResult(pending);
        match outcome {
            Ok(()) => Ok(result),
            Err(error) => {
                result.discard();
                Err(error)
            }
        }
    }

    /// Waits for the all-gathers. Returns the full parameters.
    pub(super) fn wait(
        self,
        unit: &FsdpParamGroup,
        memory: &UnshardMemory,
    ) -> Result<Vec<(Arc<FsdpParam>, FullBuffer)>> {
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

    /// Waits for the all-gathers and drops their outputs: peers still need this rank's inputs.
    pub(super) fn discard(self) {
        self.0.into_iter().for_each(|pending| drop(pending.work.wait()));
    }
}

impl AllGatherRequest {
    fn of(unit: &FsdpParamGroup, missing: &[usize]) -> Result<Vec<Self>> {
        let mut requests: Vec<AllGatherRequest> = vec![];
        for &position in missing {
            let param = &unit.params()[position];
            let kept = match param.take_post_forward_shard() {
                Some(part) => Some((param.spec.ranks.post_forward_group(part.ranks)?, part.buffer)),
                None => None,
            };
            let ranks = kept.as_ref().map_or(param.spec.ranks.shard(), |(fewer, _)| fewer).clone();
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
                    let input = Arc::new(PooledInput { buffer: Some(buffer), pool: unit.pool.clone() });
                    parts.push(GatherPart { input, counts });
                    Gathered::Whole
                }
                None => add_inputs(param, parts)?,
            };
            params.push((param.clone(), gathered));
        }
        Ok(requests)
    }
}

/// Adds this rank's inputs for a parameter.
fn add_inputs(param: &FsdpParam, parts: &mut Vec<GatherPart>) -> Result<Gathered> {
    let layout = &param.spec.layout;
    let counts = layout.counts();
    let Some(extension) = &param.spec.extension else {
        let input: Arc<dyn Readable> = match &param.spec.replica_sharding {
            Some(_) => Arc::new(TensorMemory(param.shard_in_compute_dtype()?)),
            None => own_input(param)?,
        };
        parts.push(GatherPart { input, counts });
        return Ok(if layout.is_concatenation() { Gathered::Whole } else { Gathered::Concatenated });
    };
    let lengths: Vec<Vec<usize>> = counts.iter().map(|&count| extension.lengths(count)).collect();
    let encoded = extension.pre_all_gather(&param.shard_in_compute_dtype()?)?;
    let count = encoded.len();
    for (i, buffer) in encoded.into_iter().enumerate() {
        let counts = lengths.iter().map(|of_rank| of_rank.get(i).copied().unwrap_or(0)).collect();
        parts.push(GatherPart { input: Arc::new(buffer), counts });
    }
    Ok(Gathered::Encoded(count))
}

/// Returns the values that this rank holds, in the compute dtype.
fn own_input(param: &FsdpParam) -> Result<Arc<dyn Readable>> {
    Ok(match &param.spec.offload {
        Some(offload) => Arc::new(offload.upload(to_core_dtype(param.compute_dtype())?)?),
        None => Arc::new(TensorMemory(param.own_in_compute_dtype()?)),
    })
}

impl PendingAllGather {
    /// Waits, and adds the full parameters to `full`.
    fn wait(
        self,
        unit: &FsdpParamGroup,
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
                true => Ok(FullBuffer { buffer: param.take_kept_buffer()?, is_kept: true }),
                false => scratch(),
            };
            let values = match gathered {
                Gathered::Whole if self.in_place => FullBuffer { buffer: next()?, is_kept: true },
                Gathered::Whole | Gathered::Concatenated => {
                    let shards = next()?;
                    check_output(unit, &param, &shards)?;
                    let whole = matches!(gathered, Gathered::Whole);
                    if whole && !memory.keep {
                        FullBuffer { buffer: shards, is_kept: false }
                    } else {
                        let mut full = destination()?;
                        match whole {
                            true => copy(&shards, &mut full.buffer)?,
                            false => layout.unpack(&shards, &mut full.buffer)?,
                        }
                        allocator.give(shards);
                        full
                    }
                }
                Gathered::Encoded(count) => {
                    let encoded = (0..count).map(|_| next()).collect::<Result<Vec<_>>>()?;
                    let concatenation = layout.is_concatenation();
                    let mut decoded = if concatenation { destination()? } else { scratch()? };
                    if let Some(extension) = &param.spec.extension {
                        extension.post_all_gather(&encoded, &layout.counts(), &mut decoded.buffer)?;
                    }
                    encoded.into_iter().for_each(|buffer| allocator.give(buffer));
                    if concatenation {
                        decoded
                    } else {
                        let mut full = destination()?;
                        layout.unpack(&decoded.buffer, &mut full.buffer)?;
                        allocator.give(decoded.buffer);
                        full
                    }
                }
            };
            check_output(unit, &param, &values.buffer)?;
            full.push((param, values));
        }
        Ok(())
    }
}

fn check_output(unit: &FsdpParamGroup, param: &FsdpParam, buffer: &Buffer) -> Result<()> {
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
                Gathered::Whole => kept.push(Some(param.take_kept_buffer()?)),
                Gathered::Concatenated => kept.push(None),
                Gathered::Encoded(count) => kept.extend((0..*count).map(|_| None)),
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

/// An input that goes back to the pool when the collective has read it.
struct PooledInput {
    buffer: Option<Buffer>,
    pool: Arc<Pool>,
}

impl Readable for PooledInput {
    fn dtype(&self) -> DType {
        self.buffer.as_ref().map_or(DType::U8, Buffer::dtype)
    }
    fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::len)
    }
    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        self.buffer.as_ref().map_or(Ok(()), |buffer| buffer.read(f))
    }
    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        self.buffer.as_ref().map_or(Ok(()), |buffer| buffer.view(f))
    }
    fn device(&self) -> DeviceId {
        self.buffer.as_ref().map_or(DeviceId::Host, Readable::device)
    }
}

impl Drop for PooledInput {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give(buffer);
        }
    }
}

/// A pending all-gather over replicas of the shards that they divide among them.
pub(super) struct ReplicaGather {
    work: Work,
    /// Positions of the parameters in the unit.
    positions: Vec<usize>,
}

/// Shards that replicas divide among them: gathered once a step, before the first all-gather, and dropped when an
/// optimizer may step.
impl FsdpParamGroup {
    /// Issues the all-gathers over replicas of the shards that are neither pending nor gathered.
    pub(super) fn start_replica_gather(&self) -> Result<()> {
        if !self.replica_gathers.lock().is_empty() {
            return Ok(());
        }
        let mut sets: Vec<(Arc<DataParallel>, Vec<usize>)> = vec![];
        for (position, param) in self.params().iter().enumerate() {
            if param.spec.replica_sharding.as_ref().is_none_or(|sharding| sharding.is_gathered()) {
                continue;
            }
            match sets.iter_mut().find(|(ranks, _)| Arc::ptr_eq(ranks, &param.spec.ranks)) {
                Some((_, positions)) => positions.push(position),
                None => sets.push((param.spec.ranks.clone(), vec![position])),
            }
        }
        for (ranks, positions) in sets {
            let Some(replicas) = ranks.replicate() else { continue };
            let mut parts = vec![];
            for &position in &positions {
                let param = &self.params()[position];
                let sharding = param.spec.replica_sharding.as_ref();
                let counts = sharding.map(|sharding| sharding.layout.counts()).unwrap_or_default();
                parts.push(GatherPart { input: own_input(param)?, counts });
            }
            tracing::debug!(unit = self.name(), parameters = positions.len(), "gather shards over replicas");
            let signature = self.signature(positions.iter().copied()).with_advice(REPLICA_GATHER_ADVICE);
            let work = replicas.signed(signature).all_gather(parts, self.pool.clone());
            self.replica_gathers.lock().push(ReplicaGather { work, positions });
        }
        Ok(())
    }

    /// Waits for the all-gathers over replicas.
    pub(super) fn wait_for_replica_gather(&self) -> Result<()> {
        let gathers = std::mem::take(&mut *self.replica_gathers.lock());
        if gathers.is_empty() {
            return Ok(());
        }
        let _span = tracing::debug_span!("wait for all-gather", unit = self.name(), what = "shards").entered();
        let _heartbeat = heartbeat::span("wait for all-gather", self.name());
        let mut outcome = Ok(());
        for gather in gathers {
            match outcome {
                Ok(()) => outcome = self.finish_replica_gather(gather),
                // The others are waited for as well, so that none stays in flight.
                Err(_) => drop(gather.work.wait()),
            }
        }
        outcome
    }

    fn finish_replica_gather(&self, ReplicaGather { work, positions }: ReplicaGather) -> Result<()> {
        let failed = |source| self.communication_failed("all-gather over replicas", source);
        let buffers = work.wait().map_err(failed)?;
        if buffers.len() != positions.len() {
            bail!("FSDP unit `{}`: the all-gather over replicas returned {} buffers", self.name(), buffers.len())
        }
        for (position, gathered) in positions.into_iter().zip(buffers) {
            let param = &self.params()[position];
            let Some(sharding) = &param.spec.replica_sharding else { continue };
            let shard = if sharding.layout.is_concatenation() {
                gathered
            } else {
                let dtype = to_core_dtype(param.compute_dtype())?;
                let mut shard = self.pool.take(dtype, sharding.shard_len()).map_err(Error::from)?;
                sharding.layout.unpack(&gathered, &mut shard)?;
                self.pool.give(gathered);
                shard
            };
            self.pool.leave(&shard);
            sharding.set_shard(Some(to_tensor(shard, &sharding.shape, param.device())?));
        }
        Ok(())
    }

    /// Drops the gathered shards, since the replicas' parts may have changed.
    pub(super) fn drop_replica_gather(&self) {
        for gather in std::mem::take(&mut *self.replica_gathers.lock()) {
            for buffer in gather.work.wait().unwrap_or_default() {
                self.pool.give(buffer);
            }
        }
        let shardings = self.params().iter().filter_map(|param| param.spec.replica_sharding.as_ref());
        shardings.for_each(|sharding| sharding.set_shard(None));
    }
}

/// A pending reduction of a unit's gradients: a reduce-scatter over the shard ranks, then an all-reduce over the
/// replicas, and then an all-reduce over the tensor-parallel ranks of the gradients that are terms there.
pub(super) struct Reduction {
    unit: Arc<FsdpParamGroup>,
    ranks: Arc<DataParallel>,
    /// Positions of the parameters whose gradients the pending collective reduces.
    positions: Vec<usize>,
    work: Work,
    hop: Hop,
    options: ReduceOptions,
    /// Gradients that are reduced already, and are handed out with the others.
    reduced: Vec<(usize, Buffer)>,
}

/// The ranks that a pending collective of a reduction is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hop {
    Shards,
    Replicas,
    TensorParallel,
}

/// The unit's settings when the reduction began. The user may change them while it is pending.
#[derive(Clone, Copy)]
struct ReduceOptions {
    op: ReduceOp,
    /// Number that sums are divided by; `None` for averages.
    divisor: Option<f64>,
    all_reduce: bool,
    /// Whether a last buffer counts the ranks that used each parameter.
    with_usage: bool,
    /// Numbers of backwards whose gradients the reduce-scatter and the all-reduce sum.
    backwards: (usize, usize),
}

impl ReduceOptions {
    /// Returns what gradients are divided by before they are summed, and what the sums are divided by. A sum in F16
    /// might overflow where its quotient does not: a power of two near the root of the divisor goes first, as in
    /// PyTorch.
    fn divisors(&self, dtype: DType) -> (Option<f64>, Option<f64>) {
        let Some(divisor) = self.divisor.filter(|_| dtype == DType::F16) else { return (None, self.divisor) };
        let mut before = 1.;
        while divisor % before == 0. && divisor / before > before {
            before *= 2.;
        }
        (Some(before), Some(divisor / before))
    }
}

/// One reduce-scatter over the same ranks, before it is issued.
struct ReduceScatterRequest {
    ranks: Arc<DataParallel>,
    options: ReduceOptions,
    /// Positions of the parameters in the unit.
    positions: Vec<usize>,
    parts: Vec<ScatterPart>,
    /// Whether this rank used each of the parameters.
    used: Vec<bool>,
}

impl Reduction {
    /// Takes the unit's gradients and issues their reduce-scatters. Without gradient synchronisation, keeps them for a
    /// later backward. `started` gets the pending reductions, also if an error is returned.
    pub(super) fn start(unit: &Arc<FsdpParamGroup>, started: &mut Vec<Self>) -> Result<()> {
        let (sync, unused, separate, custom) = {
            let settings = unit.settings.lock();
            (
                settings.requires_gradient_sync,
                settings.reduce_scatter_unused_params,
                settings.separate_reduce_scatter_group,
                settings.reduce_scatter.clone(),
            )
        };
        let backwards = if sync { unit.reduce_backwards() } else { (0, 0) };
        let mut requests: Vec<ReduceScatterRequest> = vec![];
        for (position, param) in unit.params().iter().enumerate().filter(|(_, param)| param.trainable()) {
            if let Some(grad) = param.gradient.take_accumulated() {
                let grad = cast(grad, unit.reduce_dtype(param)?, unit.pool.as_ref())?;
                param.gradient.accumulate(Stage::Unreduced, grad)?;
            }
            if !sync {
                continue;
            }
            let (grad, used) = match param.gradient.take(Stage::Unreduced) {
                Some(grad) => (grad, true),
                None if unused => (param.gradient.zeros(unit.reduce_dtype(param)?)?, false),
                None => continue,
            };
            let layout = &param.spec.layout;
            let mut input = if layout.is_concatenation() { grad } else { unit.packed(layout, grad)? };
            let ranks = &param.spec.ranks;
            let at = match requests.iter().position(|request| Arc::ptr_eq(&request.ranks, ranks)) {
                Some(at) => at,
                None => {
                    requests.push(ReduceScatterRequest {
                        options: unit.reduce_options(ranks, unused, backwards),
                        ranks: ranks.clone(),
                        positions: vec![],
                        parts: vec![],
                        used: vec![],
                    });
                    requests.len() - 1
                }
            };
            let request = &mut requests[at];
            if let (Some(before), _) = request.options.divisors(input.dtype()) {
                scale(&mut input, 1. / before)?;
            }
            request.positions.push(position);
            request.parts.push(ScatterPart { input, counts: layout.counts() });
            request.used.push(used);
        }
        if !sync {
            return Ok(());
        }
        // Gradients that wait for their all-reduce are reduced even if this backward added nothing.
        for param in unit.params().iter().filter(|param| param.trainable()) {
            let ranks = &param.spec.ranks;
            let known = requests.iter().any(|request| Arc::ptr_eq(&request.ranks, ranks))
                || started.iter().any(|other: &Reduction| Arc::ptr_eq(&other.ranks, ranks));
            let options = unit.reduce_options(ranks, unused, backwards);
            if !known && options.all_reduce {
                started.extend(Reduction::of_partly_reduced(unit.clone(), ranks.clone(), options)?);
            }
        }
        for ReduceScatterRequest { ranks, options, positions, mut parts, used } in requests {
            tracing::debug!(unit = unit.name(), gradients = positions.len(), "reduce-scatter");
            let shard = if separate { ranks.dedicated_reduce_scatter_group()? } else { ranks.shard().clone() };
            let shard = shard.signed(unit.reduce_signature(&positions, backwards.0));
            if options.with_usage {
                let counts = vec![positions.len(); shard.size()];
                let numbers: Vec<f32> = counts.iter().flat_map(|_| used.iter().map(|&used| f32::from(used))).collect();
                parts.push(ScatterPart { input: unit.usage_buffer(&positions, &numbers)?, counts });
            }
            let work = match &custom {
                Some(custom) => custom.reduce_scatter(&shard, parts, options.op, unit.pool.clone()),
                None => shard.reduce_scatter(parts, options.op, unit.pool.clone()),
            };
            let (unit, hop) = (unit.clone(), Hop::Shards);
            started.push(Reduction { unit, ranks, positions, work, hop, options, reduced: vec![] });
        }
        Ok(())
    }

    /// Continues with the shards that are reduced over the shard ranks: over the replicas, over the tensor-parallel
    /// ranks, or to the end.
    fn of_partly_reduced(
        unit: Arc<FsdpParamGroup>,
        ranks: Arc<DataParallel>,
        options: ReduceOptions,
    ) -> Result<Option<Self>> {
        let (positions, buffers) = unit.take_partly_reduced(&ranks);
        match ranks.replicate() {
            _ if positions.is_empty() => Ok(None),
            Some(_) => Reduction::over_replicas(unit, ranks, options, positions, buffers).map(Some),
            None => Reduction::over_tensor_parallel(unit, ranks, options, positions.into_iter().zip(buffers).collect()),
        }
    }

    /// Issues the all-reduce of shards over the replicas, or a reduce-scatter where replicas divide the shards.
    fn over_replicas(
        unit: Arc<FsdpParamGroup>,
        ranks: Arc<DataParallel>,
        options: ReduceOptions,
        positions: Vec<usize>,
        mut buffers: Vec<Buffer>,
    ) -> Result<Self> {
        let Some(replicas) = ranks.replicate() else {
            bail!("FSDP unit `{}` has no replicas to reduce over", unit.name())
        };
        if options.with_usage {
            buffers.push(unit.usage_so_far(&positions)?);
        }
        let signed = replicas.signed(unit.reduce_signature(&positions, options.backwards.1));
        let work = match ranks.is_sharded_over_replicas() {
            false => {
                tracing::debug!(unit = unit.name(), gradients = positions.len(), "all-reduce");
                signed.all_reduce(buffers, options.op)
            }
            true => {
                tracing::debug!(unit = unit.name(), gradients = positions.len(), "reduce-scatter over replicas");
                let parts = unit.parts_for_replicas(&positions, buffers, replicas.size())?;
                signed.reduce_scatter(parts, options.op, unit.pool.clone())
            }
        };
        Ok(Reduction { unit, ranks, positions, work, hop: Hop::Replicas, options, reduced: vec![] })
    }

    /// Issues the all-reduce of gradients that are terms over the tensor-parallel ranks. They are summed, never
    /// divided. Without terms, stores all gradients and returns `None`.
    fn over_tensor_parallel(
        unit: Arc<FsdpParamGroup>,
        ranks: Arc<DataParallel>,
        options: ReduceOptions,
        reduced: Vec<(usize, Buffer)>,
    ) -> Result<Option<Self>> {
        let params = unit.params();
        let partial = |position: usize| params[position].parallel().filter(|parallel| parallel.is_partial());
        let Some(parallel) = reduced.iter().find_map(|(position, _)| partial(*position)) else {
            unit.store_reduced(options, reduced)?;
            return Ok(None);
        };
        let group = parallel.group().clone();
        let (terms, reduced): (Vec<_>, Vec<_>) =
            reduced.into_iter().partition(|(position, _)| partial(*position).is_some());
        let (positions, mut buffers): (Vec<usize>, Vec<Buffer>) = terms.into_iter().unzip();
        tracing::debug!(unit = unit.name(), gradients = positions.len(), "all-reduce over tensor-parallel ranks");
        if options.with_usage {
            buffers.push(unit.usage_so_far(&positions)?);
        }
        let signed = group.signed(unit.reduce_signature(&positions, options.backwards.1));
        let work = signed.all_reduce(buffers, ReduceOp::Sum);
        Ok(Some(Reduction { unit, ranks, positions, work, hop: Hop::TensorParallel, options, reduced }))
    }
}

impl InFlight for Reduction {
    fn hop(&self) -> Hop {
        self.hop
    }

    fn advance(self) -> Result<Option<Self>> {
        let Reduction { unit, ranks, positions, work, hop, options, mut reduced } = self;
        let scatters = hop == Hop::Shards || hop == Hop::Replicas && ranks.is_sharded_over_replicas();
        let what = if scatters { "reduce-scatter" } else { "all-reduce" };
        let span = tracing::debug_span!("wait for reduction", unit = unit.name(), what);
        let heartbeat = heartbeat::span("wait for reduction", unit.name());
        let mut buffers = span.in_scope(|| work.wait()).map_err(|source| unit.communication_failed(what, source))?;
        drop(heartbeat);
        let shards = positions.iter().map(|&position| match hop {
            Hop::Shards => unit.params()[position].shard_len(),
            Hop::Replicas | Hop::TensorParallel => unit.params()[position].region().elements(),
        });
        let expected = || shards.clone().chain(options.with_usage.then_some(positions.len()));
        if buffers.iter().map(Buffer::len).ne(expected()) {
            bail!(
                "FSDP unit `{}`: the {what} returned buffers of {:?} elements instead of {:?}",
                unit.name(),
                buffers.iter().map(Buffer::len).collect::<Vec<_>>(),
                expected().collect::<Vec<_>>()
            )
        }
        // A sum or a mean over ranks is positive where one of them used the parameter.
        let usage = if options.with_usage { buffers.pop() } else { None };
        let counts = usage.as_ref().map(to_numbers).transpose()?;
        for (at, &position) in positions.iter().enumerate() {
            let is_used = counts.as_ref().is_none_or(|counts| counts.get(at).is_none_or(|&count| count > 0.));
            unit.params()[position].gradient.note_used(is_used);
        }
        if let Some(usage) = usage {
            unit.pool.give(usage);
        }
        let buffers = positions.into_iter().zip(buffers);
        match hop {
            Hop::Shards => {
                for (position, buffer) in buffers {
                    unit.params()[position].gradient.accumulate(Stage::PartlyReduced, buffer)?;
                }
                if options.all_reduce { Reduction::of_partly_reduced(unit, ranks, options) } else { Ok(None) }
            }
            Hop::Replicas => Reduction::over_tensor_parallel(unit, ranks, options, buffers.collect()),
            Hop::TensorParallel => {
                reduced.extend(buffers);
                reduced.sort_by_key(|(position, _)| *position);
                unit.store_reduced(options, reduced)?;
                Ok(None)
            }
        }
    }

    fn discard(self) {
        let reduced = self.reduced.into_iter().map(|(_, buffer)| buffer);
        for buffer in self.work.wait().unwrap_or_default().into_iter().chain(reduced) {
            self.unit.pool.give(buffer);
        }
    }
}

impl FsdpParamGroup {
    fn reduce_signature(&self, positions: &[usize], backwards: usize) -> Signature {
        let signature = self.signature(positions.iter().copied()).with_advice(REDUCE_ADVICE);
        if backwards == 1 { signature } else { signature.with_how(format!(", gradients of {backwards} backwards")) }
    }

    fn reduce_dtype(&self, param: &FsdpParam) -> Result<DType> {
        to_core_dtype(self.mp_policy.reduce_dtype.unwrap_or(param.dtype()))
    }

    fn reduce_options(&self, ranks: &DataParallel, with_usage: bool, backwards: (usize, usize)) -> ReduceOptions {
        let settings = self.settings.lock();
        let sums = settings.force_sum_reduction || settings.gradient_divide_factor.is_some();
        let size = ranks.shard().size() * ranks.replicate().map_or(1, |replicas| replicas.size());
        ReduceOptions {
            op: if sums { ReduceOp::Sum } else { ReduceOp::Avg },
            divisor: sums.then(|| settings.gradient_divide_factor.unwrap_or(size as f64)),
            all_reduce: settings.requires_all_reduce,
            with_usage,
            backwards,
        }
    }

    /// Takes the shards that wait for an all-reduce over the replicas of `ranks`, with their positions.
    fn take_partly_reduced(&self, ranks: &Arc<DataParallel>) -> (Vec<usize>, Vec<Buffer>) {
        let on_ranks = self.params().iter().enumerate().filter(|(_, param)| Arc::ptr_eq(&param.spec.ranks, ranks));
        on_ranks.filter_map(|(position, param)| Some((position, param.gradient.take(Stage::PartlyReduced)?))).unzip()
    }

    /// Returns a buffer of these numbers, on the device of the parameters at `positions`.
    fn usage_buffer(&self, positions: &[usize], numbers: &[f32]) -> Result<Buffer> {
        match positions.first() {
            Some(&position) => from_numbers(numbers, self.params()[position].device()),
            None => bail!("FSDP unit `{}` reduces no gradients", self.name()),
        }
    }

    /// Returns a buffer that tells which of these parameters some rank used, as far as the reduction has come.
    fn usage_so_far(&self, positions: &[usize]) -> Result<Buffer> {
        let used = positions.iter().map(|&position| f32::from(self.params()[position].gradient.is_used()));
        self.usage_buffer(positions, &used.collect::<Vec<_>>())
    }

    /// Returns the inputs of a reduce-scatter over replicas that divide the shards. All replicas get the usage.
    fn parts_for_replicas(
        &self,
        positions: &[usize],
        buffers: Vec<Buffer>,
        replicas: usize,
    ) -> Result<Vec<ScatterPart>> {
        let mut parts = vec![];
        for (at, buffer) in buffers.into_iter().enumerate() {
            let Some(&position) = positions.get(at) else {
                let numbers = to_numbers(&buffer)?.repeat(replicas);
                let input = self.usage_buffer(positions, &numbers)?;
                parts.push(ScatterPart { input, counts: vec![buffer.len(); replicas] });
                self.pool.give(buffer);
                continue;
            };
            let param = &self.params()[position];
            let Some(sharding) = &param.spec.replica_sharding else {
                bail!("parameter `{}` is not sharded over replicas", param.name())
            };
            let layout = &sharding.layout;
            let input = if layout.is_concatenation() { buffer } else { self.packed(layout, buffer)? };
            parts.push(ScatterPart { input, counts: layout.counts() });
        }
        Ok(parts)
    }

    /// Returns the values of `whole` with the shards one after another.
    fn packed(&self, layout: &ShardLayout, whole: Buffer) -> Result<Buffer> {
        let mut parts = self.pool.take(whole.dtype(), whole.len()).map_err(Error::from)?;
        layout.pack(&whole, &mut parts)?;
        self.pool.give(whole);
        Ok(parts)
    }

    /// Stores reduced gradient shards in their parameters.
    fn store_reduced(&self, options: ReduceOptions, reduced: Vec<(usize, Buffer)>) -> Result<()> {
        let (positions, mut buffers): (Vec<usize>, Vec<Buffer>) = reduced.into_iter().unzip();
        if let Some(offload) = positions.iter().find_map(|&position| self.params()[position].spec.offload.as_ref()) {
            offload.begin_downloads()?;
        }
        let hook = self.settings.lock().all_reduce_hook.clone();
        if let Some(hook) = hook {
            let lengths: Vec<usize> = buffers.iter().map(Buffer::len).collect();
            buffers = hook.reduce(buffers)?;
            if buffers.iter().map(Buffer::len).ne(lengths.iter().copied()) {
                bail!(
                    "FSDP unit `{}`: the all-reduce hook changed the buffers' number or lengths; it must return \
                     {lengths:?}",
                    self.name()
                )
            }
        }
        for (position, mut buffer) in positions.into_iter().zip(buffers) {
            if let (_, Some(after)) = options.divisors(buffer.dtype()) {
                scale(&mut buffer, 1. / after)?;
            }
            let param = &self.params()[position];
            let buffer = cast(buffer, to_core_dtype(param.dtype())?, self.pool.as_ref())?;
            param.add_reduced(buffer)?;
        }
        Ok(())
    }
}

/// A pending reduction. The simulated ranks of `order` have their own.
pub(super) trait InFlight: Sized {
    /// Returns the ranks that the pending collective is over.
    fn hop(&self) -> Hop;

    /// Waits for the collective, and issues the next one, if any. All ranks must call it in the same order.
    fn advance(self) -> Result<Option<Self>>;

    /// Waits for the collective and drops its outputs: peers still need this rank's inputs.
    fn discard(self);
}

/// The pending reductions, the oldest first.
pub(super) struct ReductionQueue<R>(Mutex<VecDeque<R>>);

impl<R> Default for ReductionQueue<R> {
    fn default() -> Self {
        ReductionQueue(Mutex::default())
    }
}

impl<R: InFlight> ReductionQueue<R> {
    /// Advances the oldest reductions until fewer than `max` are on each hop, apart from reductions that just came to
    /// it. The number of reductions decides, never their speed, so all ranks issue their collectives in the same order.
    pub(super) fn limit(&self, max: usize) -> Result<()> {
        let mut waiting = std::mem::take(&mut *self.0.lock());
        let mut in_flight = [0; 3];
        waiting.iter().for_each(|reduction| in_flight[reduction.hop() as usize] += 1);
        let mut kept = VecDeque::with_capacity(waiting.len());
        let mut outcome = Ok(());
        while let Some(reduction) = waiting.pop_front() {
            let count = &mut in_flight[reduction.hop() as usize];
            if *count < max {
                kept.push_back(reduction);
                continue;
            }
            *count -= 1;
            match reduction.advance() {
                Ok(next) => kept.extend(next),
                Err(error) => {
                    // The others stay in flight until the step is reset.
                    kept.append(&mut waiting);
                    outcome = Err(error);
                }
            }
        }
        *self.0.lock() = kept;
        outcome
    }

    pub(super) fn add(&self, started: Vec<R>) {
        self.0.lock().extend(started);
    }

    /// Waits until all reductions are done.
    pub(super) fn finish(&self) -> Result<()> {
        loop {
            let oldest = self.0.lock().pop_front();
            let Some(mut reduction) = oldest else { return Ok(()) };
            while let Some(next) = reduction.advance()? {
                reduction = next;
            }
        }
    }

    /// Waits for all reductions, and drops their outcome.
    pub(super) fn discard(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        all.into_iter().for_each(R::discard);
    }
}

/// Returns the largest of all ranks' numbers, element by element, over the shard ranks, the replicas and the
/// tensor-parallel ranks of all `units`. Numbers are below 2^24.
pub(super) fn largest(units: &[Arc<FsdpParamGroup>], numbers: Vec<usize>) -> Result<Vec<usize>> {
    let mut groups: Vec<(&FsdpParamGroup, &ProcessGroup)> = vec![];
    for unit in units {
        for param in unit.params() {
            let ranks = &param.spec.ranks;
            let parallel = param.parallel().map(Parallel::group);
            for group in [Some(ranks.shard()), ranks.replicate(), parallel].into_iter().flatten() {
                if group.size() > 1 && !groups.iter().any(|(_, known)| known.is(group)) {
                    groups.push((unit, group));
                }
            }
        }
    }
    if numbers.is_empty() {
        return Ok(vec![]);
    }
    let mut numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
    for (unit, group) in groups {
        let Some(param) = unit.params().first() else { continue };
        let signature = unit.signature([]).with_how(", units that losses reach").with_advice(COMPARE_ADVICE);
        let buffer = from_numbers(&numbers, param.device())?;
        let reduced = group.signed(signature).all_reduce(vec![buffer], ReduceOp::Max).wait();
        let reduced = reduced.map_err(|source| unit.communication_failed("all-reduce", source))?;
        let [reduced] = &reduced[..] else { bail!("an all-reduce of one buffer returned {}", reduced.len()) };
        numbers = to_numbers(reduced)?;
    }
    Ok(numbers.into_iter().map(|number| number as usize).collect())
}
