//! Nodes of Candle's graph for operations of this library.
//!
//! Candle's backward adds each gradient that an operation returns to a new tensor of zeros. Between two operations of
//! this library, gradients therefore bypass Candle: an operation has a *token*, a scalar node that stands for it in the
//! graph, and its output is a node that follows the token. An operation that takes the output follows the token instead,
//! and adds its gradient to the sum in which the token's backward finds it. The first gradient is moved there. Other
//! operations follow the output, whose backward passes their gradient on to the same sum.
//!
//! An output that is a scalar is the operation's own node.
//!
//! The sums belong to one backward and not to the graph: see [`running`].
//!
//! The graph holds the values that an operation's backward reads ([`Reads`]), and no others. So those of a sum, or of
//! queries that a rotation reads, are freed with the caller's last handle. Outputs that cost little are freed as well,
//! and computed again when a backward reads them ([`recomputed_op`]).

mod joined;
mod running;
mod teardown;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, MetalStorage};
use candle_core::{CustomOp1, CustomOp2, CustomOp3, DType, Device};
use candle_core::{Layout, Result, Shape, Storage, Tensor, TensorId, bail};
use parking_lot::Mutex;

use crate::storage::{scalar, with_slice, with_slice_mut};
pub(crate) use joined::Joined;
pub(crate) use running::{Key, Running, backward};
use teardown::drop_flat;

/// The backward of a node with one source.
pub(crate) trait Backward: Send + Sync + 'static {
    /// Returns the node's name in Candle's messages.
    fn name(&self) -> &'static str;

    /// Returns the gradient of `source`, given the gradient of the node.
    fn backward(&self, source: &Tensor, node: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>>;
}

/// Returns a node with this storage that follows `source` in the graph. Both are on one device. Gradients do not bypass
/// Candle.
pub(crate) fn node(source: &Tensor, memory: Storage, shape: Shape, backward: impl Backward) -> Result<Tensor> {
    source.apply_op1(GraphOp::of(backward, (memory, shape)))
}

/// [`node`] that is never freed, because it is part of many graphs, as a parameter's nodes are.
pub(crate) fn lasting_node(source: &Tensor, memory: Storage, shape: Shape, backward: impl Backward) -> Result<Tensor> {
    let mut op = GraphOp::of(backward, (memory, shape));
    op.is_lasting = true;
    source.apply_op1(op)
}

/// Returns a node with this storage that follows `source` in the graph, for an operation whose backward reads only the
/// gradient, as a hook's. The graph keeps neither the node's values nor those of a source that has a token. `backward`
/// gets the node's gradient and returns the source's; `None` is zeros. It is not among [`RecordedOutputs`].
pub(crate) fn node_without_values(
    name: &'static str,
    source: &Tensor,
    memory: Storage,
    shape: impl Into<Shape>,
    backward: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let is_linked = Link::of(source).is_some();
    let gradients = move |sources: &[&Tensor], _: &Tensor, gradient: &Tensor| {
        let gradient = match backward(gradient)? {
            // Candle needs a gradient of every node that it visits.
            None if !is_linked && !sources[0].is_variable() => Some(sources[0].zeros_like()?),
            gradient => gradient,
        };
        Ok([gradient, None, None])
    };
    op_node(name, &[source], (memory, shape.into()), Reads::Nothing, None, gradients)
}

/// Tells whether the graph of an operation's output exists.
#[derive(Clone)]
pub(crate) struct Lifetime(Weak<Slot>);

impl Lifetime {
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Returns the lifetime of a tensor's graph, or `None` if the tensor is not an output with a token.
pub(crate) fn lifetime(tensor: &Tensor) -> Option<Lifetime> {
    Some(Lifetime(Arc::downgrade(&Link::of(tensor)?.slot)))
}

/// Returns the node that stands for a tensor where an operation of this library takes it: its token, if it has one.
pub(crate) fn followed(tensor: &Tensor) -> TensorId {
    Link::of(tensor).map_or(tensor.id(), |link| link.token.id())
}

/// Values that an operation's backward reads, besides the gradient of its output. The graph keeps no others: a source or
/// an output that backward does not read is freed with its last other user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    Nothing,
    /// The values of the sources.
    Sources,
    /// The values of the output.
    Output,
    SourcesAndOutput,
}

