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
//! The graph holds the values that an operation's backward reads ([`Reads`]), and no others. So those of a sum, or of
//! queries that a rotation reads, are freed with the caller's last handle. Outputs that cost little are freed as well,
//! and computed again when a backward reads them ([`recomputed_op`]).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, MetalStorage};
use candle_core::{CustomOp1, CustomOp2, CustomOp3, DType, Device};
use candle_core::{Layout, Result, Shape, Storage, Tensor, TensorId, bail};
use parking_lot::Mutex;

use crate::storage::{scalar, sum, with_slice, with_slice_mut};

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
    source.apply_op1(GraphOp { is_lasting: true, ..GraphOp::of(backward, (memory, shape)) })
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
    let follow = |op: GraphOp| {
        let follows = |at: usize| links[at].as_ref().map_or(sources[at], |link| &link.token);
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
    let slot = Arc::new(Slot::default());
    let token = follow(op((scalar(sources[0].device())?, Shape::from(())), Some(slot.clone())))?;
    let output = token.apply_op1(Output { name, result: Mutex::new(Some(result)), slot: slot.clone() })?;
    let _ = slot.output.set(OutputKind::of(&output));
    if let Some(compute) = compute {
        let sources = (0..sources.len()).map(values).collect();
        *slot.recomputation.lock() = Some(Recomputation { compute, sources, values: None });
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
#[derive(Default)]
struct Slot {
    gradient: GradientSum,
    output: OnceLock<OutputKind>,
    /// The values of the output, if its token's backward reads them.
    values: Mutex<Option<Tensor>>,
    /// Set if the output is computed again in backward, until that has passed it.
    recomputation: Mutex<Option<Recomputation>>,
}

impl Slot {
    /// Returns the values of an output that is computed again. They stay until backward has passed the output.
    fn recomputed(&self) -> Result<Tensor> {
        let mut recomputation = self.recomputation.lock();
        let (Some(Recomputation { compute, sources, values }), Some(kind)) = (&mut *recomputation, self.output.get())
        else {
            return freed("an activation");
        };
        if let Some(values) = values {
            return Ok(values.clone());
        }
        let of_sources = sources.iter().map(Values::get).collect::<Result<Vec<_>>>()?;
        let memory = compute(&of_sources.iter().collect::<Vec<_>>())?;
        // A variable, since operations ask whether the source has a gradient.
        let computed = Tensor::from_storage(memory, kind.shape.clone(), BackpropOp::none(), true);
        Ok(values.insert(computed).clone())
    }

    /// Frees recomputed values once backward has passed the output, and with `all` what computes them.
    fn end_recomputation(&self, all: bool) {
        let mut recomputation = self.recomputation.lock();
        match &mut *recomputation {
            Some(recomputation) if !all => recomputation.values = None,
            recomputation => *recomputation = None,
        }
    }
}

type Compute = dyn Fn(&[&Tensor]) -> Result<Storage> + Send + Sync;

/// How an output is computed again.
struct Recomputation {
    compute: Arc<Compute>,
    sources: Vec<Values>,
    /// The output, once it was computed again.
    values: Option<Tensor>,
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

    fn get(&self) -> Result<Tensor> {
        match self {
            Values::Kept(values) => Ok(values.clone()),
            Values::Recomputed(slot) => slot.recomputed(),
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

/// A gradient to which several operations add, apart from Candle's store.
#[derive(Default)]
pub(crate) struct GradientSum(Mutex<Option<Gradient>>);

enum Gradient {
    /// Others may hold its memory.
    Moved(Tensor),
    Owned(Tensor),
}

impl GradientSum {
    /// Adds a gradient whose memory others may hold.
    fn add(&self, gradient: Tensor) -> Result<()> {
        let mut known = self.0.lock();
        *known = Some(match known.take() {
            None => Gradient::Moved(gradient),
            Some(Gradient::Moved(first)) => Gradient::Owned(sum(&first, &gradient)?),
            Some(Gradient::Owned(total)) => Gradient::Owned(add_to(total, &gradient)?),
        });
        Ok(())
    }

    /// Adds a gradient that has no other reader.
    pub(crate) fn add_owned(&self, gradient: Tensor) -> Result<()> {
        let mut sum = self.0.lock();
        *sum = Some(Gradient::Owned(match sum.take() {
            None => gradient.contiguous()?,
            Some(Gradient::Moved(first)) => add_to(gradient.contiguous()?, &first)?,
            Some(Gradient::Owned(total)) => add_to(total, &gradient)?,
        }));
        Ok(())
    }

    pub(crate) fn take(&self) -> Option<Tensor> {
        self.0.lock().take().map(|(Gradient::Moved(gradient) | Gradient::Owned(gradient))| gradient)
    }
}

/// Adds to a contiguous tensor in place.
fn add_to(total: Tensor, more: &Tensor) -> Result<Tensor> {
    let more = more.contiguous()?;
    with_slice_mut(&total, |kernels, total| with_slice(&more, |_, more| kernels.add(total, more)))?;
    Ok(total)
}

type Gradients = dyn Fn(&[&Tensor], &Tensor, &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync;

thread_local! {
    /// Whether a backward frees what it has passed.
    static FREES: Cell<bool> = const { Cell::new(false) };
}

/// Runs a backward that frees each operation's values once it has passed it. A later backward over them fails.
pub(crate) fn freeing<T>(backward: impl FnOnce() -> T) -> T {
    let before = FREES.replace(true);
    let _restore = scopeguard::guard((), move |()| FREES.set(before));
    backward()
}

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
        }
    }

    fn backward(&self, arguments: &[&Tensor], node: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let frees = FREES.get() && !self.is_lasting;
        let known = if frees { self.backward.lock().take() } else { self.backward.lock().clone() };
        let Some(OpBackward { gradients, sources }) = known else { return freed(self.name) };
        let values = |(&argument, source): (&&Tensor, &Option<Source>)| {
            let values = source.as_ref().and_then(|source| source.values.as_ref());
            values.map_or_else(|| Ok(argument.clone()), Values::get)
        };
        let of_sources: Vec<Tensor> = arguments.iter().zip(&sources).map(values).collect::<Result<_>>()?;
        let of_sources: Vec<&Tensor> = of_sources.iter().collect();
        let mut found = match &self.slot {
            None => gradients(&of_sources, node, gradient)?,
            Some(slot) => {
                let Some(kind) = slot.output.get() else { bail!("{}: backward ran during forward", self.name) };
                slot.end_recomputation(frees);
                let gradient = slot.gradient.take().map_or_else(|| kind.zeros(), Ok)?;
                let output = if frees { slot.values.lock().take() } else { slot.values.lock().clone() };
                gradients(&of_sources, output.as_ref().unwrap_or(node), &gradient)?
            }
        };
        for ((gradient, source), argument) in found.iter_mut().zip(&sources).zip(arguments) {
            let Some(Source { slot, .. }) = source else { continue };
            gradient.take().map_or(Ok(()), |gradient| slot.gradient.add(gradient))?;
            // Candle needs a gradient of every node that it visits. A token's value is 0.
            *gradient = Some(argument.detach());
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
        self.slot.gradient.add(gradient.clone())?;
        Ok([Some(token.detach())])
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
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use candle_core::{DType, Device, Var};

    use super::*;

    /// `factor * x`, as an operation of this library that keeps `x`.
    fn scaled(x: &Tensor, factor: f64) -> Tensor {
        let values: Vec<f32> = (x.detach() * factor).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let memory = Storage::Cpu(CpuStorage::F32(values));
        graph_op("scaled", &[x], memory, x.shape(), Reads::Sources, move |_, _, dy| Ok([Some((dy * factor)?)])).unwrap()
    }

    fn variable() -> Var {
        Var::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu).unwrap()
    }

    fn gradient(loss: &Tensor, x: &Var) -> Vec<f32> {
        loss.backward().unwrap().get(x).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn every_user_of_an_output_adds_its_gradient() {
        let x = variable();
        let y = scaled(&x, 2.);
        // Three operations of this library and two of Candle, which all use `y`.
        let mut users: Vec<Tensor> = [3., 5., 7.].map(|factor| scaled(&y, factor)).into();
        users.extend([(&y * 11.).unwrap(), y.t().unwrap()]);
        let loss = users.iter().map(|user| user.sum_all().unwrap()).reduce(|a, b| (a + b).unwrap()).unwrap();
        for _ in 0..2 {
            assert_eq!(gradient(&loss, &x), [2. * (3. + 5. + 7. + 11. + 1.); 4]);
        }
        // Another loss over the same graph.
        assert_eq!(gradient(&users[1].sum_all().unwrap(), &x), [10.; 4]);
    }

    #[test]
    fn a_shared_gradient_is_not_changed_by_its_sum() {
        let x = variable();
        let (a, b) = (scaled(&x, 2.), scaled(&x, 3.));
        let memory = Storage::Cpu(CpuStorage::F32(vec![0.; 4]));
        // Both sources get the same tensor, and `a` gets more.
        let both = graph_op("both", &[&a, &b], memory, a.shape(), Reads::Nothing, |_, _, dy| {
            Ok([Some(dy.clone()), Some(dy.clone())])
        });
        let more = [scaled(&a, 10.), scaled(&a, 100.)].map(|more| more.sum_all().unwrap());
        let loss = ((both.unwrap().sum_all().unwrap() + &more[0]).unwrap() + &more[1]).unwrap();
        assert_eq!(gradient(&loss, &x), [2. * 111. + 3.; 4]);
    }

    #[test]
    fn links_end_with_their_outputs() {
        let x = variable();
        let y = scaled(&x, 2.);
        let next = scaled(&y, 3.);
        let id = y.id();
        assert!(Link::of(&y).is_some() && Link::of(&y.detach()).is_none());
        assert_eq!(y.detach().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2., 4., 6., 8.]);
        drop(y);
        assert!(is_output(id), "the next operation reads the output in backward");
        drop(next);
        assert!(!is_output(id));
        let constant = scaled(&x.as_detached_tensor(), 2.);
        assert!(!constant.track_op() && Link::of(&constant).is_none());
    }

    #[test]
    fn values_that_backward_does_not_read_are_freed() {
        let x = variable();
        for (reads, is_kept) in [(Reads::Nothing, false), (Reads::Sources, true), (Reads::Output, false)] {
            let y = scaled(&x, 2.);
            let id = y.id();
            let memory = y.storage_and_layout().0.try_clone(y.layout()).unwrap();
            let next = graph_op("next", &[&y], memory, y.shape(), reads, |_, _, dy| Ok([Some(dy.clone())])).unwrap();
            drop(y);
            assert_eq!(is_output(id), is_kept, "{reads:?}");
            assert_eq!(gradient(&next.sum_all().unwrap(), &x), [2.; 4]);
        }
    }

    /// The square of `x`, which is computed again in backward, and how often it was computed.
    fn square(x: &Tensor) -> (Tensor, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let compute = move |x: &[&Tensor]| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(Storage::Cpu(CpuStorage::F32(x[0].detach().sqr()?.flatten_all()?.to_vec1()?)))
        };
        let backward = |x: &[&Tensor], dy: &Tensor| Ok([Some((x[0].detach() * dy)?.affine(2., 0.)?)]);
        (recomputed_op("square", &[x], compute, backward).unwrap(), count)
    }

    /// An operation whose gradient is the values of its source.
    fn reader(x: &Tensor) -> Tensor {
        let memory = x.storage_and_layout().0.try_clone(x.layout()).unwrap();
        graph_op("reader", &[x], memory, x.shape(), Reads::Sources, |x, _, _| {
            assert!(x[0].track_op());
            Ok([Some(x[0].detach())])
        })
        .unwrap()
    }

    #[test]
    fn an_activation_is_freed_and_computed_once_for_all_that_read_it() {
        let x = variable();
        let (y, count) = square(&scaled(&x, 1.));
        let (z, count_z) = square(&y);
        let ids = [y.id(), z.id()];
        // The gradient of z is 2 z = 2 x^4, and that of x is then 4 x^3 2 x^4. A reader of y adds 2 x x^2.
        let users = [reader(&z), reader(&z), reader(&y)].map(|user| user.sum_all().unwrap());
        let loss = ((&users[0] + &users[1]).unwrap() + &users[2]).unwrap();
        drop((y, z));
        assert!(ids.into_iter().all(|id| !is_output(id)), "the graph keeps an activation");
        let expected = [1f32, 2., 3., 4.].map(|x| 8. * x.powi(7) + 2. * x.powi(3));
        for run in 2..4 {
            assert_eq!(gradient(&loss, &x), expected);
            let counts = [&count, &count_z].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(counts, [run; 2]);
        }
        assert_eq!(freeing(|| gradient(&loss, &x)), expected);
        let error = freeing(|| loss.backward()).unwrap_err().to_string();
        assert!(error.contains("backward_retain_graph"), "{error}");
    }

    #[test]
    fn an_activation_is_kept_for_operations_after_a_backward_that_frees() {
        let x = variable();
        let (y, count) = square(&x);
        freeing(|| y.sum_all().unwrap().backward()).unwrap();
        let loss = reader(&y).sum_all().unwrap();
        let error = loss.backward().unwrap_err().to_string();
        assert!(error.contains("square: the graph has been through backward"), "{error}");
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn backward_gets_the_output_that_it_reads() {
        let x = variable();
        let memory = Storage::Cpu(CpuStorage::F32(vec![5., 6., 7., 8.]));
        let y =
            graph_op("y", &[x.as_tensor()], memory, x.shape(), Reads::Output, |_, y, _| Ok([Some(y.clone())])).unwrap();
        let loss = y.sum_all().unwrap();
        drop(y);
        assert_eq!(gradient(&loss, &x), [5., 6., 7., 8.]);
    }

    #[test]
    fn the_newest_record_has_the_outputs() {
        let x = variable();
        let outer = RecordedOutputs::begin();
        let y = scaled(&x, 2.);
        let inner = RecordedOutputs::begin();
        let z = scaled(&y, 3.);
        let of_record = |record: RecordedOutputs| {
            record.end().into_iter().map(|(token, output)| (token, output.id())).collect::<Vec<_>>()
        };
        assert_eq!(of_record(inner), [(followed(&z), z.id())]);
        assert_eq!(of_record(outer), [(followed(&y), y.id())]);
        assert_eq!(gradient(&z.sum_all().unwrap(), &x), [6.; 4]);
        RECORDED.with_borrow(|recorded| assert!(recorded.is_empty()));
    }

    #[test]
    fn half_floats_are_summed_like_candle_does() {
        for dtype in [DType::BF16, DType::F16] {
            let x = Var::from_tensor(&variable().to_dtype(dtype).unwrap()).unwrap();
            let like = |x: &Tensor| {
                let memory = x.storage_and_layout().0.try_clone(x.layout()).unwrap();
                graph_op("same", &[x], memory, x.shape(), Reads::Nothing, |_, _, dy| Ok([Some(dy.clone())])).unwrap()
            };
            let y = like(&x);
            let users = [like(&y), like(&y), like(&y)].map(|user| user.sum_all().unwrap());
            let loss = ((&users[0] + &users[1]).unwrap() + &users[2]).unwrap();
            let gradient = loss.backward().unwrap().get(&x).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [3.; 4]);
        }
    }
}
