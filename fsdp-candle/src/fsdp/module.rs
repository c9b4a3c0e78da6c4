//! A module under `fully_shard`: its calls, its backward, and its control by hand. `settings` has its setters.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Result, Tensor};

use super::diagnostics::{GraphCut, is_freed_storage_error};
use super::hooks;
use super::order::GraphExists;
use super::param::FsdpParam;
use super::param_group::FsdpParamGroup;
use super::schedule::Schedule;
use crate::autograd::{keeps_graph, no_grad};
use crate::collectives;
use crate::error::Error;
use crate::graph::{self, Lifetime};
use crate::storage::copied_storage;
use crate::tensors::{Tensors, with_tensors};

/// A module under `fully_shard`. Calling it unshards its parameters, runs it and reshards them.
///
/// [`Module::forward`] calls a module with Candle's ordinary signature. [`FsdpModule::call`] runs a closure on a module
/// with any other signature.
///
/// A clone is the same unit, as clones of Candle's layers share their tensors. Its calls unshard the same parameters,
/// and the gradients of all clones add up.
#[derive(Clone)]
pub struct FsdpModule<M> {
    inner: M,
    pub(crate) group: Arc<FsdpParamGroup>,
    pub(crate) schedule: Arc<Schedule>,
    /// Number of modules of the unit, which are called one by one.
    parts: usize,
    unmanaged: Arc<[Arc<FsdpParam>]>,
}

impl<M: std::fmt::Debug> std::fmt::Debug for FsdpModule<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FsdpModule")
            .field("unit", &self.name())
            .field("params", &self.params())
            .field("inner", &self.inner)
            .finish()
    }
}

impl<A, B> FsdpModule<(A, B)> {
    /// Splits a unit into its two modules, which are called one by one inside the forward of another unit: a norm and a
    /// head, for example. The unit is resharded after both have run.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let (norm, head) = fully_shard(&opts, vb.pp("last"), |vb| {
    ///     Ok((nn::rms_norm(4, 1e-5, vb.pp("norm"))?, nn::linear(4, 2, vb.pp("head"))?))
    /// })?
    /// .into_parts();
    /// let model = fully_shard(&opts, vb, |_| Ok((norm, head)))?;
    /// let y = model.call(|(norm, head)| {
    ///     let normed = norm.forward(&x)?;
    ///     assert!(head.params()[0].is_unsharded()); // the unit still has a module to run
    ///     head.forward(&normed)
    /// })?;
    /// assert!(model.inner().1.params().iter().all(|param| !param.is_unsharded()));
    /// model.backward(&y.sum_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_parts(self) -> (FsdpModule<A>, FsdpModule<B>) {
        let FsdpModule { inner: (a, b), group, schedule, parts, unmanaged } = self;
        group.split_into_modules();
        let parts = parts + 1;
        let b = FsdpModule {
            inner: b,
            group: group.clone(),
            schedule: schedule.clone(),
            parts,
            unmanaged: unmanaged.clone(),
        };
        (FsdpModule { inner: a, group, schedule, parts, unmanaged }, b)
    }
}

impl<M> FsdpModule<M> {
    pub(super) fn new(
        inner: M,
        group: Arc<FsdpParamGroup>,
        schedule: Arc<Schedule>,
        unmanaged: Vec<Arc<FsdpParam>>,
    ) -> Self {
        FsdpModule { inner, group, schedule, parts: 1, unmanaged: unmanaged.into() }
    }

    /// Returns the module itself. Calling its forward bypasses the hooks, so its parameters are not unsharded.
    pub fn inner(&self) -> &M {
        &self.inner
    }

    /// Returns the module itself, to change anything except parameters: to clear a cache, for example.
    pub fn inner_mut(&mut self) -> &mut M {
        &mut self.inner
    }

