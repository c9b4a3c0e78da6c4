//! The reduction of a unit's gradients: reduce-scatter over the shard ranks, then all-reduce over the replicas, and
//! then over the tensor-parallel ranks of those that are terms there.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::process_group::Signature;
use fsdp_core::{Allocator, Buffer, DType, ReduceOp, ScatterPart, Work, heartbeat};

use super::gradient::Stage;
use super::group::ParamGroup;
use super::param::FsdpParam;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::error::Error;
use crate::storage::{cast, from_numbers, scale, to_core_dtype, to_numbers};

/// The way out for ranks that reduce different gradients.
const ADVICE: &str = "Ranks reduce the gradients of the same parameters, of as many backwards. Where ranks may use \
                      different parameters, call `set_reduce_scatter_unused_params(true, Recurse::Yes)` of the root on \
                      every rank";

/// A reduction in flight.
pub(crate) struct Reduction {
    group: Arc<ParamGroup>,
    ranks: Arc<DataParallel>,
    /// The parameters, by position, whose gradients it carries.
    members: Vec<usize>,
    work: Work,
    over: Over,
    rule: Rule,
    /// What is reduced already, and handed out with these.
    done: Vec<(usize, Buffer)>,
}

/// How the unit reduced when the reduction began: settings may change while it is in flight.
#[derive(Clone, Copy)]
struct Rule {
    op: ReduceOp,
    /// What sums are divided by, all in all.
    divisor: Option<f64>,
    all_reduce: bool,
    /// Whether a last buffer tells which parameters the ranks have used.
    told: bool,
    /// How many backwards' gradients the reduce-scatter and the all-reduce carry.
    backwards: (usize, usize),
}

impl Rule {
    /// What gradients are divided by before they are summed, and what sums are divided by. A sum of F16 might overflow
    /// where its quotient would not: a power of two near the root of the divisor goes first, as in PyTorch.
    fn divisors(&self, dtype: DType) -> (Option<f64>, Option<f64>) {
        let Some(divisor) = self.divisor.filter(|_| dtype == DType::F16) else { return (None, self.divisor) };
        let mut before = 1.;
        while divisor % before == 0. && divisor / before > before {
            before *= 2.;
        }
        (Some(before), Some(divisor / before))
    }
}

/// The ranks that a reduction goes over now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    Shards,
    Replicas,
    TensorParallel,
}

/// The gradients that go over one set of ranks.
struct Flight {
    ranks: Arc<DataParallel>,
    rule: Rule,
    /// The parameters, by position.
    members: Vec<usize>,
    parts: Vec<ScatterPart>,
    /// Which of them this rank used.
    used: Vec<bool>,
}

