//! A module under `fully_shard`: its calls, its backward, its control by hand and its settings.
//!
//! With [`Recurse::Yes`], a setting also reaches the units inside this one: the units whose path starts with its path.
//! For a unit of several modules ([`FsdpModule::into_parts`]), these are the units inside its modules.

use std::error::Error as StdError;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Module, ModuleT, Result, Tensor};

use super::comm::{AllGather, AllReduceHook, PostAccumulateGradHook, ReduceScatter};
use super::diagnostics::GraphCut;
use super::handles::{GradientReductionHandle, Unit, UnshardHandle, UnshardedUnits};
use super::hooks;
use super::param::FsdpParam;
use super::param_group::FsdpParamGroup;
use super::policy::{Recurse, ReshardAfterForward};
use super::schedule::Schedule;
use super::settings::{CommSettings, UnshardSettings};
use super::unit_call::{UnitCall, cast};
use crate::autograd::keeps_graph;
use crate::error::{Error, to_candle};
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

    /// Returns the module itself. Calling its forward bypasses the hooks: its parameters are unsharded only while
    /// [`FsdpModule::unshard_all`] holds them.
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
    ///     let scale = vb.get(2, "scale")?; // multiplied by hand
    ///     Ok::<_, candle_core::Error>((nn::linear_no_bias(4, 2, vb)?, scale))
    /// })?;
    /// assert_eq!(model.unmanaged_parameters()[0].name(), "layer.scale");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unmanaged_parameters(&self) -> &[Arc<FsdpParam>] {
        &self.unmanaged
    }

    /// Returns the parameters of this unit alone. Units inside the module own the others, also those that
    /// [`shard`](crate::shard) makes by name. For an optimizer, see [`FsdpModule::trainable`].
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.group.params()
    }

    /// Returns the parameters of this unit and of all units inside it that get gradients, for an optimizer of this
    /// module: PyTorch's `module.parameters()`. [`ShardedVarMap::trainable`](crate::ShardedVarMap::trainable) has those
    /// of all modules of a map.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// let build = |name: &str| {
    ///     shard(&opts, &[&format!("{name}.hidden")], vb.pp(name), |vb| {
    ///         Ok::<_, candle_core::Error>([nn::linear(4, 8, vb.pp("hidden"))?, nn::linear(8, 1, vb.pp("output"))?])
    ///     })
    /// };
    /// let (generator, critic) = (build("generator")?, build("critic")?);
    /// assert_eq!((generator.params().len(), generator.trainable().len()), (2, 4));
    /// assert!(critic.trainable().iter().all(|param| param.name().starts_with("critic.")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trainable(&self) -> Vec<Arc<FsdpParam>> {
        let units = self.schedule.units_inside(self.group.path());
        let params = units.iter().flat_map(|unit| unit.params().to_vec());
        params.filter(|param| param.trainable()).collect()
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
    /// Errors of `forward`, whose type may be any error, such as `anyhow::Error`: it becomes Candle's, with the text of
    /// its causes. A closure that ends in `Ok(..)` names the type: `Ok::<_, candle_core::Error>(..)`. Errors of the
    /// collectives. Fails if another thread calls a unit of the model, unless that unit's forward waits for this call.
    /// After an error that all ranks get at the same point, the model is ready for the next call. After an error of a
    /// single rank, the ranks are at different collectives: end the job.
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
    pub fn call<O: Tensors, E: Into<Box<dyn StdError + Send + Sync>>>(
        &self,
        forward: impl FnOnce(&M) -> std::result::Result<O, E>,
    ) -> Result<O> {
        Ok(self.unit_call().run(vec![], || forward(&self.inner).map_err(to_candle))?.0)
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
    pub fn call_mut<O: Tensors, E: Into<Box<dyn StdError + Send + Sync>>>(
        &mut self,
        forward: impl FnOnce(&mut M) -> std::result::Result<O, E>,
    ) -> Result<O> {
        let FsdpModule { inner, group, schedule, parts, .. } = self;
        Ok(UnitCall { group, schedule, parts: *parts }.run(vec![], || forward(inner).map_err(to_candle))?.0)
    }

    fn unit_call(&self) -> UnitCall<'_> {
        UnitCall { group: &self.group, schedule: &self.schedule, parts: self.parts }
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
    ///     Ok::<_, candle_core::Error>((masked, vec![nn::silu(&y)?]))
    /// })?;
    /// model.backward(&(y.sum_all()? + gate[0].sum_all()?)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn call_with<I: Tensors, O: Tensors, E: Into<Box<dyn StdError + Send + Sync>>>(
        &self,
        inputs: I,
        forward: impl FnOnce(&M, I) -> std::result::Result<O, E>,
    ) -> Result<O> {
        let forward = |inner: &M, inputs: I| forward(inner, inputs).map_err(to_candle);
        let policy = &self.group.mp_policy;
        let inputs = match policy.param_dtype {
            Some(dtype) if policy.cast_forward_inputs => cast(inputs, dtype)?,
            _ => inputs,
        };
        if !(self.group.has_frozen() && keeps_graph()) || self.schedule.runs_without_hooks(&self.group)? {
            let (inputs, watched) = self.watched(inputs)?;
            return Ok(self.unit_call().run(watched, || forward(&self.inner, inputs))?.0);
        }
        let call = self.schedule.frozen_call(&self.group);
        let inputs =
            inputs.map_tensors(&mut |tensor| hooks::post_backward(&tensor, self.group.id(), &self.schedule, &call))?;
        let (inputs, watched) = self.watched(inputs)?;
        let (outputs, hook) = self.unit_call().run(watched, || forward(&self.inner, inputs))?;
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
    /// [`grad_norm`](crate::grad_norm) returns the norm of the whole gradient,
    /// [`clip_grad_norm`](crate::clip_grad_norm) clips by it, and [`FsdpParam::grad`] returns a gradient as a
    /// [`DTensor`](crate::DTensor).
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
        self.schedule.backward(&self.group, loss, false)
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
        self.schedule.backward(&self.group, loss, true)
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
}

