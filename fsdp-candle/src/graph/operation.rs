//! Operations whose result is already computed when Candle's graph gets them.

use std::sync::Arc;

use candle_core::{Result, Shape, Storage, Tensor, bail};
use parking_lot::Mutex;

use super::computed::{Computed, Forward, custom_op};
use super::recomputation::{Compute, Recomputation, Values};
use super::record::record;
use super::running::{Key, Running, freed};
use super::teardown::drop_flat;
use super::token::{OutputState, Slot, Token};
use crate::storage::scalar;

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
    source.apply_op1(GraphOp::of(backward, Computed { memory, shape }))
}

/// [`node`] that is never freed, because it is part of many graphs, as a parameter's nodes are.
pub(crate) fn lasting_node(source: &Tensor, memory: Storage, shape: Shape, backward: impl Backward) -> Result<Tensor> {
    let mut op = GraphOp::of(backward, Computed { memory, shape });
    op.is_lasting = true;
    source.apply_op1(op)
}

/// Returns a node with this storage that follows `source` in the graph, for an operation whose backward reads only the
/// gradient, as a hook's. The graph keeps neither the node's values nor those of a source that has a token. `backward`
/// gets the node's gradient and returns the source's; `None` is zeros. It is not among
/// [`RecordedOutputs`](super::RecordedOutputs).
pub(crate) fn node_without_values(
    name: &'static str,
    source: &Tensor,
    memory: Storage,
    shape: impl Into<Shape>,
    backward: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let has_token = Token::of(source).is_some();
    let gradients = move |sources: &[&Tensor], _: &Tensor, gradient: &Tensor| {
        let gradient = match backward(gradient)? {
            // Candle needs a gradient of every node that it visits.
            None if !has_token && !sources[0].is_variable() => Some(sources[0].zeros_like()?),
            gradient => gradient,
        };
        Ok([gradient, None, None])
    };
    let computed = Computed { memory, shape: shape.into() };
    Operation { name, sources: &[source], computed, reads: Reads::Nothing, compute: None }.node(gradients)
}

/// Values that an operation's backward reads, besides the gradient of its output. The graph keeps no others: a source
/// or an output that backward does not read is freed with its last other user.
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
    let computed = Computed { memory, shape: shape.into() };
    Operation { name, sources: &sources, computed, reads, compute: None }.recorded(backward)
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
    let computed = Computed { memory: compute(sources)?, shape: sources[0].shape().clone() };
    let backward = move |sources: &[&Tensor], _: &Tensor, gradient: &Tensor| backward(sources, gradient);
    Operation { name, sources, computed, reads: Reads::Sources, compute: Some(Arc::new(compute)) }.recorded(backward)
}

/// An operation that is not in the graph yet.
struct Operation<'a> {
    name: &'static str,
    /// One to three sources.
    sources: &'a [&'a Tensor],
    computed: Computed,
    reads: Reads,
    /// Computes the result again.
    compute: Option<Arc<Compute>>,
}

impl Operation<'_> {
    /// [`Operation::node`] that is among [`RecordedOutputs`](super::RecordedOutputs).
    fn recorded<G: IntoIterator<Item = Option<Tensor>>>(
        self,
        backward: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<G> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let output = self.node(move |sources, node, gradient| {
            let mut gradients = backward(sources, node, gradient)?.into_iter();
            Ok(std::array::from_fn(|_| gradients.next().flatten()))
        })?;
        record(&output);
        Ok(output)
    }

    /// Returns the result as a node that follows the sources, by way of a token if it may have one.
    fn node(
        self,
        gradients: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<SourceGradients> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let Operation { name, sources, computed, reads, compute } = self;
        let sources: Vec<SourceNode<'_>> = sources.iter().map(|source| SourceNode::of(source)).collect();
        let reads_sources = matches!(reads, Reads::Sources | Reads::SourcesAndOutput);
        let bypassed = sources.iter().map(|source| source.bypassed(reads_sources)).collect();
        let op = |computed, slot| GraphOp::new(name, computed, gradients, bypassed, slot);
        let may_have_token = !matches!(computed.memory, Storage::Metal(_)) && computed.shape.rank() > 0;
        if !(may_have_token && sources.iter().any(|source| source.tensor.track_op())) {
            return follow(&sources, op(computed, None));
        }
        let key = Key::new();
        let recomputation = compute.map(|compute| {
            Recomputation::new(key, computed.shape.clone(), compute, sources.iter().map(SourceNode::values).collect())
        });
        let slot = Arc::new(Slot::new(key, recomputation));
        let of_token = Computed { memory: scalar(sources[0].tensor.device())?, shape: Shape::from(()) };
        let node = follow(&sources, op(of_token, Some(slot.clone())))?;
        Token { node, slot }.output(name, computed, matches!(reads, Reads::Output | Reads::SourcesAndOutput))
    }
}

