//! What can be set of a unit or of a whole model while it trains.
//!
//! With [`Recurse::Yes`] a setting reaches the units inside this one as well: those whose path starts with its own. For
//! a unit that was taken apart ([`FsdpModule::into_parts`]) those are the units inside its modules, which the paths of
//! its own parameters tell, and not those beside them.

use std::sync::Arc;

use super::handles::Unit;
use crate::error::Result;
use crate::fsdp::comm::{AllGather, AllReduceHook, ReduceScatter};
use crate::fsdp::module::FsdpModule;
use crate::fsdp::policy::{Recurse, ReshardAfterForward};
use crate::fsdp::step::UnitRules;
use crate::fsdp::unit::{ParamGroup, Settings};

impl<M> FsdpModule<M> {
    /// The units that `recurse` means.
    fn reached(&self, recurse: Recurse) -> impl Iterator<Item = Arc<ParamGroup>> {
        let groups = self.schedule().units().into_iter();
        groups.filter(move |group| {
            Arc::ptr_eq(group, self.group()) || recurse == Recurse::Yes && self.group().path().contains(group.path())
        })
    }

    fn change(&self, recurse: Recurse, change: impl Fn(&mut Settings)) {
        self.reached(recurse).for_each(|group| change(&mut group.settings()));
    }

    /// As [`FsdpModule::change`], for when units communicate.
    fn change_rules(&self, recurse: Recurse, change: impl Fn(&mut UnitRules)) {
        self.reached(recurse).for_each(|group| self.schedule().change_rules(group.id(), &change));
    }

    /// The positions of units. One of another model has none here.
    fn of_this_model(&self, units: &[Unit]) -> Vec<usize> {
        let own = units.iter().map(Unit::id).filter(|id| self.schedule().has(id));
        own.map(|id| id.index).collect()
    }

