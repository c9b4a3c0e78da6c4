//! Nodes of Candle's graph that run hooks in backward.
//!
//! - A parameter's nodes are `leaf -> Anchor -> Unshard` ([`param_nodes`]). The anchor's backward reports that the
//!   gradient is complete.
//! - An output of a unit passes a [`BoundaryHook`], whose backward runs before the unit's.
//! - An input of a unit with frozen parameters passes one too, whose backward runs after the unit's ([`FrozenCall`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, bail};
use parking_lot::Mutex;
use scopeguard::defer;

use super::param::FsdpParam;
use super::param_group::UnitId;
use super::schedule::Schedule;
use crate::autograd::{next_number, number};
use crate::graph::{Backward, followed, lasting_node, node_without_values};
use crate::storage::{self, copied_storage};

/// The nodes of a parameter, on the device that computes.
pub(crate) struct ParamNodes {
    pub(crate) leaf: TensorId,
    pub(crate) anchor: Tensor,
    pub(crate) full: Tensor,
}

/// Makes the nodes of a parameter. The full tensor has no memory yet.
///
/// The leaf is a scalar in place of the shard, since a graph is on one device and the shard may be on another. Candle's
/// layers use the full tensor. The layers of `nn` use the anchor, and leave their gradient with the parameter. Both
/// lead to the anchor, so its backward runs once, when the gradient is complete.
///
/// A frozen parameter has the same nodes, since it may be trained later. The layers of `nn` leave them out of the graph
/// while it is frozen.
pub(crate) fn param_nodes(device: &Device, shape: &Shape, dtype: DType) -> Result<ParamNodes> {
    let leaf = Tensor::from_storage(storage::scalar(device)?, (), BackpropOp::none(), true);
    let anchor = lasting_node(&leaf, storage::scalar(device)?, Shape::from(()), Anchor)?;
    let full = lasting_node(&anchor, storage::empty(dtype, device)?, shape.clone(), Unshard)?;
    Ok(ParamNodes { leaf: leaf.id(), anchor, full })
}

/// Makes the anchor of a further pass, on top of the parameter's anchor. Its backward reports the end of the pass.
pub(super) fn pass_anchor(anchor: &Tensor, pass: usize) -> Result<Tensor> {
    lasting_node(anchor, storage::scalar(anchor.device())?, Shape::from(()), PassAnchor { pass })
}

thread_local! {
    static UNREPORTED: Cell<usize> = const { Cell::new(0) };
}

/// Runs a backward inside a backward: parameters accumulate gradients, and anchors report nothing.
pub(crate) fn without_reports<T>(backward: impl FnOnce() -> T) -> T {
    let outer = UNREPORTED.get();
    UNREPORTED.set(outer + 1);
    defer!(UNREPORTED.set(outer));
    backward()
}

fn param_of(node: &Tensor) -> Result<Arc<FsdpParam>> {
    match FsdpParam::of(node) {
        Some(param) => Ok(param),
        None => bail!("a sharded parameter was dropped before backward: keep the ShardedVarMap alive until after it"),
    }
}

struct Anchor;

impl Backward for Anchor {
    fn name(&self) -> &'static str {
        "fsdp-anchor"
    }

    fn backward(&self, _leaf: &Tensor, anchor: &Tensor, _grad: &Tensor) -> Result<Option<Tensor>> {
        if UNREPORTED.get() > 0 {
            return Ok(None); // the outer graph has the same anchor, after all uses
        }
        let param = param_of(anchor)?;
        if param.trainable() {
            param.schedule()?.post_accumulate_grad(&param)?;
        }
        Ok(None) // the sharded gradient is stored when backward ends
    }
}

struct PassAnchor {
    pass: usize,
}

impl Backward for PassAnchor {
    fn name(&self) -> &'static str {
        "fsdp-pass-anchor"
    }

    fn backward(&self, anchor: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let param = param_of(anchor)?;
        if UNREPORTED.get() == 0 && param.trainable() {
            param.schedule()?.post_pass(&param, self.pass)?;
        }
        Ok(Some(anchor.zeros_like()?))
    }
}

struct Unshard;

impl Backward for Unshard {
    fn name(&self) -> &'static str {
        "fsdp-unshard"
    }

    fn backward(&self, anchor: &Tensor, full: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let param = param_of(full)?;
        if param.trainable() {
            param.gradient.add(grad)?;
        }
        Ok(Some(anchor.zeros_like()?))
    }
}

/// Adds the pre-backward hook to a unit's output: its backward runs before anything inside the unit.
pub(super) fn pre_backward(output: &Tensor, unit: &UnitId, pass: usize, schedule: &Arc<Schedule>) -> Result<Tensor> {
    let hook = BoundaryHook { unit: unit.clone(), schedule: Arc::downgrade(schedule), at: Boundary::Output { pass } };
    hooked(output, hook)
}

