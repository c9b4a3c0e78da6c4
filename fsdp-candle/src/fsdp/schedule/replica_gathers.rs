//! The gathers over replicas of the shards that replicas divide among them: when they begin, and how long they last.

use std::sync::Arc;

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
        units.iter().for_each(|unit| unit.drop_stale_replica_shards());
        let is_inside = |unit: &&Arc<FsdpParamGroup>| unit.index() == root.index() || root.path().contains(unit.path());
        units.iter().filter(is_inside).try_for_each(|unit| unit.start_replica_gather())
    }

    /// Records whether a backward handed out gradients: an optimizer may then change the shards.
    pub(super) fn handed_out(&self, gradients: bool) {
        self.units().iter().for_each(|unit| unit.set_replica_shards_fresh(!gradients));
    }

    /// Reshards a unit. An optimizer may step before the next unshard, unless micro-batches share the shards that were
    /// gathered over replicas.
    pub(super) fn reshard(&self, unit: &FsdpParamGroup) -> Result<()> {
        unit.drop_stale_replica_shards();
        unit.reshard()
    }

    /// Reshards every unit, since shards have changed.
    pub(crate) fn reshard_all(&self) -> Result<()> {
        let units = self.units();
        units.iter().for_each(|unit| unit.set_replica_shards_fresh(false));
        units.iter().try_for_each(|unit| unit.reshard())
    }
}