impl Reduction {
    /// Takes the gradients that are there and issues their reduce-scatters, one for each set of ranks; or files them
    /// for a later backward where the unit does not synchronise. Where the unit is set so, they go over a process group
    /// of their own. `started` gets those in flight, an error or not.
    pub(crate) fn start(group: &Arc<ParamGroup>, started: &mut Vec<Self>) -> Result<()> {
        let (sync, unused, separate, custom) = {
            let settings = group.settings();
            (
                settings.requires_gradient_sync,
                settings.reduce_scatter_unused_params,
                settings.separate_reduce_scatter_group,
                settings.reduce_scatter.clone(),
            )
        };
        let backwards = if sync { group.carry_backwards() } else { (0, 0) };
        let mut flights: Vec<Flight> = vec![];
        for (position, param) in group.params().iter().enumerate().filter(|(_, param)| param.trainable()) {
            if let Some(grad) = param.gradient().take_collected() {
                let grad = cast(grad, group.reduce_dtype(param)?, group.members().pool.as_ref())?;
                param.gradient().accumulate(Stage::Unreduced, grad)?;
            }
            if !sync {
                continue;
            }
            let (grad, used) = match param.gradient().take(Stage::Unreduced) {
                Some(grad) => (grad, true),
                None if unused => (param.gradient().zeros(group.reduce_dtype(param)?)?, false),
                None => continue,
            };
            let mut input = if param.layout().is_concatenation() { grad } else { group.pack(param, grad)? };
            let at = match flights.iter().position(|flight| Arc::ptr_eq(&flight.ranks, param.ranks())) {
                Some(at) => at,
                None => {
                    let (ranks, rule) = (param.ranks().clone(), group.rule(param.ranks(), unused, backwards));
                    flights.push(Flight { ranks, rule, members: vec![], parts: vec![], used: vec![] });
                    flights.len() - 1
                }
            };
            let flight = &mut flights[at];
            if let (Some(before), _) = flight.rule.divisors(input.dtype()) {
                scale(&mut input, 1. / before)?;
            }
            flight.members.push(position);
            flight.parts.push(ScatterPart { input, counts: param.layout().counts() });
            flight.used.push(used);
        }
        if !sync {
            return Ok(());
        }
        // What waits for its all-reduce goes along even when this backward brought nothing new.
        for param in group.params().iter().filter(|param| param.trainable()) {
            let ranks = param.ranks();
            let known = flights.iter().any(|flight| Arc::ptr_eq(&flight.ranks, ranks))
                || started.iter().any(|other: &Reduction| Arc::ptr_eq(&other.ranks, ranks));
            let rule = group.rule(ranks, unused, backwards);
            if !known && rule.all_reduce {
                started.extend(Reduction::of_partly_reduced(group.clone(), ranks.clone(), rule)?);
            }
        }
        for Flight { ranks, rule, members, mut parts, used } in flights {
            tracing::debug!(unit = group.name(), gradients = members.len(), "reduce-scatter");
            let shard = if separate { ranks.dedicated_reduce_scatter_group()? } else { ranks.shard().clone() };
            let shard = shard.signed(group.signs(&members, backwards.0));
            if rule.told {
                let counts = vec![members.len(); shard.size()];
                let numbers: Vec<f32> = counts.iter().flat_map(|_| used.iter().map(|&used| f32::from(used))).collect();
                parts.push(ScatterPart { input: group.told(&members, &numbers)?, counts });
            }
            let work = match &custom {
                Some(custom) => custom.reduce_scatter(&shard, parts, rule.op, group.members().pool.clone()),
                None => shard.reduce_scatter(parts, rule.op, group.members().pool.clone()),
            };
            let (group, over) = (group.clone(), Over::Shards);
            started.push(Reduction { group, ranks, members, work, over, rule, done: vec![] });
        }
        Ok(())
    }

    /// What follows for the shards that are reduced over the shard ranks: over the replicas, over the tensor-parallel
    /// ranks, or nothing.
    fn of_partly_reduced(group: Arc<ParamGroup>, ranks: Arc<DataParallel>, rule: Rule) -> Result<Option<Self>> {
        let (members, buffers) = group.take_partly_reduced(&ranks);
        match ranks.replicate() {
            _ if members.is_empty() => Ok(None),
            Some(_) => Reduction::over_replicas(group, ranks, rule, members, buffers).map(Some),
            None => Reduction::over_tensor_parallel(group, ranks, rule, members.into_iter().zip(buffers).collect()),
        }
    }

    /// The all-reduce of shards that are reduced over the shard ranks; a reduce-scatter where replicas hold parts.
    fn over_replicas(
        group: Arc<ParamGroup>,
        ranks: Arc<DataParallel>,
        rule: Rule,
        members: Vec<usize>,
        mut buffers: Vec<Buffer>,
    ) -> Result<Self> {
        let Some(replicas) = ranks.replicate() else {
            bail!("FSDP unit `{}` has no replicas to reduce over", group.name())
        };
        if rule.told {
            buffers.push(group.told_used(&members)?);
        }
        let signed = replicas.signed(group.signs(&members, rule.backwards.1));
        let work = match ranks.is_divided() {
            false => {
                tracing::debug!(unit = group.name(), gradients = members.len(), "all-reduce");
                signed.all_reduce(buffers, rule.op)
            }
            true => {
                tracing::debug!(unit = group.name(), gradients = members.len(), "reduce-scatter over replicas");
                let parts = group.parts_for_replicas(&members, buffers, replicas.size())?;
                signed.reduce_scatter(parts, rule.op, group.members().pool.clone())
            }
        };
        Ok(Reduction { group, ranks, members, work, over: Over::Replicas, rule, done: vec![] })
    }

