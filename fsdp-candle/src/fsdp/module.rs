//! A module whose parameters are one unit: its forward runs between the hooks.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Result, Tensor};

use crate::autograd::keeps_graph;
use crate::collectives;
use crate::diagnostics::{GraphCut, is_freed_storage_error};
use crate::fsdp::graph;
use crate::fsdp::step::Schedule;
use crate::fsdp::unit::{FsdpParam, ParamGroup};
use crate::tensors::Tensors;

/// A module under `fully_shard`. Calling it gathers its parameters, runs it and frees them again.
///
/// A module with Candle's ordinary signature is called by [`Module::forward`]; one with any other by
/// [`FsdpModule::call`], which runs a closure on it.
///
/// A clone is the same unit, as the clones of Candle's layers share their tensors: its calls gather the same
/// parameters, and gradients of all clones add up.
#[derive(Clone)]
pub struct FsdpModule<M> {
    inner: M,
    group: Arc<ParamGroup>,
    schedule: Arc<Schedule>,
    /// How many modules make up the unit; each of them is called by itself.
    parts: usize,
    /// The parameters that would be in units by name if their uses showed.
    raw: Arc<[Arc<FsdpParam>]>,
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
    /// Two modules of one unit, to be called apart inside the forward of another: a norm and a head, say. The unit is
    /// resharded after both have run.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let (norm, head) = fully_shard(&opts, vb.pp("last"), |vb| {
    ///     Ok((nn::rms_norm(4, 1e-5, vb.pp("norm"))?, nn::linear(4, 2, vb.pp("head"))?))
    /// })?
    /// .into_parts();
    /// let model = fully_shard(&opts, vb, |_| Ok((norm, head)))?;
    /// let y = model.call(|(norm, head)| {
    ///     let normed = norm.forward(&x)?;
    ///     assert!(head.params()[0].is_unsharded()); // the unit waits for its other half
    ///     head.forward(&normed)
    /// })?;
    /// assert!(model.inner().1.params().iter().all(|param| !param.is_unsharded()));
    /// model.backward(&y.sum_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_parts(self) -> (FsdpModule<A>, FsdpModule<B>) {
        let FsdpModule { inner: (a, b), group, schedule, parts, raw } = self;
        group.take_apart();
        let parts = parts + 1;
        (
            FsdpModule { inner: a, group: group.clone(), schedule: schedule.clone(), parts, raw: raw.clone() },
            FsdpModule { inner: b, group, schedule, parts, raw },
        )
    }
}

impl<M> FsdpModule<M> {
    pub(crate) fn new(inner: M, group: Arc<ParamGroup>, schedule: Arc<Schedule>, raw: Vec<Arc<FsdpParam>>) -> Self {
        FsdpModule { inner, group, schedule, parts: 1, raw: raw.into() }
    }

    /// The module itself. Calling its forward goes past the hooks, and so meets parameters that are not there.
    pub fn inner(&self) -> &M {
        &self.inner
    }

    /// The module itself, to change what is no parameter: to clear a cache, say.
    pub fn inner_mut(&mut self) -> &mut M {
        &mut self.inner
    }

