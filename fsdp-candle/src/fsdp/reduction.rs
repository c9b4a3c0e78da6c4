//! The reduction of a unit's gradients: over the shard ranks, the replicas and the tensor-parallel ranks.
//!
//! As in an all-gather, parameters on the same ranks share one collective. Its signature also has the number of
//! backwards whose gradients it reduces.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::process_group::Signature;
use fsdp_core::{Allocator, Buffer, DType, ProcessGroup, ReduceOp, ScatterPart, Work, heartbeat};
use parking_lot::Mutex;

use super::gradient::Stage;
use super::param::FsdpParam;
use super::param_group::FsdpParamGroup;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::error::Error;
use crate::storage::{cast, from_numbers, scale, to_core_dtype, to_numbers};

/// Advice for ranks that reduce different gradients.
const REDUCE_ADVICE: &str = "Ranks reduce the gradients of the same parameters, of as many backwards. Where ranks may \
     use different parameters, call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the root on every rank";

/// Advice for ranks that compare different numbers of units.
const COMPARE_ADVICE: &str = "Ranks that may use different parameters compare what their losses reach when a backward \
     begins: every rank must call backward as often, of a model with the same units";

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
        let (sync, unused, separate, from_process_group, custom) = {
            let settings = unit.settings.lock();
            (
                settings.requires_gradient_sync,
                settings.reduce_scatter_unused_params,
                settings.separate_reduce_scatter_group,
                settings.memory_from_process_group,
                settings.reduce_scatter.clone(),
            )
        };
        let backwards = if sync { unit.reduce_backwards() } else { (0, 0) };
        let mut requests: Vec<ReduceScatterRequest> = vec![];
        for (position, param) in unit.params().iter().enumerate().filter(|(_, param)| param.trainable()) {
            let grad = match param.gradient.take_accumulated() {
                Some(grad) => Some(cast(grad, reduce_dtype(param)?, unit.pool().as_ref())?),
                None => None,
            };
            if !sync {
                grad.map_or(Ok(()), |grad| param.gradient.accumulate(Stage::Unreduced, grad))?;
                continue;
            }
            let (grad, used) = match param.gradient.take_with(Stage::Unreduced, grad)? {
                Some(grad) => (grad, true),
                None if unused => (param.gradient.zeros(reduce_dtype(param)?)?, false),
                None => continue,
            };
            let layout = &param.spec.layout;
            let mut input = if layout.is_concatenation() { grad } else { packed(unit, layout, grad)? };
            let ranks = &param.spec.ranks;
            let at = match requests.iter().position(|request| Arc::ptr_eq(&request.ranks, ranks)) {
                Some(at) => at,
                None => {
                    requests.push(ReduceScatterRequest {
                        options: reduce_options(unit, ranks, unused, backwards),
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
            let options = reduce_options(unit, ranks, unused, backwards);
            if !known && options.all_reduce {
                started.extend(Reduction::of_partly_reduced(unit.clone(), ranks.clone(), options)?);
            }
        }
        for ReduceScatterRequest { ranks, options, positions, mut parts, used } in requests {
            tracing::debug!(unit = unit.name(), gradients = positions.len(), "reduce-scatter");
            let shard = if separate { ranks.dedicated_reduce_scatter_group()? } else { ranks.shard.clone() };
            let shard = if from_process_group { shard.with_registered_memory().map_err(Error::from)? } else { shard };
            let shard = shard.signed(reduce_signature(unit, &positions, backwards.0));
            if options.with_usage {
                let counts = vec![positions.len(); shard.size()];
                let numbers: Vec<f32> = counts.iter().flat_map(|_| used.iter().map(|&used| f32::from(used))).collect();
                parts.push(ScatterPart { input: usage_buffer(unit, &positions, &numbers)?, counts });
            }
            let work = match &custom {
                Some(custom) => custom.reduce_scatter(&shard, parts, options.op, unit.pool().clone()),
                None => shard.reduce_scatter(parts, options.op, unit.pool().clone()),
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
        let (positions, buffers) = take_partly_reduced(&unit, &ranks);
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
            buffers.push(usage_so_far(&unit, &positions)?);
        }
        let signed = replicas.signed(reduce_signature(&unit, &positions, options.backwards.1));
        let work = match ranks.is_sharded_over_replicas {
            false => {
                tracing::debug!(unit = unit.name(), gradients = positions.len(), "all-reduce");
                signed.all_reduce(buffers, options.op)
            }
            true => {
                tracing::debug!(unit = unit.name(), gradients = positions.len(), "reduce-scatter over replicas");
                let parts = parts_for_replicas(&unit, &positions, buffers, replicas.size())?;
                signed.reduce_scatter(parts, options.op, unit.pool().clone())
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
        let partial = |position: usize| params[position].parallel().filter(|parallel| parallel.is_partial);
        let Some(parallel) = reduced.iter().find_map(|(position, _)| partial(*position)) else {
            store_reduced(&unit, options, reduced)?;
            return Ok(None);
        };
        let group = parallel.group.clone();
        let (terms, reduced): (Vec<_>, Vec<_>) =
            reduced.into_iter().partition(|(position, _)| partial(*position).is_some());
        let (positions, mut buffers): (Vec<usize>, Vec<Buffer>) = terms.into_iter().unzip();
        tracing::debug!(unit = unit.name(), gradients = positions.len(), "all-reduce over tensor-parallel ranks");
        if options.with_usage {
            buffers.push(usage_so_far(&unit, &positions)?);
        }
        let signed = group.signed(reduce_signature(&unit, &positions, options.backwards.1));
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
        let scatters = hop == Hop::Shards || hop == Hop::Replicas && ranks.is_sharded_over_replicas;
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
            unit.pool().give(usage);
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
                store_reduced(&unit, options, reduced)?;
                Ok(None)
            }
        }
    }

    fn discard(self) {
        let reduced = self.reduced.into_iter().map(|(_, buffer)| buffer);
        for buffer in self.work.wait().unwrap_or_default().into_iter().chain(reduced) {
            self.unit.pool().give(buffer);
        }
    }
}

fn reduce_signature(unit: &FsdpParamGroup, positions: &[usize], backwards: usize) -> Signature {
    let signature = unit.signature(positions.iter().copied()).with_advice(REDUCE_ADVICE);
    if backwards == 1 { signature } else { signature.with_how(format!(", gradients of {backwards} backwards")) }
}

fn reduce_dtype(param: &FsdpParam) -> Result<DType> {
    to_core_dtype(param.spec.reduce_dtype)
}

fn reduce_options(
    unit: &FsdpParamGroup,
    ranks: &DataParallel,
    with_usage: bool,
    backwards: (usize, usize),
) -> ReduceOptions {
    let settings = unit.settings.lock();
    // An expert's gradient is a sum over the ranks that send it tokens already.
    let sums = settings.force_sum_reduction || settings.gradient_divide_factor.is_some() || ranks.experts().is_some();
    ReduceOptions {
        op: if sums { ReduceOp::Sum } else { ReduceOp::Avg },
        divisor: sums.then(|| settings.gradient_divide_factor.unwrap_or(ranks.batches() as f64)),
        all_reduce: settings.requires_all_reduce,
        with_usage,
        backwards,
    }
}

/// Takes the shards that wait for an all-reduce over the replicas of `ranks`, with their positions.
fn take_partly_reduced(unit: &FsdpParamGroup, ranks: &Arc<DataParallel>) -> (Vec<usize>, Vec<Buffer>) {
    let on_ranks = unit.params().iter().enumerate().filter(|(_, param)| Arc::ptr_eq(&param.spec.ranks, ranks));
    on_ranks.filter_map(|(position, param)| Some((position, param.gradient.take(Stage::PartlyReduced)?))).unzip()
}

/// Returns a buffer of these numbers, on the device of the parameters at `positions`.
fn usage_buffer(unit: &FsdpParamGroup, positions: &[usize], numbers: &[f32]) -> Result<Buffer> {
    match positions.first() {
        Some(&position) => from_numbers(numbers, unit.params()[position].device()),
        None => bail!("FSDP unit `{}` reduces no gradients", unit.name()),
    }
}

/// Returns a buffer that tells which of these parameters some rank used, as far as the reduction has come.
fn usage_so_far(unit: &FsdpParamGroup, positions: &[usize]) -> Result<Buffer> {
    let used = positions.iter().map(|&position| f32::from(unit.params()[position].gradient.is_used()));
    usage_buffer(unit, positions, &used.collect::<Vec<_>>())
}

/// Returns the inputs of a reduce-scatter over replicas that divide the shards. All replicas get the usage.
fn parts_for_replicas(
    unit: &FsdpParamGroup,
    positions: &[usize],
    buffers: Vec<Buffer>,
    replicas: usize,
) -> Result<Vec<ScatterPart>> {
    let mut parts = vec![];
    for (at, buffer) in buffers.into_iter().enumerate() {
        let Some(&position) = positions.get(at) else {
            let numbers = to_numbers(&buffer)?.repeat(replicas);
            let input = usage_buffer(unit, positions, &numbers)?;
            parts.push(ScatterPart { input, counts: vec![buffer.len(); replicas] });
            unit.pool().give(buffer);
            continue;
        };
        let param = &unit.params()[position];
        let layout = &param.divided_over_replicas()?.layout;
        let input = if layout.is_concatenation() { buffer } else { packed(unit, layout, buffer)? };
        parts.push(ScatterPart { input, counts: layout.counts() });
    }
    Ok(parts)
}

/// Returns the values of `whole` with the shards one after another.
fn packed(unit: &FsdpParamGroup, layout: &ShardLayout, whole: Buffer) -> Result<Buffer> {
    let mut parts = unit.pool().take(whole.dtype(), whole.len()).map_err(Error::from)?;
    layout.pack(&whole, &mut parts)?;
    unit.pool().give(whole);
    Ok(parts)
}

/// Stores reduced gradient shards in their parameters.
fn store_reduced(unit: &FsdpParamGroup, options: ReduceOptions, reduced: Vec<(usize, Buffer)>) -> Result<()> {
    let (positions, mut buffers): (Vec<usize>, Vec<Buffer>) = reduced.into_iter().unzip();
    if let Some(offload) = positions.iter().find_map(|&position| unit.params()[position].shard.offload()) {
        offload.begin_downloads()?;
    }
    let hook = unit.settings.lock().all_reduce_hook.clone();
    if let Some(hook) = hook {
        let lengths: Vec<usize> = buffers.iter().map(Buffer::len).collect();
        buffers = hook.reduce(buffers)?;
        if buffers.iter().map(Buffer::len).ne(lengths.iter().copied()) {
            bail!(
                "FSDP unit `{}`: the all-reduce hook changed the buffers' number or lengths; it must return \
                 {lengths:?}",
                unit.name()
            )
        }
    }
    for (position, mut buffer) in positions.into_iter().zip(buffers) {
        if let (_, Some(after)) = options.divisors(buffer.dtype()) {
            scale(&mut buffer, 1. / after)?;
        }
        let param = &unit.params()[position];
        let buffer = cast(buffer, to_core_dtype(param.dtype())?, unit.pool().as_ref())?;
        param.add_reduced(buffer)?;
    }
    Ok(())
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

/// Returns the largest of all ranks' numbers, element by element, over the shard ranks, the replicas, the
/// tensor-parallel ranks and the ranks of experts of all `units`. Numbers are below 2^24.
pub(super) fn largest(units: &[Arc<FsdpParamGroup>], numbers: Vec<usize>) -> Result<Vec<usize>> {
    let mut groups: Vec<(&FsdpParamGroup, &ProcessGroup)> = vec![];
    for unit in units {
        for param in unit.params() {
            let ranks = &param.spec.ranks;
            let parallel = param.parallel().map(|parallel| &parallel.group);
            for group in [Some(&ranks.shard), ranks.replicate(), parallel, ranks.experts()].into_iter().flatten() {
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