    /// The all-reduce of those that are terms over the tensor-parallel ranks: a sum, of which the others are no part.
    /// `None`, with all of them handed out, where there are none.
    fn over_tensor_parallel(
        group: Arc<ParamGroup>,
        ranks: Arc<DataParallel>,
        rule: Rule,
        reduced: Vec<(usize, Buffer)>,
    ) -> Result<Option<Self>> {
        let params = group.params();
        let partial = |position: usize| params[position].parallel().filter(|parallel| parallel.is_partial());
        let Some(parallel) = reduced.iter().find_map(|(position, _)| partial(*position)) else {
            group.deliver(rule, reduced)?;
            return Ok(None);
        };
        let terms = parallel.group().clone();
        let (partial, done): (Vec<_>, Vec<_>) =
            reduced.into_iter().partition(|(position, _)| partial(*position).is_some());
        let (members, mut buffers): (Vec<usize>, Vec<Buffer>) = partial.into_iter().unzip();
        tracing::debug!(unit = group.name(), gradients = members.len(), "all-reduce over tensor-parallel ranks");
        if rule.told {
            buffers.push(group.told_used(&members)?);
        }
        let work = terms.signed(group.signs(&members, rule.backwards.1)).all_reduce(buffers, ReduceOp::Sum);
        Ok(Some(Reduction { group, ranks, members, work, over: Over::TensorParallel, rule, done }))
    }

    /// Over which ranks it is now, of those that it may go over one after the other.
    pub(crate) fn hop(&self) -> usize {
        match self.over {
            Over::Shards => 0,
            Over::Replicas => 1,
            Over::TensorParallel => 2,
        }
    }

    /// Waits, and goes on: to the replicas, to the tensor-parallel ranks, or to the end.
    pub(crate) fn advance(self) -> Result<Option<Self>> {
        let Reduction { group, ranks, members, work, over, rule, mut done } = self;
        let scatters = over == Over::Shards || over == Over::Replicas && ranks.is_divided();
        let what = if scatters { "reduce-scatter" } else { "all-reduce" };
        let span = tracing::debug_span!("wait for reduction", unit = group.name(), what);
        let told = heartbeat::span("wait for reduction", group.name());
        let mut buffers =
            span.in_scope(|| work.wait()).map_err(|source| group.members().communication_failed(what, source))?;
        drop(told);
        let shards = members.iter().map(|&position| match over {
            Over::Shards => group.params()[position].shard_len(),
            Over::Replicas | Over::TensorParallel => group.params()[position].region().elements(),
        });
        let expected = || shards.clone().chain(rule.told.then_some(members.len()));
        if buffers.iter().map(Buffer::len).ne(expected()) {
            bail!(
                "FSDP unit `{}`: the {what} returned buffers of {:?} elements instead of {:?}",
                group.name(),
                buffers.iter().map(Buffer::len).collect::<Vec<_>>(),
                expected().collect::<Vec<_>>()
            )
        }
        // A sum or a mean over ranks is positive where one of them has used the parameter.
        let used = if rule.told { buffers.pop() } else { None };
        let told = used.as_ref().map(to_numbers).transpose()?;
        for (at, &position) in members.iter().enumerate() {
            let some_rank = told.as_ref().is_none_or(|told| told.get(at).is_none_or(|&told| told > 0.));
            group.params()[position].gradient().note_used(some_rank);
        }
        if let Some(used) = used {
            group.members().pool.give(used);
        }
        if over == Over::TensorParallel {
            done.extend(members.into_iter().zip(buffers));
            done.sort_by_key(|(position, _)| *position);
            group.deliver(rule, done)?;
            return Ok(None);
        }
        if over == Over::Replicas {
            return Reduction::over_tensor_parallel(group, ranks, rule, members.into_iter().zip(buffers).collect());
        }
        for (&position, buffer) in members.iter().zip(buffers) {
            group.params()[position].gradient().accumulate(Stage::PartlyReduced, buffer)?;
        }
        if !rule.all_reduce {
            return Ok(None);
        }
        Reduction::of_partly_reduced(group, ranks, rule)
    }

    /// Waits and forgets the outcome.
    pub(crate) fn abandon(self) {
        let done = self.done.into_iter().map(|(_, buffer)| buffer);
        for buffer in self.work.wait().unwrap_or_default().into_iter().chain(done) {
            self.group.members().pool.give(buffer);
        }
    }
}

impl ParamGroup {
    /// The numbers of backwards whose gradients the reductions that begin carry: since the last reduce-scatter, and
    /// since the last all-reduce.
    fn carry_backwards(&self) -> (usize, usize) {
        let all_reduce = self.settings().requires_all_reduce;
        let mut carried = self.carried();
        let scattered = carried.scattered.carry();
        (scattered, if all_reduce { carried.replicated.carry() } else { 0 })
    }

    /// What a reduction is about.
    fn signs(&self, members: &[usize], backwards: usize) -> Signature {
        let signature = self.members().signature(members.iter().copied()).with_advice(ADVICE);
        if backwards == 1 { signature } else { signature.with_how(format!(", gradients of {backwards} backwards")) }
    }

