//! The reduction of a unit's gradients: reduce-scatter over the shard ranks, then all-reduce over the replicas.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::{Allocator, Buffer, DType, ReduceOp, ScatterPart, Work, heartbeat};

use super::ParamGroup;
use crate::data_parallel::DataParallel;
use crate::param::{FsdpParam, Stage};
use crate::storage::{add, cast, scale, to_core_dtype};

/// A reduction in flight.
pub(crate) struct Reduction {
    group: Arc<ParamGroup>,
    ranks: Arc<DataParallel>,
    /// The parameters, by position, whose gradients it carries.
    members: Vec<usize>,
    work: Work,
    over: Over,
    rule: Rule,
}

/// How the unit reduced when the reduction began: settings may change while it is in flight.
#[derive(Clone, Copy)]
struct Rule {
    op: ReduceOp,
    /// What sums are divided by, all in all.
    divisor: Option<f64>,
    all_reduce: bool,
}

impl Rule {
    /// What gradients are divided by before they are summed, and what sums are divided by. A sum of F16 might overflow where its quotient would not: a power
    /// of two near the root of the divisor goes first, as in PyTorch.
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
}

impl Reduction {
    /// Takes the gradients that are there and issues their reduce-scatters, one for each set of ranks; or files them for a later backward where the unit does not
    /// synchronise. With `apart`, or where the unit is set so, they go over a process group of their own.
    /// `started` gets those in flight, an error or not.
    pub(crate) fn start(group: &Arc<ParamGroup>, apart: bool, started: &mut Vec<Self>) -> Result<()> {
        let (sync, unused, separate, custom) = {
            let settings = group.settings();
            (
                settings.requires_gradient_sync,
                settings.reduce_scatter_unused_params,
                settings.separate_reduce_scatter_group,
                settings.reduce_scatter.clone(),
            )
        };
        let mut flights: Vec<(Arc<DataParallel>, Vec<usize>, Vec<ScatterPart>)> = vec![];
        for (position, param) in group.params.iter().enumerate().filter(|(_, param)| param.trainable()) {
            if let Some(grad) = param.take_grad() {
                let grad = cast(grad, group.reduce_dtype(param)?, group.pool.as_ref())?;
                param.accumulate(Stage::Unreduced, grad)?;
            }
            if !sync {
                continue;
            }
            let grad = match param.take(Stage::Unreduced) {
                Some(grad) => grad,
                None if unused => Buffer::zeros(group.reduce_dtype(param)?, param.shape().elem_count()),
                None => continue,
            };
            let mut input = if param.layout().is_concatenation() { grad } else { group.pack(param, grad)? };
            if let (Some(before), _) = group.rule(param.ranks()).divisors(input.dtype()) {
                scale(&mut input, 1. / before)?;
            }
            let part = ScatterPart { input, counts: param.layout().counts() };
            match flights.iter_mut().find(|(ranks, _, _)| Arc::ptr_eq(ranks, param.ranks())) {
                Some((_, members, parts)) => {
                    members.push(position);
                    parts.push(part);
                }
                None => flights.push((param.ranks().clone(), vec![position], vec![part])),
            }
        }
        let rules = |ranks: &DataParallel| group.rule(ranks);
        if sync {
            // What waits for its all-reduce goes along even when this backward brought nothing new.
            for param in group.params.iter().filter(|param| param.trainable()) {
                let ranks = param.ranks();
                let known = flights.iter().any(|(other, _, _)| Arc::ptr_eq(other, ranks))
                    || started.iter().any(|other: &Reduction| Arc::ptr_eq(&other.ranks, ranks));
                if !known && let Some(replicas) = ranks.replicate().filter(|_| rules(ranks).all_reduce) {
                    let (members, buffers) = group.take_partly_reduced(ranks);
                    if !members.is_empty() {
                        let rule = rules(ranks);
                        let work = replicas.all_reduce(buffers, rule.op);
                        let (group, ranks) = (group.clone(), ranks.clone());
                        started.push(Reduction { group, ranks, members, work, over: Over::Replicas, rule });
                    }
                }
            }
        }
        let start = |(ranks, members, parts): (Arc<DataParallel>, Vec<usize>, Vec<ScatterPart>)| {
            tracing::debug!(unit = group.name, gradients = members.len(), "reduce-scatter");
            let rule = rules(&ranks);
            let op = rule.op;
            let shard = if apart || separate { ranks.shard_apart()? } else { ranks.shard().clone() };
            let work = match &custom {
                Some(custom) => custom.reduce_scatter(&shard, parts, op, group.pool.clone()),
                None => shard.reduce_scatter(parts, op, group.pool.clone()),
            };
            Result::Ok(Reduction { group: group.clone(), ranks, members, work, over: Over::Shards, rule })
        };
        for flight in flights {
            started.push(start(flight)?);
        }
        Ok(())
    }

    /// Whether the next step issues another collective, which must happen in the same order on every rank.
    pub(crate) fn is_over_shards(&self) -> bool {
        self.over == Over::Shards
    }

