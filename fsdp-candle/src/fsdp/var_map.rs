//! The sharded variables of a model, behind an ordinary [`VarBuilder`]: a sharded [`candle_nn::VarMap`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fsdp_core::layout::Region;
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{DType as CoreDType, DeviceMesh, ProcessGroup, ReduceOp};
use indexmap::IndexMap;
use parking_lot::Mutex;

use super::offload::Offload;
use super::param::FsdpParam;
use super::param_nodes::param_nodes;
use super::param_spec::ParamSpec;
use super::policy::{NamePredicate, ReshardAfterForward};
use super::replica_sharding::ReplicaSharding;
use super::schedule::Schedule;
use super::unit_options::UnitOptions;
use super::weight_format::{Blocks, WeightFormat};
use crate::adapter::{Adapters, LoraConfig, adapted_layer};
use crate::data_parallel::{DataParallel, DataParallelMeshDims, largest_over};
use crate::disk::{FileTensor, StateFile, StateOnDisk};
use crate::error::{Error, Result};
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::kernels;
use crate::storage::{copied, copy_in, take, to_core_dtype, to_var};
use crate::tensor_parallel::BoundPlan;
use crate::world::World;

/// End of a name that no tensor has. [`ShardedVarMap::is_behind`] asks a builder for it.
const UNKNOWN_NAME: &str = "fsdp_candle_whose_builder_is_this";

/// Name of the mesh dimension of [`ShardedVarMap::of_world`].
const WORLD_DIM: &str = "dp_shard";

/// All parameters of a model, each rank holding its shards. Cheap to clone; clones are the same map.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// use fsdp_candle::initializer::Philox;
///
/// let world = World::single()?;
/// let vars = ShardedVarMap::of_world(&world)?;
/// vars.init_with(Philox::new(42))?; // the same values for any number of ranks
/// vars.freeze(|fqn| fqn.starts_with("embed"))?;
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///     Ok((nn::embedding(10, 4, vb.pp("embed"))?, nn::linear(4, 2, vb.pp("head"))?))
/// })?;
/// assert_eq!((vars.params().len(), vars.trainable().len()), (3, 2));
///
/// let ids = Tensor::new(&[[1u32, 2]], world.device())?;
/// let y = model.call(|(embed, head)| head.forward(&embed.forward(&ids)?))?;
/// let grads = model.backward(&y.sum_all()?)?;
/// assert!(grads.get(vars.get("embed.weight").unwrap().var()).is_none());
/// vars.release_buffers(); // for example, before an evaluation with other shapes
/// println!("{vars}"); // units, parameters, placements, bytes
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ShardedVarMap(Arc<Inner>);

struct Inner {
    mesh: DeviceMesh,
    ranks: Mutex<Option<Arc<DataParallel>>>,
    /// Pairs of the roles on the mesh that a caller passed, and the same roles on the map's whole mesh.
    widened: Mutex<Vec<[Arc<DataParallel>; 2]>>,
    device: Device,
    schedule: Arc<Schedule>,
    initializer: Mutex<Arc<dyn Initializer>>,
    frozen: Mutex<NamePredicate>,
    adapters: Mutex<Option<Arc<Adapters>>>,
    plan: Mutex<Option<Arc<BoundPlan>>>,
    params: Mutex<IndexMap<String, Owned>>,
    ignored: Mutex<IndexMap<String, Var>>,
    buffers: Mutex<IndexMap<String, Var>>,
    building: Mutex<Vec<Building>>,
    /// File of the shards of parameters that are built from now on.
    shard_file: Mutex<Option<Arc<StateFile>>>,
    /// Name of the parameter that a builder was asked for last.
    last_asked_for: Mutex<Option<String>>,
    /// Whether a builder of this map was asked for [`UNKNOWN_NAME`].
    was_asked: AtomicBool,
}

struct Owned {
    param: Arc<FsdpParam>,
    /// Name of the unit. Each `fully_shard` call has an [`Arc`] of its own, since names may repeat.
    unit: Arc<str>,
}

/// Bytes of buffers, from [`ShardedVarMap::buffer_memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferMemory {
    /// Bytes in use now.
    pub now: usize,
    /// Bytes that were in use at most, since the map was made.
    pub most: usize,
}

/// A `fully_shard` call whose closure runs.
struct Building {
    name: Arc<str>,
    opts: UnitOptions,
    ranks: Arc<DataParallel>,
    params: Vec<Arc<FsdpParam>>,
}

impl ShardedVarMap {
    /// Makes an empty map for the ranks of a mesh that train copies of one model: 1-D (shard), or 2-D (replicate,
    /// shard). [`ShardedVarMap::of_world`] takes all ranks of a job. Initial values are drawn with seed 0 unless
    /// [`ShardedVarMap::init_with`] sets another initializer.
    pub fn new(mesh: &DeviceMesh, device: &Device) -> Self {
        ShardedVarMap::with_ranks(mesh, None, device)
    }