    fn reduce_dtype(&self, param: &FsdpParam) -> Result<fsdp_core::DType> {
        to_core_dtype(self.mp_policy().reduce_dtype.unwrap_or(param.dtype()))
    }

    /// How the unit reduces over these ranks: by sums where the division is its own.
    fn rule(&self, ranks: &DataParallel, told: bool, backwards: (usize, usize)) -> Rule {
        let settings = self.settings();
        let sums = settings.force_sum_reduction || settings.gradient_divide_factor.is_some();
        let size = ranks.shard().size() * ranks.replicate().map_or(1, |replicas| replicas.size());
        Rule {
            op: if sums { ReduceOp::Sum } else { ReduceOp::Avg },
            divisor: sums.then(|| settings.gradient_divide_factor.unwrap_or(size as f64)),
            all_reduce: settings.requires_all_reduce,
            told,
            backwards,
        }
    }

    /// The shards that wait for an all-reduce over the replicas of `ranks`, with the positions of their parameters.
    fn take_partly_reduced(&self, ranks: &Arc<DataParallel>) -> (Vec<usize>, Vec<Buffer>) {
        let on_ranks = self.params().iter().enumerate().filter(|(_, param)| Arc::ptr_eq(param.ranks(), ranks));
        on_ranks.filter_map(|(position, param)| Some((position, param.gradient().take(Stage::PartlyReduced)?))).unzip()
    }

    /// Numbers about some of the parameters, to travel with their gradients.
    fn told(&self, members: &[usize], numbers: &[f32]) -> Result<Buffer> {
        match members.first() {
            Some(&position) => from_numbers(numbers, self.params()[position].device()),
            None => bail!("FSDP unit `{}` has no gradients to tell of", self.name()),
        }
    }

    /// Which of these some rank has used, as far as the reduction has come.
    fn told_used(&self, members: &[usize]) -> Result<Buffer> {
        let used = members.iter().map(|&position| f32::from(self.params()[position].gradient().is_used()));
        self.told(members, &used.collect::<Vec<_>>())
    }

    /// Reduced shards, and what is told of them, as each replica gets its part.
    fn parts_for_replicas(&self, members: &[usize], buffers: Vec<Buffer>, replicas: usize) -> Result<Vec<ScatterPart>> {
        let mut parts = vec![];
        for (at, buffer) in buffers.into_iter().enumerate() {
            let Some(&position) = members.get(at) else {
                // What is told, which all get.
                let numbers = to_numbers(&buffer)?.repeat(replicas);
                parts.push(ScatterPart { input: self.told(members, &numbers)?, counts: vec![buffer.len(); replicas] });
                self.members().pool.give(buffer);
                continue;
            };
            let param = &self.params()[position];
            let Some(divided) = param.parts() else { bail!("parameter `{}` is not divided", param.name()) };
            let input = match divided.layout().is_concatenation() {
                true => buffer,
                false => self.packed(divided.layout(), buffer)?,
            };
            parts.push(ScatterPart { input, counts: divided.layout().counts() });
        }
        Ok(parts)
    }

    fn pack(&self, param: &FsdpParam, grad: Buffer) -> Result<Buffer> {
        self.packed(param.layout(), grad)
    }

    fn packed(&self, layout: &ShardLayout, whole: Buffer) -> Result<Buffer> {
        let mut parts = self.members().pool.take(whole.dtype(), whole.len()).map_err(Error::from)?;
        layout.pack(&whole, &mut parts)?;
        self.members().pool.give(whole);
        Ok(parts)
    }

    /// Files reduced shards of gradients with their parameters.
    fn deliver(&self, rule: Rule, reduced: Vec<(usize, Buffer)>) -> Result<()> {
        let (members, mut buffers): (Vec<usize>, Vec<Buffer>) = reduced.into_iter().unzip();
        if let Some(offload) = members.iter().find_map(|&position| self.params()[position].offload()) {
            offload.begin_downloads()?;
        }
        let hook = self.settings().all_reduce_hook.clone();
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
        for (position, mut buffer) in members.into_iter().zip(buffers) {
            if let (_, Some(after)) = rule.divisors(buffer.dtype()) {
                scale(&mut buffer, 1. / after)?;
            }
            let param = &self.params()[position];
            let buffer = cast(buffer, to_core_dtype(param.dtype())?, self.members().pool.as_ref())?;
            param.keep_reduced(buffer)?;
        }
        Ok(())
    }
}