impl<M: ModuleT> FsdpModule<M> {
    /// Runs a module whose forward differs in training: one with dropout or batch norm.
    ///
    /// A module with [`Module`] implements [`ModuleT`], and so does its `FsdpModule`. Rust then allows no second
    /// implementation for the other modules, which have this function instead. [`nn::func_t`](crate::nn::func_t) makes
    /// a `ModuleT` of it, for code that is generic over the trait.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # use candle_core::ModuleT;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// fn evaluate(model: &impl ModuleT, x: &Tensor) -> candle_core::Result<Tensor> {
    ///     model.forward_t(x, false)
    /// }
    ///
    /// let model = fully_shard(&opts, vb, |vb| nn::batch_norm(4, 1e-5, vb))?;
    /// let y = model.forward_t(&x, true)?;
    /// model.backward(&y.sum_all()?)?;
    /// evaluate(&nn::func_t(|x, train| model.forward_t(x, train)), &x)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.call_with(xs.clone(), |inner, xs| inner.forward_t(&xs, train))
    }
}

impl<M: Module> Module for FsdpModule<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.call_with(xs.clone(), |inner, xs| inner.forward(&xs))
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

    /// Holds this unit and all units inside it unsharded, by whatever means they were made, until the handle is
    /// dropped: PyTorch's `summon_full_params`. Collective, and the only collective: while the handle lives, the
    /// module's forwards run on this rank alone. Ranks may run different numbers of them, or none, as for sampling,
    /// acting in an environment, and validation. The whole model is in memory meanwhile.
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
    ///         let layer = |i| nn::linear(4, 4, vb.pp(format!("layers.{i}")));
    ///         Ok::<_, candle_core::Error>([layer(0)?, layer(1)?])
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

/// Settings, which may change between steps.
impl<M> FsdpModule<M> {
    /// Returns the units that `recurse` selects.
    fn selected(&self, recurse: Recurse) -> impl Iterator<Item = Arc<FsdpParamGroup>> {
        let groups = self.schedule.units().into_iter();
        groups.filter(move |group| {
            Arc::ptr_eq(group, &self.group) || recurse == Recurse::Yes && self.group.path().contains(group.path())
        })
    }