    /// The parameters of this unit that patterns of [`FullyShard::units`](crate::FullyShard::units) match and no layer
    /// of [`nn`](crate::nn) holds: nobody tells of their uses, so they are gathered as long as this unit is.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// let opts = FullyShard::new(&vars).units(["layer"]);
    /// let model = shard(&opts, vars.builder(DType::F32), |vb| {
    ///     let vb = vb.pp("layer");
    ///     Ok((nn::linear_no_bias(4, 2, vb.clone())?, vb.get(2, "scale")?)) // multiplied by hand
    /// })?;
    /// assert_eq!(model.unmanaged_parameters()[0].name(), "layer.scale");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unmanaged_parameters(&self) -> &[Arc<FsdpParam>] {
        &self.raw
    }

    /// The parameters of this unit: those of the module less those of units inside it.
    pub fn params(&self) -> &[Arc<FsdpParam>] {
        self.group.params()
    }

    /// The unit's path in the model, `(root)` for the root.
    pub fn name(&self) -> &str {
        self.group.name()
    }

    /// Runs `forward` on the module with its parameters gathered: for modules of any signature. Inputs are as the
    /// closure captures them: they are not cast, and frozen parameters stay gathered until backward ends.
    /// [`FsdpModule::call_with`] does better.
    ///
    /// # Errors
    /// Those of `forward`, and of the collectives. An error that all ranks meet at the same point leaves the model
    /// ready for the next call; after one of a single rank the ranks stand at different collectives: end the job.
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
    /// let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
    /// let opts = FullyShard::new(&vars);
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| Ok(Scaled(nn::linear(4, 2, vb)?))).unwrap();
    /// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap();
    /// let y = model.call(|m| m.forward(&x, 2.0)).unwrap();
    /// assert_eq!(y.dims(), [3, 2]);
    /// ```
    pub fn call<O: Tensors>(&self, forward: impl FnOnce(&M) -> Result<O>) -> Result<O> {
        Ok(self.hooks().run(vec![], || forward(&self.inner))?.0)
    }

    /// As [`FsdpModule::call`], for modules whose forward changes them: those with a cache of keys and values, say.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor, Result};
    /// # use fsdp_candle::{fully_shard, FullyShard, ShardedVarMap, World, nn};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
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
    ///
    /// # Errors
    /// As [`FsdpModule::call`].
    pub fn call_mut<O: Tensors>(&mut self, forward: impl FnOnce(&mut M) -> Result<O>) -> Result<O> {
        let FsdpModule { inner, group, schedule, parts, .. } = self;
        Ok(Hooks { group, schedule, parts: *parts }.run(vec![], || forward(inner))?.0)
    }

    fn hooks(&self) -> Hooks<'_> {
        Hooks { group: &self.group, schedule: &self.schedule, parts: self.parts }
    }

    /// As [`FsdpModule::call`], with inputs that are cast to the unit's `param_dtype` where its policy says so.
    ///
    /// # Errors
    /// As [`FsdpModule::call`].
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
    /// // Any number of tensors in and out: tuples, vectors, options, and types of yours that implement `Tensors`.
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
        let policy = self.group.mp_policy();
        let inputs = match policy.param_dtype {
            Some(dtype) if policy.cast_forward_inputs => cast(inputs, dtype)?,
            _ => inputs,
        };
        if !(self.group.has_frozen() && keeps_graph()) {
            let (inputs, known) = self.known(inputs)?;
            return Ok(self.hooks().run(known, || forward(&self.inner, inputs))?.0);
        }
        let call = self.schedule.frozen_call(&self.group);
        let inputs = inputs
            .map_tensors(&mut |tensor| graph::input(&tensor, self.group.id(), self.schedule.listener(), &call))?;
        let (inputs, known) = self.known(inputs)?;
        let (outputs, hook) = self.hooks().run(known, || forward(&self.inner, inputs))?;
        call.ended(hook);
        Ok(outputs)
    }

    /// The tensors of the inputs, beside them, while the unit is watched.
    fn known<I: Tensors>(&self, inputs: I) -> Result<(I, Vec<Tensor>)> {
        let mut known = vec![];
        if !(keeps_graph() && self.schedule.diagnostics().graph.is_watched(self.group.index())) {
            return Ok((inputs, known));
        }
        let inputs = inputs.map_tensors(&mut |tensor| {
            known.push(tensor.clone());
            Ok(tensor)
        })?;
        Ok((inputs, known))
    }

    /// Candle's backward with the gradients reduced: averaged over the data-parallel ranks, sharded as the parameters
    /// are, and filed under the ids of the parameters' [`FsdpParam::var`]. Collective: every rank calls it, on the
    /// outermost module.
    ///
    /// # Errors
    /// Candle's, and those of the collectives; what they leave is as for [`FsdpModule::call`]. A loss without a graph,
    /// unless ranks may use different units
    /// ([`set_reduce_scatter_unused_params`](FsdpModule::set_reduce_scatter_unused_params)). Ranks whose losses have a
    /// graph fail when this rank leaves, or in its next collective.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.schedule.backward(loss).map_err(|error| self.explain_backward(error))
    }

    /// The trainable parameters that took part in a forward and got no gradient in its backward, on this rank or any
    /// other, by name: layers that cut the graph, or unused ones. Those that got a wrong one, since some of their uses
    /// are before a cut, are in [`FsdpModule::graph_cuts`].
    pub fn parameters_without_gradient(&self) -> Vec<String> {
        self.schedule.diagnostics().without_gradient()
    }

    /// The trainable parameters that the last backward reached on no rank, by name, unit by unit: experts that nobody
    /// chose, say. Where ranks use different units
    /// ([`set_reduce_scatter_unused_params`](FsdpModule::set_reduce_scatter_unused_params)), these have gradients of
    /// zero.
    pub fn unused_parameters(&self) -> Vec<String> {
        self.schedule.diagnostics().unused()
    }

    /// Where forward was seen to leave the graph, in the units that have been through a backward: gradients before such
    /// a place are wrong. Said once on rank 0 as well. [`GraphCut`] says what can be seen.
    pub fn graph_cuts(&self) -> Vec<GraphCut> {
        self.schedule.diagnostics().graph.told()
    }

    pub(crate) fn group(&self) -> &Arc<ParamGroup> {
        &self.group
    }

    pub(crate) fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// Says what Candle's message about the poison means in backward, where no call of a unit is missing.
    fn explain_backward(&self, error: candle_core::Error) -> candle_core::Error {
        if !is_freed_storage_error(&error) {
            return error;
        }
        error.context(format!(
            "FSDP unit `{}`: backward came to parameters that are not gathered (Candle calls their storage F4). Either \
             the loss's graph has been through \
             backward, or reset_iter_state forgot it, as a forward or backward that fails does by itself: run forward \
             again, and call backward on the new loss. \
             Or a unit has set_unshard_in_backward(false) and was not unsharded by hand",
            self.name()
        ))
    }
}

