//! A closure that runs again in backward.
//!
//! In the outer graph a checkpointed closure is `sources -> Joined -> Recompute -> output..`; everything in between is a
//! scalar. The sources are the leaves of the closure's graph: its inputs, the variables that it uses, and the anchors of
//! the sharded parameters that it uses. Candle's own backward therefore counts every use: a variable or parameter may be
//! used inside and outside of closures, and a parameter's anchor reports once, after the last use. The backward of
//! `Recompute` runs the closure again on copies of its inputs and runs Candle's backward over the new graph. It passes
//! each source's gradient to [`Joined`], whose backward comes next.
//!
//! A closure that captured a tensor with operations of this library before it does not run again: the backward of the new
//! graph would go through these operations too, which belong to the outer graph. The graph of its only run is kept.

use std::collections::HashSet;
use std::sync::{Arc, Once};

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var, bail};
use parking_lot::Mutex;

use super::offload::{ActivationOffload, Saved};
use super::saved_outputs::{Keep, OperationCall, record, replay};
use crate::autograd::{count_checkpoint, keeps_graph, next_number, number, on_at_least};
use crate::collectives::scope;
use crate::context_parallel::{self, Scope, with_scope};
use crate::fsdp::{FsdpParam, without_reports};
use crate::graph::{self, Backward, Joined, Key, Running, node, node_without_values};
use crate::random::{self, RngState};
use crate::storage;
use crate::tensors::{Tensors, with_tensors};
use crate::warning::warn;

/// Candle's backward is recursive: with less stack than this it moves to a stack of its own.
const STACK_RED_ZONE_BYTES: usize = 1 << 20;
const STACK_BYTES: usize = 64 << 20;

/// Runs `f` on `inputs` and keeps only the inputs for backward, which runs `f` again: less memory for a second forward.
///
/// Inputs and outputs are a [`Tensor`], a tuple, a `Vec`, or another type that implements [`Tensors`]. Integer tensors
/// pass through. Losses and gradients have the same bits as without checkpointing.
///
/// `f` must do the same each time. It draws the same numbers from [`random`](crate::random), as for dropout, in
/// backward (PyTorch's `preserve_rng_state`); seed other randomness inside `f`. `f` captures its layers in an [`Arc`].
/// Pass everything else that has a gradient through `inputs`. If `f` captured such a tensor, gradients are right, but its
/// activations are kept as without a checkpoint, after a second forward, and a warning says so. Variables that `f` uses
/// get gradients, sharded or not, also if they are used elsewhere.
///
/// Under `fully_shard`, checkpoint *inside* a unit, whose parameters are gathered before backward runs `f` again. `f`
/// must not call an [`FsdpModule`](crate::FsdpModule). Checkpoints may be nested. Fails if the second run differs.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::{activation_checkpoint::checkpoint, fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// struct Mlp(nn::Linear, nn::Linear);
/// impl Mlp {
///     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
///         self.1.forward(&nn::gelu(&self.0.forward(x)?)?)
///     }
/// }
/// let world = World::single().unwrap();
/// let vars = ShardedVarMap::of_world(&world).unwrap();
/// let opts = FullyShard::new(&vars);
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///     Ok(Arc::new(Mlp(nn::linear(4, 16, vb.pp("up"))?, nn::linear(16, 4, vb.pp("down"))?)))
/// })
/// .unwrap();
///
/// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap();
/// let y = model.call(|mlp| {
///     let mlp = mlp.clone();
///     checkpoint(move |x: Tensor| mlp.forward(&x), x)
/// });
/// let grads = model.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
/// assert!(vars.trainable().iter().all(|param| grads.get(param.var()).is_some()));
/// ```
pub fn checkpoint<I, O, F>(f: F, inputs: I) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
    F: Fn(I) -> Result<O> + Send + Sync + 'static,
{
    run(None, None, f, inputs)
}

