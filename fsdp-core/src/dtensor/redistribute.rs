//! Taking the steps of a plan.

use std::{ops::Range, sync::Arc};

use super::{
    memory::{LocalMemory, packing, unpacking},
    permute::{overlap, runs},
    plan::{Action, Step, plan},
    spec::{DTensorSpec, shape_of},
};
use crate::{
    Buffer, DeviceMesh, Error, ExchangePart, GatherPart, ProcessGroup, Readable, ReduceOp, Result, ScatterPart, Work,
    layout::Ranges,
};

/// A redistribution in flight: all its collectives are issued, and the last runs while the caller goes on.
///
/// It is for DTensors over whatever memory a library has; [`super::DTensor`] is over host buffers.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_core::{Buffer, DTensorSpec, DType, DeviceMesh, Heap, Placement, process_group::local};
/// use fsdp_core::dtensor::Redistribution;
/// local::run(2, |world| {
///     let mesh = DeviceMesh::new(&world, &[("dp", 2)])?;
///     let shards = DTensorSpec::new(mesh.layout().clone(), &[Placement::Shard(0)], &[2], DType::F32)?;
///     let whole = shards.with_placements(&[Placement::Replicate])?;
///     let mine = Arc::new(Buffer::F32(vec![world.rank() as f32]));
///     let gathering = Redistribution::issue(&shards, &whole, &mesh, mine, Arc::new(Heap))?;
///     // Something else is computed here.
///     assert_eq!(gathering.wait()?, Some(Buffer::F32(vec![0., 1.])));
///     Ok::<_, fsdp_core::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<_, fsdp_core::Error>(())
/// ```
#[must_use = "what arrives comes from wait()"]
pub struct Redistribution {
    last: Taken,
    memory: Arc<dyn LocalMemory>,
}

/// What a rank holds on the way.
enum Held {
    /// What it began with, which others may share.
    Given(Arc<dyn Readable>),
    /// What a step has made.
    Made(Buffer),
}

/// A step that has been taken.
enum Taken {
    Done(Held),
    InFlight(Box<InFlight>),
}

/// A collective that runs.
struct InFlight {
    work: Work,
    group: ProcessGroup,
    /// Where what comes from each rank belongs; as it comes, if nothing is said.
    arriving: Option<Vec<Vec<Range<usize>>>>,
}

impl Redistribution {
    /// Takes the steps of [`plan`] from one layout of a tensor to another, of which this rank holds `local`, row-major,
    /// in `memory`. Collective over the mesh. It returns when the last collective is issued, so that ranks issue them
    /// in the order of their calls; those before it are waited for. `local` is not to be changed before the end.
    ///
    /// # Errors
    /// Those of [`plan`] and of a collective, and when `local` does not fit `from`.
    pub fn issue(
        from: &DTensorSpec,
        to: &DTensorSpec,
        mesh: &DeviceMesh,
        local: Arc<dyn Readable>,
        memory: Arc<dyn LocalMemory>,
    ) -> Result<Self> {
        let expected = from.local_shape(mesh.rank())?;
        let len: usize = expected.iter().product();
        if (local.len(), local.dtype()) != (len, from.dtype()) {
            return Err(Error::Layout(format!(
                "rank {} of the mesh: the local tensor has {} elements of {}, but of {from} it must have shape \
                 {expected:?}, {len} elements",
                mesh.rank(),
                local.len(),
                local.dtype()
            )));
        }
        let (mut spec, mut last) = (from.clone(), Taken::Done(Held::Given(local)));
        for step in plan(from, to)? {
            let mut placements = spec.placements().to_vec();
            placements[step.mesh_dim] = step.to;
            let next = spec.with_placements(&placements)?;
            let held = last.land(&*memory)?;
            last = take(&step, &spec, &next, mesh, held, &memory)?;
            spec = next;
        }
        Ok(Redistribution { last, memory })
    }

    /// Whether [`Redistribution::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.last {
            Taken::Done(_) => true,
            Taken::InFlight(running) => running.work.is_done(),
        }
    }

    /// What this rank holds now; `None` if it is what it held before. As [`Work::wait`], it blocks for memory of the
    /// host, and lets a device wait by itself.
    ///
    /// # Errors
    /// Those of a collective.
    pub fn wait(self) -> Result<Option<Buffer>> {
        match self.last.land(&*self.memory)? {
            Held::Given(_) => Ok(None),
            Held::Made(buffer) => Ok(Some(buffer)),
        }
    }
}

impl Taken {
    fn land(self, memory: &dyn LocalMemory) -> Result<Held> {
        match self {
            Taken::Done(held) => Ok(held),
            Taken::InFlight(running) => {
                let InFlight { work, group, arriving } = *running;
                let parts = group.only_output(work)?;
                let Some(runs) = arriving else { return Ok(Held::Made(parts)) };
                unpacked(&group, parts, &runs, memory).map(Held::Made)
            }
        }
    }
}

impl Held {
    fn readable(&self) -> &dyn Readable {
        match self {
            Held::Given(local) => &**local,
            Held::Made(buffer) => buffer,
        }
    }

