//! Taking the steps of a plan.

use std::{ops::Range, sync::Arc};

use super::{
    permute::{overlap, pack, runs, unpack},
    plan::{Action, Step},
    spec::{DTensorSpec, shape_of},
};
use crate::{
    Buffer, DeviceMesh, Error, ExchangePart, GatherPart, Heap, ProcessGroup, ReduceOp, Result, ScatterPart,
    layout::Ranges,
};

/// What this rank holds after `step`, of what it holds before. Collective over the ranks along the step's mesh
/// dimension.
pub(super) fn take(
    step: &Step,
    from: &DTensorSpec,
    to: &DTensorSpec,
    mesh: &DeviceMesh,
    local: Arc<Buffer>,
) -> Result<Arc<Buffer>> {
    let group = mesh.group(step.mesh_dim)?;
    let action = step.action().ok_or_else(|| {
        Error::Layout(format!("mesh dimension {} can't go from {} to {} at once", step.mesh_dim, step.from, step.to))
    })?;
    match action {
        Action::AllReduce(op) => all_reduce(group, local, op).map(Arc::new),
        Action::Split(op) => split(group, local, op),
        Action::Slice => Sides::new(step, from, to, mesh)?.slice(&local).map(Arc::new),
        Action::AllGather => Sides::new(step, from, to, mesh)?.all_gather(group, local).map(Arc::new),
        Action::ReduceScatter(op) => Sides::new(step, from, to, mesh)?.reduce_scatter(group, &local, op).map(Arc::new),
        Action::AllToAll => Sides::new(step, from, to, mesh)?.all_to_all(group, &local).map(Arc::new),
    }
}

fn all_reduce(group: &ProcessGroup, local: Arc<Buffer>, op: ReduceOp) -> Result<Buffer> {
    group.only_output(group.all_reduce(vec![Arc::unwrap_or_clone(local)], op))
}

/// Terms of what every rank holds: for a sum the first rank keeps it and the others have zeros, otherwise it is its own
/// average, smallest and largest.
fn split(group: &ProcessGroup, local: Arc<Buffer>, op: ReduceOp) -> Result<Arc<Buffer>> {
    match op {
        ReduceOp::Sum if group.rank() > 0 => Buffer::try_zeros(local.dtype(), local.len()).map(Arc::new),
        _ => Ok(local),
    }
}

/// What the ranks along a mesh dimension hold before and after a step, in their order.
struct Sides {
    /// This rank's place among them.
    own: usize,
    from: Vec<Vec<Ranges>>,
    to: Vec<Vec<Ranges>>,
}

impl Sides {
    fn new(step: &Step, from: &DTensorSpec, to: &DTensorSpec, mesh: &DeviceMesh) -> Result<Self> {
        let outside = || Error::Internal {
            rank: mesh.rank(),
            what: format!("mesh {} has no such rank along its dimension {}", mesh.layout(), step.mesh_dim),
        };
        let ranks = mesh.layout().ranks_along(step.mesh_dim, mesh.rank()).ok_or_else(outside)?;
        let own = ranks.iter().position(|&rank| rank == mesh.rank()).ok_or_else(outside)?;
        let ranges = |spec: &DTensorSpec| ranks.iter().map(|&rank| spec.ranges(rank)).collect::<Result<Vec<_>>>();
        Ok(Sides { own, from: ranges(from)?, to: ranges(to)? })
    }

    /// Which runs of what this rank holds before the step every rank holds after it.
    fn leaving(&self) -> Vec<Vec<Range<usize>>> {
        let own = &self.from[self.own];
        self.to.iter().map(|to| runs(&shape_of(own), &overlap(own, to).0)).collect()
    }

    /// Which runs of what this rank holds after the step every rank holds before it.
    fn arriving(&self) -> Vec<Vec<Range<usize>>> {
        let own = &self.to[self.own];
        self.from.iter().map(|from| runs(&shape_of(own), &overlap(from, own).1)).collect()
    }

    fn slice(&self, local: &Buffer) -> Result<Buffer> {
        let (from, to) = (&self.from[self.own], &self.to[self.own]);
        packed(local, &[runs(&shape_of(from), &overlap(from, to).0)])
    }

    fn all_gather(&self, group: &ProcessGroup, local: Arc<Buffer>) -> Result<Buffer> {
        let arriving = self.arriving();
        let part = GatherPart { input: local, counts: counts(&arriving) };
        unpacked(group.only_output(group.all_gather(vec![part], Heap::shared()))?, &arriving)
    }

    fn reduce_scatter(&self, group: &ProcessGroup, local: &Buffer, op: ReduceOp) -> Result<Buffer> {
        let leaving = self.leaving();
        let part = ScatterPart { input: packed(local, &leaving)?, counts: counts(&leaving) };
        group.only_output(group.reduce_scatter(vec![part], op, Heap::shared()))
    }

    fn all_to_all(&self, group: &ProcessGroup, local: &Buffer) -> Result<Buffer> {
        let (leaving, arriving) = (self.leaving(), self.arriving());
        let part = ExchangePart {
            input: packed(local, &leaving)?,
            send_counts: counts(&leaving),
            recv_counts: counts(&arriving),
        };
        unpacked(group.only_output(group.all_to_all(vec![part], Heap::shared()))?, &arriving)
    }
}

fn counts(runs: &[Vec<Range<usize>>]) -> Vec<usize> {
    runs.iter().map(|runs| runs.iter().map(Range::len).sum()).collect()
}

/// The runs of `local`, one list after the other.
fn packed(local: &Buffer, runs: &[Vec<Range<usize>>]) -> Result<Buffer> {
    let mut packed = Buffer::try_zeros(local.dtype(), counts(runs).iter().sum())?;
    let mut rest = packed.bytes_mut();
    for runs in runs {
        rest = pack(local.bytes(), runs, local.dtype().size(), rest);
    }
    Ok(packed)
}

/// The elements of `parts`, one list of runs after the other, where these runs are.
fn unpacked(parts: Buffer, runs: &[Vec<Range<usize>>]) -> Result<Buffer> {
    let mut end = 0;
    let in_place = runs.iter().flatten().all(|run| run.start == std::mem::replace(&mut end, run.end));
    if in_place {
        return Ok(parts);
    }
    let mut whole = Buffer::try_zeros(parts.dtype(), parts.len())?;
    let mut rest = parts.bytes();
    for runs in runs {
        rest = unpack(rest, runs, parts.dtype().size(), whole.bytes_mut());
    }
    Ok(whole)
}
