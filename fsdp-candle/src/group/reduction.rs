//! The reduction of a unit's gradients: reduce-scatter over the shard ranks, then all-reduce over the replicas.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::{Allocator, Buffer, ReduceOp, ScatterPart, Work};

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
}

/// The ranks that a reduction goes over now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    Shards,
    Replicas,
}

impl Reduction {
    /// Takes the gradients that are there and issues their reduce-scatters, one for each set of ranks; or files them for a later backward where the unit does not
    /// synchronise.
    pub(crate) fn start(group: &Arc<ParamGroup>) -> Result<Vec<Self>> {
        let (sync, unused, apart, custom) = {
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
            let input = if param.layout().is_concatenation() { grad } else { group.pack(param, grad)? };
            let part = ScatterPart { input, counts: param.layout().counts() };
            match flights.iter_mut().find(|(ranks, _, _)| Arc::ptr_eq(ranks, param.ranks())) {
                Some((_, members, parts)) => {
                    members.push(position);
                    parts.push(part);
                }
                None => flights.push((param.ranks().clone(), vec![position], vec![part])),
            }
        }
        let op = group.reduce_op();
        let start = |(ranks, members, parts): (Arc<DataParallel>, Vec<usize>, Vec<ScatterPart>)| {
            tracing::debug!(unit = group.name, gradients = members.len(), "reduce-scatter");
            let shard = if apart { ranks.shard_apart()? } else { ranks.shard().clone() };
            let work = match &custom {
                Some(custom) => custom.reduce_scatter(&shard, parts, op, group.pool.clone()),
                None => shard.reduce_scatter(parts, op, group.pool.clone()),
            };
            Ok(Reduction { group: group.clone(), ranks, members, work, over: Over::Shards })
        };
        flights.into_iter().map(start).collect()
    }

    /// Whether the next step issues another collective, which must happen in the same order on every rank.
    pub(crate) fn is_over_shards(&self) -> bool {
        self.over == Over::Shards
    }

    /// Waits, and goes on: to the replicas, or to the end.
    pub(crate) fn advance(self) -> Result<Option<Self>> {
        let Reduction { group, ranks, mut members, work, over } = self;
        let what = if over == Over::Shards { "reduce-scatter" } else { "all-reduce" };
        let span = tracing::debug_span!("wait for reduction", unit = group.name, what);
        let mut buffers = span.in_scope(|| work.wait()).map_err(|source| group.communication_failed(what, source))?;
        if over == Over::Shards
            && let Some(replicas) = ranks.replicate()
        {
            if !group.settings().requires_all_reduce {
                for (position, buffer) in members.into_iter().zip(buffers) {
                    group.params[position].accumulate(Stage::PartlyReduced, buffer)?;
                }
                return Ok(None);
            }
            for (position, param) in
                group.params.iter().enumerate().filter(|(_, param)| Arc::ptr_eq(param.ranks(), &ranks))
            {
                let Some(earlier) = param.take(Stage::PartlyReduced) else { continue };
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
            let work = replicas.all_reduce(buffers, group.reduce_op());
            return Ok(Some(Reduction { group, ranks, members, work, over: Over::Replicas }));
        }
        group.deliver(&ranks, members, buffers)?;
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

    /// Sums when the division is the unit's own.
    fn reduce_op(&self) -> ReduceOp {
        let settings = self.settings();
        if settings.force_sum_reduction || settings.gradient_divide_factor.is_some() {
            ReduceOp::Sum
        } else {
            ReduceOp::Avg
        }
    }

    fn pack(&self, param: &FsdpParam, grad: Buffer) -> Result<Buffer> {
        let mut shards = self.pool.take(grad.dtype(), grad.len());
        param.layout().pack_buffer(&grad, &mut shards)?;
        self.pool.give(grad);
        Ok(shards)
    }

    /// Files reduced shards of gradients with their parameters.
    fn deliver(&self, ranks: &DataParallel, members: Vec<usize>, mut buffers: Vec<Buffer>) -> Result<()> {
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
        let divisor = (self.reduce_op() == ReduceOp::Sum).then(|| {
            let size = ranks.shard().size() * ranks.replicate().map_or(1, |replicas| replicas.size());
            self.settings().gradient_divide_factor.unwrap_or(size as f64)
        });
        for (position, mut buffer) in members.into_iter().zip(buffers) {
            if let Some(divisor) = divisor {
                scale(&mut buffer, 1. / divisor)?;
            }
            let param = &self.params[position];
            let buffer = cast(buffer, to_core_dtype(param.dtype())?, self.pool.as_ref())?;
            param.accumulate(Stage::Reduced, buffer)?;
        }
        Ok(())
    }
}