    fn into_readable(self) -> Arc<dyn Readable> {
        match self {
            Held::Given(local) => local,
            Held::Made(buffer) => Arc::new(buffer),
        }
    }
}

/// Does `step`. Collective over the ranks along the step's mesh dimension.
fn take(
    step: &Step,
    from: &DTensorSpec,
    to: &DTensorSpec,
    mesh: &DeviceMesh,
    held: Held,
    memory: &Arc<dyn LocalMemory>,
) -> Result<Taken> {
    let group = mesh.group(step.mesh_dim)?;
    let action = step.action().ok_or_else(|| {
        Error::Layout(format!("mesh dimension {} can't go from {} to {} at once", step.mesh_dim, step.from, step.to))
    })?;
    let sides = || Sides::new(step, from, to, mesh);
    let in_flight = |work, arriving| Taken::InFlight(Box::new(InFlight { work, group: group.clone(), arriving }));
    Ok(match action {
        Action::AllReduce(op) => {
            let buffer = match held {
                Held::Made(buffer) => buffer,
                Held::Given(local) => {
                    let all = 0..local.len();
                    packed(group, &*local, &[vec![all]], &**memory)?
                }
            };
            in_flight(group.all_reduce(vec![buffer], op), None)
        }
        Action::Split(op) => Taken::Done(split(group, held, op, &**memory)?),
        Action::Slice => {
            let runs = sides()?.kept();
            Taken::Done(Held::Made(packed(group, held.readable(), &[runs], &**memory)?))
        }
        Action::AllGather => {
            let arriving = sides()?.arriving();
            let part = GatherPart { input: held.into_readable(), counts: counts(&arriving) };
            in_flight(group.all_gather(vec![part], memory.clone()), Some(arriving))
        }
        Action::ReduceScatter(op) => {
            let leaving = sides()?.leaving();
            let input = packed(group, held.readable(), &leaving, &**memory)?;
            let part = ScatterPart { input, counts: counts(&leaving) };
            in_flight(group.reduce_scatter(vec![part], op, memory.clone()), None)
        }
        Action::AllToAll => {
            let sides = sides()?;
            let (leaving, arriving) = (sides.leaving(), sides.arriving());
            let part = ExchangePart {
                input: packed(group, held.readable(), &leaving, &**memory)?,
                send_counts: counts(&leaving),
                recv_counts: counts(&arriving),
            };
            in_flight(group.all_to_all(vec![part], memory.clone()), Some(arriving))
        }
    })
}

/// Terms of what every rank holds: for a sum the first rank keeps it and the others have zeros, otherwise it is its own
/// average, smallest and largest.
fn split(group: &ProcessGroup, held: Held, op: ReduceOp, memory: &dyn LocalMemory) -> Result<Held> {
    let local = held.readable();
    match op {
        ReduceOp::Sum if group.rank() > 0 => memory.zeros(local.dtype(), local.len()).map(Held::Made),
        _ => Ok(held),
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

    /// Which runs of what this rank holds before the step it still holds after it.
    fn kept(&self) -> Vec<Range<usize>> {
        let (from, to) = (&self.from[self.own], &self.to[self.own]);
        runs(&shape_of(from), &overlap(from, to).0)
    }
}

fn counts(runs: &[Vec<Range<usize>>]) -> Vec<usize> {
    runs.iter().map(|runs| runs.iter().map(Range::len).sum()).collect()
}

/// The runs of `local`, one list after the other.
fn packed(
    group: &ProcessGroup,
    local: &dyn Readable,
    runs: &[Vec<Range<usize>>],
    memory: &dyn LocalMemory,
) -> Result<Buffer> {
    let mut packed = memory.take(local.dtype(), counts(runs).iter().sum())?;
    let mut rows = Vec::new();
    let mut at = 0;
    for (runs, count) in runs.iter().zip(counts(runs)) {
        rows.extend(packing(runs, at));
        at += count;
    }
    let mut outcome = Ok(());
    local.view(&mut |view| outcome = memory.copy_rows(view, &mut packed, &rows)).map_err(|why| {
        let message = format!("a DTensor's elements can't be read now: {why}");
        Error::Argument { rank: group.rank(), message }
    })?;
    outcome.map(|()| packed)
}

/// The elements of `parts`, one list of runs after the other, where these runs are.
fn unpacked(
    group: &ProcessGroup,
    parts: Buffer,
    runs: &[Vec<Range<usize>>],
    memory: &dyn LocalMemory,
) -> Result<Buffer> {
    let mut end = 0;
    let in_place = runs.iter().flatten().all(|run| run.start == std::mem::replace(&mut end, run.end));
    if in_place {
        return Ok(parts);
    }
    let mut whole = memory.take(parts.dtype(), parts.len())?;
    let mut rows = Vec::new();
    let mut at = 0;
    for (runs, count) in runs.iter().zip(counts(runs)) {
        rows.extend(unpacking(runs, at));
        at += count;
    }
    let mut outcome = Ok(());
    let read = parts.view(&mut |view| outcome = memory.copy_rows(view, &mut whole, &rows));
    read.map_err(|what| Error::Internal { rank: group.rank(), what })?;
    outcome?;
    memory.give(parts);
    Ok(whole)
}
