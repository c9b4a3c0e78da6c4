//! The settings of a model that may change between steps.
//!
//! With [`Recurse::Yes`], a setting also reaches the units inside this one: the units whose path starts with its path.
//! For a unit of several modules ([`FsdpModule::into_parts`]), these are the units inside its modules.

use std::sync::Arc;

use super::comm::{AllGather, AllReduceHook, PostAccumulateGradHook, ReduceScatter};
use super::module::{FsdpModule, Unit};
use super::param_group::FsdpParamGroup;
use super::policy::{Recurse, ReshardAfterForward};
use super::settings::{CommSettings, UnshardSettings};
use crate::error::{Error, Result};

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
    fn indices(&self, units: &[Unit]) -> Result<Vec<usize>> {
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
    pub fn set_modules_to_forward_prefetch(&self, units: &[Unit]) -> Result<()> {
        let units = self.indices(units)?;
        self.change_unshard(Recurse::No, |settings| settings.forward_prefetch.clone_from(&units));
        Ok(())
    }

    /// Sets the units to unshard when this unit's backward begins. An empty list restores the default: the unit whose
    /// forward preceded this one's. Fails for a unit of another map.
    pub fn set_modules_to_backward_prefetch(&self, units: &[Unit]) -> Result<()> {
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
    /// Backward then hands out none. An optimizer in the hook changes the unit's shards and drops the gradients, so a rank holds the sharded
    /// gradients of one or two units at a time: PyTorch's `register_post_accumulate_grad_hook`, torchtune's optimizer in
    /// backward.
    ///
    /// The hook runs when backward waits for the reduction of a unit, in the same order on every rank. It runs at the end
    /// of backward if later reductions may add to the gradients: after several forwards of one unit, with
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
    pub fn set_separate_reduce_scatter_group(&self, separate: bool, recurse: Recurse) -> Result<()> {
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
    pub fn set_reshard_after_forward(&self, policy: ReshardAfterForward, recurse: Recurse) -> Result<()> {
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
            params.for_each(|param| param.drop_kept_buffer());
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