    /// Returns the parameters of this unit that patterns of [`shard`](crate::shard) match and
    /// that no layer of [`nn`](crate::nn) holds. Nothing reports their uses, so they are unsharded as long as this unit
    /// is.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// let opts = FullyShard::new(&vars);
    /// let model = shard(&opts, &["layer"], vars.builder(DType::F32), |vb| {
    ///     let vb = vb.pp("layer");
    ///     Ok((nn::linear_no_bias(4, 2, vb.clone())?, vb.get(2, "scale")?)) // multiplied by hand
    /// })?;
    /// assert_eq!(model.unmanaged_parameters()[0].name(), "layer.scale");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unmanaged_parameters(&self) -> &[Arc<FsdpParam>] {
        &self.unmanaged
    }

    /// Returns the parameters of this unit. Units inside the module own the others.
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.group.params()
    }

    /// Returns the unit's path in the model, `(root)` for the root.
    pub fn name(&self) -> &str {
        self.group.name()
    }

    /// Runs `forward` on the module with its parameters unsharded, for modules of any signature. Inputs that the
    /// closure captures are not cast, and frozen parameters stay unsharded until backward ends.
    /// [`FsdpModule::call_with`] does both.
    ///
    /// # Errors
    /// Errors of `forward`, which maps errors of other types: `model.call(|m| m.forward(x).map_err(Error::wrap))`, with
    /// `candle_core::Error`. Errors of the collectives. Fails if another thread calls a unit of the model, unless that
    /// unit's forward waits for this call. After an error that all ranks get at the same point, the model is
    /// ready for the next call. After an error of a single rank, the ranks are at different collectives: end the job.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor, Result};
    /// # use fsdp_candle::{fully_shard, FullyShard, ShardedVarMap, nn};
    /// struct Scaled(nn::Linear);
    /// impl Scaled {
    ///     fn forward(&self, x: &Tensor, scale: f64) -> Result<Tensor> {
    ///         use candle_core::Module;
    ///         self.0.forward(x)? * scale
    ///     }
    /// }
    /// let world = fsdp_candle::World::single().unwrap();
    /// let vars = ShardedVarMap::of_world(&world).unwrap();
    /// let opts = FullyShard::new(&vars);
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| Ok(Scaled(nn::linear(4, 2, vb)?))).unwrap();
    /// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap();
    /// let y = model.call(|m| m.forward(&x, 2.0)).unwrap();
    /// assert_eq!(y.dims(), [3, 2]);
    /// ```
    pub fn call<O: Tensors>(&self, forward: impl FnOnce(&M) -> Result<O>) -> Result<O> {
        Ok(self.hooks().run(vec![], || forward(&self.inner))?.0)
    }

    /// As [`FsdpModule::call`], for modules whose forward changes them: a cache of keys and values, for example.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor, Result};
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// struct Counts(nn::Linear, usize);
    /// impl Counts {
    ///     fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
    ///         self.1 += x.dim(0)?;
    ///         self.0.forward(x)
    ///     }
    /// }
    /// let opts = FullyShard::new(&vars);
    /// let mut model = fully_shard(&opts, vars.builder(DType::F32), |vb| Ok(Counts(nn::linear(4, 2, vb)?, 0)))?;
    /// let y = model.call_mut(|m| m.forward(&x))?;
    /// assert_eq!(model.inner().1, 3);
    /// model.backward(&y.sum_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn call_mut<O: Tensors>(&mut self, forward: impl FnOnce(&mut M) -> Result<O>) -> Result<O> {
        let FsdpModule { inner, group, schedule, parts, .. } = self;
        Ok(Hooks { group, schedule, parts: *parts }.run(vec![], || forward(inner))?.0)
    }

    fn hooks(&self) -> Hooks<'_> {
        Hooks { group: &self.group, schedule: &self.schedule, parts: self.parts }
    }

    /// As [`FsdpModule::call`], with inputs that are cast to the unit's `param_dtype` if its policy says so.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
    /// // Inputs and outputs are tuples, vectors, options, and your own types that implement `Tensors`.
    /// let (y, gate) = model.call_with((x, None::<Tensor>), |linear, (x, mask)| {
    ///     let y = linear.forward(&x)?;
    ///     let masked = match mask {
    ///         Some(mask) => y.mul(&mask)?,
    ///         None => y.clone(),
    ///     };
    ///     Ok((masked, vec![nn::silu(&y)?]))
    /// })?;
    /// model.backward(&(y.sum_all()? + gate[0].sum_all()?)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn call_with<I: Tensors, O: Tensors>(&self, inputs: I, forward: impl FnOnce(&M, I) -> Result<O>) -> Result<O> {
        let policy = &self.group.mp_policy;
        let inputs = match policy.param_dtype {
            Some(dtype) if policy.cast_forward_inputs => cast(inputs, dtype)?,
            _ => inputs,
        };
        if !(self.group.has_frozen() && keeps_graph()) || self.schedule.runs_without_hooks(&self.group)? {
            let (inputs, watched) = self.watched(inputs)?;
            return Ok(self.hooks().run(watched, || forward(&self.inner, inputs))?.0);
        }
        let call = self.schedule.frozen_call(&self.group);
        let inputs =
            inputs.map_tensors(&mut |tensor| hooks::post_backward(&tensor, self.group.id(), &self.schedule, &call))?;
        let (inputs, watched) = self.watched(inputs)?;
        let (outputs, hook) = self.hooks().run(watched, || forward(&self.inner, inputs))?;
        call.end(hook);
        Ok(outputs)
    }

    /// Returns the inputs, and their tensors while diagnostics watch the unit.
    fn watched<I: Tensors>(&self, inputs: I) -> Result<(I, Vec<Tensor>)> {
        match keeps_graph() && self.schedule.diagnostics.graph.is_watched(self.group.index()) {
            true => with_tensors(inputs),
            false => Ok((inputs, vec![])),
        }
    }

    /// Runs Candle's backward and reduces the gradients: averaged over the data-parallel ranks, sharded as the
    /// parameters, and stored under the ids of [`FsdpParam::var`]. Collective: every rank calls it, on the outermost
    /// module.
    ///
    /// A norm or a sum over the returned `GradStore` is therefore of this rank's shards alone.
    /// [`grad_norm`](crate::grad_norm) returns the norm of the whole gradient, [`clip_grad_norm`](crate::clip_grad_norm)
    /// clips by it, and [`FsdpParam::grad`] returns a gradient as a [`DTensor`](crate::DTensor).
    ///
    /// # Errors
    /// Errors of Candle and of the collectives; [`FsdpModule::call`] tells the state after them. Fails for a loss
    /// without a graph, unless ranks may use different units
    /// ([`set_reduce_scatter_unused_params`](FsdpModule::set_reduce_scatter_unused_params)). The other ranks then fail
    /// in their next collective, or when this rank exits.
    ///
    /// Backward frees the activations of [`nn`](crate::nn)'s layers as it passes them, as PyTorch's does. Another
    /// backward over the same graph fails: see [`FsdpModule::backward_retain_graph`].
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.schedule.backward(&self.group, loss, false).map_err(|error| self.explain_backward(error))
    }

    /// [`FsdpModule::backward`] that keeps the graph for another backward, as PyTorch's `backward(retain_graph=True)`:
    /// for losses that share a forward, and whose gradients are wanted one by one. Errors: see
    /// [`FsdpModule::backward`].
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(2, 2, vb))?;
    /// let y = model.forward(&Tensor::ones((3, 2), DType::F32, world.device())?)?;
    /// let of_mean = model.backward_retain_graph(&y.mean_all()?)?;
    /// let of_square = model.backward(&y.sqr()?.mean_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn backward_retain_graph(&self, loss: &Tensor) -> Result<GradStore> {
        self.schedule.backward(&self.group, loss, true).map_err(|error| self.explain_backward(error))
    }

    /// Returns the names of trainable parameters that took part in a forward and got no gradient in its backward, on
    /// any rank: a layer cut the graph, or they were unused. [`FsdpModule::graph_cuts`] lists the cuts, before which
    /// gradients are wrong.
    pub fn parameters_without_gradient(&self) -> Vec<String> {
        self.schedule.diagnostics.without_gradient()
    }

    /// Returns the names of trainable parameters that the last backward reached on no rank, unit by unit: experts that
    /// no token chose, for example. Where ranks use different units
    /// ([`set_reduce_scatter_unused_params`](FsdpModule::set_reduce_scatter_unused_params)), their gradients are zero.
    pub fn unused_parameters(&self) -> Vec<String> {
        self.schedule.diagnostics.unused.lock().clone()
    }

    /// Returns the places where forward left the graph, in units that have been through a backward. Gradients before
    /// such a place are wrong. Rank 0 also logs each place once. [`GraphCut`] describes what can be detected.
    pub fn graph_cuts(&self) -> Vec<GraphCut> {
        self.schedule.diagnostics.graph.reported_cuts()
    }

    /// Explains Candle's message about F4 in backward, where no call of a unit is missing.
    fn explain_backward(&self, error: candle_core::Error) -> candle_core::Error {
        if !is_freed_storage_error(&error) {
            return error;
        }
        error.context(format!(
            "FSDP unit `{}`: backward came to parameters that are sharded (Candle calls their storage F4). Either the \
             loss's graph has been through backward, or was dropped by reset_iter_state or a failed step: run forward \
             again. Or a unit has set_unshard_in_backward(false) and was not unsharded by hand",
            self.name()
        ))
    }
}

