//! Forward: the hooks around a called unit.

use std::sync::Arc;

use candle_core::Result;

use super::Schedule;
use super::explain::explain;
use crate::autograd::keeps_graph;
use crate::fsdp::callers::Entered;
use crate::fsdp::frozen_call::FrozenCall;
use crate::fsdp::order::{Forward, GraphExists};
use crate::fsdp::param_group::FsdpParamGroup;

impl Schedule {
    /// Runs before the forward of a called unit: unshards it, and prefetches the next units.
    pub(in crate::fsdp) fn pre_forward(&self, unit: &Arc<FsdpParamGroup>) -> Result<ForwardGuard<'_>> {
        self.check(unit.id())?;
        let entered = self.callers.enter(unit)?;
        self.check_model()?;
        let begun = {
            let units = self.units.lock();
            let may_be_stale = |unit: usize| units.get(unit).is_some_and(|unit| unit.may_be_stale());
            self.order.lock().pre_forward(unit.index(), keeps_graph(), may_be_stale)
        };
        let (forward, actions) = begun.map_err(|error| explain(error, unit.id()))?;
        let guard = ForwardGuard { schedule: self, forward, exists: None, ok: false, _entered: entered };
        if forward.is_root {
            self.start_replica_gathers(unit)?;
        }
        self.execute(actions)?;
        Ok(guard)
    }

    /// Runs the checks of the complete model, until all have passed once.
    pub(super) fn check_model(&self) -> Result<()> {
        let checks = self.first_forward_checks.lock().clone();
        checks.iter().try_for_each(|check| check())?;
        self.first_forward_checks.lock().clear();
        Ok(())
    }

    /// Runs after the forward of a called unit, which consists of `parts` modules. Returns whether its outputs need a
    /// pre-backward hook. Drop the guard when they have it.
    pub(in crate::fsdp) fn post_forward(
        &self,
        unit: &FsdpParamGroup,
        guard: &mut ForwardGuard<'_>,
        parts: usize,
    ) -> Result<bool> {
        let (hook, actions) = self.order.lock().post_forward(unit.index(), guard.forward, parts);
        self.execute(actions)?;
        if guard.forward.is_root && !keeps_graph() {
            self.units().iter().for_each(|unit| unit.drop_replica_shards());
        }
        guard.ok = true;
        Ok(hook)
    }

    /// Begins a call of a unit with frozen parameters.
    pub(in crate::fsdp) fn frozen_call(&self, unit: &FsdpParamGroup) -> Arc<FrozenCall> {
        let call = Arc::new(FrozenCall::new(unit.index()));
        let mut calls = self.frozen_calls.lock();
        if calls.len() == calls.capacity() {
            calls.retain(|call| call.strong_count() > 0);
        }
        calls.push(Arc::downgrade(&call));
        call
    }
}

/// A running forward. Dropping it before [`Schedule::post_forward`] means that the forward failed.
pub(in crate::fsdp) struct ForwardGuard<'a> {
    schedule: &'a Schedule,
    pub(in crate::fsdp) forward: Forward,
    /// Returns whether the graph of the outputs exists, if that can be told.
    pub(in crate::fsdp) exists: Option<GraphExists>,
    ok: bool,
    /// Ends after the forward.
    _entered: Entered<'a>,
}

impl Drop for ForwardGuard<'_> {
    fn drop(&mut self) {
        self.schedule.order.lock().end_forward(self.forward, self.exists.take());
        if !self.ok && self.forward.is_root {
            self.schedule.reset();
        }
    }
}
