//! Engines and their limits, as cuDNN 9.26 has them on a GPU of capability 9.0.

use std::sync::Arc;

use crate::element::Element;

use super::graph::{Attention, Graph, Operation};
use super::refusal::{Refusal, Result, bad, unsupported};
use super::tensor::Tensor;

/// Engines for attention as one operation, and for its gradients.
const FORWARD: i64 = 9;
const BACKWARD: i64 = 6;
/// `CUDNN_NUMERICAL_NOTE_TENSOR_CORE`. Neither engine says that it is nondeterministic, whatever its knobs.
pub(super) const NOTES: [i64; 1] = [0];

// cudnnBackendKnobType_t.
const STAGES: i64 = 14;
const KERNEL: i64 = 24;
const CLUSTER: i64 = 27;
const STREAM_K: i64 = 38;
const TILE_M: i64 = 40;
const TILE_N: i64 = 41;
/// Value of `STAGES` that adds gradients of queries in a fixed order.
const ORDERED: i64 = 4;

const WIDEST_HEAD: usize = 256;
const HEAD_STEP: usize = 8;
/// Rows of queries that share a counter in the workspace, and the bytes of a counter.
const TILE_ROWS: usize = 64;
const COUNTER: usize = 8;
const WORKSPACE_ALIGN: usize = 128;
const BASE_WORKSPACE: usize = 256;

/// An engine for a graph.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) graph: Arc<Graph>,
    pub(super) index: i64,
}

/// The type and the value of a knob.
pub(super) type Knob = (i64, i64);

/// An engine with its knobs. A plan is the same.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) engine: Engine,
    pub(super) knobs: Vec<Knob>,
    /// The 16-bit float of its tensors.
    pub(super) of: Element,
}

impl Engine {
    /// Fails for an engine that is not for this graph.
    pub(super) fn new(graph: Arc<Graph>, index: i64) -> Result<Self> {
        closed(&graph)?;
        let expected = if graph.is_forward() { FORWARD } else { BACKWARD };
        if index != expected {
            return Err(unsupported(format!("engine {index} is not for this graph; engine {expected} is emulated")));
        }
        Ok(Self { graph, index })
    }
}

/// Fails if a virtual tensor is read that no operation makes.
pub(super) fn closed(graph: &Graph) -> Result<()> {
    if graph.open.is_empty() {
        Ok(())
    } else {
        Err(bad(format!("no operation makes the virtual tensors {:?}", graph.open)))
    }
}

impl Config {
    pub(super) fn new(engine: Engine, knobs: Vec<Knob>) -> Result<Self> {
        for (i, (knob, value)) in knobs.iter().enumerate() {
            let is_known = match *knob {
                STAGES => !engine.graph.is_forward() && *value == ORDERED,
                KERNEL | CLUSTER | STREAM_K | TILE_M | TILE_N => *value >= 0,
                _ => false,
            };
            if !is_known {
                return Err(unsupported(format!(
                    "knob {knob} with the value {value} is not of engine {}",
                    engine.index
                )));
            }
            if knobs[..i].iter().any(|(other, _)| other == knob) {
                return Err(bad(format!("knob {knob} is chosen twice")));
            }
        }
        if !knobs.iter().any(|(knob, _)| *knob == KERNEL) {
            return Err(unsupported(format!(
                "engine {} needs knob {KERNEL}, the kernel's configuration",
                engine.index
            )));
        }
        let of = supported(&engine.graph)?;
        Ok(Self { engine, knobs, of })
    }

    /// Returns the configuration that the heuristics choose.
    pub(super) fn best(graph: Arc<Graph>) -> Result<Self> {
        let (index, [kernel, m, n]) = if graph.is_forward() { (FORWARD, [1, 3, 2]) } else { (BACKWARD, [2, 2, 1]) };
        let knobs = vec![(KERNEL, kernel), (CLUSTER, 0), (STREAM_K, 0), (TILE_M, m), (TILE_N, n)];
        Self::new(Engine::new(graph, index)?, knobs)
    }

    /// Returns the bytes of the workspace. Measured with cuDNN 9.26: gradients of keys and values for each head of the
    /// queries, if heads share keys, and with [`ORDERED`] a counter for each tile of queries.
    pub(super) fn workspace(&self) -> usize {
        let mut bytes = BASE_WORKSPACE;
        for operation in &self.engine.graph.operations {
            bytes += match &**operation {
                Operation::Reduction { x, y } if x.is_virtual && x.dims[1] != y.dims[1] => {
                    (x.dims.iter().product::<usize>() * x.of.bytes()).next_multiple_of(WORKSPACE_ALIGN)
                }
                _ => 0,
            };
        }
        if self.knobs.contains(&(STAGES, ORDERED)) {
            let of = |one: &Arc<Operation>| match &**one {
                Operation::Matmul { a, .. } if a.is_real() => {
                    let [batch, heads, rows, _] = a.dims;
                    batch * heads * rows.div_ceil(TILE_ROWS) * COUNTER
                }
                _ => 0,
            };
            let counters = self.engine.graph.operations.iter().map(of).max().unwrap_or(0);
            bytes += counters.next_multiple_of(WORKSPACE_ALIGN);
        }
        bytes
    }
}

/// Returns the type of queries, keys and values. Fails for graphs that no engine computes.
fn supported(graph: &Graph) -> Result<Element> {
    let mut found: Option<Element> = None;
    for tensor in graph.tensors.values().filter(|one| one.is_real()) {
        let Some(half) = tensor.of.half() else {
            sums(graph, tensor)?;
            continue;
        };
        heads(tensor)?;
        if *found.get_or_insert(half) != half {
            return Err(unsupported(format!("tensor {} is of {half:?}, others of {found:?}", tensor.uid)));
        }
    }
    for operation in &graph.operations {
        let Operation::Attention(Attention { q, k, v, o, softmax, .. }) = &**operation else { continue };
        if let Some(one) = [q, k, v, o].into_iter().find(|one| one.of.half().is_none() || one.strides[3] != 1) {
            return Err(unsupported(format!("tensor {} must be of 16-bit floats whose rows have no gaps", one.uid)));
        }
        if softmax.stats.as_ref().is_some_and(|stats| stats.of.half().is_some()) {
            return Err(unsupported("the stats must be of f32"));
        }
    }
    found.ok_or_else(|| unsupported("no tensor is of 16-bit floats"))
}

/// Fails for f32 in memory, except in one column, and in results that are read again.
fn sums(graph: &Graph, tensor: &Tensor) -> Result<()> {
    let is_between = graph.makes(tensor.uid) && graph.reads(tensor.uid);
    if tensor.dims[3] != 1 && !(is_between && tensor.strides[3] == 1) {
        return Err(unsupported(format!("tensor {} of {:?} must be of bf16 or f16", tensor.uid, tensor.dims)));
    }
    Ok(())
}

/// Fails for heads that the engines do not take. A transposed tensor has its heads in the dimension before the last.
fn heads(tensor: &Tensor) -> std::result::Result<(), Refusal> {
    let Tensor { uid, dims, strides, .. } = tensor;
    let Some(dim) = [3, 2].into_iter().find(|dim| strides[*dim] == 1) else {
        return Err(unsupported(format!("tensor {uid} has the strides {strides:?}: its rows have gaps")));
    };
    if !dims[dim].is_multiple_of(HEAD_STEP) || dims[dim] > WIDEST_HEAD {
        let why = format!("tensor {uid} of {dims:?}: a head must have a multiple of {HEAD_STEP} elements, at most");
        return Err(unsupported(format!("{why} {WIDEST_HEAD}")));
    }
    Ok(())
}