    /// Makes an empty map for the ranks of a mesh whose dimensions have the roles `dims`: PyTorch's `dp_mesh_dims`.
    /// Collective. Fails if the mesh lacks a dimension, one is named twice, or ranks pass different ones.
    pub fn with_dp_mesh_dims(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>, device: &Device) -> Result<Self> {
        let ranks = Arc::new(DataParallel::of_dims(mesh, dims)?);
        Ok(ShardedVarMap::with_ranks(mesh, Some(ranks), device))
    }

    /// Makes an empty map that shards over all ranks of a job, on this rank's device, as PyTorch's `fully_shard`
    /// without a `mesh`. The mesh has one dimension, `dp_shard`. Does not communicate.
    ///
    /// ```
    /// use fsdp_candle::{ShardedVarMap, World};
    ///
    /// let world = World::single()?;
    /// let vars = ShardedVarMap::of_world(&world)?;
    /// assert_eq!(vars.mesh().size_of("dp_shard")?, world.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_world(world: &World) -> Result<Self> {
        Ok(ShardedVarMap::new(&DeviceMesh::from_group(WORLD_DIM, world.group())?, world.device()))
    }

    fn with_ranks(mesh: &DeviceMesh, ranks: Option<Arc<DataParallel>>, device: &Device) -> Self {
        ShardedVarMap(Arc::new(Inner {
            mesh: mesh.clone(),
            ranks: Mutex::new(ranks),
            widened: Mutex::default(),
            device: device.clone(),
            schedule: Arc::new(Schedule::new(mesh.rank(), device)),
            initializer: Mutex::new(Arc::new(Philox::new(0))),
            frozen: Mutex::new(Arc::new(|_| false)),
            adapters: Mutex::default(),
            plan: Mutex::default(),
            params: Mutex::default(),
            ignored: Mutex::default(),
            buffers: Mutex::default(),
            building: Mutex::default(),
            shard_file: Mutex::default(),
            last_asked_for: Mutex::default(),
            was_asked: AtomicBool::new(false),
        }))
    }

    /// Sets the initial values of all parameters. Fails if parameters are built: load values by
    /// [`load_model`](crate::load_model) then.
    pub fn init_with(&self, initializer: impl Initializer + 'static) -> Result<()> {
        self.before_building("init_with", ", or load values by load_model")?;
        *self.0.initializer.lock() = Arc::new(initializer);
        Ok(())
    }

    /// Fails if parameters are built: the setting would not act on them. `or_else` is another way out.
    fn before_building(&self, setting: &str, or_else: &str) -> Result<()> {
        let params = self.0.params.lock();
        let Some(first) = params.keys().next() else { return Ok(()) };
        Err(Error::Argument(format!(
            "rank {}: ShardedVarMap::{setting} acts on parameters that are built after it, and {} are built (`{first}` was \
             the first). Call it before the model is built{or_else}. Another model can have a map of its own",
            self.mesh().rank(),
            params.len()
        )))
    }

    /// Keeps the shards of all parameters in a file of a directory instead of memory. An
    /// all-gather reads a shard, the next unit's while this unit computes, and an optimizer of this crate reads and
    /// writes it a block at a time. Losses, gradients, state dicts and checkpoints have the same bits.
    ///
    /// In memory remain gathered parameters, gradients, and the optimizer's state unless that is on disk as well
    /// ([`crate::ElementwiseOptimizer::on_disk`]). With a step in backward
    /// ([`set_post_accumulate_grad_hook`](crate::FsdpModule::set_post_accumulate_grad_hook)), there are only the
    /// gradients of a unit.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// # let dir = std::env::temp_dir();
    /// vars.store_on_disk(&fsdp_candle::StateOnDisk::new(dir))?;
    /// let model = fully_shard(&opts, vb, |vb| nn::linear(4, 2, vb))?;
    /// let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
    /// let weight = model.params()[0].dtensor()?; // a copy
    /// # assert_eq!(weight.shape(), [2, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`crate::Error::StateOnDisk`] if the directory's disk fails or is full, and
    /// [`crate::Error::Argument`] if layers compute on a device other than the CPU or parameters are built.
    pub fn store_on_disk(&self, disk: &StateOnDisk) -> Result<()> {
        if !self.0.device.is_cpu() {
            return Err(Error::Argument(format!(
                "rank {}: shards on disk are for layers that compute on the CPU, found {:?}: use OffloadPolicy::Cpu to \
                 keep shards out of the device's memory",
                self.mesh().rank(),
                self.0.device.location()
            )));
        }
        self.before_building("store_on_disk", "")?;
        self.store_in(Arc::new(disk.growing_file(self.mesh().rank())?));
        Ok(())
    }

    /// Keeps the shards of parameters that are built from now on in a file.
    pub(crate) fn store_in(&self, file: Arc<StateFile>) {
        *self.0.shard_file.lock() = Some(file);
    }

    /// Freezes the parameters whose FQN `frozen` accepts: they are sharded and unsharded, and get no gradient. Fails if
    /// parameters are built: [`ShardedVarMap::set_requires_grad`] freezes them.
    pub fn freeze(&self, frozen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Result<()> {
        self.before_building("freeze", ", or call set_requires_grad(false, ..)")?;
        *self.0.frozen.lock() = Arc::new(frozen);
        Ok(())
    }

    /// Adds low-rank adapters to the layers whose FQN `targets` accepts. The model does not change. Fails if parameters
    /// are built. Adapters exist for [`crate::nn::Linear`] and [`crate::nn::Conv1D`] that functions of `nn` make from
    /// a builder. [`ShardedVarMap::adapted`] lists the layers with an adapter.
    ///
    /// To train only the adapters, [freeze](ShardedVarMap::freeze) all other parameters.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// vars.freeze(|name| !nn::is_adapter(name))?;
    /// vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |layer| layer.ends_with("q_proj"))?;
    /// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///     Ok((nn::linear(8, 6, vb.pp("q_proj"))?, nn::linear(8, 6, vb.pp("k_proj"))?))
    /// })?;
    /// assert_eq!(vars.adapted(), ["q_proj"]);
    /// assert_eq!(vars.trainable().len(), 2); // q_proj.lora_A.weight, q_proj.lora_B.weight
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adapt(&self, config: LoraConfig, targets: impl Fn(&str) -> bool + Send + Sync + 'static) -> Result<()> {
        self.before_building("adapt", "")?;
        *self.0.adapters.lock() = Some(Arc::new(Adapters { config, targets: Box::new(targets) }));
        Ok(())
    }

    /// Returns the FQNs of the layers with an adapter, in the order in which they were built.
    pub fn adapted(&self) -> Vec<String> {
        self.0.params.lock().keys().filter_map(|name| adapted_layer(name)).map(String::from).collect()
    }

    /// Returns an ordinary builder that stores its parameters in this map. [`crate::fully_shard`] takes only such
    /// builders, and parameters are built inside its closure.
    ///
    /// It replaces `VarBuilder::from_varmap`. [`ShardedVarMap::init_with`] with
    /// [`Pretrained`](crate::initializer::Pretrained) replaces `from_mmaped_safetensors`: call it before the model is
    /// built, and each rank reads only its shards.
    pub fn builder(&self, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, self.0.device.clone())
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.0.mesh
    }

    /// Returns all parameters in the order in which they were built, which is the same on all ranks.
    pub fn params(&self) -> Vec<Arc<FsdpParam>> {
        self.0.params.lock().values().map(|owned| owned.param.clone()).collect()
    }

    /// Returns the parameters that get gradients, for an optimizer.
    pub fn trainable(&self) -> Vec<Arc<FsdpParam>> {
        self.params().into_iter().filter(|param| param.trainable()).collect()
    }

    /// Returns the shards of the parameters that get gradients, for an optimizer of `candle_nn`. The optimizer must treat
    /// each element alone, and must accept shards without elements: [`CandleOptimizer`](crate::CandleOptimizer) leaves
    /// these out.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// use candle_nn::Optimizer;
    ///
    /// let mut optim = candle_nn::SGD::new(vars.trainable_vars(), 0.1)?;
    /// // Instead of `optim.backward_step(&loss)`, which does not reduce:
    /// let grads = model.backward(&model.forward(&x)?.sqr()?.sum_all()?)?;
    /// optim.step(&grads)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trainable_vars(&self) -> Vec<Var> {
        self.trainable().iter().map(|param| param.var().clone()).collect()
    }

    /// Returns the parameter called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<FsdpParam>> {
        self.0.params.lock().get(name).map(|owned| owned.param.clone())
    }

    /// Returns the parameters that `ignored_params` excluded, which are whole on every rank.
    pub fn ignored(&self) -> Vec<(String, Var)> {
        listed(&self.0.ignored)
    }

    /// Returns the buffers: running statistics, which Candle's `BatchNorm` asks for as `running_mean` and `running_var`
    /// and updates in forward. They are neither sharded nor trained. Each rank keeps the statistics of its own batches;
    /// [`ShardedVarMap::average_buffers`] averages them. State dicts and checkpoints contain them. A checkpointed
    /// closure runs twice, and updates them twice.
    pub fn buffers(&self) -> Vec<(String, Var)> {
        listed(&self.0.buffers)
    }

    /// Returns the ignored parameters and the buffers.
    pub(crate) fn wholes(&self) -> Vec<(String, Var)> {
        let mut all = self.ignored();
        all.extend(self.buffers());
        all
    }

    /// Sets every buffer to its mean over the ranks of the map's mesh. Collective. Call it before an evaluation or a
    /// save that should count all ranks' batches.
    ///
    /// PyTorch's `fully_shard` leaves buffers alone as well. A checkpoint contains the buffers of one rank, and loading
    /// gives them to all ranks.
    ///
    /// ```
    /// use fsdp_core::process_group::local;
    /// # use fsdp_candle::doc_example::*;
    /// # use candle_nn::ModuleT;
    ///
    /// local::try_run(2, |group| {
    ///     let world = World::of(group);
    ///     let vars = ShardedVarMap::of_world(&world)?;
    ///     let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
    ///     let norm = fully_shard(&opts, vb, |vb| candle_nn::batch_norm(3, 1e-5, vb))?;
    ///     assert_eq!(vars.params().len(), 2); // weight and bias; the statistics are buffers
    ///     norm.call(|norm| norm.forward_t(&Tensor::full(world.rank() as f32, (4, 3), world.device())?, true))?;
    ///     vars.average_buffers()?;
    ///     assert_eq!(vars.buffers()[0].0, "running_mean");
    ///     assert_eq!(vars.buffers()[0].1.to_vec1::<f32>()?, [0.05; 3]); // a tenth of the mean of 0 and 1
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn average_buffers(&self) -> Result<()> {
        let vars: Vec<_> = self.buffers().into_iter().map(|(_, var)| var).collect();
        let mut values = vars.iter().map(|var| copied(var.as_tensor())).collect::<Result<Vec<_>>>()?;
        if values.is_empty() {
            return Ok(());
        }
        let subject = Subject::new("average of buffers", []);
        for dim in 0..self.mesh().layout().shape().len() {
            let group = self.mesh().group(dim)?.signed(Signature::new(&subject, []));
            values = group.all_reduce(values, ReduceOp::Avg).wait()?;
        }
        for (var, mean) in vars.iter().zip(&values) {
            copy_in(mean, var.as_tensor())?;
        }
        Ok(())
    }

    /// Returns the memory of this rank's buffers: gathered parameters, gradients until they are reduced, and what
    /// collectives exchange. Shards and activations are not in it, and neither are parameters whose storage is kept
    /// ([`set_keep_unsharded_storage`](crate::FsdpModule::set_keep_unsharded_storage)).
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// let y = model.forward(&x)?;
    /// let gathered = vars.buffer_memory();
    /// model.backward(&y.sum_all()?)?;
    /// let after = vars.buffer_memory();
    /// assert!(gathered.now > 0 && after.now < gathered.now && after.most >= gathered.now);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn buffer_memory(&self) -> BufferMemory {
        let [now, most] = self.0.schedule.pool.taken_bytes();
        BufferMemory { now, most }
    }

    /// Frees the buffers that are kept for the next step, which then allocates them again.
    pub fn release_buffers(&self) {
        self.0.schedule.pool.clear();
    }

    /// Reshards every unit, since shards have changed.
    pub(crate) fn reshard(&self) -> Result<()> {
        Ok(self.0.schedule.reshard_all()?)
    }

    /// Returns the mesh with the roles of its dimensions.
    pub(crate) fn ranks(&self) -> Result<Arc<DataParallel>> {
        let known = self.0.ranks.lock().clone();
        let ranks = match known {
            Some(ranks) => ranks,
            None => Arc::new(DataParallel::of(&self.0.mesh)?),
        };
        Ok(self.0.ranks.lock().get_or_insert(ranks).clone())
    }

    /// Returns roles on the whole mesh for roles on some of its dimensions. The other dimensions may be those of tensor
    /// parallelism, which divide the unit's parameters.
    pub(super) fn on_whole_mesh(&self, ranks: Arc<DataParallel>) -> Arc<DataParallel> {
        let mut known = self.0.widened.lock();
        if let Some([_, whole]) = known.iter().find(|[given, _]| Arc::ptr_eq(given, &ranks)) {
            return whole.clone();
        }
        let Some(whole) = ranks.on_larger_mesh(&self.0.mesh) else { return ranks };
        // Units with the same roles share their collectives' groups.
        let own = self.0.ranks.lock().clone().filter(|own| own.has_same_roles(&whole));
        let whole = own.unwrap_or_else(|| Arc::new(whole));
        known.push([ranks, whole.clone()]);
        whole
    }

    /// Returns the mesh of the ranks that train copies of the model. Gradients must reach all of them.
    fn copies(&self) -> DeviceMesh {
        self.ranks().map_or_else(|_| self.0.mesh.clone(), |ranks| ranks.data.clone())
    }

    /// Returns the meshes of trainable parameters in the order in which they were built, or the map's mesh if there are
    /// none. They do not depend on a rank's gradients.
    pub(crate) fn all_ranks(&self) -> Result<Vec<Arc<DataParallel>>> {
        let mut all: Vec<Arc<DataParallel>> = vec![];
        for param in self.trainable() {
            if !all.iter().any(|ranks| Arc::ptr_eq(ranks, &param.spec.ranks)) {
                all.push(param.spec.ranks.clone());
            }
        }
        if all.is_empty() {
            all.push(self.ranks()?);
        }
        Ok(all)
    }

    /// Returns the tensor-parallel ranks, if there is a plan.
    pub(crate) fn parallel_ranks(&self) -> Option<ProcessGroup> {
        self.0.plan.lock().as_ref().and_then(|plan| plan.ranks().cloned())
    }

    /// Sets the plan of tensor parallelism, and a check of the model that runs in the first forward.
    pub(super) fn set_plan(&self, plan: Arc<BoundPlan>, check: fn(&ShardedVarMap, &BoundPlan) -> Result<()>) {
        *self.0.plan.lock() = Some(plan.clone());
        let inner = Arc::downgrade(&self.0);
        self.0.schedule.before_first_forward(move || match inner.upgrade() {
            Some(inner) => check(&ShardedVarMap(inner), &plan),
            None => Ok(()),
        });
    }

    pub(crate) fn schedule(&self) -> &Arc<Schedule> {
        &self.0.schedule
    }

    /// Returns the name of the parameter that a builder was asked for last.
    pub(super) fn last_asked_for(&self) -> Option<String> {
        self.0.last_asked_for.lock().clone()
    }

    /// Returns whether `vb` is a builder of this map, renamed or not. Candle does not tell where a builder gets its
    /// tensors. A query for any name comes to [`ShardedVarMap::contains_tensor`] of the map behind the builder.
    pub(super) fn is_behind(&self, vb: &VarBuilder<'_>) -> bool {
        self.0.was_asked.store(false, Ordering::Relaxed);
        vb.contains_tensor(UNKNOWN_NAME);
        self.0.was_asked.load(Ordering::Relaxed)
    }
}

