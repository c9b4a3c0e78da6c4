//! The execution of a plan: pack what leaves a rank, run the collectives, unpack what the other ranks sent.
//!
//! A part of a local tensor is the product of one list of index ranges a dimension. [`overlap`] finds the part that two
//! ranks share, [`runs`] lists its elements as runs of consecutive elements, and [`packing`] joins runs at even
//! distances to [`Rows`], which the memory copies.

#![allow(clippy::single_range_in_vec_init, reason = "a part is a list of ranges, often of one")]

use std::{ops::Range, sync::Arc};

use super::{
    plan::{Action, Step, plan},
    spec::{DTensorSpec, shape_of},
};
use crate::{
    Allocator, Buffer, DType, DeviceMesh, Error, ExchangePart, GatherPart, Heap, ProcessGroup, Readable, ReduceOp,
    Result, ScatterPart, View, Work,
    layout::Ranges,
    process_group::{Signature, Subject},
};

/// A redistribution in flight. All its collectives are issued; the last one runs while the caller continues.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_core::{Buffer, DTensorSpec, DType, DeviceMesh, Heap, Placement, process_group::local};
/// use fsdp_core::dtensor::Redistribution;
/// local::try_run(2, |world| {
///     let mesh = DeviceMesh::new(&world, &[("dp", 2)])?;
///     let shards = DTensorSpec::new(mesh.layout().clone(), &[Placement::Shard(0)], &[2], DType::F32)?;
///     let whole = shards.with_placements(&[Placement::Replicate])?;
///     let mine = Arc::new(Buffer::F32(vec![world.rank() as f32]));
///     let gathering = Redistribution::issue(&shards, &whole, &mesh, mine, Arc::new(Heap), Some("weight"))?;
///     // Something else is computed here.
///     assert_eq!(gathering.wait()?, Some(Buffer::F32(vec![0., 1.])));
///     Ok::<_, fsdp_core::Error>(())
/// })?;
/// # Ok::<_, fsdp_core::Error>(())
/// ```
#[must_use = "what arrives comes from wait()"]
pub struct Redistribution {
    last: StepState,
    memory: Arc<dyn LocalMemory>,
}

/// The local elements between two steps.
enum Local {
    /// The caller's input, which others may share.
    Input(Arc<dyn Readable>),
    /// The output of a step.
    Output(Buffer),
}

/// The last executed step.
enum StepState {
    Done(Local),
    InFlight(Box<InFlight>),
}

/// The collective of a step, which runs.
struct InFlight {
    work: Work,
    group: ProcessGroup,
    /// Where each rank's elements belong in the output. `None` if they are in order.
    received: Option<Vec<Vec<Range<usize>>>>,
}

impl Redistribution {
    /// Executes the steps of [`plan`] from one layout of a tensor to another. This rank's elements are `local`,
    /// row-major, in `memory`. Collective over the mesh.
    ///
    /// Returns when the last collective is issued, so ranks issue collectives in the order of their calls. Earlier
    /// collectives are waited for. Do not change `local` before [`Redistribution::wait`] returns. Errors call the tensor
    /// by its `name`, if it has one. Ranks whose names, layouts or goals differ get [`Error::Mismatch`].
    ///
    /// # Errors
    /// Returns the errors of [`plan`] and of the collectives, and an error when `local` does not fit `from`.
    pub fn issue(
        from: &DTensorSpec,
        to: &DTensorSpec,
        mesh: &DeviceMesh,
        local: Arc<dyn Readable>,
        memory: Arc<dyn LocalMemory>,
        name: Option<&str>,
    ) -> Result<Self> {
        let expected = from.local_shape(mesh.rank())?;
        let len: usize = expected.iter().product();
        if (local.len(), local.dtype()) != (len, from.dtype()) {
            return Err(Error::Layout(format!(
                "rank {} of the mesh: the local tensor has {} elements of {}, expected {len} of shape \
                 {expected:?} for {from}",
                mesh.rank(),
                local.len(),
                local.dtype()
            )));
        }
        let (mut spec, mut last) = (from.clone(), StepState::Done(Local::Input(local)));
        let steps = plan(from, to)?;
        let name = name.map_or_else(|| "a DTensor".to_string(), |name| format!("`{name}`"));
        let signature = Signature::new(&Subject::new(format!("{name}, {from}, to {to}"), []), []);
        for step in steps {
            let mut placements = spec.placements().to_vec();
            placements[step.mesh_dim] = step.to;
            let next = spec.with_placements(&placements)?;
            let local = last.wait(&*memory)?;
            last = execute(&step, &spec, &next, mesh, &signature, local, &memory)?;
            spec = next;
        }
        Ok(Redistribution { last, memory })
    }