/// The hooks around a call of a unit.
struct Hooks<'a> {
    group: &'a Arc<FsdpParamGroup>,
    schedule: &'a Arc<Schedule>,
    parts: usize,
}

impl Hooks<'_> {
    /// Runs a forward. `inputs` are its watched inputs. Also returns whether the backward of the outputs unshards the
    /// unit.
    fn run<O: Tensors>(&self, inputs: Vec<Tensor>, forward: impl FnOnce() -> Result<O>) -> Result<(O, bool)> {
        if self.schedule.runs_without_hooks(self.group)? {
            let outputs = no_grad(|| collectives::scope(forward)).map_err(|error| self.explain(error))?;
            let outputs = self.cast_outputs(outputs)?;
            return Ok((outputs.map_tensors(&mut |tensor| Ok(tensor.detach()))?, false));
        }
        let mut guard = self.schedule.pre_forward(self.group)?;
        let watch = match keeps_graph() {
            true => self.schedule.diagnostics.graph.begin(self.group, inputs)?,
            false => None,
        };
        let span = tracing::debug_span!("forward", unit = self.group.name());
        let heartbeat = fsdp_core::heartbeat::span("forward", self.group.name());
        let outputs = collectives::scope(|| span.in_scope(forward)).map_err(|error| self.explain(error))?;
        drop(heartbeat);
        let is_watched = watch.is_some();
        let outputs = match watch {
            Some(watch) => watch.end(outputs)?,
            None => outputs,
        };
        let outputs = self.cast_outputs(outputs)?;
        let hook = self.schedule.post_forward(self.group, &mut guard, self.parts)?;
        let outputs = match (hook, keeps_graph()) {
            (true, _) => outputs.map_tensors(&mut |tensor| {
                hooks::pre_backward(&tensor, self.group.id(), guard.forward.pass, self.schedule)
            })?,
            (false, true) => outputs,
            (false, false) => outputs.map_tensors(&mut |tensor| Ok(tensor.detach()))?,
        };
        let outputs = if is_watched { self.schedule.diagnostics.graph.note_returned(outputs)? } else { outputs };
        let outputs = match guard.forward.is_root && keeps_graph() {
            true => {
                let (outputs, exists) = with_lifetime(outputs)?;
                guard.exists = exists;
                outputs
            }
            false => outputs,
        };
        Ok((outputs, hook))
    }

    fn cast_outputs<O: Tensors>(&self, outputs: O) -> Result<O> {
        match self.group.mp_policy.output_dtype {
            Some(dtype) => cast(outputs, dtype),
            None => Ok(outputs),
        }
    }

    /// Explains Candle's message about F4.
    fn explain(&self, error: candle_core::Error) -> candle_core::Error {
        if !is_freed_storage_error(&error) {
            return error;
        }
        let units = self.schedule.units();
        let sharded = units.iter().filter(|group| !group.is_unsharded());
        let sharded: Vec<String> = (sharded.enumerate())
            .map(|(at, group)| match at {
                0 => format!("`{}` ({})", group.name(), group.listed()),
                _ => format!("`{}`", group.name()),
            })
            .collect();
        if sharded.is_empty() {
            return error; // a norm's weight of another dtype than its input
        }
        error.context(format!(
            "FSDP unit `{}`: a sharded parameter was used (Candle calls its storage F4) outside the forward of the \
             unit that owns it, or by a layer that computes on its weights while it is built. These units are not \
             gathered here: {}. Call the unit through its FsdpModule (`forward` or `call`), or hold it by \
             `unshard_all()`. To read a value, call `vars.get(name)`, and `dtensor()?.full_tensor()` of the parameter",
            self.group.name(),
            sharded.join(", ")
        ))
    }
}