fn listed(vars: &Mutex<IndexMap<String, Var>>) -> Vec<(String, Var)> {
    vars.lock().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

/// Freezing and training parameters that are built.
impl ShardedVarMap {
    /// Freezes or trains the parameters whose FQN `select` accepts: PyTorch's `param.requires_grad_(..)`. Returns their
    /// number. Call it between steps: after an iteration's last backward, before the next forward. Collective: every
    /// rank selects the same parameters.
    ///
    /// A frozen parameter gets no gradient, no memory for one and no reduction; its pending gradients are dropped. It
    /// is unsharded as before. An optimizer that has it keeps its state and skips it. To step it when it is trained
    /// again, make the optimizer of all parameters (`AdamW::new(vars.params(), ..)`).
    ///
    /// Layers of [`nn`](crate::nn) look at the setting whenever they compute. Other layers hold a tensor with or
    /// without a graph: a parameter that was built trainable stays in their graph while it is frozen, and Candle
    /// computes its gradient and drops it.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let world = World::single()?;
    /// let vars = ShardedVarMap::of_world(&world)?;
    /// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///     Ok((nn::linear(4, 4, vb.pp("body"))?, nn::linear(4, 2, vb.pp("head"))?))
    /// })?;
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let step = || model.backward(&model.call(|(body, head)| head.forward(&body.forward(&x)?))?.sum_all()?);
    /// let weight = vars.get("body.weight").unwrap();
    ///
    /// assert_eq!(vars.set_requires_grad(false, |fqn| fqn.starts_with("body."))?, 2); // train only the head
    /// assert!(step()?.get(weight.var()).is_none());
    /// vars.set_requires_grad(true, |_| true)?; // train all parameters
    /// assert!(step()?.get(weight.var()).is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails if `select` accepts no parameter, inside a forward or backward, and if ranks select different parameters.
    /// Fails for a trained parameter whose mesh lacks ranks of the map's mesh. Fails for a trained parameter that was
    /// built frozen and that no layer of `nn` holds, since no gradient would reach it. Fails for a trained parameter that
    /// is stored in fewer bits ([`FullyShard::store`](crate::FullyShard::store)). Nothing changes then, on any rank.
    pub fn set_requires_grad(&self, requires_grad: bool, select: impl Fn(&str) -> bool) -> Result<usize> {
        let schedule = self.schedule();
        if schedule.is_running() {
            return Err(Error::Argument(
                "set_requires_grad was called inside a forward or backward of the model: call it between steps".into(),
            ));
        }
        let params = self.params();
        let selected: Vec<bool> = params.iter().map(|param| select(param.name())).collect();
        let after: Vec<bool> = (params.iter().zip(&selected))
            .map(|(param, selected)| if *selected { requires_grad } else { param.trainable() })
            .collect();
        self.check_agreement(&params, &after)?;
        let count = selected.iter().filter(|selected| **selected).count();
        if count == 0 {
            return Err(Error::Argument(format!(
                "set_requires_grad: none of the {} parameters was selected. `ShardedVarMap::params` has their names",
                params.len()
            )));
        }
        let changes = || params.iter().zip(&after).filter(|(param, after)| param.trainable() != **after);
        for (param, _) in changes().filter(|(_, after)| **after) {
            self.check_trainable(param)?;
        }
        let changed: Vec<Arc<FsdpParam>> = changes().map(|(param, _)| param.clone()).collect();
        changes().for_each(|(param, after)| param.set_requires_grad(*after));
        schedule.requires_grad_changed(&changed);
        Ok(count)
    }

    fn check_trainable(&self, param: &FsdpParam) -> Result<()> {
        if let Some(stored) = param.spec.stored {
            return Err(param.error(format!(
                "it is stored as {stored:?} (FullyShard::store), which can't be trained: build it without"
            )));
        }
        param.spec.ranks.check_covers(&self.copies()).map_err(|message| param.error(message))?;
        match param.can_be_trained() {
            true => Ok(()),
            false => Err(param.error(
                "it was frozen (`freeze`) when it was built, and no layer of fsdp_candle::nn holds it, so no gradient \
                 would reach it. Build it trainable, and freeze it afterwards with set_requires_grad",
            )),
        }
    }

    /// Fails on every rank if ranks selected different parameters.
    fn check_agreement(&self, params: &[Arc<FsdpParam>], after: &[bool]) -> Result<()> {
        let mesh = self.mesh();
        // For each parameter: whether any rank trains it, and whether any rank freezes it.
        let any = after.iter().flat_map(|&on| [f32::from(on), f32::from(!on)]).collect();
        let any = largest_over(mesh, any, "check that ranks agree on set_requires_grad")?;
        let differ = |any: &[f32]| any.iter().all(|&any| any > 0.);
        let found = params.iter().zip(after).zip(any.chunks(2)).find(|(_, any)| differ(any));
        let Some(((param, after), _)) = found else { return Ok(()) };
        Err(param.error(format!(
            "ranks disagree on whether it is trained: rank {} would {} it, others would not. Call set_requires_grad \
             with the same selection on every rank; nothing was changed",
            mesh.rank(),
            if *after { "train" } else { "freeze" }
        )))
    }
}

/// A `fully_shard` call while its closure runs. Dropping it before [`OpenUnit::close`] removes everything that the
/// closure made.
pub(super) struct OpenUnit<'a> {
    vars: &'a ShardedVarMap,
    depth: usize,
    units: usize,
    params: usize,
    ignored: usize,
    buffers: usize,
    built: bool,
}

