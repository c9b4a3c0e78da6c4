//! Units that the user unshards and reshards: by hand, or with a handle of `unshard_all`.

use std::sync::Arc;

use candle_core::Result;

use super::Schedule;
use crate::autograd::keeps_graph;
use crate::error::Error;
use crate::fsdp::order::Order;
use crate::fsdp::param_group::FsdpParamGroup;

impl Schedule {
    /// Returns a called unit and the units by name that its call runs.
    fn called_with(&self, called: &FsdpParamGroup) -> Vec<Arc<FsdpParamGroup>> {
        let units = self.units();
        let with = self.order.lock().called_with(called.index());
        with.into_iter().filter_map(|unit| units.get(unit).cloned()).collect()
    }

    /// Issues the all-gathers of a called unit and its units by name. Returns these units. They stay unsharded until
    /// the user reshards them, a forward with a graph does, or backward.
    pub(in crate::fsdp) fn start_unshard_by_hand(&self, called: &FsdpParamGroup) -> Result<Vec<Arc<FsdpParamGroup>>> {
        let units = self.called_with(called);
        for unit in &units {
            self.refresh(unit, |order| order.unshard_by_hand(unit.index()))?;
            unit.start_unshard()?;
        }
        Ok(units)
    }

    /// Reshards a unit that a forward left unsharded, if its values may be stale. `left` tells whether a forward did.
    fn refresh(&self, unit: &FsdpParamGroup, left: impl FnOnce(&mut Order) -> bool) -> Result<()> {
        let left = left(&mut self.order.lock());
        if left && unit.may_be_stale() { unit.reshard() } else { Ok(()) }
    }

    /// Reshards a called unit and its units by name, by the user's hand.
    pub(in crate::fsdp) fn reshard_by_hand(&self, called: &FsdpParamGroup) -> Result<()> {
        self.called_with(called).iter().try_for_each(|unit| {
            self.order.lock().reshard_by_hand(unit.index());
            self.reshard(unit)
        })
    }

    /// Unshards units for [`Schedule::release`], one after the other.
    pub(in crate::fsdp) fn hold(&self, units: &[Arc<FsdpParamGroup>]) -> Result<()> {
        self.check_model()?;
        for (at, unit) in units.iter().enumerate() {
            let held = self.refresh(unit, |order| order.hold(unit.index())).and_then(|()| unit.unshard());
            if let Err(error) = held {
                self.release(&units[..=at]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Reshards units that [`Schedule::hold`] unsharded, unless another handle holds them.
    pub(in crate::fsdp) fn release(&self, units: &[Arc<FsdpParamGroup>]) {
        for unit in units.iter().filter(|unit| self.has(unit.id())) {
            let is_held = self.order.lock().release(unit.index());
            if !is_held && let Err(error) = self.reshard(unit) {
                tracing::warn!(unit = unit.name(), %error, "reshard of a unit that was held unsharded");
            }
        }
    }

    /// Returns whether a forward of this unit runs without hooks: no other forward runs, and all units inside it are
    /// held unsharded, or were unsharded by hand and need no graph. Such a forward leaves no trace, so ranks may run
    /// different numbers of them.
    pub(in crate::fsdp) fn runs_without_hooks(&self, unit: &FsdpParamGroup) -> Result<bool> {
        let is_held = {
            let order = self.order.lock();
            if order.is_running() {
                return Ok(false);
            }
            order.is_held(unit.index())
        };
        if !is_held && keeps_graph() {
            return Ok(false);
        }
        let inside = self.units_inside(unit.path());
        let freed = inside.iter().find(|unit| !unit.is_whole());
        match freed {
            Some(freed) if is_held => Err(Error::unit(
                freed.name(),
                "`unshard_all` held it, and an optimizer's step, a load or a failed step has freed its values since: \
                 drop the handle, and call `unshard_all` again on every rank",
            )
            .into()),
            Some(_) => Ok(false),
            None => {
                let order = self.order.lock();
                let by_hand =
                    |unit: &Arc<FsdpParamGroup>| unit.params().is_empty() || order.is_unsharded_by_hand(unit.index());
                Ok(is_held || inside.iter().all(by_hand))
            }
        }
    }
}