    /// Waits, and goes on: to the replicas, or to the end.
    pub(crate) fn advance(self) -> Result<Option<Self>> {
        let Reduction { group, ranks, mut members, work, over, rule } = self;
        let what = if over == Over::Shards { "reduce-scatter" } else { "all-reduce" };
        let span = tracing::debug_span!("wait for reduction", unit = group.name, what);
        let told = heartbeat::span("wait for reduction", &group.name);
        let mut buffers = span.in_scope(|| work.wait()).map_err(|source| group.communication_failed(what, source))?;
        drop(told);
        let expected = || members.iter().map(|&position| group.params[position].region().elements());
        if buffers.iter().map(Buffer::len).ne(expected()) {
            bail!(
                "FSDP unit `{}`: the {what} returned buffers of {:?} elements instead of {:?}",
                group.name,
                buffers.iter().map(Buffer::len).collect::<Vec<_>>(),
                expected().collect::<Vec<_>>()
            )
        }
        if over == Over::Shards
            && let Some(replicas) = ranks.replicate()
        {
            if !rule.all_reduce {
                for (position, buffer) in members.into_iter().zip(buffers) {
                    group.params[position].accumulate(Stage::PartlyReduced, buffer)?;
                }
                return Ok(None);
            }
            let (positions, earlier) = group.take_partly_reduced(&ranks);
            for (position, earlier) in positions.into_iter().zip(earlier) {
                match members.iter().position(|&member| member == position) {
                    Some(at) => {
                        add(&mut buffers[at], &earlier)?;
                        group.pool.give(earlier);
                    }
                    None => {
                        members.push(position);
                        buffers.push(earlier);
                    }
                }
            }
            tracing::debug!(unit = group.name, gradients = members.len(), "all-reduce");
            let work = replicas.all_reduce(buffers, rule.op);
            return Ok(Some(Reduction { group, ranks, members, work, over: Over::Replicas, rule }));
        }
        group.deliver(rule, members, buffers)?;
        Ok(None)
    }

    /// Waits and forgets the outcome.
    pub(crate) fn abandon(self) {
        for buffer in self.work.wait().unwrap_or_default() {
            self.group.pool.give(buffer);
        }
    }
}

impl ParamGroup {
    fn reduce_dtype(&self, param: &FsdpParam) -> Result<fsdp_core::DType> {
        to_core_dtype(self.mp_policy.reduce_dtype.unwrap_or(param.dtype()))
    }

    /// How the unit reduces over these ranks: by sums where the division is its own.
    fn rule(&self, ranks: &DataParallel) -> Rule {
        let settings = self.settings();
        let sums = settings.force_sum_reduction || settings.gradient_divide_factor.is_some();
        let size = ranks.shard().size() * ranks.replicate().map_or(1, |replicas| replicas.size());
        Rule {
            op: if sums { ReduceOp::Sum } else { ReduceOp::Avg },
            divisor: sums.then(|| settings.gradient_divide_factor.unwrap_or(size as f64)),
            all_reduce: settings.requires_all_reduce,
        }
    }

    /// The shards that wait for an all-reduce over the replicas of `ranks`, with the positions of their parameters.
    fn take_partly_reduced(&self, ranks: &Arc<DataParallel>) -> (Vec<usize>, Vec<Buffer>) {
        let on_ranks = self.params.iter().enumerate().filter(|(_, param)| Arc::ptr_eq(param.ranks(), ranks));
        on_ranks.filter_map(|(position, param)| Some((position, param.take(Stage::PartlyReduced)?))).unzip()
    }

    fn pack(&self, param: &FsdpParam, grad: Buffer) -> Result<Buffer> {
        let mut shards = self.pool.take(grad.dtype(), grad.len());
        param.layout().pack_buffer(&grad, &mut shards)?;
        self.pool.give(grad);
        Ok(shards)
    }

    /// Files reduced shards of gradients with their parameters.
    fn deliver(&self, rule: Rule, members: Vec<usize>, mut buffers: Vec<Buffer>) -> Result<()> {
        let hook = self.settings().all_reduce_hook.clone();
        if let Some(hook) = hook {
            let lengths: Vec<usize> = buffers.iter().map(Buffer::len).collect();
            buffers = hook.reduce(buffers)?;
            if buffers.iter().map(Buffer::len).ne(lengths.iter().copied()) {
                bail!(
                    "FSDP unit `{}`: the all-reduce hook changed the buffers' number or lengths; it must return {lengths:?}",
                    self.name
                )
            }
        }
        for (position, mut buffer) in members.into_iter().zip(buffers) {
            if let (_, Some(after)) = rule.divisors(buffer.dtype()) {
                scale(&mut buffer, 1. / after)?;
            }
            let param = &self.params[position];
            let buffer = cast(buffer, to_core_dtype(param.dtype())?, self.pool.as_ref())?;
            param.accumulate(Stage::Reduced, buffer)?;
        }
        Ok(())
    }
}
