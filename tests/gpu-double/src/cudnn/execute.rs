//! Executions: the memory of a call, and its operation on a stream.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    bytes, memory, report,
    streams::{Access, Operation, Progress, Touch},
};

use super::engine::Config;
use super::evaluate::{Memory, evaluate};
use super::refusal::{Result, bad, unsupported};
use super::tensor::Tensor;

/// The addresses of a call.
#[derive(Debug)]
pub(super) struct Pack {
    pub(super) places: BTreeMap<i64, u64>,
    /// Null if missing.
    pub(super) workspace: u64,
}

/// Memory of a tensor or of the workspace.
struct Place<'a> {
    at: u64,
    len: usize,
    is_written: bool,
    /// The workspace if missing.
    tensor: Option<&'a Tensor>,
}

impl Place<'_> {
    fn name(&self) -> String {
        self.tensor.map_or("the workspace".into(), |tensor| format!("tensor {}", tensor.uid))
    }

    /// Fails if the memory ends before the place does. Memory that the driver does not know is refused later.
    fn fits(&self) -> Result<()> {
        match memory::base_of(self.at) {
            Some((base, len)) if self.at - base + self.len as u64 > len as u64 => {
                let left = len as u64 - (self.at - base);
                Err(unsupported(format!("{} needs {} bytes, and its memory has {left}", self.name(), self.len)))
            }
            _ => Ok(()),
        }
    }

    /// Returns the ranges of bytes of its elements, in order.
    fn ranges(&self) -> Vec<(u64, u64)> {
        let Some(tensor) = self.tensor else { return vec![(self.at, self.at + self.len as u64)] };
        let bytes = tensor.of.bytes() as u64;
        let mut all: Vec<_> = tensor.offsets().map(|offset| self.at + offset as u64 * bytes).collect();
        all.sort_unstable();
        all.into_iter().map(|at| (at, at + bytes)).collect()
    }

    fn overlaps(&self, other: &Self) -> bool {
        if self.at.max(other.at) >= (self.at + self.len as u64).min(other.at + other.len as u64) {
            return false;
        }
        // Rows of two tensors may alternate in memory, as those of packed q, k and v.
        let (mine, others) = (self.ranges(), other.ranges());
        mine.iter().any(|(start, end)| {
            let next = others.partition_point(|(_, other)| other <= start);
            others.get(next).is_some_and(|(other, _)| other < end)
        })
    }
}

/// Returns the operation of a call.
///
/// Numbers by value are read here: their addresses are the host's.
pub(super) unsafe fn operation(plan: &Arc<Config>, pack: &Pack) -> Result<Operation> {
    let graph = &plan.engine.graph;
    if let Some(uid) = pack.places.keys().find(|uid| graph.tensors.get(uid).is_none_or(|one| one.is_virtual)) {
        return Err(bad(format!("the graph has no tensor {uid} in memory or by value")));
    }
    let (mut memory, mut places) = (Memory { places: BTreeMap::new(), numbers: BTreeMap::new() }, Vec::new());
    for tensor in graph.tensors.values().filter(|one| !one.is_virtual) {
        let at = pack.places.get(&tensor.uid).copied().unwrap_or(0);
        if at == 0 {
            return Err(unsupported(format!("the variant pack has no address of tensor {}", tensor.uid)));
        }
        if tensor.is_by_value {
            // SAFETY: the caller passes the address of a number of this type.
            memory.numbers.insert(tensor.uid, unsafe { tensor.of.read(at as *const u8) });
            continue;
        }
        if !at.is_multiple_of(tensor.alignment) {
            let why = format!("tensor {} at {at:#x} is not aligned to {} bytes", tensor.uid, tensor.alignment);
            return Err(unsupported(why));
        }
        memory.places.insert(tensor.uid, at);
        let is_written = graph.makes(tensor.uid);
        places.push(Place { at, len: tensor.span(), is_written, tensor: Some(tensor) });
    }
    let (workspace, len) = (pack.workspace, plan.workspace());
    if workspace == 0 {
        return Err(unsupported(format!("the variant pack has no workspace; {len} bytes are needed")));
    }
    places.push(Place { at: workspace, len, is_written: true, tensor: None });
    places.iter().try_for_each(Place::fits)?;
    if bytes::computes() {
        disjoint(&places)?;
    }
    let flops = graph.operations.iter().map(|one| one.flops()).sum();
    report::count_many(&format!("operations of products: attention of {:?}", plan.of), flops);
    let touches = touches(places.iter().map(|place| (place.at, place.is_written)));
    let plan = plan.clone();
    let run = move || {
        if bytes::computes() {
            // SAFETY: the stream has its turn, and the program allocated tensors and a workspace of these sizes.
            unsafe {
                bytes::fill_with_nan(workspace, len);
                evaluate(&plan.engine.graph, &memory);
            }
        }
        Progress::Done
    };
    Ok(Operation { name: "cudnnBackendExecute".into(), touches, run: Box::new(run) })
}

/// Returns one touch of each allocation, a write if any part of it is written: parts do not overlap, and an operation
/// does not race with itself.
fn touches(places: impl Iterator<Item = (u64, bool)>) -> Vec<Touch> {
    let mut allocations = BTreeMap::<u64, (u64, bool)>::new();
    for (at, is_written) in places {
        let base = memory::base_of(at).map_or(at, |(base, _)| base);
        allocations.entry(base).or_insert((at, false)).1 |= is_written;
    }
    let access = |is_written| if is_written { Access::Write } else { Access::Read };
    allocations.into_values().map(|(at, is_written)| Touch { at, access: access(is_written) }).collect()
}

/// Fails if written memory overlaps with other memory.
fn disjoint(places: &[Place]) -> Result<()> {
    for (i, one) in places.iter().enumerate() {
        for other in &places[i + 1..] {
            if (one.is_written || other.is_written) && one.overlaps(other) {
                return Err(bad(format!("{} and {} overlap, and one is written", one.name(), other.name())));
            }
        }
    }
    Ok(())
}