impl<'a> OpenUnit<'a> {
    /// Opens a unit: it owns the parameters that are built until it is closed.
    pub(super) fn begin(vars: &'a ShardedVarMap, name: &str, opts: &UnitOptions, ranks: &Arc<DataParallel>) -> Self {
        let units = vars.0.schedule.next_index();
        let mut building = vars.0.building.lock();
        building.push(Building { name: name.into(), opts: opts.clone(), ranks: ranks.clone(), params: vec![] });
        OpenUnit {
            vars,
            depth: building.len(),
            units,
            params: vars.0.params.lock().len(),
            ignored: vars.0.ignored.lock().len(),
            buffers: vars.0.buffers.lock().len(),
            built: false,
        }
    }

    /// Returns whether the unit itself has built nothing.
    pub(super) fn is_empty(&self) -> bool {
        let inner = &self.vars.0;
        self.params().is_empty()
            && inner.ignored.lock().len() == self.ignored
            && inner.buffers.lock().len() == self.buffers
    }

    /// Returns the unit's parameters so far.
    pub(super) fn params(&self) -> Vec<Arc<FsdpParam>> {
        self.vars.0.building.lock().last().map_or_else(Vec::new, |unit| unit.params.clone())
    }

    /// Keeps everything that the closure made.
    pub(super) fn close(mut self) {
        self.built = true;
        self.vars.0.building.lock().pop();
    }
}