    /// Returns whether [`Redistribution::wait`] would return at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.last {
            StepState::Done(_) => true,
            StepState::InFlight(running) => running.work.is_done(),
        }
    }

    /// Returns this rank's new elements, or `None` if they are the input's. As [`Work::wait`], it blocks for host
    /// memory and orders the stream of a device.
    pub fn wait(self) -> Result<Option<Buffer>> {
        match self.last.wait(&*self.memory)? {
            Local::Input(_) => Ok(None),
            Local::Output(buffer) => Ok(Some(buffer)),
        }
    }
}

impl StepState {
    fn wait(self, memory: &dyn LocalMemory) -> Result<Local> {
        match self {
            StepState::Done(local) => Ok(local),
            StepState::InFlight(running) => {
                let InFlight { work, group, received } = *running;
                let parts = group.only_output(work)?;
                let Some(runs) = received else { return Ok(Local::Output(parts)) };
                unpacked(&group, parts, &runs, memory).map(Local::Output)
            }
        }
    }
}

impl Local {
    fn readable(&self) -> &dyn Readable {
        match self {
            Local::Input(local) => &**local,
            Local::Output(buffer) => buffer,
        }
    }

    fn into_readable(self) -> Arc<dyn Readable> {
        match self {
            Local::Input(local) => local,
            Local::Output(buffer) => Arc::new(buffer),
        }
    }
}

/// Executes `step`, whose collective has this signature. Collective over the ranks along the step's mesh dimension.
fn execute(
    step: &Step,
    from: &DTensorSpec,
    to: &DTensorSpec,
    mesh: &DeviceMesh,
    signature: &Signature,
    local: Local,
    memory: &Arc<dyn LocalMemory>,
) -> Result<StepState> {
    let group = &mesh.group(step.mesh_dim)?.signed(signature.clone());
    let action = step.action().ok_or_else(|| {
        Error::Layout(format!("mesh dimension {}: no single step from {} to {}", step.mesh_dim, step.from, step.to))
    })?;
    let parts = || RankParts::new(step, from, to, mesh);
    let in_flight = |work, received| StepState::InFlight(Box::new(InFlight { work, group: group.clone(), received }));
    Ok(match action {
        Action::AllReduce(op) => {
            let buffer = match local {
                Local::Output(buffer) => buffer,
                Local::Input(local) => {
                    let all = 0..local.len();
                    packed(group, &*local, &[vec![all]], &**memory)?
                }
            };
            in_flight(group.all_reduce(vec![buffer], op), None)
        }
        Action::Split(op) => StepState::Done(split(group, local, op, &**memory)?),
        Action::Slice => {
            let runs = parts()?.kept();
            StepState::Done(Local::Output(packed(group, local.readable(), &[runs], &**memory)?))
        }
        Action::AllGather => {
            let received = parts()?.received();
            let part = GatherPart { input: local.into_readable(), counts: counts(&received) };
            in_flight(group.all_gather(vec![part], memory.clone()), Some(received))
        }
        Action::ReduceScatter(op) => {
            let sent = parts()?.sent();
            let input = packed(group, local.readable(), &sent, &**memory)?;
            let part = ScatterPart { input, counts: counts(&sent) };
            in_flight(group.reduce_scatter(vec![part], op, memory.clone()), None)
        }
        Action::AllToAll => {
            let parts = parts()?;
            let (sent, received) = (parts.sent(), parts.received());
            let part = ExchangePart {
                input: packed(group, local.readable(), &sent, &**memory)?,
                send_counts: counts(&sent),
                recv_counts: counts(&received),
            };
            in_flight(group.all_to_all(vec![part], memory.clone()), Some(received))
        }
    })
}