/// Returns an operation's result as a node that follows its sources in the graph. There are one to three sources, on
/// one device. `backward(sources, node, gradient)` returns the gradients of the sources, in order. Tensors that it
/// does not read may be scalars.
pub(crate) fn graph_op<G: IntoIterator<Item = Option<Tensor>>>(
    name: &'static str,
    sources: &[impl AsRef<Tensor>],
    memory: Storage,
    shape: impl Into<Shape>,
    reads: Reads,
    backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<G> + Send + Sync + 'static,
) -> Result<Tensor> {
    let sources: Vec<&Tensor> = sources.iter().map(AsRef::as_ref).collect();
    recorded_op(name, &sources, (memory, shape.into()), reads, None, backward)
}

/// Returns `compute(sources)` as [`graph_op`] does, for a function that costs little. The output has the first source's
/// shape. The graph keeps the sources and not the output: if the backward of a later operation reads it, `compute` runs
/// again. `backward(sources, gradient)` returns the gradients of the sources.
pub(crate) fn recomputed_op<G: IntoIterator<Item = Option<Tensor>>>(
    name: &'static str,
    sources: &[&Tensor],
    compute: impl Fn(&[&Tensor]) -> Result<Storage> + Send + Sync + 'static,
    backward: impl Fn(&[&Tensor], &Tensor) -> Result<G> + Send + Sync + 'static,
) -> Result<Tensor> {
    let result = (compute(sources)?, sources[0].shape().clone());
    let backward = move |sources: &[&Tensor], _: &Tensor, gradient: &Tensor| backward(sources, gradient);
    recorded_op(name, sources, result, Reads::Sources, Some(Arc::new(compute)), backward)
}

/// [`op_node`], whose output is among [`RecordedOutputs`].
fn recorded_op<G: IntoIterator<Item = Option<Tensor>>>(
    name: &'static str,
    sources: &[&Tensor],
    result: (Storage, Shape),
    reads: Reads,
    compute: Option<Arc<Compute>>,
    backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<G> + Send + Sync + 'static,
) -> Result<Tensor> {
    let gradients = move |sources: &[&Tensor], node: &Tensor, gradient: &Tensor| {
        let mut gradients = backward(sources, node, gradient)?.into_iter();
        Ok(std::array::from_fn(|_| gradients.next().flatten()))
    };
    let output = op_node(name, sources, result, reads, compute, gradients)?;
    RECORDED.with_borrow_mut(|recorded| {
        recorded.last_mut().map(|outputs| outputs.insert(followed(&output), output.clone()))
    });
    Ok(output)
}

/// Returns an operation's result as a node that follows its sources, by way of a token if it may have one. `compute`
/// computes the result again.
fn op_node(
    name: &'static str,
    sources: &[&Tensor],
    result: (Storage, Shape),
    reads: Reads,
    compute: Option<Arc<Compute>>,
    gradients: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync + 'static,
) -> Result<Tensor> {
    let links: Vec<Option<Link>> = sources.iter().map(|source| Link::of(source)).collect();
    let follow = |mut op: GraphOp| {
        let follows = |at: usize| links[at].as_ref().map_or(sources[at], |link| &link.token);
        op.follows = (0..sources.len()).map(follows).filter(|source| source.track_op()).cloned().collect();
        match sources.len() {
            1 => follows(0).apply_op1(op),
            2 => follows(0).apply_op2(follows(1), op),
            3 => follows(0).apply_op3(follows(1), follows(2), op),
            count => bail!("{name}: expected 1 to 3 sources, found {count}"),
        }
    };
    let reads_sources = matches!(reads, Reads::Sources | Reads::SourcesAndOutput);
    let values = |at: usize| Values::of(sources[at], links[at].as_ref());
    let kept =
        |at: usize| Some(Source { values: reads_sources.then(|| values(at)), slot: links[at].as_ref()?.slot.clone() });
    let kept = (0..sources.len()).map(kept).collect();
    let (memory, shape) = &result;
    let may_have_token = !matches!(memory, Storage::Metal(_)) && shape.rank() > 0;
    let op = |result, slot| GraphOp::new(name, result, gradients, kept, slot);
    if !(may_have_token && sources.iter().any(|source| source.track_op())) {
        return follow(op(result, None));
    }
    let slot = Arc::new(Slot::new());
    let token = follow(op((scalar(sources[0].device())?, Shape::from(())), Some(slot.clone())))?;
    let output = token.apply_op1(Output { name, result: Mutex::new(Some(result)), slot: slot.clone() })?;
    let _ = slot.output.set(OutputKind::of(&output));
    if let Some(compute) = compute {
        let sources = (0..sources.len()).map(values).collect();
        *slot.recomputation.lock() = Some(Recomputation { compute, sources });
    }
    if matches!(reads, Reads::Output | Reads::SourcesAndOutput) {
        *slot.values.lock() = Some(output.detach());
    }
    LINKS.lock().insert(output.id(), Link { token, slot });
    Ok(output)
}