    fn change_comm(&self, recurse: Recurse, change: impl Fn(&mut CommSettings)) {
        self.selected(recurse).for_each(|group| self.schedule.change_comm_settings(&group, &change));
    }

    fn change_unshard(&self, recurse: Recurse, change: impl Fn(&mut UnshardSettings)) {
        self.selected(recurse).for_each(|group| self.schedule.change_unshard_settings(&group, &change));
    }

    /// Returns the indices of units. Fails for a unit of another map.
    fn indices(&self, units: &[Unit]) -> crate::error::Result<Vec<usize>> {
        let index = |unit: &Unit| match self.schedule.has(unit.0.id()) {
            true => Ok(unit.index()),
            false => Err(Error::unit(
                self.group.name(),
                format!(
                    "its prefetch list has the unit `{}` of a model in another ShardedVarMap, which it cannot unshard: \
                     pass units of its own model",
                    unit.name()
                ),
            )),
        };
        units.iter().map(index).collect()
    }

    /// Sets the units to unshard when this unit's forward begins. An empty list restores the default: the unit that
    /// followed in the last iteration. Fails for a unit of another map.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let blocks = (0..4)
    ///     .map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| nn::linear(4, 4, vb)))
    ///     .collect::<Result<Vec<_>, _>>()?;
    /// // Prefetch two blocks in forward, and two in backward.
    /// let units: Vec<_> = blocks.iter().map(|block| block.unit()).collect();
    /// for (i, block) in blocks.iter().enumerate() {
    ///     block.set_modules_to_forward_prefetch(&units[i + 1..(i + 3).min(units.len())])?;
    ///     let before: Vec<_> = units[..i].iter().rev().take(2).cloned().collect();
    ///     block.set_modules_to_backward_prefetch(&before)?;
    /// }
    /// let model = fully_shard(&opts, vb, |_| Ok(blocks))?;
    /// let y = model.call(|blocks| {
    ///     let y = blocks[0].forward(&x)?;
    ///     assert!(blocks[2].params().iter().all(|param| !param.is_unsharded())); // pending
    ///     blocks[1..].iter().try_fold(y, |x, block| block.forward(&x))
    /// })?;
    /// model.backward(&y.sqr()?.mean_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_modules_to_forward_prefetch(&self, units: &[Unit]) -> crate::error::Result<()> {
        let units = self.indices(units)?;
        self.change_unshard(Recurse::No, |settings| settings.forward_prefetch.clone_from(&units));
        Ok(())
    }

    /// Sets the units to unshard when this unit's backward begins. An empty list restores the default: the unit whose
    /// forward preceded this one's. Fails for a unit of another map.
    pub fn set_modules_to_backward_prefetch(&self, units: &[Unit]) -> crate::error::Result<()> {
        let units = self.indices(units)?;
        self.change_unshard(Recurse::No, |settings| settings.backward_prefetch.clone_from(&units));
        Ok(())
    }

    /// Sets whether units without a prefetch list prefetch the next unit, for the whole model. Default: true.
    pub fn set_implicit_prefetch(&self, implicit: bool) {
        self.schedule.change_model_settings(|settings| settings.implicit_prefetch = implicit);
    }

    /// Sets whether backward reduces gradients. Otherwise they stay unsharded, in the reduce dtype, and add to the
    /// gradients of the next backward that reduces.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// let loss = || model.forward(&x)?.sum_all();
    /// model.set_requires_gradient_sync(false, Recurse::Yes);
    /// let grads = model.backward(&loss()?)?; // kept by the model, not communicated
    /// assert!(grads.get(&weight).is_none());
    /// model.set_requires_gradient_sync(true, Recurse::Yes);
    /// let grads = model.backward(&loss()?)?; // both backwards' gradients, reduced once
    /// assert_eq!(grads.get(&weight).unwrap().to_vec2::<f32>()?, [[6.; 4]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_requires_gradient_sync(&self, sync: bool, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.requires_gradient_sync = sync);
    }

    /// Sets whether gradients are reduced over replicas (HSDP) and handed out. Otherwise they are reduced over the
    /// shard ranks only, and add to the gradients of the next backward that does both. The setting also holds on meshes
    /// without replicas.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// use fsdp_core::process_group::local;
    ///
    /// // Two replicas of a model (threads here), each sharded over one rank.
    /// local::try_run(2, |group| {
    ///     let world = World::of(group);
    ///     let mesh = world.mesh(&[("dp_replicate", 2), ("dp_shard", 1)])?;
    ///     let vars = ShardedVarMap::new(&mesh, world.device());
    ///     let opts = FullyShard::new(&vars);
    ///     let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    ///     let x = Tensor::full(world.rank() as f32, (3, 4), world.device())?;
    ///     let loss = || model.forward(&x)?.sum_all();
    ///
    ///     model.set_requires_all_reduce(false, Recurse::Yes);
    ///     let first = model.backward(&loss()?)?;
    ///     assert!(first.get(vars.params()[0].var()).is_none());
    ///     model.set_requires_all_reduce(true, Recurse::Yes);
    ///     let grads = model.backward(&loss()?)?; // one all-reduce for both backwards
    ///     // The mean over replicas of 2 x 0 and 2 x 3.
    ///     assert_eq!(grads.get(vars.params()[0].var()).unwrap().to_vec2::<f32>()?, [[3.; 4]; 2]);
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_requires_all_reduce(&self, all_reduce: bool, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.requires_all_reduce = all_reduce);
    }

    /// Sets whether the next backward ends the iteration. Otherwise it does not wait for its reductions and hands out
    /// no gradients; the last backward hands out their sum.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// let loss = || model.forward(&x)?.sum_all();
    /// for micro_batch in 1..=3 {
    ///     model.set_is_last_backward(micro_batch == 3);
    ///     let grads = model.backward(&loss()?)?;
    ///     assert_eq!(grads.get(&weight).is_some(), micro_batch == 3); // the sum of all three
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_is_last_backward(&self, last: bool) {
        self.schedule.change_model_settings(|settings| settings.is_last_backward = last);
    }

    /// Sets what takes the reduced gradients of each unit of the whole model, while backward goes on to the next units.
    /// Backward then hands out none. An optimizer in the hook changes the unit's shards and drops the gradients, so a
    /// rank holds the sharded gradients of one or two units at a time: PyTorch's `register_post_accumulate_grad_hook`,
    /// torchtune's optimizer in backward.
    ///
    /// The hook runs when backward waits for the reduction of a unit, in the same order on every rank. It runs at the
    /// end of backward if later reductions may add to the gradients: after several forwards of one unit, with
    /// [`set_reduce_scatter_unused_params`](FsdpModule::set_reduce_scatter_unused_params), and with manual
    /// finalization. Gradients of a backward that is not the last one stay in the model
    /// ([`set_is_last_backward`](FsdpModule::set_is_last_backward)). The norm of all gradients is known only after
    /// backward: clip by the norm of the last step ([`GradNorm`](crate::GradNorm)), or not at all.
    ///
    /// ```
    /// # use std::sync::{Arc, Mutex};
    /// # use candle_core::backprop::GradStore;
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// let optim = Arc::new(Mutex::new(AdamW::new(vars.trainable(), AdamWConfig::default())?));
    /// let in_backward = optim.clone();
    /// let step = move |grads: GradStore| Ok(in_backward.lock().unwrap().step(&grads)?);
    /// model.set_post_accumulate_grad_hook(Some(Arc::new(step)));
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert!(grads.get(&weight).is_none());
    /// assert_eq!(optim.lock().unwrap().states()[0].step, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_post_accumulate_grad_hook(&self, hook: Option<Arc<dyn PostAccumulateGradHook>>) {
        self.schedule.set_post_accumulate_grad_hook(hook);
    }

    /// Sets whether you end backward yourself, by [`FsdpModule::finalize_backward`].
    pub fn set_manual_backward_finalization(&self, manual: bool) {
        self.schedule.change_model_settings(|settings| settings.manual_finalization = manual);
    }

    /// Sets whether reductions have a process group of their own, so that they do not queue behind all-gathers. This
    /// overlaps more, and needs one more group. Collective. Fails if the group cannot be made.
    pub fn set_separate_reduce_scatter_group(&self, separate: bool, recurse: Recurse) -> crate::error::Result<()> {
        if separate {
            for group in self.selected(recurse) {
                group
                    .params()
                    .iter()
                    .try_for_each(|param| param.spec.ranks.dedicated_reduce_scatter_group().map(drop))?;
            }
        }
        self.change_comm(recurse, |settings| settings.separate_reduce_scatter_group = separate);
        Ok(())
    }

    /// Sets whether all-gathers and reduce-scatters go through memory that the process group allocates: NCCL's, registered
    /// with its communicator. NCCL then needs no copies through buffers of its own, and fewer of the GPU's processors.
    /// Inputs are copied to this memory, and outputs from it. It takes the bytes of the largest all-gather or
    /// reduce-scatter of the unit, for the life of the process group. Set it alike on all ranks. Results do not change.
    ///
    /// Fails on CPUs, on GPUs without NCCL, and with NCCL older than 2.19. A single rank does not communicate, so its GPU
    /// allocates nothing.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// use fsdp_candle::Recurse;
    ///
    /// let error = model.set_allocate_memory_from_process_group_for_comm(true, Recurse::Yes).unwrap_err();
    /// assert!(error.to_string().contains("It needs a CUDA device for each rank and NCCL 2.19 or newer"), "{error}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_allocate_memory_from_process_group_for_comm(
        &self,
        enable: bool,
        recurse: Recurse,
    ) -> crate::error::Result<()> {
        if enable {
            for group in self.selected(recurse) {
                group
                    .params()
                    .iter()
                    .try_for_each(|param| param.spec.ranks.shard.with_registered_memory().map(drop))?;
            }
        }
        self.change_comm(recurse, |settings| settings.memory_from_process_group = enable);
        Ok(())
    }

    /// Sets what a unit does with its unsharded parameters after forward. Collective for [`ReshardAfterForward::To`],
    /// which makes groups. Fails if the number of ranks of `To` does not divide the number of shard ranks, or is
    /// trivial.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// use fsdp_candle::ReshardAfterForward;
    ///
    /// for (policy, kept) in [(ReshardAfterForward::Always, false), (ReshardAfterForward::Never, true)] {
    ///     model.set_reshard_after_forward(policy, Recurse::Yes)?;
    ///     let y = model.forward(&x)?;
    ///     assert_eq!(model.params()[0].is_unsharded(), kept);
    ///     model.backward(&y.sum_all()?)?;
    /// }
    /// assert!(model.set_reshard_after_forward(ReshardAfterForward::To(2), Recurse::Yes).is_err()); // one rank
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_reshard_after_forward(&self, policy: ReshardAfterForward, recurse: Recurse) -> crate::error::Result<()> {
        if let ReshardAfterForward::To(size) = policy {
            for group in self.selected(recurse) {
                group.params().iter().try_for_each(|param| param.spec.ranks.post_forward_group(size).map(drop))?;
            }
        }
        self.change_unshard(recurse, |settings| settings.reshard_after_forward = policy);
        Ok(())
    }

    /// Sets whether parameters are freed after backward. Otherwise they are stale once the optimizer has stepped: use
    /// it for several backwards before one step.
    pub fn set_reshard_after_backward(&self, reshard: bool, recurse: Recurse) {
        self.change_unshard(recurse, |settings| settings.reshard_after_backward = reshard);
    }

    /// Sets whether backward unshards parameters. Otherwise they must be unsharded already.
    pub fn set_unshard_in_backward(&self, unshard: bool) {
        self.change_unshard(Recurse::No, |settings| settings.unshard_in_backward = unshard);
    }

    /// Sets whether each parameter keeps the buffer of its full values while it is sharded, from its next unshard on.
    /// The buffer's address then stays the same until a step fails. With a custom all-gather, values are copied there
    /// once more.
    pub fn set_keep_unsharded_storage(&self, keep: bool, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.keep_unsharded_storage = keep);
        if !keep {
            let params = self.selected(recurse).flat_map(|group| group.params().to_vec());
            params.for_each(|param| param.full.drop_kept_buffer());
        }
    }

    /// Sets the number that sums of gradients are divided by; `None` for the number of ranks.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// let loss = || model.forward(&x)?.sum_all();
    /// let mean = model.backward(&loss()?)?; // over the ranks
    /// model.set_gradient_divide_factor(Some(3.), Recurse::Yes); // the number of rows instead of ranks
    /// let by_rows = model.backward(&loss()?)?;
    /// assert_eq!(mean.get(&weight).unwrap().to_vec2::<f32>()?, [[3.; 4]; 2]);
    /// assert_eq!(by_rows.get(&weight).unwrap().to_vec2::<f32>()?, [[1.; 4]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_gradient_divide_factor(&self, factor: Option<f64>, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.gradient_divide_factor = factor);
    }

    /// Sets whether reductions are sums with a separate division, instead of averages.
    pub fn set_force_sum_reduction_for_comms(&self, force: bool, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.force_sum_reduction = force);
    }

    /// Sets whether parameters without a gradient take part in the reduction with zeros, so that ranks may use
    /// different parameters. Without this setting, such ranks get an error that names the parameters. Set it alike on
    /// all ranks. [`FsdpModule::parameters_without_gradient`] then lists the parameters that no rank used.
    ///
    /// On some ranks, parameters and whole units may then have no gradient. While the setting holds for any unit, ranks
    /// compare what their losses reach when a backward begins, by two small all-reduces. Each rank then unshards and
    /// reduces every unit that some rank's loss reaches, once a backward. The lists of
    /// [`FsdpModule::set_modules_to_backward_prefetch`] have no effect.
    ///
    /// Forward always unshards a unit when it is called. Every rank must therefore call the same units in the same
    /// order, whatever it does with their outputs; otherwise all ranks get an error. To call different units, first
    /// `unshard()` all of them on every rank with [`ReshardAfterForward::Never`]; without a graph, call
    /// [`FsdpModule::unshard_all`]. Units by name
    /// ([`shard`](crate::shard)) are unsharded in the order in which they were built, whether a rank uses them or not:
    /// a rank that uses one also unshards the units before it.
    pub fn set_reduce_scatter_unused_params(&self, reduce: bool, recurse: Recurse) {
        self.change_comm(recurse, |settings| settings.reduce_scatter_unused_params = reduce);
    }

    /// Sets how many units' reduce-scatters may be pending, for the whole model: more overlap for more memory.
    /// Default: 1.
    pub fn set_reduce_scatter_max_input_buffers(&self, max: usize) {
        self.schedule.change_model_settings(|settings| settings.max_reductions = max.max(1));
    }

    /// Sets a hook that changes the reduced gradient shards before they are handed out.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
    /// # let weight = vars.params()[0].var().clone();
    /// use std::sync::Arc;
    /// use fsdp_core::Buffer;
    ///
    /// let signs = |shards: Vec<Buffer>| {
    ///     let sign = |shard| match shard {
    ///         Buffer::F32(values) => Buffer::F32(values.into_iter().map(f32::signum).collect()),
    ///         other => other,
    ///     };
    ///     Ok(shards.into_iter().map(sign).collect())
    /// };
    /// model.set_all_reduce_hook(Some(Arc::new(signs)));
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert_eq!(grads.get(&weight).unwrap().to_vec2::<f32>()?, [[1.; 4]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_all_reduce_hook(&self, hook: Option<Arc<dyn AllReduceHook>>) {
        self.change_comm(Recurse::No, |settings| settings.all_reduce_hook.clone_from(&hook));
    }

    /// Sets an all-gather of your own.
    pub fn set_custom_all_gather(&self, custom: Option<Arc<dyn AllGather>>) {
        self.change_comm(Recurse::No, |settings| settings.all_gather.clone_from(&custom));
    }

    /// Sets a reduce-scatter of your own.
    pub fn set_custom_reduce_scatter(&self, custom: Option<Arc<dyn ReduceScatter>>) {
        self.change_comm(Recurse::No, |settings| settings.reduce_scatter.clone_from(&custom));
    }
}
