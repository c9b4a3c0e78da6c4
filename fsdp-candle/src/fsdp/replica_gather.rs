//! The all-gathers of a unit over the replicas that divide its shards: once a step, before the first all-gather over the
//! shard ranks. The gathered shards are dropped when an optimizer may step.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::{Allocator, GatherPart, Work, heartbeat};
use parking_lot::Mutex;

use super::all_gather::own_input;
use super::shard_reader::ShardReader;
use super::unit_params::UnitParams;
use crate::data_parallel::DataParallel;
use crate::error::Error;
use crate::storage::{to_core_dtype, to_tensor};

/// Advice for ranks that gather different shards over replicas.
const REPLICA_GATHER_ADVICE: &str = "Shards are gathered over replicas when a root's forward begins: every rank must \
     call the same roots in the same order";

/// A pending all-gather over replicas of the shards that they divide among them.
struct ReplicaGather {
    work: Work,
    /// Positions of the parameters in the unit.
    positions: Vec<usize>,
}

/// The pending all-gathers of a unit over replicas.
#[derive(Default)]
pub(super) struct ReplicaGathers(Mutex<Vec<ReplicaGather>>);

impl ReplicaGathers {
    /// Issues the all-gathers over replicas of the shards that are neither pending nor gathered.
    pub(super) fn start(&self, unit: &UnitParams) -> Result<()> {
        if !self.0.lock().is_empty() {
            return Ok(());
        }
        let mut sets: Vec<(Arc<DataParallel>, Vec<usize>)> = vec![];
        for (position, param) in unit.params().iter().enumerate() {
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
            let (mut parts, reader) = (vec![], ShardReader::new(unit.pool()));
            for &position in &positions {
                let param = &unit.params()[position];
                let sharding = param.spec.replica_sharding.as_ref();
                let counts = sharding.map(|sharding| sharding.layout.counts()).unwrap_or_default();
                parts.push(GatherPart { input: own_input(param, unit.pool(), &reader)?, counts });
            }
            tracing::debug!(unit = unit.name(), parameters = positions.len(), "gather shards over replicas");
            let signature = unit.signature(positions.iter().copied()).with_advice(REPLICA_GATHER_ADVICE);
            let work = replicas.signed(signature).all_gather(parts, unit.pool().clone());
            self.0.lock().push(ReplicaGather { work, positions });
        }
        Ok(())
    }

    /// Waits for the all-gathers over replicas.
    pub(super) fn wait(&self, unit: &UnitParams) -> Result<()> {
        let gathers = std::mem::take(&mut *self.0.lock());
        if gathers.is_empty() {
            return Ok(());
        }
        let _span = tracing::debug_span!("wait for all-gather", unit = unit.name(), what = "shards").entered();
        let _heartbeat = heartbeat::span("wait for all-gather", unit.name());
        let mut outcome = Ok(());
        for gather in gathers {
            match outcome {
                Ok(()) => outcome = Self::finish(unit, gather),
                // The others are waited for as well, so that none stays in flight.
                Err(_) => drop(gather.work.wait()),
            }
        }
        outcome
    }

    fn finish(unit: &UnitParams, ReplicaGather { work, positions }: ReplicaGather) -> Result<()> {
        let failed = |source| unit.communication_failed("all-gather over replicas", source);
        let buffers = work.wait().map_err(failed)?;
        if buffers.len() != positions.len() {
            bail!("FSDP unit `{}`: the all-gather over replicas returned {} buffers", unit.name(), buffers.len())
        }
        for (position, gathered) in positions.into_iter().zip(buffers) {
            let param = &unit.params()[position];
            let Some(sharding) = &param.spec.replica_sharding else { continue };
            let shard = if sharding.layout.is_concatenation() {
                gathered
            } else {
                let dtype = to_core_dtype(param.compute_dtype())?;
                let mut shard = unit.pool().take(dtype, sharding.shard_len()).map_err(Error::from)?;
                sharding.layout.unpack(&gathered, &mut shard)?;
                unit.pool().give(gathered);
                shard
            };
            unit.pool().leave(&shard);
            sharding.set_shard(Some(to_tensor(shard, &sharding.shape, param.device())?));
        }
        Ok(())
    }

    /// Drops the gathered shards, since the replicas' parts may have changed.
    pub(super) fn clear(&self, unit: &UnitParams) {
        for gather in std::mem::take(&mut *self.0.lock()) {
            for buffer in gather.work.wait().unwrap_or_default() {
                unit.pool().give(buffer);
            }
        }
        let shardings = unit.params().iter().filter_map(|param| param.spec.replica_sharding.as_ref());
        shardings.for_each(|sharding| sharding.set_shard(None));
    }
}