impl Drop for OpenUnit<'_> {
    fn drop(&mut self) {
        if !self.built {
            self.vars.0.building.lock().truncate(self.depth - 1);
            self.vars.0.params.lock().truncate(self.params);
            self.vars.0.ignored.lock().truncate(self.ignored);
            self.vars.0.buffers.lock().truncate(self.buffers);
            self.vars.0.schedule.truncate(self.units);
        }
    }
}

/// Building parameters.
impl ShardedVarMap {
    /// Builds what a layer asks for: a sharded parameter, an ignored one or a buffer. Returns the tensor that the layer
    /// holds.
    fn build(&self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<Tensor> {
        let fail = |message: String| Error::parameter(name, message);
        let building = self.0.building.lock();
        let Some(unit) = building.last() else {
            return Err(Error::parameter(
                name,
                "it was asked for outside fully_shard: build the module inside the closure of a fully_shard call",
            ));
        };
        let (unit, opts, ranks) = (unit.name.clone(), unit.opts.clone(), unit.ranks.clone());
        drop(building);
        *self.0.last_asked_for.lock() = Some(name.into());
        if let Some(param) = self.shared(name, &shape, dtype, &unit)? {
            return Ok(param.held.clone());
        }
        if !dtype.is_float() {
            return Err(fail(format!("expected a floating point dtype, found {dtype:?}")));
        }
        let dims = shape.dims();
        check_size(name, dims, dtype)?;
        if is_buffer(name) {
            return self.whole(&self.0.buffers, name, dims, init, dtype);
        }
        let plan = self.0.plan.lock().clone();
        let parallel = plan.map_or(Ok(None), |plan| plan.of(name, dims))?;
        if opts.ignored_params.as_ref().is_some_and(|ignored| ignored(name)) {
            if let Some(parallel) = parallel {
                let style = parallel.style.name();
                return Err(fail(format!(
                    "it is ignored, and so whole on every rank, but the plan makes its module {style}: remove it from \
                     ignored_params or from the plan"
                )));
            }
            return self.whole(&self.0.ignored, name, dims, init, dtype);
        }
        let placement = opts.shard_placement_fn.as_ref().and_then(|choose| choose(name, dims)).unwrap_or_default();
        let ranks = placement.mesh.map_or(ranks, |mesh| self.on_whole_mesh(mesh.0));
        let dim = placement.dim;
        if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
            ranks.post_forward_group(size)?;
        }
        let local = parallel.as_ref().map_or(dims.to_vec(), |parallel| parallel.local(dims));
        // The user's closures run without a lock.
        let frozen = self.0.frozen.lock().clone();
        let trainable = !frozen(name);
        let adapters = self.0.adapters.lock().clone();
        if trainable {
            ranks.check_covers(&self.copies()).map_err(fail)?;
        }
        // A frozen parameter has no optimizer state to divide, and is unsharded over the shard ranks only.
        let ranks =
            if opts.shard_optimizer_over_replicas && trainable { ranks.sharded_over_replicas()? } else { ranks };
        let (region, layout) = ranks.lay_out(name, (dims, &local), dim, parallel.as_deref())?;
        let replica_sharding = ranks.lay_out_parts(name, &local, dim)?;
        let extension = opts.extension.as_ref().and_then(|choose| choose(name));
        let stored = opts.store.as_ref().and_then(|choose| choose(name, dims));
        if stored.is_some() && (trainable || extension.is_some()) {
            let why = if trainable { "it is trained: freeze it" } else { "it has an all-gather extension: choose one" };
            return Err(fail(format!("FullyShard::store is for frozen parameters, and {why}, or leave it out")));
        }
        let blocks = stored.and_then(WeightFormat::blocks);
        let blocks = blocks.map(|format| Blocks::of(name, format, dims, &region)).transpose()?;
        let stored_dtype = if stored == Some(WeightFormat::Bf16) { DType::BF16 } else { dtype };
        let request = ShardRequest { name, shape: dims, dtype: stored_dtype, region: &region, init };
        let shard = self.initial(&request, blocks.as_ref(), opts.offload_policy.home(&self.0.device))?;
        let schedule = &self.0.schedule;
        let offload = Offload::of(&shard, opts.offload_policy, &self.0.device, &schedule.downloads)?;
        let compute_dtype = opts.mp_policy.compute_dtype(name, dtype).map_err(fail)?;
        let reduce_dtype = opts.mp_policy.reduce_dtype.unwrap_or(dtype);
        let shard_file = self.0.shard_file.lock().clone().filter(|_| shard.elem_count() > 0);
        let on_disk = shard_file.map(|file| FileTensor::new(file, &shard)).transpose()?;
        if on_disk.is_some() {
            take(&shard)?;
        }
        let spec = ParamSpec {
            name: name.into(),
            region,
            shard_dim: dim,
            layout,
            replica_sharding: replica_sharding.map(|(shape, layout)| ReplicaSharding::new(shape, layout)),
            ranks,
            parallel,
            dtype,
            compute_dtype,
            reduce_dtype,
            stored,
            blocks,
            trainable,
            extension,
            adapters,
            offload,
            on_disk,
            shape,
        };
        let nodes = param_nodes(&self.0.device, &local.into(), compute_dtype)?;
        let param = FsdpParam::new(spec, shard, nodes, &schedule.pool, schedule)?;
        self.0.params.lock().insert(name.into(), Owned { param: param.clone(), unit });
        if let Some(unit) = self.0.building.lock().last_mut() {
            unit.params.push(param.clone());
        }
        Ok(param.held.clone())
    }