/// Returns the node of an operation that follows its sources.
fn follow(sources: &[SourceNode<'_>], mut op: GraphOp) -> Result<Tensor> {
    let nodes: Vec<&Tensor> = sources.iter().map(SourceNode::node).collect();
    op.follows = nodes.iter().filter(|node| node.track_op()).map(|node| (*node).clone()).collect();
    match nodes[..] {
        [a] => a.apply_op1(op),
        [a, b] => a.apply_op2(b, op),
        [a, b, c] => a.apply_op3(b, c, op),
        _ => bail!("{}: expected 1 to 3 sources, found {}", op.forward.name, nodes.len()),
    }
}

/// A source of an operation that is not in the graph yet.
struct SourceNode<'a> {
    tensor: &'a Tensor,
    token: Option<Token>,
}

impl<'a> SourceNode<'a> {
    fn of(tensor: &'a Tensor) -> Self {
        SourceNode { tensor, token: Token::of(tensor) }
    }

    /// Returns the node that the operation follows.
    fn node(&self) -> &Tensor {
        self.token.as_ref().map_or(self.tensor, |token| &token.node)
    }

    fn values(&self) -> Values {
        self.token.as_ref().map_or_else(|| Values::Kept(self.tensor.clone()), |token| token.values(self.tensor))
    }

    fn bypassed(&self, is_read: bool) -> Option<BypassedSource> {
        let slot = self.token.as_ref()?.slot.clone();
        Some(BypassedSource { values: is_read.then(|| self.values()), slot })
    }
}

/// The gradients of an operation's sources.
type SourceGradients = [Option<Tensor>; 3];

type Gradients = dyn Fn(&[&Tensor], &Tensor, &Tensor) -> Result<SourceGradients> + Send + Sync;

/// An operation in Candle's graph.
struct GraphOp {
    forward: Forward,
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
    sources: Vec<Option<BypassedSource>>,
}

/// A source whose token stands for it.
#[derive(Clone)]
struct BypassedSource {
    /// Values, if backward reads them.
    values: Option<Values>,
    slot: Arc<Slot>,
}

impl GraphOp {
    /// Returns an operation with one source.
    fn of(backward: impl Backward, computed: Computed) -> Self {
        let name = backward.name();
        let gradients = move |sources: &[&Tensor], node: &Tensor, gradient: &Tensor| {
            Ok([backward.backward(sources[0], node, gradient)?, None, None])
        };
        GraphOp::new(name, computed, gradients, vec![None], None)
    }

    fn new(
        name: &'static str,
        computed: Computed,
        gradients: impl Fn(&[&Tensor], &Tensor, &Tensor) -> Result<SourceGradients> + Send + Sync + 'static,
        sources: Vec<Option<BypassedSource>>,
        slot: Option<Arc<Slot>>,
    ) -> Self {
        let backward = OpBackward { gradients: Arc::new(gradients), sources };
        GraphOp {
            forward: Forward::new(name, computed),
            backward: Mutex::new(Some(backward)),
            is_lasting: false,
            slot,
            follows: vec![],
        }
    }

    fn backward(&self, arguments: &[&Tensor], node: &Tensor, gradient: &Tensor) -> Result<SourceGradients> {
        let (name, running) = (self.forward.name, Running::current());
        let frees = running.frees && !self.is_lasting;
        let known = if frees { self.backward.lock().take() } else { self.backward.lock().clone() };
        let Some(OpBackward { gradients, sources }) = known else { return freed(name) };
        let values = |(&argument, source): (&&Tensor, &Option<BypassedSource>)| {
            let values = source.as_ref().and_then(|source| source.values.as_ref());
            values.map_or_else(|| Ok(argument.clone()), |values| values.get(&running))
        };
        let of_sources: Vec<Tensor> = arguments.iter().zip(&sources).map(values).collect::<Result<_>>()?;
        let of_sources: Vec<&Tensor> = of_sources.iter().collect();
        let mut found = match &self.slot {
            None => gradients(&of_sources, node, gradient)?,
            Some(slot) => {
                let OutputState { gradient, values } = slot.take(name, &running, frees)?;
                gradients(&of_sources, values.as_ref().unwrap_or(node), &gradient)?
            }
        };
        for ((gradient, source), argument) in found.iter_mut().zip(&sources).zip(arguments) {
            let Some(BypassedSource { slot, .. }) = source else { continue };
            // Candle needs a gradient of every node that it visits. A token's is a scalar.
            *gradient = match gradient.take() {
                Some(gradient) => running.add(slot.key, gradient, argument)?,
                None => Some(argument.detach()),
            };
        }
        Ok(found)
    }
}

custom_op!(GraphOp: CustomOp1(a), [da, ..] => da, Option<Tensor>);
custom_op!(GraphOp: CustomOp2(a, b), [da, db, _] => (da, db), (Option<Tensor>, Option<Tensor>));
custom_op!(
    GraphOp: CustomOp3(a, b, c), [da, db, dc] => (da, db, dc), (Option<Tensor>, Option<Tensor>, Option<Tensor>)
);