/// What runs around a call of a unit's module.
struct Hooks<'a> {
    group: &'a Arc<ParamGroup>,
    schedule: &'a Arc<Schedule>,
    parts: usize,
}

impl Hooks<'_> {
    /// Runs a forward with those of its inputs that are known. Tells as well whether the backward of the outputs
    /// gathers the unit.
    fn run<O: Tensors>(&self, inputs: Vec<Tensor>, forward: impl FnOnce() -> Result<O>) -> Result<(O, bool)> {
        let mut guard = self.schedule.pre_forward(self.group)?;
        let watch = match keeps_graph() {
            true => self.schedule.diagnostics().graph.begin(self.group, inputs)?,
            false => None,
        };
        let span = tracing::debug_span!("forward", unit = self.group.name());
        let told = fsdp_core::heartbeat::span("forward", self.group.name());
        let outputs = collectives::scope(|| span.in_scope(forward)).map_err(|error| self.explain(error))?;
        drop(told);
        let outputs = match watch {
            Some(watch) => watch.end(outputs)?,
            None => outputs,
        };
        let outputs = match self.group.mp_policy().output_dtype {
            Some(dtype) => cast(outputs, dtype)?,
            None => outputs,
        };
        let hook = self.schedule.post_forward(self.group, &mut guard, self.parts)?;
        let outputs = match (hook, keeps_graph()) {
            (true, _) => outputs.map_tensors(&mut |tensor| {
                graph::output(&tensor, self.group.id(), guard.pass(), self.schedule.listener())
            })?,
            (false, true) => outputs,
            (false, false) => outputs.map_tensors(&mut |tensor| Ok(tensor.detach()))?,
        };
        Ok((outputs, hook))
    }

    /// Says what Candle's message about the poison means.
    fn explain(&self, error: candle_core::Error) -> candle_core::Error {
        if !is_freed_storage_error(&error) {
            return error;
        }
        let sharded: Vec<String> = self
            .schedule
            .units()
            .iter()
            .filter(|group| !group.is_unsharded())
            .map(|group| format!("`{}`", group.name()))
            .collect();
        if sharded.is_empty() {
            return error; // a norm's weight of another dtype than its input
        }
        error.context(format!(
            "FSDP unit `{}`: a sharded parameter was used (Candle calls its storage F4, and its norms name their \
             input's \
             dtype alone) outside the forward of the unit that owns it, or by a layer that computes on its weights \
             while it is built. It belongs to one of the units that are not gathered here: {}. Call that unit through \
             its FsdpModule (`forward` or `call`), or `unshard()` it first",
            self.group.name(),
            sharded.join(", ")
        ))
    }
}

fn cast<T: Tensors>(tensors: T, dtype: DType) -> Result<T> {
    tensors.map_tensors(&mut |tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor) })
}

impl<M: Module> Module for FsdpModule<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.call_with(xs.clone(), |inner, xs| inner.forward(&xs))
    }
}
