//! A closure that runs again when backward comes to it.
//!
//! In the outer graph a checkpointed closure is `sources -> Bridge.. -> sum -> Recompute -> Output..`: everything in
//! between is a scalar. The sources are what the closure's graph starts from: its inputs, the variables that it used,
//! and the anchors of the sharded parameters that it used. So Candle's own backward knows every use: a variable or
//! parameter may be used inside and outside of closures, and a parameter's anchor still reports once, after the last
//! use. `Recompute`'s backward runs the closure again on copies of its inputs, runs Candle's backward over the new
//! graph, and leaves each source's gradient in its bridge, whose backward comes next.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Shape, Tensor, TensorId, Var, bail};

use super::kept::{Keep, OperationCall, keeping, using};
use crate::autograd::{next_number, number, on_at_least};
use crate::collectives::scope;
use crate::fsdp::FsdpParam;
use crate::fsdp::without_reports;
use crate::kernels::{Backward, node};
use crate::random;
use crate::storage;
use crate::tensors::Tensors;

/// Candle walks a graph recursively: below this much stack the walk moves to a stack of its own.
const STACK_RED_ZONE_BYTES: usize = 1 << 20;
const STACK_BYTES: usize = 64 << 20;

thread_local! {
    static CHECKPOINTS: Cell<usize> = const { Cell::new(0) };
}

/// How many closures this thread has checkpointed: their graphs are out of sight.
pub(crate) fn checkpoints() -> usize {
    CHECKPOINTS.get()
}

/// Runs `f` on `inputs` and keeps the inputs alone for backward, which runs `f` once more to get at the rest: less
/// memory for a second forward.
///
/// Inputs and outputs are a [`Tensor`], a tuple, a `Vec`, or a type of your own ([`Tensors`]). Tensors of integers are
/// passed on as they are. Losses and gradients are the same bits as without checkpointing.
///
/// `f` must do the same each time. What it draws from [`random`](crate::random), as dropout does, it draws again in
/// backward (PyTorch's `preserve_rng_state`); other randomness is seeded inside `f`. It captures its layers, in an
/// [`Arc`]; whatever else has a gradient comes in through `inputs` (a captured tensor with a graph keeps that graph
/// alive, and backward goes through it once more). Variables that `f` uses get their gradients, sharded or not, used
/// elsewhere or not.
///
/// Under `fully_shard`, checkpoint *inside* a unit: its parameters are gathered before backward enters it, thus before
/// `f` runs again. `f` itself may not call an [`FsdpModule`](crate::FsdpModule). Checkpoints may be nested.
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
/// let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
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
///
/// # Errors
/// Those of `f`. In backward, those of `f` again, and when it did something else than the first time.
pub fn checkpoint<I, O, F>(f: F, inputs: I) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
    F: Fn(I) -> Result<O> + Send + Sync + 'static,
{
    run(None, f, inputs)
}

/// [`checkpoint`] that also keeps the outputs of the operations that `keep` accepts, which then run once: more memory
/// for less of a second forward. Those are operations of [`nn`](crate::nn)'s layers that cost much to compute
/// ([`Operation`](super::Operation)); PyTorch's `create_selective_checkpoint_contexts(policy_fn)`. Of checkpoints in
/// each other the innermost decides.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor, Var};
/// use fsdp_candle::activation_checkpoint::{Operation, selective_checkpoint};
/// use fsdp_candle::nn;
///
/// let weight = Var::ones((4, 4), DType::F32, &Device::Cpu)?;
/// let layer = nn::Linear::new(weight.as_tensor().clone(), None);
/// let y = selective_checkpoint(
///     |call| call.operation == Operation::Linear && call.number == 0, // of two products the first
///     move |x: Tensor| layer.forward(&nn::silu(&layer.forward(&x)?)?),
///     Tensor::ones((2, 4), DType::F32, &Device::Cpu)?,
/// )?;
/// assert!(y.sum_all()?.backward()?.get(&weight).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As those of [`checkpoint`].
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
    run(Some(&keep), f, inputs)
}