/// Also returns a function that returns whether the graph of one of the tensors exists, if that can be told: for scalars,
/// as losses are, and for outputs of the layers of `nn`.
fn with_lifetime<T: Tensors>(tensors: T) -> Result<(T, Option<GraphExists>)> {
    let scalars = Arc::new(());
    let mut others: Option<Vec<Lifetime>> = Some(vec![]);
    let tensors = tensors.map_tensors(&mut |tensor| {
        if !tensor.track_op() {
            return Ok(tensor);
        }
        if tensor.rank() > 0 || !tensor.dtype().is_float() {
            match (graph::lifetime(&tensor), &mut others) {
                (Some(lifetime), Some(others)) => others.push(lifetime),
                _ => others = None,
            }
            return Ok(tensor);
        }
        let (exists, memory) = (scalars.clone(), copied_storage(&tensor)?);
        graph::node_without_values("fsdp-output", &tensor, memory, (), move |gradient| {
            let _ = &exists;
            Ok(Some(gradient.clone()))
        })
    })?;
    let scalars = Arc::downgrade(&scalars);
    let exists = others.map(|others| {
        Box::new(move || scalars.strong_count() > 0 || !others.iter().all(Lifetime::is_over)) as GraphExists
    });
    Ok((tensors, exists))
}

fn cast<T: Tensors>(tensors: T, dtype: DType) -> Result<T> {
    tensors.map_tensors(&mut |tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor) })
}