/// Makes terms of a replicated tensor. For a sum, the first rank keeps the elements and the others get zeros; otherwise
/// every rank keeps them.
fn split(group: &ProcessGroup, input: Local, op: ReduceOp, memory: &dyn LocalMemory) -> Result<Local> {
    let local = input.readable();
    match op {
        ReduceOp::Sum if group.rank() > 0 => memory.zeros(local.dtype(), local.len()).map(Local::Output),
        _ => Ok(input),
    }
}

/// Index ranges that each rank along a mesh dimension holds before and after a step.
struct RankParts {
    /// This rank's position among the ranks.
    own: usize,
    from: Vec<Vec<Ranges>>,
    to: Vec<Vec<Ranges>>,
}

impl RankParts {
    fn new(step: &Step, from: &DTensorSpec, to: &DTensorSpec, mesh: &DeviceMesh) -> Result<Self> {
        let outside = || Error::Internal {
            rank: mesh.rank(),
            what: format!("mesh {} has no such rank along its dimension {}", mesh.layout(), step.mesh_dim),
        };
        let ranks = mesh.layout().ranks_along(step.mesh_dim, mesh.rank()).ok_or_else(outside)?;
        let own = ranks.iter().position(|&rank| rank == mesh.rank()).ok_or_else(outside)?;
        let ranges = |spec: &DTensorSpec| ranks.iter().map(|&rank| spec.ranges(rank)).collect::<Result<Vec<_>>>();
        Ok(RankParts { own, from: ranges(from)?, to: ranges(to)? })
    }

    /// Returns, for each rank, the runs of this rank's old elements that the rank holds after the step.
    fn sent(&self) -> Vec<Vec<Range<usize>>> {
        let own = &self.from[self.own];
        self.to.iter().map(|to| runs(&shape_of(own), &overlap(own, to).0)).collect()
    }

    /// Returns, for each rank, the runs of this rank's new elements that the rank holds before the step.
    fn received(&self) -> Vec<Vec<Range<usize>>> {
        let own = &self.to[self.own];
        self.from.iter().map(|from| runs(&shape_of(own), &overlap(from, own).1)).collect()
    }

    /// Returns the runs of this rank's old elements that it keeps.
    fn kept(&self) -> Vec<Range<usize>> {
        let (from, to) = (&self.from[self.own], &self.to[self.own]);
        runs(&shape_of(from), &overlap(from, to).0)
    }
}

fn counts(runs: &[Vec<Range<usize>>]) -> Vec<usize> {
    runs.iter().map(|runs| runs.iter().map(Range::len).sum()).collect()
}

/// Copies runs of `local` into a new buffer, one list after the other.
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
        let message = format!("the elements of a DTensor cannot be read: {why}");
        Error::Argument { rank: group.rank(), message }
    })?;
    outcome.map(|()| packed)
}

/// Copies the elements of `parts`, one list of runs after the other, to the positions of the runs.
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

/// Rows of elements at even distances, to copy from one memory to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of rows.
    pub count: usize,
    /// Elements in a row.
    pub len: usize,
    /// First element to read.
    pub from: usize,
    /// First element to write.
    pub to: usize,
    /// Elements from one row to the next in the source.
    pub from_stride: usize,
    /// Elements from one row to the next in the destination.
    pub to_stride: usize,
}

/// Memory of one device in which a [`Redistribution`] packs and unpacks. [`Heap`] is host memory.
pub trait LocalMemory: Allocator {
    /// Returns a buffer of zeros.
    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Copies rows. The elements of `from` have the dtype of `to`.
    ///
    /// # Errors
    /// Returns an error when the memory belongs to another device or a row is out of bounds.
    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> Result<()>;
}