thread_local! {
    /// The outputs of each [`RecordedOutputs`] of this thread, by the ids of their tokens. The newest is the last.
    static RECORDED: RefCell<Vec<HashMap<TensorId, Tensor>>> = const { RefCell::new(vec![]) };
}

/// Records the outputs of this thread's operations, which the graph does not have. A newer one takes its place while it
/// exists.
pub(crate) struct RecordedOutputs {
    depth: usize,
}

impl RecordedOutputs {
    pub(crate) fn begin() -> Self {
        let depth = RECORDED.with_borrow_mut(|recorded| {
            recorded.push(HashMap::new());
            recorded.len()
        });
        RecordedOutputs { depth }
    }

    /// Returns the outputs, each by the id of its token.
    pub(crate) fn end(self) -> HashMap<TensorId, Tensor> {
        RECORDED.with_borrow_mut(|recorded| recorded.get_mut(self.depth - 1).map(std::mem::take)).unwrap_or_default()
    }
}

impl Drop for RecordedOutputs {
    fn drop(&mut self) {
        let ended = RECORDED.with_borrow_mut(|recorded| recorded.split_off(recorded.len().min(self.depth - 1)));
        // Freed graphs may have other outputs.
        drop(ended);
    }
}

/// The links of all outputs that exist.
static LINKS: LazyLock<Mutex<HashMap<TensorId, Link>>> = LazyLock::new(Mutex::default);

/// Returns whether this is an existing output that has a token.
#[cfg(test)]
pub(crate) fn is_output(id: TensorId) -> bool {
    LINKS.lock().contains_key(&id)
}

/// What an output and its token share.
struct Slot {
    /// Place of the output's gradient, and of values that are computed again, in the state of a backward.
    key: Key,
    output: OnceLock<OutputKind>,
    /// The values of the output, if its token's backward reads them.
    values: Mutex<Option<Tensor>>,
    /// Set if the output is computed again in backward, until a backward has freed it.
    recomputation: Mutex<Option<Recomputation>>,
}

impl Slot {
    fn new() -> Self {
        Slot { key: Key::new(), output: OnceLock::new(), values: Mutex::default(), recomputation: Mutex::default() }
    }

    /// Returns the values of an output that is computed again. They stay until backward has passed the output.
    fn recomputed(&self, running: &Arc<Running>) -> Result<Tensor> {
        if let Some(values) = running.values(self.key) {
            return Ok(values);
        }
        let (Some(Recomputation { compute, sources }), Some(kind)) =
            (self.recomputation.lock().clone(), self.output.get())
        else {
            return freed("an activation");
        };
        let of_sources = sources.iter().map(|source| source.get(running)).collect::<Result<Vec<_>>>()?;
        let memory = compute(&of_sources.iter().collect::<Vec<_>>())?;
        // A variable, since operations ask whether the source has a gradient.
        let computed = Tensor::from_storage(memory, kind.shape.clone(), BackpropOp::none(), true);
        running.set_values(self.key, computed.clone());
        Ok(computed)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop_flat((self.values.get_mut().take(), self.recomputation.get_mut().take()));
    }
}

type Compute = dyn Fn(&[&Tensor]) -> Result<Storage> + Send + Sync;