/// Adds the post-backward hook to a unit's input: its backward runs after everything inside the unit, unless the unit's
/// closure captured further tensors with a graph.
pub(super) fn post_backward(
    input: &Tensor,
    unit: &UnitId,
    schedule: &Arc<Schedule>,
    call: &Arc<FrozenCall>,
) -> Result<Tensor> {
    let at = Boundary::Input(call.clone());
    let input_hook = BoundaryHook { unit: unit.clone(), schedule: Arc::downgrade(schedule), at };
    let hooked = hooked(input, input_hook)?;
    if input.dtype().is_float() {
        call.inputs.lock().push(number(followed(&hooked)));
    }
    Ok(hooked)
}

fn hooked(tensor: &Tensor, hook: BoundaryHook) -> Result<Tensor> {
    if !tensor.dtype().is_float() {
        return Ok(tensor.clone());
    }
    let memory = copied_storage(tensor)
        .map_err(|error| error.context(format!("of an input or output of FSDP unit `{}`", hook.unit.name)))?;
    let name = match &hook.at {
        Boundary::Input(_) => "fsdp-post-backward",
        Boundary::Output { .. } => "fsdp-pre-backward",
    };
    node_without_values(name, tensor, memory, tensor.shape(), move |gradient| {
        hook.backward()?;
        Ok(Some(gradient.clone()))
    })
}

/// The identity, with a hook in backward.
struct BoundaryHook {
    unit: UnitId,
    schedule: Weak<Schedule>,
    at: Boundary,
}

enum Boundary {
    Input(Arc<FrozenCall>),
    Output { pass: usize },
}

impl BoundaryHook {
    fn backward(&self) -> Result<()> {
        let schedule = || match self.schedule.upgrade() {
            Some(schedule) => Ok(schedule),
            None => {
                bail!("the ShardedVarMap of FSDP unit `{}` was dropped; keep it as long as the model", self.unit.name)
            }
        };
        match &self.at {
            Boundary::Input(call) if call.input_done() => schedule()?.post_backward(&self.unit),
            Boundary::Input(_) => Ok(()),
            Boundary::Output { pass } => schedule()?.pre_backward(&self.unit, *pass),
        }
    }
}

/// One call of a unit with frozen parameters.
///
/// Frozen parameters get no gradient, so they have no hook of their own in backward. They are freed after the backward
/// of the call's last input, where the order of the graph's nodes shows that nothing inside the call follows.
pub(super) struct FrozenCall {
    /// Index of the unit.
    unit: usize,
    /// Node numbers of the call's hooked inputs.
    inputs: Mutex<Vec<usize>>,
    end: OnceLock<CallEnd>,
    /// Number of inputs whose backward has still to come. It stays 0 in a backward that must not free parameters after
    /// the last of them.
    left: AtomicUsize,
}

struct CallEnd {
    /// A number greater than the numbers of all nodes that the call made.
    number: usize,
    /// Whether the backward of the outputs unshards the unit.
    unshards: bool,
}

impl FrozenCall {
    pub(super) fn new(unit: usize) -> Self {
        FrozenCall { unit, inputs: Mutex::default(), end: OnceLock::new(), left: AtomicUsize::new(0) }
    }

    /// Records the end of the call. Called once.
    pub(super) fn end(&self, unshards: bool) {
        let _ = self.end.set(CallEnd { number: next_number(), unshards });
    }

    /// Returns the positions of the first and the last of `nodes` that the call made.
    fn span(&self, nodes: &[usize]) -> Option<(usize, usize)> {
        let begin = self.inputs.lock().iter().max().copied()?;
        let inside = |node: &usize| *node > begin && self.end.get().is_none_or(|end| *node < end.number);
        Some((nodes.iter().position(inside)?, nodes.iter().rposition(inside)?))
    }

    /// Records the backward of an input. Returns whether the unit's frozen parameters can be freed.
    fn input_done(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) == Ok(1)
    }
}

/// Decides which calls free frozen parameters, for a backward over `nodes` in this order. A call frees them after the
/// backward of its last input, unless backward is then inside a call of the same unit. That happens if the closure of
/// a call captured a tensor with a graph beside its inputs. Other frozen parameters are freed when backward ends.
pub(super) fn plan_frozen_calls(calls: &[Arc<FrozenCall>], nodes: &[usize]) {
    let spans: Vec<_> = calls.iter().map(|call| call.span(nodes)).collect();
    for call in calls {
        let inputs = call.inputs.lock().clone();
        let reached = nodes.iter().filter(|node| inputs.contains(node)).count();
        let over = nodes.iter().rposition(|node| inputs.contains(node)).is_some_and(|end| {
            calls.iter().zip(&spans).filter(|(other, _)| other.unit == call.unit).all(|(other, span)| {
                let unshards = other.end.get().is_some_and(|end| end.unshards);
                span.is_none_or(|(first, last)| last < end || unshards && first > end)
            })
        });
        call.left.store(if over { reached } else { 0 }, Ordering::Relaxed);
    }
}
