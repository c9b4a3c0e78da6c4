//! A `fully_shard` call while its closure runs: all or nothing of what it asks for becomes a unit.

use std::sync::Arc;

use super::options::UnitOptions;
use super::var_map::{Building, ShardedVarMap, lock};
use crate::data_parallel::DataParallel;
use crate::fsdp::unit::FsdpParam;

/// A `fully_shard` call whose closure runs. Dropped before it is closed, it takes back all that the closure made.
pub(super) struct OpenUnit<'a> {
    vars: &'a ShardedVarMap,
    depth: usize,
    units: usize,
    params: usize,
    ignored: usize,
    buffers: usize,
    built: bool,
}

impl<'a> OpenUnit<'a> {
    /// Opens a unit: parameters asked for until it is closed are its own.
    pub(super) fn begin(vars: &'a ShardedVarMap, name: &str, opts: &UnitOptions, ranks: &Arc<DataParallel>) -> Self {
        let units = vars.0.schedule.next_index();
        let mut building = lock(&vars.0.building);
        let serial = units + building.len();
        building.push(Building { name: name.into(), serial, opts: opts.clone(), ranks: ranks.clone(), params: vec![] });
        OpenUnit {
            vars,
            depth: building.len(),
            units,
            params: lock(&vars.0.params).len(),
            ignored: lock(&vars.0.ignored).len(),
            buffers: lock(&vars.0.buffers).len(),
            built: false,
        }
    }

    /// Whether nothing was asked for in the unit's own name.
    pub(super) fn is_empty(&self) -> bool {
        let inner = &self.vars.0;
        lock(&inner.building).last().is_none_or(|unit| unit.params.is_empty())
            && lock(&inner.ignored).len() == self.ignored
            && lock(&inner.buffers).len() == self.buffers
    }

    /// The parameters that were asked for so far.
    pub(super) fn params(&self) -> Vec<Arc<FsdpParam>> {
        lock(&self.vars.0.building).last().map_or_else(Vec::new, |unit| unit.params.clone())
    }

    /// What was asked for stays.
    pub(super) fn close(mut self) {
        self.built = true;
        lock(&self.vars.0.building).pop();
    }
}

impl Drop for OpenUnit<'_> {
    fn drop(&mut self) {
        if !self.built {
            lock(&self.vars.0.building).truncate(self.depth - 1);
            lock(&self.vars.0.params).truncate(self.params);
            lock(&self.vars.0.ignored).truncate(self.ignored);
            lock(&self.vars.0.buffers).truncate(self.buffers);
            self.vars.0.schedule.truncate(self.units);
        }
    }
}