/// Checkpoints and keeps the outputs of the operations that `keep` accepts, which then run once: PyTorch's
/// `create_selective_checkpoint_contexts(policy_fn)`. Operations are the expensive ones of [`nn`](crate::nn)'s layers
/// ([`Operation`](super::Operation)). The innermost of nested checkpoints decides.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor, Var};
/// use fsdp_candle::activation_checkpoint::{Operation, selective_checkpoint};
/// use fsdp_candle::nn;
///
/// let weight = Var::ones((4, 4), DType::F32, &Device::Cpu)?;
/// let layer = nn::Linear::new(weight.as_tensor().clone(), None);
/// let y = selective_checkpoint(
///     |call| call.operation == Operation::Linear && call.number == 0, // the first of two products
///     move |x: Tensor| layer.forward(&nn::silu(&layer.forward(&x)?)?),
///     Tensor::ones((2, 4), DType::F32, &Device::Cpu)?,
/// )?;
/// assert!(y.sum_all()?.backward()?.get(&weight).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn selective_checkpoint<I, O, F>(
    keep: impl Fn(&OperationCall<'_>) -> bool + Send + Sync + 'static,
    f: F,
    inputs: I,
) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
    F: Fn(I) -> Result<O> + Send + Sync + 'static,
{
    let keep: Arc<Keep> = Arc::new(keep);
    run(Some(&keep), None, f, inputs)
}

pub(super) fn run<I, O, F>(keep: Option<&Arc<Keep>>, offload: Option<&ActivationOffload>, f: F, inputs: I) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
    F: Fn(I) -> Result<O> + Send + Sync + 'static,
{
    count_checkpoint();
    // Inputs come first among the sources, so that Candle's backward visits the graph before the closure last.
    let (mut sources, mut wanted) = (vec![], vec![]);
    let saved = inputs.clone().map_tensors(&mut |tensor| {
        let saved = tensor.detach();
        wanted.push(tensor.track_op() && tensor.dtype().is_float());
        if wanted.last() == Some(&true) {
            sources.push(tensor);
        }
        Ok(saved)
    })?;
    let state = ForwardState::now();
    let begun = next_number();
    let (first, kept) = record(keep, || scope(|| f(saved.clone())));
    let (result, outputs) = with_tensors(first?)?;
    let kept = Mutex::new(kept);
    let leaves = Leaves::of(&outputs)?;
    if keeps_graph() && leaves.have_operations_before(begun)? {
        warn_of_captured();
        return record(None, || state.again(|| f(inputs))).0;
    }
    sources.extend(leaves.variables);
    let params = leaves.params;
    for param in &params {
        sources.push(param.anchor_of_pass()?);
    }
    if sources.is_empty() {
        return result.map_tensors(&mut |tensor| Ok(tensor.detach())); // no source has a gradient
    }
    let joined = Joined::new(&sources)?;
    let token = joined.node().clone();

    let (saved, away) = match offload {
        Some(offload) if keeps_graph() => offloaded(saved, &wanted, offload)?,
        _ => (saved, vec![]),
    };
    let closure_outputs: Vec<ClosureOutput> = outputs.iter().map(ClosureOutput::of).collect();
    let run = move |copy: &mut dyn FnMut(Tensor) -> Result<Tensor>| {
        let mut away = away.iter();
        let inputs = saved.clone().map_tensors(&mut |tensor| match away.next() {
            Some(Some(saved)) => copy(saved.restore()?),
            _ => copy(tensor),
        })?;
        let kept = std::mem::take(&mut *kept.lock());
        Ok(with_tensors(replay(kept, || state.again(|| f(inputs)))?)?.1)
    };
    let recompute = Recompute {
        run: Box::new(run),
        wanted,
        leaves: leaves.ids,
        sources: sources.iter().map(Tensor::id).collect(),
        joined,
        closure_outputs: closure_outputs.clone(),
    };
    let token = node(&token, storage::scalar(token.device())?, Shape::from(()), recompute)?;
    let node = number(token.id());
    // One report is enough, because the parameters belong to one model.
    params.iter().any(|param| param.register_recomputation(begun..node, node));
    let mut closure_outputs = closure_outputs.into_iter();
    result.map_tensors(&mut |tensor| match closure_outputs.next() {
        Some(end) if tensor.dtype().is_float() => end.output(&tensor, &token),
        _ => Ok(tensor.detach()),
    })
}