pub(super) fn run<I, O, F>(keep: Option<&Arc<Keep>>, f: F, inputs: I) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
    F: Fn(I) -> Result<O> + Send + Sync + 'static,
{
    CHECKPOINTS.set(CHECKPOINTS.get().wrapping_add(1));
    // Inputs come first among the sources: Candle's backward then goes on into what is before the closure when all else
    // is done.
    let (mut sources, mut wanted) = (vec![], vec![]);
    let saved = inputs.map_tensors(&mut |tensor| {
        let saved = tensor.detach();
        wanted.push(tensor.track_op() && tensor.dtype().is_float());
        if wanted.last() == Some(&true) {
            sources.push(tensor);
        }
        Ok(saved)
    })?;
    let random = random::get_rng_state();
    let begun = next_number();
    let (first, kept) = keeping(keep, || scope(|| f(saved.clone())));
    let (result, outputs) = list(first?)?;
    let kept = Mutex::new(kept);
    let start = Start::of(&outputs)?;
    sources.extend(start.variables);
    let params = start.params;
    for param in &params {
        sources.push(param.anchor_of_pass()?);
    }

    let mut bridges = vec![];
    let mut token: Option<Tensor> = None;
    for source in &sources {
        let slot = Slot::default();
        let scalar = scalar(source, Bridge(slot.clone()))?;
        bridges.push((source.id(), slot));
        token = Some(match token {
            Some(sum) => (sum + scalar)?,
            None => scalar,
        });
    }
    let Some(token) = token else {
        return result.map_tensors(&mut |tensor| Ok(tensor.detach())); // nothing here has a gradient
    };

    let ends: Vec<End> = outputs.iter().map(End::of).collect();
    let run = move |copy: &mut dyn FnMut(Tensor) -> Result<Tensor>| {
        let inputs = saved.clone().map_tensors(&mut |tensor| copy(tensor))?;
        let kept = std::mem::take(&mut *kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        Ok(list(using(kept, || random::with_state(random, || scope(|| f(inputs))))?)?.1)
    };
    let recompute = Recompute { run: Box::new(run), wanted, start: start.ids, bridges, ends: ends.clone() };
    let token = scalar(&token, recompute)?;
    let node = number(token.id());
    // One report is enough: the parameters belong to one model.
    params.iter().any(|param| param.register_recomputation(begun..node, node));
    let mut ends = ends.into_iter();
    result.map_tensors(&mut |tensor| match ends.next() {
        Some(end) if tensor.dtype().is_float() => end.output(&tensor, &token),
        _ => Ok(tensor.detach()),
    })
}

/// The tensors of a value, beside it.
fn list<T: Tensors>(value: T) -> Result<(T, Vec<Tensor>)> {
    let mut tensors = vec![];
    let value = value.map_tensors(&mut |tensor| {
        tensors.push(tensor.clone());
        Ok(tensor)
    })?;
    Ok((value, tensors))
}

/// A place for one gradient.
#[derive(Clone, Default)]
struct Slot(Arc<Mutex<Option<Tensor>>>);

impl Slot {
    fn put(&self, gradient: Option<Tensor>) {
        *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = gradient;
    }

    fn take(&self) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }
}

/// What the graph of some outputs starts from.
#[derive(Default)]
struct Start {
    /// Variables that are no sharded parameters'.
    variables: Vec<Tensor>,
    params: Vec<Arc<FsdpParam>>,
    /// The ids of the variables, and of the parameters' anchors.
    ids: HashSet<TensorId>,
}

impl Start {
    fn of(outputs: &[Tensor]) -> Result<Self> {
        let (mut start, mut seen, mut params) = (Start::default(), HashSet::new(), HashSet::new());
        let mut leaves = HashSet::new();
        for output in outputs {
            for node in on_enough_stack(|| output.sorted_nodes())? {
                if !seen.insert(node.id()) {
                    continue;
                }
                if let Some(param) = FsdpParam::of(node) {
                    if params.insert(param.anchor.id()) {
                        leaves.insert(param.leaf);
                        start.params.push(param);
                    }
                } else if node.is_variable() {
                    start.variables.push(node.clone());
                }
            }
        }
        start.variables.retain(|variable| !leaves.contains(&variable.id()));
        start.ids =
            start.variables.iter().map(Tensor::id).chain(start.params.iter().map(|param| param.anchor.id())).collect();
        Ok(start)
    }
}

fn on_enough_stack<T>(f: impl FnOnce() -> T) -> Result<T> {
    on_at_least(STACK_RED_ZONE_BYTES, STACK_BYTES, "a checkpoint's backward", f)
}

