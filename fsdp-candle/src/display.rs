//! `Display` of models: units as a tree, with parameters, placements and bytes.

use std::fmt;
use std::sync::Arc;

use crate::fsdp::{FsdpModule, FsdpParam, FsdpParamGroup, Schedule, ShardedVarMap, UnitPath};

/// Formats bytes with a unit.
fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.),
    }
}

/// Returns the bytes of this rank's shard.
fn held(param: &FsdpParam) -> usize {
    param.stored_region().elements() * param.dtype().size_in_bytes()
}

/// Returns the bytes of all shards.
fn whole(param: &FsdpParam) -> usize {
    param.stored_shape().iter().product::<usize>() * param.dtype().size_in_bytes()
}

fn write_param(f: &mut fmt::Formatter<'_>, param: &FsdpParam, indent: &str) -> fmt::Result {
    let placements: Vec<String> = param.placements().iter().map(ToString::to_string).collect();
    write!(
        f,
        "{indent}{} {:?} {:?} ({}) {} of {}",
        param.name(),
        param.shape().dims(),
        param.spec.dtype,
        placements.join(", "),
        size(held(param)),
        size(whole(param))
    )?;
    if let Some(stored) = param.spec.encoding.stored() {
        write!(f, ", stored as {stored:?}")?;
    }
    if param.compute_dtype() != param.spec.dtype {
        write!(f, ", computes in {:?}", param.compute_dtype())?;
    }
    if let Some(parallel) = param.parallel() {
        write!(f, ", {}", parallel.style.name())?;
    }
    writeln!(f, "{}", if param.trainable() { "" } else { ", frozen" })
}

fn write_unit(f: &mut fmt::Formatter<'_>, schedule: &Schedule, unit: &FsdpParamGroup, depth: usize) -> fmt::Result {
    let indent = "  ".repeat(depth);
    let params = unit.params();
    let held: usize = params.iter().map(|param| held(param)).sum();
    let whole: usize = params.iter().map(|param| whole(param)).sum();
    writeln!(
        f,
        "{indent}{} [{:?}, {}]: this rank holds {} of {}",
        unit.name(),
        schedule.reshard_after_forward(unit),
        if unit.is_unsharded() { "unsharded" } else { "sharded" },
        size(held),
        size(whole)
    )?;
    params.iter().try_for_each(|param| write_param(f, param, &format!("{indent}  . ")))
}

/// Writes some of a model's units, each below the nearest unit around it.
fn write_tree(f: &mut fmt::Formatter<'_>, schedule: &Schedule, some: impl Fn(&FsdpParamGroup) -> bool) -> fmt::Result {
    let units = schedule.units();
    let paths: Vec<&UnitPath> = units.iter().map(|unit| unit.path()).collect();
    let mut within: Vec<_> = units.iter().filter(|unit| some(unit)).collect();
    // A unit comes before the units inside it; siblings keep the order of construction.
    within.sort_by_key(|unit| unit.path().depth(&paths));
    let mut written: Vec<usize> = vec![];
    fn descend(
        f: &mut fmt::Formatter<'_>,
        schedule: &Schedule,
        within: &[&Arc<FsdpParamGroup>],
        at: usize,
        written: &mut Vec<usize>,
        depth: usize,
    ) -> fmt::Result {
        written.push(at);
        write_unit(f, schedule, within[at], depth)?;
        for child in 0..within.len() {
            if !written.contains(&child) && within[at].path().contains(within[child].path()) {
                descend(f, schedule, within, child, written, depth + 1)?;
            }
        }
        Ok(())
    }
    for at in 0..within.len() {
        if !written.contains(&at) {
            descend(f, schedule, &within, at, &mut written, 0)?;
        }
    }
    Ok(())
}

impl<M> fmt::Display for FsdpModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_tree(f, &self.schedule, |unit| self.group.path().contains(unit.path()))
    }
}

impl fmt::Display for ShardedVarMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "mesh {} rank {}", self.mesh().layout(), self.mesh().rank())?;
        write_tree(f, self.schedule(), |_| true)
    }
}