/// The state of a thread that a closure reads besides its inputs. A second run has the state of the first.
struct ForwardState {
    random: RngState,
    context: Option<Scope>,
}

impl ForwardState {
    fn now() -> Self {
        ForwardState { random: random::get_rng_state(), context: context_parallel::current() }
    }

    fn again<T>(&self, f: impl FnOnce() -> T) -> T {
        with_scope(self.context.clone(), || random::with_state(self.random, || scope(f)))
    }
}

/// Offloads the wanted inputs. Also returns, for each input, its copy if it has one.
fn offloaded<I: Tensors>(
    inputs: I,
    wanted: &[bool],
    offload: &ActivationOffload,
) -> Result<(I, Vec<Option<Arc<Saved>>>)> {
    let mut away = vec![];
    let mut wanted = wanted.iter();
    let inputs = inputs.map_tensors(&mut |tensor| {
        let saved = if wanted.next() == Some(&true) { offload.save(&tensor)? } else { None };
        away.push(saved);
        // A scalar takes the place of an input that is away.
        if let Some(Some(_)) = away.last() { Tensor::zeros((), DType::U8, &Device::Cpu) } else { Ok(tensor) }
    })?;
    Ok((inputs, away))
}

/// The leaves of the graph of some outputs.
#[derive(Default)]
struct Leaves {
    /// Variables other than sharded parameters.
    variables: Vec<Tensor>,
    params: Vec<Arc<FsdpParam>>,
    /// Ids of the variables and of the parameters' anchors.
    ids: HashSet<TensorId>,
    /// Ids of other scalars of the graph. The operations of this library have one each.
    scalars: Vec<TensorId>,
}

impl Leaves {
    fn of(outputs: &[Tensor]) -> Result<Self> {
        let (mut leaves, mut seen, mut params) = (Leaves::default(), HashSet::new(), HashSet::new());
        let mut param_leaves = HashSet::new();
        for output in outputs {
            for node in on_enough_stack(|| output.sorted_nodes())? {
                if !seen.insert(node.id()) {
                    continue;
                }
                if let Some(param) = FsdpParam::of(node) {
                    if params.insert(param.anchor.id()) {
                        param_leaves.insert(param.leaf);
                        leaves.params.push(param);
                    }
                } else if node.is_variable() {
                    leaves.variables.push(node.clone());
                } else if node.rank() == 0 {
                    leaves.scalars.push(node.id());
                }
            }
        }
        leaves.variables.retain(|variable| !param_leaves.contains(&variable.id()));
        leaves.ids = leaves
            .variables
            .iter()
            .map(Tensor::id)
            .chain(leaves.params.iter().map(|param| param.anchor.id()))
            .collect();
        Ok(leaves)
    }

    /// Returns whether the graph has operations of this library that are older than `begun`, other than parameters.
    fn have_operations_before(&self, begun: usize) -> Result<bool> {
        let mut older = self.scalars.iter().filter(|id| number(**id) < begun).peekable();
        if older.peek().is_none() {
            return Ok(false);
        }
        let anchors = self.params.iter().map(|param| Ok(param.anchor_of_pass()?.id()));
        let anchors = anchors.collect::<Result<HashSet<_>>>()?;
        Ok(older.any(|id| !anchors.contains(id)))
    }
}

fn warn_of_captured() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        warn(
            "a checkpointed closure uses a tensor with a graph that is not among its inputs. Its activations are kept, \
             as without a checkpoint. Pass the tensor through `inputs`",
        );
    });
}

fn on_enough_stack<T>(f: impl FnOnce() -> T) -> Result<T> {
    on_at_least(STACK_RED_ZONE_BYTES, STACK_BYTES, "a checkpoint's backward", f)
}