/// How an output is computed again.
#[derive(Clone)]
struct Recomputation {
    compute: Arc<Compute>,
    sources: Vec<Values>,
}

/// The values of an operation's source.
#[derive(Clone)]
enum Values {
    Kept(Tensor),
    /// Those of an output that is computed again.
    Recomputed(Arc<Slot>),
}

impl Values {
    fn of(source: &Tensor, link: Option<&Link>) -> Self {
        match link {
            Some(link) if link.slot.recomputation.lock().is_some() => Values::Recomputed(link.slot.clone()),
            _ => Values::Kept(source.clone()),
        }
    }

    fn get(&self, running: &Arc<Running>) -> Result<Tensor> {
        match self {
            Values::Kept(values) => Ok(values.clone()),
            Values::Recomputed(slot) => slot.recomputed(running),
        }
    }
}

/// Returns the error for an operation whose values a backward has freed.
fn freed<T>(name: &str) -> Result<T> {
    bail!(
        "{name}: the graph has been through backward, which freed it: run forward again, or keep the graph by \
         backward_retain_graph"
    )
}

/// An output's id, and what its gradient is like.
struct OutputKind {
    id: TensorId,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl OutputKind {
    fn of(output: &Tensor) -> Self {
        OutputKind {
            id: output.id(),
            shape: output.shape().clone(),
            dtype: output.dtype(),
            device: output.device().clone(),
        }
    }

    fn zeros(&self) -> Result<Tensor> {
        Tensor::zeros(&self.shape, self.dtype, &self.device)
    }
}

/// The token of an output.
#[derive(Clone)]
struct Link {
    token: Tensor,
    slot: Arc<Slot>,
}

impl Link {
    fn of(output: &Tensor) -> Option<Self> {
        LINKS.lock().get(&output.id()).cloned()
    }
}

/// Adds to a contiguous tensor in place.
fn add_to(total: Tensor, more: &Tensor) -> Result<Tensor> {
    let more = more.contiguous()?;
    with_slice_mut(&total, |kernels, total| with_slice(&more, |_, more| kernels.add(total, more)))?;
    Ok(total)
}

type Gradients = dyn Fn(&[&Tensor], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync;

/// An operation whose result is already computed.
struct GraphOp {
    name: &'static str,
    result: Mutex<Option<(Storage, Shape)>>,
    /// `None` once it is freed.
    backward: Mutex<Option<OpBackward>>,
    /// Whether it is never freed. See [`lasting_node`].
    is_lasting: bool,
    /// If this is a token.
    slot: Option<Arc<Slot>>,
    /// The nodes before it, so that freeing a node does not free the nodes before it ([`drop_flat`] does).
    follows: Vec<Tensor>,
}

impl Drop for GraphOp {
    fn drop(&mut self) {
        drop_flat((std::mem::take(&mut self.follows), self.backward.get_mut().take()));
    }
}

/// The backward of an operation, with the values that it reads.
#[derive(Clone)]
struct OpBackward {
    gradients: Arc<Gradients>,
    /// Each source whose token stands for it.
    sources: Vec<Option<Source>>,
}

/// A source whose token stands for it.
#[derive(Clone)]
struct Source {
    /// Values, if backward reads them.
    values: Option<Values>,
    slot: Arc<Slot>,
}

impl GraphOp {
    /// Returns an operation with one source.
    fn of(backward: impl Backward, result: (Storage, Shape)) -> Self {
        let name = backward.name();
        let gradients = move |sources: &[&Tensor], node: &Tensor, gradient: &Tensor| {
            Ok([backward.backward(sources[0], node, gradient)?, None, None])
        };
        GraphOp::new(name, result, gradients, vec![None], None)
    }

    fn new(
        name: &'static str,
        result: (Storage, Shape),
        gradients: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync + 'static,
        sources: Vec<Option<Source>>,
        slot: Option<Arc<Slot>>,
    ) -> Self {
        let backward = OpBackward { gradients: Arc::new(gradients), sources };
        GraphOp {
            name,
            result: Mutex::new(Some(result)),
            backward: Mutex::new(Some(backward)),
            is_lasting: false,
            slot,
            follows: vec![],
        }
    }

    fn backward(&self, arguments: &[&Tensor], node: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let running = Running::current();
        let frees = running.frees && !self.is_lasting;
        let known = if frees { self.backward.lock().take() } else { self.backward.lock().clone() };
        let Some(OpBackward { gradients, sources }) = known else { return freed(self.name) };
        let values = |(&argument, source): (&&Tensor, &Option<Source>)| {
            let values = source.as_ref().and_then(|source| source.values.as_ref());
            values.map_or_else(|| Ok(argument.clone()), |values| values.get(&running))
        };
        let of_sources: Vec<Tensor> = arguments.iter().zip(&sources).map(values).collect::<Result<_>>()?;
        let of_sources: Vec<&Tensor> = of_sources.iter().collect();
        let mut found = match &self.slot {
            None => gradients(&of_sources, node, gradient)?,
            Some(slot) => {
                let Some(kind) = slot.output.get() else { bail!("{}: backward ran during forward", self.name) };
                running.drop_values(slot.key);
                let recomputation = if frees { slot.recomputation.lock().take() } else { None };
                drop(recomputation);
                let gradient = running.take(slot.key).map_or_else(|| kind.zeros(), Ok)?;
                let output = if frees { slot.values.lock().take() } else { slot.values.lock().clone() };
                gradients(&of_sources, output.as_ref().unwrap_or(node), &gradient)?
            }
        };
        for ((gradient, source), argument) in found.iter_mut().zip(&sources).zip(arguments) {
            let Some(Source { slot, .. }) = source else { continue };
            // Candle needs a gradient of every node that it visits. A token's is a scalar.
            *gradient = Some(match gradient.take() {
                Some(gradient) => running.add(slot.key, gradient, argument)?,
                None => argument.detach(),
            });
        }
        Ok(found)
    }
}

/// An operation's output, which follows its token.
struct Output {
    name: &'static str,
    result: Mutex<Option<(Storage, Shape)>>,
    slot: Arc<Slot>,
}

impl Output {
    fn backward(&self, [token]: &[&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Some(Running::current().add(self.slot.key, gradient.clone(), token)?)])
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let link = self.slot.output.get().and_then(|kind| LINKS.lock().remove(&kind.id));
        // Outside of the lock, because it may free a graph with other outputs.
        drop(link);
    }
}

macro_rules! forward {
    ($self:ident, $device:ident) => {
        match $self.result.lock().take() {
            Some((Storage::$device(storage), shape)) => Ok((storage, shape)),
            Some(_) => bail!("{}: a node must be on the device of its source", $self.name),
            None => bail!("{} ran twice", $self.name),
        }
    };
}

/// Implements Candle's trait for operations with these sources.
macro_rules! custom_op {
    ($op:ident: $trait:ident($($source:ident),*), $gradients:pat => $found:expr, $returned:ty) => {
        #[allow(unused_variables)]
        impl $trait for $op {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $($source: &CpuStorage, _: &Layout),*) -> Result<(CpuStorage, Shape)> {
                forward!(self, Cpu)
            }

            fn cuda_fwd(&self, $($source: &CudaStorage, _: &Layout),*) -> Result<(CudaStorage, Shape)> {
                forward!(self, Cuda)
            }

            fn metal_fwd(&self, $($source: &MetalStorage, _: &Layout),*) -> Result<(MetalStorage, Shape)> {
                forward!(self, Metal)
            }

            fn bwd(&self, $($source: &Tensor,)* node: &Tensor, gradient: &Tensor) -> Result<$returned> {
                let $gradients = self.backward(&[$($source),*], node, gradient)?;
                Ok($found)
            }
        }
    };
}
custom_op!(Output: CustomOp1(a), [da] => da, Option<Tensor>);
custom_op!(GraphOp: CustomOp1(a), [da, ..] => da, Option<Tensor>);
custom_op!(GraphOp: CustomOp2(a, b), [da, db, _] => (da, db), (Option<Tensor>, Option<Tensor>));
custom_op!(
    GraphOp: CustomOp3(a, b, c), [da, db, dc] => (da, db, dc), (Option<Tensor>, Option<Tensor>, Option<Tensor>)
);

#[cfg(test)]
mod tests;