    /// Returns the parameter called `name`, if the same unit has built it already.
    fn shared(&self, name: &str, shape: &Shape, dtype: DType, unit: &Arc<str>) -> Result<Option<Arc<FsdpParam>>> {
        let all = self.0.params.lock();
        let Some(owned) = all.get(name) else { return Ok(None) };
        let message = if !Arc::ptr_eq(&owned.unit, unit) {
            format!(
                "it already belongs to FSDP unit `{}`, and unit `{unit}` asks for it again: apply fully_shard once to \
                 each module, bottom-up, and pass the built submodules on",
                owned.unit
            )
        } else if owned.param.shape() != shape || owned.param.spec.dtype != dtype {
            format!(
                "unit `{unit}` asks for it as {:?} {:?} and as {:?} {dtype:?}: shared parameters need one shape and \
                 dtype",
                owned.param.shape().dims(),
                owned.param.spec.dtype,
                shape.dims()
            )
        } else {
            return Ok(Some(owned.param.clone()));
        };
        Err(Error::parameter(name, message))
    }

    /// Returns an ignored parameter or a buffer.
    fn whole(
        &self,
        all: &Mutex<IndexMap<String, Var>>,
        name: &str,
        dims: &[usize],
        init: Init,
        dtype: DType,
    ) -> Result<Tensor> {
        if let Some(var) = all.lock().get(name) {
            if (var.dims(), var.dtype()) == (dims, dtype) {
                return Ok(var.as_tensor().clone());
            }
            let message = format!(
                "it is whole on every rank, and was asked for as {:?} {:?} and as {dims:?} {dtype:?}: shared tensors \
                 need one shape and dtype",
                var.dims(),
                var.dtype()
            );
            return Err(Error::parameter(name, message));
        }
        let request = ShardRequest { name, shape: dims, dtype, region: &Region::whole(dims), init };
        let var = self.initial(&request, None, &self.0.device)?;
        self.0.schedule.diagnostics.pass_over(var.id());
        all.lock().insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }

