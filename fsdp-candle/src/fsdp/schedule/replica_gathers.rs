//! The gathers over replicas of the shards that replicas divide among them: when they begin, and how long they last.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::Result;

use super::Schedule;
use crate::fsdp::param_group::FsdpParamGroup;

impl Schedule {
    /// Issues the all-gathers over replicas for the units inside a root: all at once and in one order, whatever the
    /// forward will use.
    pub(super) fn start_replica_gathers(&self, root: &FsdpParamGroup) -> Result<()> {
        let units = self.units();
        if !units.iter().any(|unit| unit.is_sharded_over_replicas()) {
            return Ok(());
        }
        if !self.replica_shards_are_fresh.load(Ordering::Relaxed) {
            units.iter().for_each(|unit| unit.drop_replica_gather());
        }
        let is_inside = |unit: &&Arc<FsdpParamGroup>| unit.index() == root.index() || root.path().contains(unit.path());
        units.iter().filter(is_inside).try_for_each(|unit| unit.start_replica_gather())
    }

    pub(super) fn drop_replica_gathers(&self) {
        self.units().iter().for_each(|unit| unit.drop_replica_gather());
    }

    /// Records whether a backward handed out gradients: an optimizer may then change the shards.
    pub(super) fn handed_out(&self, gradients: bool) {
        self.replica_shards_are_fresh.store(!gradients, Ordering::Relaxed);
        if gradients {
            self.drop_replica_gathers();
        }
    }

    /// Reshards a unit. An optimizer may step before the next unshard, unless micro-batches share the shards that were
    /// gathered over replicas.
    pub(in crate::fsdp) fn reshard(&self, unit: &FsdpParamGroup) -> Result<()> {
        if !self.replica_shards_are_fresh.load(Ordering::Relaxed) {
            unit.drop_replica_gather();
        }
        unit.reshard()
    }

    /// Reshards every unit, since shards have changed.
    pub(crate) fn reshard_all(&self) -> Result<()> {
        self.replica_shards_are_fresh.store(false, Ordering::Relaxed);
        self.units().iter().try_for_each(|unit| unit.reshard())?;
        self.drop_replica_gathers();
        Ok(())
    }
}
