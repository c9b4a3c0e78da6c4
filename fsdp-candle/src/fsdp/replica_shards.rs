//! The shards of a unit that replicas divide among them (HSDP). Each replica updates its part, and has the whole shards
//! during a step: it gathers them before the first all-gather over the shard ranks. They are dropped when an optimizer
//! may step.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use fsdp_core::{Allocator, GatherPart, Work, heartbeat};
use parking_lot::Mutex;

use super::shard_inputs::ShardInputs;
use super::unit_params::UnitParams;
use crate::data_parallel::{DataParallel, ReplicaLayout};
use crate::error::Error;
use crate::storage::{to_core_dtype, to_tensor};

/// Advice for ranks that gather different shards over replicas.
const REPLICA_GATHER_ADVICE: &str = "Shards are gathered over replicas when a root's forward begins: every rank must \
     call the same roots in the same order";

/// The whole shards of a unit that replicas divide among them.
#[derive(Default)]
pub(super) struct ReplicaShards(Mutex<State>);

#[derive(Default)]
struct State {
    pending: Vec<ReplicaGather>,
    /// Gathered shards in the compute dtype, by the parameter's position in the unit.
    gathered: HashMap<usize, Tensor>,
    /// Whether gathered shards remain up to date: no gradients were handed out since.
    is_fresh: bool,
}

/// A pending all-gather over replicas.
struct ReplicaGather {
    work: Work,
    /// Positions of the parameters in the unit.
    positions: Vec<usize>,
}

impl ReplicaShards {
    /// Issues the all-gathers of the shards that are neither pending nor gathered.
    pub(super) fn start(&self, unit: &UnitParams) -> Result<()> {
        let mut sets: Vec<(Arc<DataParallel>, Vec<usize>)> = vec![];
        {
            let state = self.0.lock();
            if !state.pending.is_empty() {
                return Ok(());
            }
            for (position, param) in unit.params().iter().enumerate() {
                if param.spec.over_replicas.is_none() || state.gathered.contains_key(&position) {
                    continue;
                }
                match sets.iter_mut().find(|(ranks, _)| Arc::ptr_eq(ranks, &param.spec.ranks)) {
                    Some((_, positions)) => positions.push(position),
                    None => sets.push((param.spec.ranks.clone(), vec![position])),
                }
            }
        }
        for (ranks, positions) in sets {
            let Some(replicas) = ranks.replicate() else { continue };
            let (mut parts, inputs) = (vec![], ShardInputs::new(unit.pool()));
            for &position in &positions {
                let param = &unit.params()[position];
                let counts = param.divided_over_replicas()?.layout.counts();
                let input = param.shard.input(param.compute_dtype(), &inputs)?;
                parts.push(GatherPart { input, counts });
            }
            tracing::debug!(unit = unit.name(), parameters = positions.len(), "gather shards over replicas");
            let signature = unit.signature(positions.iter().copied()).with_advice(REPLICA_GATHER_ADVICE);
            let work = replicas.signed(signature).all_gather(parts, unit.pool().clone());
            self.0.lock().pending.push(ReplicaGather { work, positions });
        }
        Ok(())
    }

    /// Waits for the all-gathers.
    pub(super) fn wait(&self, unit: &UnitParams) -> Result<()> {
        let pending = std::mem::take(&mut self.0.lock().pending);
        if pending.is_empty() {
            return Ok(());
        }
        let _span = tracing::debug_span!("wait for all-gather", unit = unit.name(), what = "shards").entered();
        let _heartbeat = heartbeat::span("wait for all-gather", unit.name());
        let mut outcome = Ok(());
        for gather in pending {
            match outcome {
                Ok(()) => outcome = self.finish(unit, gather),
                // The others are waited for as well, so that none stays in flight.
                Err(_) => drop(gather.work.wait()),
            }
        }
        outcome
    }

    fn finish(&self, unit: &UnitParams, ReplicaGather { work, positions }: ReplicaGather) -> Result<()> {
        let failed = |source| unit.communication_failed("all-gather over replicas", source);
        let buffers = work.wait().map_err(failed)?;
        if buffers.len() != positions.len() {
            bail!("FSDP unit `{}`: the all-gather over replicas returned {} buffers", unit.name(), buffers.len())
        }
        for (position, gathered) in positions.into_iter().zip(buffers) {
            let param = &unit.params()[position];
            let ReplicaLayout { shape, layout } = param.divided_over_replicas()?;
            let shard = if layout.is_concatenation() {
                gathered
            } else {
                let dtype = to_core_dtype(param.compute_dtype())?;
                let mut shard = unit.pool().take(dtype, param.shard_len()).map_err(Error::from)?;
                layout.unpack(&gathered, &mut shard)?;
                unit.pool().give(gathered);
                shard
            };
            unit.pool().leave(&shard);
            let shard = to_tensor(shard, shape, param.device())?;
            self.0.lock().gathered.insert(position, shard);
        }
        Ok(())
    }

    /// Returns the gathered shard of a parameter that replicas divide.
    pub(super) fn shard(&self, unit: &UnitParams, position: usize) -> Result<Tensor> {
        match self.0.lock().gathered.get(&position) {
            Some(shard) => Ok(shard.clone()),
            None => {
                bail!("parameter `{}`: its shard is not gathered over the replicas now", unit.params()[position].name())
            }
        }
    }

    /// Drops the shards, since the replicas' parts may have changed. A collective that still reads one keeps its
    /// memory.
    pub(super) fn clear(&self, unit: &UnitParams) {
        let pending = std::mem::take(&mut self.0.lock().pending);
        for gather in pending {
            for buffer in gather.work.wait().unwrap_or_default() {
                unit.pool().give(buffer);
            }
        }
        self.0.lock().gathered.clear();
    }

    /// Drops the shards, unless micro-batches share them: otherwise, an optimizer may step before the next forward.
    pub(super) fn clear_unless_fresh(&self, unit: &UnitParams) {
        if !self.0.lock().is_fresh {
            self.clear(unit);
        }
    }

    /// Records whether the shards remain up to date until the next forward. Drops them otherwise.
    pub(super) fn set_fresh(&self, unit: &UnitParams, is_fresh: bool) {
        self.0.lock().is_fresh = is_fresh;
        self.clear_unless_fresh(unit);
    }
}