impl LocalMemory for Heap {
    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Buffer::try_zeros(dtype, len)
    }

    #[allow(clippy::infallible_destructuring_match, reason = "there may be memory of devices")]
    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> Result<()> {
        let size = to.dtype().size();
        let from = match from {
            View::Host(bytes) => bytes,
            #[cfg(feature = "cuda")]
            View::Cuda(view) => {
                let cause = "host memory cannot copy device memory; pass the memory of the device";
                return Err(crate::device::cuda::failed(view.stream(), "copying elements of a DTensor", &cause));
            }
        };
        let to = to.bytes_mut();
        for rows in rows {
            for row in 0..rows.count {
                let (read, written) = (rows.from + row * rows.from_stride, rows.to + row * rows.to_stride);
                to[written * size..(written + rows.len) * size]
                    .copy_from_slice(&from[read * size..(read + rows.len) * size]);
            }
        }
        Ok(())
    }
}

/// Returns the rows that copy `runs` one after the other, starting at element `at` of the destination.
pub(super) fn packing(runs: &[Range<usize>], mut at: usize) -> Vec<Rows> {
    let mut all: Vec<Rows> = Vec::new();
    for run in runs {
        let len = run.len();
        match all.last_mut() {
            Some(rows) if rows.len == len && rows.continues_at(run.start) => {
                rows.from_stride = (run.start - rows.from) / rows.count;
                rows.count += 1;
            }
            _ => all.push(Rows { count: 1, len, from: run.start, to: at, from_stride: len, to_stride: len }),
        }
        at += len;
    }
    all
}

/// Returns the rows that copy consecutive elements, starting at element `at` of the source, to `runs`.
pub(super) fn unpacking(runs: &[Range<usize>], at: usize) -> Vec<Rows> {
    packing(runs, at).into_iter().map(Rows::reversed).collect()
}

impl Rows {
    /// Returns whether a row at element `from` continues the rows at their distance.
    fn continues_at(&self, from: usize) -> bool {
        self.count == 1 || from == self.from + self.count * self.from_stride
    }

    fn reversed(self) -> Self {
        let Rows { count, len, from, to, from_stride, to_stride } = self;
        Rows { count, len, from: to, to: from, from_stride: to_stride, to_stride: from_stride }
    }
}

/// Returns the common indices of `a` and `b`, as positions among the indices of each.
pub(super) fn overlap(a: &[Ranges], b: &[Ranges]) -> (Vec<Ranges>, Vec<Ranges>) {
    a.iter().zip(b).map(|(a, b)| overlap_of_one(a, b)).unzip()
}

fn overlap_of_one(a: &[Range<usize>], b: &[Range<usize>]) -> (Ranges, Ranges) {
    let (mut in_a, mut in_b) = (Vec::new(), Vec::new());
    let (mut next_a, mut next_b) = (a.iter().peekable(), b.iter().peekable());
    // Numbers of indices before the current ranges.
    let (mut before_a, mut before_b) = (0, 0);
    while let (Some(range_a), Some(range_b)) = (next_a.peek(), next_b.peek()) {
        let (start, end) = (range_a.start.max(range_b.start), range_a.end.min(range_b.end));
        if start < end {
            let position =
                |before: usize, range: &Range<usize>| before + start - range.start..before + end - range.start;
            in_a.push(position(before_a, range_a));
            in_b.push(position(before_b, range_b));
        }
        if range_a.end <= range_b.end {
            before_a += range_a.len();
            next_a.next();
        } else {
            before_b += range_b.len();
            next_b.next();
        }
    }
    (in_a, in_b)
}

/// Returns the number of elements of a part.
fn elements(picks: &[Ranges]) -> usize {
    picks.iter().map(|ranges| ranges.iter().map(Range::len).sum::<usize>()).product()
}

/// Returns a part of a row-major tensor of shape `shape` as runs of consecutive elements, in row-major order. Runs do
/// not cross rows of the last dimension that is not whole.
pub(super) fn runs(shape: &[usize], picks: &[Ranges]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    if elements(picks) == 0 {
        return runs;
    }
    // Trailing whole dimensions make longer elements.
    let whole = shape.iter().zip(picks).rev().take_while(|(size, ranges)| **ranges == [0..**size]).count();
    let (outer, inner) = shape.split_at(shape.len() - whole);
    visit(outer, &picks[..outer.len()], inner.iter().product(), 0, &mut |run| runs.push(run));
    runs
}