    /// Makes a variable with the initial values of a region, or with their blocks.
    fn initial(&self, request: &ShardRequest<'_>, blocks: Option<&Blocks>, device: &Device) -> Result<Var> {
        let initializer = self.0.initializer.lock().clone();
        initializer.check(request)?;
        let (dtype, region) = match blocks {
            Some(blocks) => (CoreDType::U8, &blocks.region),
            None => (to_core_dtype(request.dtype)?, request.region),
        };
        let kernels = kernels::of_device(device)?;
        let memory = kernels.zeros(dtype, region.elements());
        let mut shard = memory.map_err(|error| Error::parameter(request.name, error.to_string()))?;
        let mut filled = Ok(());
        kernels.write((&mut shard).into(), &mut |bytes| {
            filled = match blocks {
                Some(blocks) => blocks.fill(&*initializer, request, bytes),
                None => initializer.fill(request, bytes),
            };
        })?;
        filled?;
        Ok(to_var(shard, &region.sizes, device)?)
    }
}

impl SimpleBackend for ShardedVarMap {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(self.build(name, shape, init, dtype)?)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let message = "a sharded parameter needs its shape: ask with `get` instead of `get_unchecked`";
        Err(Error::parameter(name, message).into())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if name.ends_with(UNKNOWN_NAME) {
            self.0.was_asked.store(true, Ordering::Relaxed);
            return false;
        }
        let initializer = self.0.initializer.lock().clone();
        self.0.params.lock().contains_key(name) || initializer.contains(name)
    }
}

/// Fails for a parameter that is larger than any memory, before allocating it.
fn check_size(name: &str, dims: &[usize], dtype: DType) -> Result<()> {
    let bytes = dims.iter().try_fold(dtype.size_in_bytes(), |bytes, &size| bytes.checked_mul(size.max(1)));
    if bytes.is_some_and(|bytes| bytes <= isize::MAX as usize) {
        return Ok(());
    }
    let message = format!("of shape {dims:?} and {dtype:?} it is larger than memory can be: check the model's sizes");
    Err(Error::parameter(name, message))
}

/// Returns whether a tensor of this name is a buffer. PyTorch registers these as buffers, and Candle's `BatchNorm` asks
/// its builder for them.
fn is_buffer(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
}