impl<M: Module> Module for FsdpModule<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.call_with(xs.clone(), |inner, xs| inner.forward(&xs))
    }
}

/// Units that [`FsdpModule::unshard_all`] holds unsharded. Dropping it reshards them, without a collective.
#[must_use = "the units are resharded when the handle is dropped"]
pub struct UnshardedUnits {
    schedule: Arc<Schedule>,
    units: Vec<Arc<FsdpParamGroup>>,
}

impl Drop for UnshardedUnits {
    fn drop(&mut self) {
        self.schedule.release(&self.units);
    }
}

impl std::fmt::Debug for UnshardedUnits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.units.iter().map(|unit| unit.name())).finish()
    }
}

/// A unit, for prefetch lists. Units by name have no other handle.
#[derive(Clone)]
pub struct Unit(pub(super) Arc<FsdpParamGroup>);

impl Unit {
    /// Returns the unit's path in the model, `(root)` for the root.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the unit's parameters.
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.0.params()
    }

    /// Returns the unit's position in the order in which units were made.
    pub(crate) fn index(&self) -> usize {
        self.0.index()
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Unit({})", self.name())
    }
}

/// A pending unshard.
#[must_use = "the parameters are unsharded when wait() returns, or when the unit's forward begins"]
pub struct UnshardHandle(Vec<Arc<FsdpParamGroup>>);

impl UnshardHandle {
    /// Waits until the parameters are unsharded. A forward that begins earlier waits for them, too.
    pub fn wait(self) -> Result<()> {
        self.0.iter().try_for_each(|unit| unit.unshard())
    }
}

/// A pending finalization of a backward.
#[must_use = "wait() stores the gradients"]
pub struct GradientReductionHandle(Arc<Schedule>);

impl GradientReductionHandle {
    /// Waits for the reductions and stores the sharded gradients in `grads`.
    pub fn wait(self, grads: &mut GradStore) -> Result<()> {
        self.0.finalize_backward(grads)
    }
}

/// Control by hand.
impl<M> FsdpModule<M> {
    /// Returns the unit, for prefetch lists.
    pub fn unit(&self) -> Unit {
        Unit(self.group.clone())
    }

    /// Returns this unit and the units inside it, in the order in which they were made, with units by name
    /// ([`shard`](crate::shard)).
    pub fn units(&self) -> Vec<Unit> {
        self.schedule.units_inside(self.group.path()).into_iter().map(Unit).collect()
    }

    /// Unshards the unit's parameters, and those of its units by name ([`shard`](crate::shard)), which have no other
    /// handle. Units that [`fully_shard`](crate::fully_shard) made inside it stay as they are:
    /// [`FsdpModule::unshard_all`] includes them. Does nothing for what is unsharded. Collective.
    ///
    /// They stay unsharded until [`FsdpModule::reshard`], an optimizer's step, backward, or a forward with a graph that
    /// reshards them. A forward without a graph leaves them, and needs no collective if all its units are unsharded.
    pub fn unshard(&self) -> Result<()> {
        self.unshard_async()?.wait()
    }