fn visit(shape: &[usize], picks: &[Ranges], element: usize, base: usize, f: &mut impl FnMut(Range<usize>)) {
    match (shape, picks) {
        ([size], [ranges]) => {
            let base = base * size;
            ranges.iter().for_each(|range| f((base + range.start) * element..(base + range.end) * element));
        }
        ([size, shape @ ..], [ranges, picks @ ..]) => {
            for index in ranges.iter().flat_map(Clone::clone) {
                visit(shape, picks, element, base * size + index, f);
            }
        }
        _ => f(base * element..(base + 1) * element),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, DType, Heap, View};
    use proptest::prelude::*;

    #[test]
    fn runs_at_even_distances_are_rows() {
        let rows = |count, len, from, to, from_stride| Rows { count, len, from, to, from_stride, to_stride: len };
        assert_eq!(packing(&[0..2, 5..7, 10..12], 3), [rows(3, 2, 0, 3, 5)]);
        assert_eq!(packing(&[0..2, 5..7, 11..13], 0), [rows(2, 2, 0, 0, 5), rows(1, 2, 11, 4, 2)]);
        assert_eq!(packing(&[1..4, 6..7], 0), [rows(1, 3, 1, 0, 3), rows(1, 1, 6, 3, 1)]);
        assert_eq!(packing(&[], 7), []);
    }

    /// Up to three ascending ranges in 0..12 that do not touch.
    fn ranges() -> impl Strategy<Value = Ranges> {
        prop::collection::btree_set(0usize..12, 0..7).prop_map(|ends| {
            let ends: Vec<_> = ends.into_iter().collect();
            ends.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect()
        })
    }

    fn indices(ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().flat_map(Clone::clone).collect()
    }

    proptest! {
        #[test]
        fn overlaps_are_positions_of_common_indices(a in ranges(), b in ranges()) {
            let (in_a, in_b) = overlap_of_one(&a, &b);
            let (a, b) = (indices(&a), indices(&b));
            let common: Vec<_> = a.iter().copied().filter(|index| b.contains(index)).collect();
            prop_assert_eq!(&common, &indices(&in_a).into_iter().map(|at| a[at]).collect::<Vec<_>>());
            prop_assert_eq!(&common, &indices(&in_b).into_iter().map(|at| b[at]).collect::<Vec<_>>());
        }

        #[test]
        fn runs_are_the_elements_in_order(
            rows in ranges(),
            columns in ranges(),
            whole in any::<bool>(),
            depth in 1usize..4,
        ) {
            let picks = vec![rows.clone(), columns.clone(), if whole { vec![0..depth] } else { vec![0..1] }];
            let mut expected = Vec::new();
            for i in indices(&rows) {
                for j in indices(&columns) {
                    expected.extend(indices(&picks[2]).into_iter().map(|k| (i * 12 + j) * depth + k));
                }
            }
            let runs = runs(&[12, 12, depth], &picks);
            prop_assert_eq!(&indices(&runs), &expected);
            let tensor = Buffer::U32((0..12 * 12 * depth as u32).collect());
            let mut packed = Buffer::zeros(DType::U32, expected.len());
            Heap.copy_rows(View::Host(tensor.bytes()), &mut packed, &packing(&runs, 0)).unwrap();
            let expected: Vec<u32> = expected.into_iter().map(|at| at as u32).collect();
            prop_assert_eq!(&packed, &Buffer::U32(expected.clone()));
            let mut back = Buffer::U32(vec![u32::MAX; tensor.len()]);
            Heap.copy_rows(View::Host(packed.bytes()), &mut back, &unpacking(&runs, 0)).unwrap();
            let there = |at: u32| if expected.contains(&at) { at } else { u32::MAX };
            prop_assert_eq!(back, Buffer::U32((0..tensor.len() as u32).map(there).collect()));
        }
    }

    #[test]
    fn consecutive_elements_are_one_run() {
        assert_eq!(runs(&[4, 3, 2], &[vec![1..3], vec![0..3], vec![0..2]]), [6..18]);
        assert_eq!(runs(&[4, 3], &[vec![0..4], vec![0..3]]), [0..12]);
        assert_eq!(runs(&[], &[]), [0..1]);
        assert_eq!(runs(&[4, 0], &[vec![0..4], vec![]]), Vec::<Range<usize>>::new());
    }
}