    /// The units to gather when this one's forward begins. Units of another model are passed over. An empty list: the
    /// unit that followed it in the last iteration.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let blocks = (0..4)
    ///     .map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| nn::linear(4, 4, vb)))
    ///     .collect::<Result<Vec<_>, _>>()?;
    /// // Two blocks ahead, and two behind in backward.
    /// let units: Vec<_> = blocks.iter().map(|block| block.unit()).collect();
    /// for (i, block) in blocks.iter().enumerate() {
    ///     block.set_modules_to_forward_prefetch(&units[i + 1..(i + 3).min(units.len())]);
    ///     let before: Vec<_> = units[..i].iter().rev().take(2).cloned().collect();
    ///     block.set_modules_to_backward_prefetch(&before);
    /// }
    /// let model = fully_shard(&opts, vb, |_| Ok(blocks))?;
    /// let y = model.call(|blocks| {
    ///     let y = blocks[0].forward(&x)?;
    ///     assert!(blocks[2].params().iter().all(|param| !param.is_unsharded())); // on its way, not installed
    ///     blocks[1..].iter().try_fold(y, |x, block| block.forward(&x))
    /// })?;
    /// model.backward(&y.sqr()?.mean_all()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_modules_to_forward_prefetch(&self, units: &[Unit]) {
        let units = self.of_this_model(units);
        self.change_rules(Recurse::No, |rules| rules.forward_prefetch.clone_from(&units));
    }

    /// The units to gather when this one's backward begins. An empty list: the unit whose forward preceded it.
    pub fn set_modules_to_backward_prefetch(&self, units: &[Unit]) {
        let units = self.of_this_model(units);
        self.change_rules(Recurse::No, |rules| rules.backward_prefetch.clone_from(&units));
    }

    /// Whether units without a list gather the next one ahead, for the whole model. True at first.
    pub fn set_implicit_prefetch(&self, implicit: bool) {
        self.schedule().change_settings(|settings| settings.implicit_prefetch = implicit);
    }

    /// Whether backward reduces gradients. Without, they stay unsharded, in the reduce dtype, and join those of the
    /// next backward that does.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Recurse, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
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
        self.change(recurse, |settings| settings.requires_gradient_sync = sync);
    }

    /// Whether gradients are reduced over replicas (HSDP) and handed out. Without, they are reduced over the shard
    /// ranks alone and join those of the next backward that does, on meshes without replicas as well.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Recurse, ShardedVarMap, World};
    /// use fsdp_core::process_group::local;
    ///
    /// // Two copies of a model (threads here), each sharded over one rank.
    /// local::run(2, |group| {
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
    ///     // The mean over copies of 2 x 0 and 2 x 3.
    ///     assert_eq!(grads.get(vars.params()[0].var()).unwrap().to_vec2::<f32>()?, [[3.; 4]; 2]);
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })
    /// .into_iter()
    /// .collect::<Result<Vec<_>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_requires_all_reduce(&self, all_reduce: bool, recurse: Recurse) {
        self.change(recurse, |settings| settings.requires_all_reduce = all_reduce);
    }

    /// Whether the next backward ends the iteration. If not, it does not wait for its reductions and hands no gradients
    /// out; the last one hands out the sum.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let loss = || model.forward(&x)?.sum_all();
    /// for micro_batch in 1..=3 {
    ///     model.set_is_last_backward(micro_batch == 3);
    ///     let grads = model.backward(&loss()?)?;
    ///     assert_eq!(grads.get(&weight).is_some(), micro_batch == 3); // the sum of all three
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_is_last_backward(&self, last: bool) {
        self.schedule().change_settings(|settings| settings.is_last_backward = last);
    }

    /// Leaves the end of backward to [`FsdpModule::finalize_backward`].
    pub fn set_manual_backward_finalization(&self, manual: bool) {
        self.schedule().change_settings(|settings| settings.manual_finalization = manual);
    }

    /// Gives reductions a process group of their own, so that they do not queue behind gathers: more overlap, and one
    /// more group. Collective.
    ///
    /// # Errors
    /// When the group can't be made.
    pub fn set_separate_reduce_scatter_group(&self, separate: bool, recurse: Recurse) -> Result<()> {
        if separate {
            for group in self.reached(recurse) {
                group.params().iter().try_for_each(|param| param.ranks().dedicated_reduce_scatter_group().map(drop))?;
            }
        }
        self.change(recurse, |settings| settings.separate_reduce_scatter_group = separate);
        Ok(())
    }

    /// What becomes of unsharded parameters after forward. Collective for [`ReshardAfterForward::To`], which makes
    /// groups.
    ///
    /// # Errors
    /// When the number of ranks of `To` does not divide those that a parameter is sharded over, or is trivial.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Recurse, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// use fsdp_candle::ReshardAfterForward;
    ///
    /// for (policy, kept) in [(ReshardAfterForward::Always, false), (ReshardAfterForward::Never, true)] {
    ///     model.set_reshard_after_forward(policy, Recurse::Yes)?;
    ///     let y = model.forward(&x)?;
    ///     assert_eq!(model.params()[0].is_unsharded(), kept);
    ///     model.backward(&y.sum_all()?)?;
    /// }
    /// assert!(model.set_reshard_after_forward(ReshardAfterForward::To(2), Recurse::Yes).is_err()); // of one rank
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_reshard_after_forward(&self, policy: ReshardAfterForward, recurse: Recurse) -> Result<()> {
        if let ReshardAfterForward::To(size) = policy {
            for group in self.reached(recurse) {
                group.params().iter().try_for_each(|param| param.ranks().neighbours(size).map(drop))?;
            }
        }
        self.change_rules(recurse, |rules| rules.reshard_after_forward = policy);
        Ok(())
    }

    /// Whether parameters are freed after backward. Without, they are stale once the optimizer has stepped: for several
    /// backwards before a step only.
    pub fn set_reshard_after_backward(&self, reshard: bool, recurse: Recurse) {
        self.change_rules(recurse, |rules| rules.reshard_after_backward = reshard);
    }

    /// Whether backward gathers parameters. Without, they must be there.
    pub fn set_unshard_in_backward(&self, unshard: bool) {
        self.change_rules(Recurse::No, |rules| rules.unshard_in_backward = unshard);
    }

    /// Whether each parameter keeps the buffer of its full values while it is sharded, from its next unshard on: its
    /// address is then the same whenever it is unsharded, until a step fails. With a custom all-gather values are
    /// copied there once more.
    pub fn set_keep_unsharded_storage(&self, keep: bool, recurse: Recurse) {
        self.change(recurse, |settings| settings.keep_unsharded_storage = keep);
        if !keep {
            self.reached(recurse).for_each(|group| group.release_kept());
        }
    }

    /// What sums of gradients are divided by; `None`: the number of ranks.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Recurse, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let loss = || model.forward(&x)?.sum_all();
    /// let mean = model.backward(&loss()?)?; // over the ranks
    /// model.set_gradient_divide_factor(Some(3.), Recurse::Yes); // over rows: each rank has as many as it may be
    /// let by_rows = model.backward(&loss()?)?;
    /// assert_eq!(mean.get(&weight).unwrap().to_vec2::<f32>()?, [[3.; 4]; 2]);
    /// assert_eq!(by_rows.get(&weight).unwrap().to_vec2::<f32>()?, [[1.; 4]; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_gradient_divide_factor(&self, factor: Option<f64>, recurse: Recurse) {
        self.change(recurse, |settings| settings.gradient_divide_factor = factor);
    }

    /// Makes reductions sums, with the division apart.
    pub fn set_force_sum_reduction_for_comms(&self, force: bool, recurse: Recurse) {
        self.change(recurse, |settings| settings.force_sum_reduction = force);
    }

    /// Whether parameters without a gradient take part in the reduction with zeros, so that ranks which used different
    /// ones still match; without it they get an error that names the parameters. Set it alike on all ranks.
    /// [`FsdpModule::parameters_without_gradient`] then names what no rank used.
    ///
    /// A unit's parameters, and whole units, may then be without a gradient on some ranks. While any unit is set so,
    /// ranks compare what their losses reach when a backward begins, by two small all-reduces. Each rank then gathers
    /// and reduces every unit that some rank's loss reaches, once a backward. The lists of
    /// [`FsdpModule::set_modules_to_backward_prefetch`] have no effect.
    ///
    /// Forward gathers a unit when it is called, and no setting changes that: every rank must call the same units in
    /// the same order, whatever it does with their outputs, or the ranks' all-gathers do not match, which is an error
    /// on all of them. To call different ones, `unshard()` all of them on every rank first, and let them keep their
    /// parameters ([`ReshardAfterForward::Never`]). Units by name ([`shard`](crate::shard)) are gathered in the order
    /// in which they were built, whether a rank uses them or not: a rank that comes to one gathers those before it as
    /// well.
    pub fn set_reduce_scatter_unused_params(&self, reduce: bool, recurse: Recurse) {
        self.change(recurse, |settings| settings.reduce_scatter_unused_params = reduce);
        let ranks_may_differ = self.schedule().ranks_may_differ();
        self.schedule().change_settings(|settings| settings.fixed_order = ranks_may_differ);
    }

    /// How many units' gradients may be in a reduce-scatter at once, for the whole model: more overlap for more memory.
    /// 1 at first.
    pub fn set_reduce_scatter_max_input_buffers(&self, max: usize) {
        self.schedule().change_settings(|settings| settings.max_reductions = max.max(1));
    }

    /// A reduction of the user's own on the reduced shards, before they are handed out.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let opts = FullyShard::new(&vars);
    /// # let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
    /// # let weight = vars.params()[0].var().clone();
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
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
        self.group().settings().all_reduce_hook = hook;
    }

    /// An all-gather of the user's own.
    pub fn set_custom_all_gather(&self, custom: Option<Arc<dyn AllGather>>) {
        self.group().settings().all_gather = custom;
    }

    /// A reduce-scatter of the user's own.
    pub fn set_custom_reduce_scatter(&self, custom: Option<Arc<dyn ReduceScatter>>) {
        self.group().settings().reduce_scatter = custom;
    }
}