/// A scalar that stands for something in the graph.
fn scalar(source: &Tensor, backward: impl Backward) -> Result<Tensor> {
    node(source, storage::scalar(source.device())?, Shape::from(()), backward)
}

/// From any tensor to a scalar without meaning: its backward hands out the gradient that was left in the slot.
struct Bridge(Slot);

impl Backward for Bridge {
    fn name(&self) -> &'static str {
        "checkpoint-bridge"
    }

    fn backward(&self, source: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        match self.0.take() {
            Some(gradient) => Ok(Some(gradient)),
            None if source.is_variable() => Ok(None),
            // Candle wants a gradient of every node that it goes through.
            None => Ok(Some(source.zeros_like()?)),
        }
    }
}

/// Runs the closure with each input mapped, and lists its outputs.
type Run = Box<dyn Fn(&mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> + Send + Sync>;

struct Recompute {
    run: Run,
    /// Of each input, whether it has a gradient.
    wanted: Vec<bool>,
    /// What the closure's graph started from in forward.
    start: HashSet<TensorId>,
    /// Of each source: its id, and where its gradient goes. The inputs that have one come first.
    bridges: Vec<(TensorId, Slot)>,
    ends: Vec<End>,
}

impl Backward for Recompute {
    fn name(&self) -> &'static str {
        "checkpoint-recompute"
    }

    fn backward(&self, token: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        self.gradients().map_err(|error| error.context("while a checkpointed closure ran again in backward"))?;
        Ok(Some(token.zeros_like()?))
    }
}

impl Recompute {
    /// Runs the closure and its backward, and leaves the gradients in the bridges.
    fn gradients(&self) -> Result<()> {
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

        let mut root: Option<Tensor> = None;
        for (output, end) in outputs.iter().zip(&self.ends) {
            let Some(gradient) = end.gradient.take() else { continue };
            let slot = Slot::default();
            slot.put(Some(gradient));
            let scalar = scalar(output, Bridge(slot))?;
            root = Some(match root {
                Some(sum) => (sum + scalar)?,
                None => scalar,
            });
        }
        let Some(root) = root else { return Ok(()) };
        drop(outputs);
        let gradients = without_reports(|| on_enough_stack(|| root.backward())?)?;
        for (position, (id, slot)) in self.bridges.iter().enumerate() {
            let id = copies.get(position).map_or(*id, Tensor::id);
            slot.put(gradients.get_id(id).cloned());
        }
        Ok(())
    }

    /// An error unless the closure did what it did in forward.
    fn check(&self, outputs: &[Tensor], copies: &[Tensor]) -> Result<()> {
        const RULE: &str = "a checkpointed closure must do the same each time it runs";
        let before: Vec<(&Shape, DType)> = self.ends.iter().map(|end| (&end.shape, end.dtype)).collect();
        let now: Vec<(&Shape, DType)> = outputs.iter().map(|output| (output.shape(), output.dtype())).collect();
        if before != now {
            bail!("{RULE}: it returned {before:?} in forward and {now:?} in backward")
        }
        let mut start = Start::of(outputs)?.ids;
        for copy in copies {
            start.remove(&copy.id());
        }
        let differ = start.symmetric_difference(&self.start).count();
        if differ > 0 {
            bail!("{RULE}: {differ} variables or sharded parameters were used in one of forward and backward only")
        }
        Ok(())
    }
}

/// One output of a checkpointed closure.
#[derive(Clone)]
struct End {
    /// Its gradient, from its backward to that of [`Recompute`].
    gradient: Slot,
    shape: Shape,
    dtype: DType,
}

impl End {
    fn of(output: &Tensor) -> Self {
        End { gradient: Slot::default(), shape: output.shape().clone(), dtype: output.dtype() }
    }

    /// The output in the outer graph: its values, and the token before it.
    fn output(self, values: &Tensor, token: &Tensor) -> Result<Tensor> {
        let shape = self.shape.clone();
        node(token, storage::copied_storage(values)?, shape, Output(self))
    }
}

struct Output(End);

impl Backward for Output {
    fn name(&self) -> &'static str {
        "checkpoint-output"
    }

    fn backward(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.0.gradient.put(Some(gradient.clone()));
        Ok(Some(token.zeros_like()?))
    }
}
