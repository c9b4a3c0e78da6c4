//! Shards that are divided over replicas: gathered once a step, before the first all-gather, and dropped when an
//! optimizer may step.

use std::sync::Arc;

use candle_core::{Result, bail};
use fsdp_core::{Allocator, GatherPart, heartbeat};

use super::gather::own;
use super::group::ParamGroup;
use super::parts::ShardGathering;
use crate::data_parallel::DataParallel;
use crate::error::Error;
use crate::storage::{to_core_dtype, to_tensor};

/// The way out for ranks that gather different shards.
const ADVICE: &str = "Shards are gathered over replicas when a root's forward begins: every rank calls the same roots \
                      in the same order";

impl ParamGroup {
    /// Issues the gathers over replicas of the shards that are neither there nor on their way.
    pub(crate) fn gather_shards(&self) -> Result<()> {
        if !self.shards().is_empty() {
            return Ok(());
        }
        let mut sets: Vec<(Arc<DataParallel>, Vec<usize>)> = vec![];
        for (position, param) in self.params().iter().enumerate() {
            if param.parts().is_none_or(|parts| parts.are_gathered()) {
                continue;
            }
            match sets.iter_mut().find(|(ranks, _)| Arc::ptr_eq(ranks, param.ranks())) {
                Some((_, members)) => members.push(position),
                None => sets.push((param.ranks().clone(), vec![position])),
            }
        }
        for (ranks, members) in sets {
            let Some(replicas) = ranks.replicate() else { continue };
            let mut parts = vec![];
            for &position in &members {
                let param = &self.params()[position];
                let counts = param.parts().map(|parts| parts.layout().counts()).unwrap_or_default();
                parts.push(GatherPart { input: own(param)?, counts });
            }
            tracing::debug!(unit = self.name(), parameters = members.len(), "gather shards over replicas");
            let signature = self.members().signature(members.iter().copied()).with_advice(ADVICE);
            let work = replicas.signed(signature).all_gather(parts, self.members().pool.clone());
            self.shards().push(ShardGathering { work, members });
        }
        Ok(())
    }

    /// Waits until the shards are there.
    pub(super) fn await_shards(&self) -> Result<()> {
        let gatherings = std::mem::take(&mut *self.shards());
        if gatherings.is_empty() {
            return Ok(());
        }
        let _span = tracing::debug_span!("wait for all-gather", unit = self.name(), what = "shards").entered();
        let _told = heartbeat::span("wait for all-gather", self.name());
        let mut outcome = Ok(());
        for gathering in gatherings {
            match outcome {
                Ok(()) => outcome = self.land(gathering),
                // Nothing stays in flight behind one that failed.
                Err(_) => drop(gathering.work.wait()),
            }
        }
        outcome
    }

    fn land(&self, ShardGathering { work, members }: ShardGathering) -> Result<()> {
        let failed = |source| self.members().communication_failed("all-gather over replicas", source);
        let buffers = work.wait().map_err(failed)?;
        if buffers.len() != members.len() {
            bail!("FSDP unit `{}`: the all-gather over replicas returned {} buffers", self.name(), buffers.len())
        }
        let pool = &self.members().pool;
        for (position, parts_of_all) in members.into_iter().zip(buffers) {
            let param = &self.params()[position];
            let Some(parts) = param.parts() else { continue };
            let shard = if parts.layout().is_concatenation() {
                parts_of_all
            } else {
                let dtype = to_core_dtype(param.compute_dtype())?;
                let mut shard = pool.take(dtype, parts.shard_len()).map_err(Error::from)?;
                parts.layout().unpack(&parts_of_all, &mut shard)?;
                pool.give(parts_of_all);
                shard
            };
            pool.leave(&shard);
            parts.set(Some(to_tensor(shard, parts.shape(), param.device())?));
        }
        Ok(())
    }

    /// Drops the shards: the replicas' parts may have changed.
    pub(crate) fn drop_shards(&self) {
        for gathering in std::mem::take(&mut *self.shards()) {
            for buffer in gathering.work.wait().unwrap_or_default() {
                self.members().pool.give(buffer);
            }
        }
        self.params().iter().filter_map(|param| param.parts()).for_each(|parts| parts.set(None));
    }

    /// Whether replicas hold parts of some shards.
    pub(crate) fn is_divided(&self) -> bool {
        self.params().iter().any(|param| param.parts().is_some())
    }
}