/// Runs the closure with each input mapped and returns its outputs.
type Run = Box<dyn Fn(&mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> + Send + Sync>;

struct Recompute {
    run: Run,
    /// Whether each input has a gradient.
    wanted: Vec<bool>,
    /// Leaves of the closure's graph in forward.
    leaves: HashSet<TensorId>,
    /// Ids of the sources. Inputs with gradients come first.
    sources: Vec<TensorId>,
    joined: Joined,
    closure_outputs: Vec<ClosureOutput>,
}

impl Backward for Recompute {
    fn name(&self) -> &'static str {
        "checkpoint-recompute"
    }

    fn backward(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let gradients = self.gradients();
        let gradients =
            gradients.map_err(|error| error.context("while a checkpointed closure ran again in backward"))?;
        self.joined.set_gradients(gradients)
    }
}

impl Recompute {
    /// Runs the closure and its backward. Returns the gradients of the sources, or none if no output has a gradient.
    fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        tracing::debug!(inputs = self.wanted.len(), "recompute");
        let mut wanted = self.wanted.iter();
        let mut copies = vec![];
        let outputs = (self.run)(&mut |saved| {
            if wanted.next() != Some(&true) {
                return Ok(saved);
            }
            let copy = Var::from_tensor(&saved)?.into_inner();
            copies.push(copy.clone());
            Ok(copy)
        })?;
        self.check(&outputs, &copies)?;

        let running = Running::current();
        let mut root: Option<Tensor> = None;
        for (output, end) in outputs.iter().zip(&self.closure_outputs) {
            let Some(gradient) = running.take(end.key) else { continue };
            let of_output = move |_: &Tensor| Ok(Some(gradient.clone()));
            let node =
                node_without_values("checkpoint-root", output, storage::scalar(output.device())?, (), of_output)?;
            root = Some(match root {
                Some(root) => (root + node)?,
                None => node,
            });
        }
        let Some(root) = root else { return Ok(vec![]) };
        drop(outputs);
        let gradients = without_reports(|| on_enough_stack(|| graph::backward(&root, true))?)?;
        let ids = copies.iter().map(Tensor::id).chain(self.sources.iter().copied().skip(copies.len()));
        Ok(ids.map(|id| gradients.get_id(id).cloned()).collect())
    }

    /// Checks that the second run used the same leaves and returned the same shapes.
    fn check(&self, outputs: &[Tensor], copies: &[Tensor]) -> Result<()> {
        const RULE: &str = "a checkpointed closure must do the same each time it runs";
        let before: Vec<(&Shape, DType)> = self.closure_outputs.iter().map(|end| (&end.shape, end.dtype)).collect();
        let now: Vec<(&Shape, DType)> = outputs.iter().map(|output| (output.shape(), output.dtype())).collect();
        if before != now {
            bail!("{RULE}: it returned {before:?} in forward and {now:?} in backward")
        }
        let mut leaves = Leaves::of(outputs)?.ids;
        for copy in copies {
            leaves.remove(&copy.id());
        }
        let differ = leaves.symmetric_difference(&self.leaves).count();
        if differ > 0 {
            bail!("{RULE}: {differ} variables or sharded parameters were used in only one of forward and backward")
        }
        Ok(())
    }
}

/// One output of a checkpointed closure.
#[derive(Clone)]
struct ClosureOutput {
    /// Place of the gradient, from the output's backward to that of [`Recompute`].
    key: Key,
    shape: Shape,
    dtype: DType,
}

impl ClosureOutput {
    fn of(output: &Tensor) -> Self {
        ClosureOutput { key: Key::new(), shape: output.shape().clone(), dtype: output.dtype() }
    }

    /// Returns the output in the outer graph: its values, after the token.
    fn output(self, values: &Tensor, token: &Tensor) -> Result<Tensor> {
        let before = token.clone();
        let keep = move |gradient: &Tensor| {
            let running = Running::current();
            running.put(self.key, gradient.clone());
            running.hold(&before).map(Some)
        };
        node_without_values("checkpoint-output", token, storage::copied_storage(values)?, self.shape, keep)
    }
}