    /// Holds this unit and all units inside it unsharded, by whatever means they were made, until the handle is dropped:
    /// PyTorch's `summon_full_params`. Collective, and the only collective: while the handle lives, the module's
    /// forwards run on this rank alone. Ranks may run different numbers of them, or none, as for sampling, acting in an
    /// environment, and validation. The whole model is in memory meanwhile.
    ///
    /// Forwards have no graph, as in [`no_grad`](crate::no_grad), and its backward is an error. To write to the full
    /// values changes no shard. An optimizer's step frees the values: drop the handle before. Tensor-parallel layers
    /// still communicate, so their ranks run the same forwards.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// use fsdp_core::process_group::local;
    ///
    /// local::try_run(2, |group| {
    ///     let world = World::of(group);
    ///     let vars = ShardedVarMap::of_world(&world)?;
    ///     let opts = FullyShard::new(&vars);
    ///     let model = shard(&opts, &["layers.*"], vars.builder(DType::F32), |vb| {
    ///         Ok([nn::linear(4, 4, vb.pp("layers.0"))?, nn::linear(4, 4, vb.pp("layers.1"))?])
    ///     })?;
    ///     let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    ///     let forward = |layers: &[nn::Linear; 2]| layers[1].forward(&layers[0].forward(&x)?);
    ///     let held = model.unshard_all()?; // every rank calls it
    ///     if world.rank() == 0 {
    ///         println!("{}", model.call(forward)?); // rank 0 alone
    ///     }
    ///     drop(held);
    ///     model.backward(&model.call(forward)?.sqr()?.mean_all()?)?;
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails inside a forward or backward of the model, and if a collective or an allocation fails. All units are
    /// resharded then.
    pub fn unshard_all(&self) -> Result<UnshardedUnits> {
        if self.schedule.is_running() {
            let message = "unshard_all was called inside a forward or backward of the model: call it between them";
            return Err(Error::unit(self.name(), message).into());
        }
        let units = self.schedule.units_inside(self.group.path());
        self.schedule.hold(&units)?;
        Ok(UnshardedUnits { schedule: self.schedule.clone(), units })
    }

    /// As [`FsdpModule::unshard`], without waiting: PyTorch's `unshard(async_op=True)`. Fails if the all-gather cannot
    /// be issued.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// let handle = model.unshard_async()?;
    /// // Load a batch here, while the all-gather runs.
    /// handle.wait()?;
    /// assert!(model.params().iter().all(|param| param.is_unsharded()));
    /// model.inner().forward(&x)?; // without the hooks: the parameters are unsharded
    /// model.reshard()?;
    /// assert!(model.inner().forward(&x).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unshard_async(&self) -> Result<UnshardHandle> {
        Ok(UnshardHandle(self.schedule.start_unshard_by_hand(&self.group)?))
    }

    /// Frees the full parameters of the unit and of its units by name.
    pub fn reshard(&self) -> Result<()> {
        self.schedule.reshard_by_hand(&self.group)
    }

    /// Prepares the whole model for a new iteration after an incomplete one: waits for pending collectives, drops
    /// gradients, and reshards parameters. Gradients that accumulated without synchronisation are lost.
    ///
    /// The model does this after an error of a forward or backward. Call it if an iteration ends in another way:
    /// between a forward and its backward, for example. Every rank must call it at the same point of the program.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// let _loss = model.forward(&x)?.sum_all()?; // the loss may be NaN: skip its backward
    /// model.reset_iter_state();
    /// assert!(model.params().iter().all(|param| !param.is_unsharded()));
    /// model.backward(&model.forward(&x)?.sum_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reset_iter_state(&self) {
        self.schedule.reset();
    }

    /// Waits for the reductions and stores the sharded gradients in `grads`. Collective.
    pub fn finalize_backward(&self, grads: &mut GradStore) -> Result<()> {
        self.schedule.finalize_backward(grads)
    }

    /// As [`FsdpModule::finalize_backward`], without waiting: PyTorch's `finalize_backward(async_op=True)`. The
    /// reductions run meanwhile.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// model.set_manual_backward_finalization(true);
    /// let mut grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert!(grads.get(&weight).is_none());
    /// let handle = model.finalize_backward_async();
    /// // Do work here that needs no gradients of this model. `finalize_backward(&mut grads)` is both calls in one.
    /// handle.wait(&mut grads)?;
    /// assert!(grads.get(&weight).is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn finalize_backward_async(&self) -> GradientReductionHandle {
        GradientReductionHandle(self.schedule.clone())
    }
}
