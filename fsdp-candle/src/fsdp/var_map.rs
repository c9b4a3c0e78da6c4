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

use super::built::{Asked, Built, EnclosingUnit, OpenParams};
use super::division::{Division, check_ignored};
use super::encoding::Encoding;
use super::memory_summary::MemorySummary;
use super::param::FsdpParam;
use super::param_nodes::param_nodes;
use super::param_spec::ParamSpec;
use super::policy::{NamePredicate, ReshardAfterForward};
use super::schedule::Schedule;
use super::shard::Shard;
use super::unit_options::UnitOptions;
use super::weight_format::Blocks;
use crate::adapter::{Adapters, LoraConfig, adapted_layer};
use crate::data_parallel::{DataParallel, DataParallelMeshDims, largest_over};
use crate::disk::{StateFile, StateOnDisk};
use crate::error::{Error, Result};
use crate::expert_parallel::{Expert, ExpertPlan};
use crate::float8::{Float8Layers, Float8Recipe};
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::kernels;
use crate::storage::{copied, copy_in, to_core_dtype, to_var};
use crate::tensor_parallel::{BoundPlan, Parallel};
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
    device: Device,
    schedule: Arc<Schedule>,
    roles: Mutex<Roles>,
    settings: Mutex<BuildSettings>,
    built: Mutex<Built>,
    /// Whether a builder of this map was asked for [`UNKNOWN_NAME`].
    was_asked: AtomicBool,
}

/// The roles of mesh dimensions.
struct Roles {
    /// The roles on the map's mesh, once a unit asked for them.
    own: Option<Arc<DataParallel>>,
    /// Pairs of the roles on the mesh that a caller passed, and the same roles on the map's whole mesh.
    widened: Vec<[Arc<DataParallel>; 2]>,
}

/// Settings of the parameters that are built from now on.
#[derive(Clone)]
struct BuildSettings {
    initializer: Arc<dyn Initializer>,
    frozen: NamePredicate,
    adapters: Option<Arc<Adapters>>,
    float8: Option<Arc<Float8Layers>>,
    plan: Option<Arc<BoundPlan>>,
    experts: Option<Arc<ExpertPlan>>,
    /// File of the shards, if they are on disk.
    shard_file: Option<Arc<StateFile>>,
}

/// Bytes of buffers, from [`ShardedVarMap::buffer_memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferMemory {
    /// Bytes in use now.
    pub now: usize,
    /// Bytes that were in use at most, since the map was made.
    pub most: usize,
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
        let map = mesh.group(0).map_or(0, ProcessGroup::next_ordinal);
        ShardedVarMap(Arc::new(Inner {
            mesh: mesh.clone(),
            device: device.clone(),
            schedule: Arc::new(Schedule::new(mesh.rank(), map, device)),
            roles: Mutex::new(Roles { own: ranks, widened: vec![] }),
            settings: Mutex::new(BuildSettings {
                initializer: Arc::new(Philox::new(0)),
                frozen: Arc::new(|_| false),
                adapters: None,
                float8: None,
                plan: None,
                experts: None,
                shard_file: None,
            }),
            built: Mutex::default(),
            was_asked: AtomicBool::new(false),
        }))
    }

    /// Sets the initial values of all parameters. Fails if parameters are built: load values by
    /// [`load_model`](crate::load_model) then.
    pub fn init_with(&self, initializer: impl Initializer + 'static) -> Result<()> {
        self.before_building("init_with", ", or load values by load_model")?;
        self.0.settings.lock().initializer = Arc::new(initializer);
        Ok(())
    }

    /// Fails if parameters are built: the setting would not act on them. `or_else` is another way out.
    fn before_building(&self, setting: &str, or_else: &str) -> Result<()> {
        let built = self.0.built.lock();
        let names = || built.params.keys().chain(built.ignored.keys()).chain(built.buffers.keys());
        let Some(first) = names().next() else { return Ok(()) };
        Err(Error::Argument(format!(
            "rank {}: ShardedVarMap::{setting} acts on parameters that are built after it, and {} are built (`{first}` was \
             the first). Call it before the model is built{or_else}. Another model can have a map of its own",
            self.mesh().rank(),
            names().count()
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
        self.before_building("store_on_disk", "")?;
        if !self.0.device.is_cpu() {
            return Err(Error::Argument(format!(
                "rank {}: shards on disk are for layers that compute on the CPU, found {:?}: use OffloadPolicy::Cpu to \
                 keep shards out of the device's memory",
                self.mesh().rank(),
                self.0.device.location()
            )));
        }
        self.store_in(Arc::new(disk.growing_file(self.mesh().rank())?));
        Ok(())
    }

    /// Keeps the shards of parameters that are built from now on in a file.
    pub(crate) fn store_in(&self, file: Arc<StateFile>) {
        self.0.settings.lock().shard_file = Some(file);
    }

    /// Freezes the parameters whose FQN `frozen` accepts: they are sharded and unsharded, and get no gradient. Fails if
    /// parameters are built: [`ShardedVarMap::set_requires_grad`] freezes them.
    pub fn freeze(&self, frozen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Result<()> {
        self.before_building("freeze", ", or call set_requires_grad(false, ..)")?;
        self.0.settings.lock().frozen = Arc::new(frozen);
        Ok(())
    }

    /// Adds low-rank adapters to the layers whose FQN `targets` accepts. The model does not change. Fails if parameters
    /// are built. Adapters exist for [`crate::nn::Linear`] and [`crate::nn::Gpt2Linear`] that functions of `nn` make from
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
        self.0.settings.lock().adapters = Some(Arc::new(Adapters { config, targets: Box::new(targets) }));
        Ok(())
    }

    /// Returns the FQNs of the layers with an adapter, in the order in which they were built.
    pub fn adapted(&self) -> Vec<String> {
        self.0.built.lock().params.keys().filter_map(|name| adapted_layer(name)).map(String::from).collect()
    }

    /// Computes the matrix products of the layers whose FQN `filter` accepts in 8-bit floats: torchao's function of this
    /// name, whose filter is `module_filter_fn`. The model does not change, and weights, gradients and checkpoints keep
    /// their dtypes. It asks for [`crate::nn::Linear`] and [`crate::nn::Gpt2Linear`]; all other layers compute as before.
    /// [`ShardedVarMap::float8_layers`] lists the layers that do. Leave out the head and the routers of experts, which
    /// lose accuracy. Fails if parameters are built.
    ///
    /// CUDA devices of compute capability 8.9 or later multiply 8-bit floats, for scales of rows from 9.0 on. The CPU
    /// rounds to the same values and multiplies those in f32, so results agree and nothing is faster.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, opts, vb) = one_rank()?;
    /// use fsdp_candle::Float8Recipe;
    ///
    /// vars.convert_to_float8_training(Float8Recipe::Tensorwise, |layer| layer != "head")?;
    /// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///     Ok((nn::linear(32, 16, vb.pp("up"))?, nn::linear(16, 10, vb.pp("head"))?))
    /// })?;
    /// assert_eq!(vars.float8_layers(), ["up"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The layer's forward fails unless both dimensions of its weight are multiples of 16, or those of this rank's part.
    pub fn convert_to_float8_training(
        &self,
        recipe: Float8Recipe,
        filter: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<()> {
        self.before_building("convert_to_float8_training", "")?;
        self.0.settings.lock().float8 = Some(Arc::new(Float8Layers::new(recipe, filter)));
        Ok(())
    }

    /// Returns the FQNs of the layers that compute in 8-bit floats, in the order in which they were built.
    pub fn float8_layers(&self) -> Vec<String> {
        self.0.settings.lock().float8.as_ref().map_or(vec![], |layers| layers.built())
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
        self.0.built.lock().params.values().map(|owned| owned.param.clone()).collect()
    }

    /// Returns the parameters that get gradients, for an optimizer.
    pub fn trainable(&self) -> Vec<Arc<FsdpParam>> {
        self.params().into_iter().filter(|param| param.trainable()).collect()
    }

    /// Returns the shards of the parameters that get gradients, for an optimizer of `candle_nn`. The optimizer must
    /// treat each element alone, and must accept shards without elements: [`CandleOptimizer`](crate::CandleOptimizer)
    /// leaves these out.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// use candle_nn::Optimizer;
    ///
    /// let mut optim = candle_nn::SGD::new(vars.trainable_vars(), 0.1)?;
    /// // Candle's `backward_step` does not reduce. `CandleOptimizer` has one that does.
    /// let grads = model.backward(&model.forward(&x)?.sqr()?.sum_all()?)?;
    /// optim.step(&grads)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trainable_vars(&self) -> Vec<Var> {
        self.trainable().iter().map(|param| param.var().clone()).collect()
    }

    /// Returns the parameter called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<FsdpParam>> {
        self.0.built.lock().params.get(name).map(|owned| owned.param.clone())
    }

    /// Returns the parameters that `ignored_params` excluded, which are whole on every rank.
    pub fn ignored(&self) -> Vec<(String, Var)> {
        listed(&self.0.built.lock().ignored)
    }

    /// Returns the buffers: running statistics, which Candle's `BatchNorm` asks for as `running_mean` and `running_var`
    /// and updates in forward, and biases by which routers choose experts (`e_score_correction_bias`), which nothing updates.
    /// They are neither sharded nor trained. Each rank keeps the statistics of its own batches;
    /// [`ShardedVarMap::average_buffers`] averages them. State dicts and checkpoints contain them. A checkpointed
    /// closure runs twice, and updates them twice.
    pub fn buffers(&self) -> Vec<(String, Var)> {
        listed(&self.0.built.lock().buffers)
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

    /// Returns what the memory of the device that this rank computes on holds, by purpose.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn memory_summary(&self) -> Result<MemorySummary> {
        Ok(self.0.schedule.memory_summary()?)
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
        let known = self.0.roles.lock().own.clone();
        let ranks = match known {
            Some(ranks) => ranks,
            None => Arc::new(DataParallel::of(&self.0.mesh)?),
        };
        Ok(self.0.roles.lock().own.get_or_insert(ranks).clone())
    }

    /// Returns roles on the whole mesh for roles on some of its dimensions. The other dimensions may be those of tensor
    /// parallelism, which divide the unit's parameters.
    pub(super) fn on_whole_mesh(&self, ranks: Arc<DataParallel>) -> Arc<DataParallel> {
        let mut roles = self.0.roles.lock();
        if let Some([_, whole]) = roles.widened.iter().find(|[given, _]| Arc::ptr_eq(given, &ranks)) {
            return whole.clone();
        }
        let Some(whole) = ranks.on_larger_mesh(&self.0.mesh) else { return ranks };
        // Units with the same roles share their collectives' groups.
        let own = roles.own.clone().filter(|own| own.has_same_roles(&whole));
        let whole = own.unwrap_or_else(|| Arc::new(whole));
        roles.widened.push([ranks, whole.clone()]);
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
        self.0.settings.lock().plan.as_ref().and_then(|plan| plan.ranks().cloned())
    }

    /// Sets the plan of tensor parallelism, and a check of the model that runs in the first forward.
    pub(super) fn set_plan(&self, plan: Arc<BoundPlan>, check: fn(&ShardedVarMap, &BoundPlan) -> Result<()>) {
        self.0.settings.lock().plan = Some(plan.clone());
        self.before_first_forward(move |vars| check(vars, &plan));
    }

    /// Returns whether there is a plan of expert parallelism.
    pub(super) fn has_expert_plan(&self) -> bool {
        self.0.settings.lock().experts.is_some()
    }

    /// Sets the plan of expert parallelism, and a check of the model that runs in the first forward.
    pub(super) fn set_expert_plan(&self, plan: Arc<ExpertPlan>, check: fn(&ShardedVarMap, &ExpertPlan) -> Result<()>) {
        self.0.settings.lock().experts = Some(plan.clone());
        self.before_first_forward(move |vars| check(vars, &plan));
    }

    fn before_first_forward(&self, check: impl Fn(&ShardedVarMap) -> Result<()> + Send + Sync + 'static) {
        let inner = Arc::downgrade(&self.0);
        self.0.schedule.before_first_forward(move || match inner.upgrade() {
            Some(inner) => check(&ShardedVarMap(inner)),
            None => Ok(()),
        });
    }

    pub(crate) fn schedule(&self) -> &Arc<Schedule> {
        &self.0.schedule
    }

    /// Returns the name of the parameter that a builder was asked for last.
    pub(super) fn last_asked_for(&self) -> Option<String> {
        self.0.built.lock().last_asked_for.clone()
    }

    /// Returns whether `vb` is a builder of this map, renamed or not. Candle does not tell where a builder gets its
    /// tensors. A query for any name comes to [`ShardedVarMap::contains_tensor`] of the map behind the builder.
    pub(super) fn is_behind(&self, vb: &VarBuilder<'_>) -> bool {
        self.0.was_asked.store(false, Ordering::Relaxed);
        vb.contains_tensor(UNKNOWN_NAME);
        self.0.was_asked.load(Ordering::Relaxed)
    }
}

fn listed(vars: &IndexMap<String, Var>) -> Vec<(String, Var)> {
    vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
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
    /// built frozen and that no layer of `nn` holds, since no gradient would reach it. Fails for a trained parameter
    /// that is stored in fewer bits ([`FullyShard::store`](crate::FullyShard::store)). Nothing changes then, on any
    /// rank.
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
        if let Some(stored) = param.spec.encoding.stored() {
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
    is_closed: bool,
}

impl<'a> OpenUnit<'a> {
    /// Opens a unit: it owns the parameters that are built until it is closed.
    pub(super) fn begin(vars: &'a ShardedVarMap, name: &str, opts: &UnitOptions, ranks: &Arc<DataParallel>) -> Self {
        let units = vars.0.schedule.next_index();
        let mut built = vars.0.built.lock();
        let unit = EnclosingUnit { name: name.into(), opts: opts.clone(), ranks: ranks.clone() };
        built.open_units.push(OpenParams { unit, params: vec![] });
        OpenUnit {
            vars,
            depth: built.open_units.len(),
            units,
            params: built.params.len(),
            ignored: built.ignored.len(),
            buffers: built.buffers.len(),
            is_closed: false,
        }
    }

    /// Returns whether the unit itself has built nothing.
    pub(super) fn is_empty(&self) -> bool {
        let own_params = self.params();
        let built = self.vars.0.built.lock();
        own_params.is_empty() && built.ignored.len() == self.ignored && built.buffers.len() == self.buffers
    }

    /// Returns the unit's parameters so far.
    pub(super) fn params(&self) -> Vec<Arc<FsdpParam>> {
        self.vars.0.built.lock().open_units.last().map_or_else(Vec::new, |unit| unit.params.clone())
    }

    /// Keeps everything that the closure made.
    pub(super) fn close(mut self) {
        self.is_closed = true;
        self.vars.0.built.lock().open_units.pop();
    }
}

impl Drop for OpenUnit<'_> {
    fn drop(&mut self) {
        if !self.is_closed {
            let mut built = self.vars.0.built.lock();
            built.open_units.truncate(self.depth - 1);
            built.params.truncate(self.params);
            built.ignored.truncate(self.ignored);
            built.buffers.truncate(self.buffers);
            drop(built);
            self.vars.0.schedule.truncate(self.units);
        }
    }
}

/// Building parameters.
impl ShardedVarMap {
    /// Builds what a layer asks for: a sharded parameter, an ignored one or a buffer. Returns the tensor that the layer
    /// holds.
    fn build(&self, asked: Asked<'_>) -> Result<Tensor> {
        let unit = self.0.built.lock().enclosing_unit(asked.name)?;
        if let Some(param) = self.0.built.lock().shared(&asked, &unit.name)? {
            return Ok(param.held.clone());
        }
        asked.check()?;
        if asked.is_buffer() {
            return self.whole(|built| &mut built.buffers, &asked);
        }
        // The user's closures run without a lock.
        let settings = self.0.settings.lock().clone();
        let parallel = match &settings.plan {
            Some(plan) => plan.of(asked.name, asked.shape.dims())?,
            None => None,
        };
        let expert = match &settings.experts {
            Some(plan) => plan.of(asked.name)?,
            None => None,
        };
        if unit.opts.ignored_params.as_ref().is_some_and(|ignored| ignored(asked.name)) {
            check_ignored(asked.name, parallel.as_deref(), expert.is_some())?;
            return self.whole(|built| &mut built.ignored, &asked);
        }
        let param = self.build_param(asked, &unit, settings, parallel, expert)?;
        self.0.built.lock().add(param.clone(), unit.name);
        Ok(param.held.clone())
    }

    /// Builds a sharded parameter.
    fn build_param(
        &self,
        Asked { name, shape, init, dtype }: Asked<'_>,
        unit: &EnclosingUnit,
        settings: BuildSettings,
        parallel: Option<Arc<Parallel>>,
        expert: Option<Expert>,
    ) -> Result<Arc<FsdpParam>> {
        let (opts, dims) = (&unit.opts, shape.dims());
        let trainable = !(settings.frozen)(name);
        let owner = expert.as_ref().map(|expert| expert.owner);
        let (ranks, shard_dim) = self.ranks_of(name, dims, unit, expert.as_ref(), trainable)?;
        let Division { local, region, layout, over_replicas } =
            Division::of(name, dims, (&ranks, shard_dim), parallel.as_deref(), owner)?;
        let extension = opts.extension.as_ref().and_then(|choose| choose(name));
        let stored = opts.store.as_ref().and_then(|choose| choose(name, dims));
        let encoding = Encoding::of(name, dims, &region, stored, extension, trainable)?;
        let compute_dtype =
            opts.mp_policy.compute_dtype(name, dtype).map_err(|reason| Error::parameter(name, reason))?;
        let stored_dtype = if let Encoding::Bf16 = encoding { DType::BF16 } else { dtype };
        let request = ShardRequest { name, shape: dims, dtype: stored_dtype, region: &region, init };
        let home = opts.offload_policy.home(&self.0.device);
        let values = initial(&*settings.initializer, &request, encoding.blocks(), home)?;
        let Inner { device, schedule, .. } = &*self.0;
        let shard = Shard::new(name, values, settings.shard_file, opts.offload_policy, device, &schedule.downloads)?;
        let spec = ParamSpec {
            name: name.into(),
            region,
            shard_dim,
            layout,
            over_replicas,
            ranks,
            parallel,
            owner,
            dtype,
            compute_dtype,
            reduce_dtype: opts.mp_policy.reduce_dtype.unwrap_or(dtype),
            encoding,
            trainable,
            adapters: settings.adapters,
            float8: settings.float8,
            shape,
        };
        let nodes = param_nodes(device, &local.into(), compute_dtype)?;
        Ok(FsdpParam::new(spec, shard, nodes, &schedule.pool, schedule)?)
    }

    /// Chooses the ranks of a parameter, and the dimension that they shard.
    fn ranks_of(
        &self,
        name: &str,
        dims: &[usize],
        unit: &EnclosingUnit,
        expert: Option<&Expert>,
        trainable: bool,
    ) -> Result<(Arc<DataParallel>, usize)> {
        let opts = &unit.opts;
        let placement = opts.shard_placement_fn.as_ref().and_then(|choose| choose(name, dims)).unwrap_or_default();
        let ranks = match expert {
            None => placement.mesh.map_or(unit.ranks.clone(), |mesh| self.on_whole_mesh(mesh.0)),
            Some(expert) if placement.mesh.is_none() && Arc::ptr_eq(&unit.ranks, &self.ranks()?) => {
                expert.ranks.clone()
            }
            Some(_) => {
                let message = "the plan makes its list of experts ExpertParallel, which decides the mesh, and its unit or \
                     shard_placement_fn sets another: leave that mesh out, or remove the list from the plan";
                return Err(Error::parameter(name, message));
            }
        };
        if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
            ranks.post_forward_group(size)?;
        }
        if trainable {
            ranks.check_covers(&self.copies()).map_err(|message| Error::parameter(name, message))?;
        }
        // A frozen parameter has no optimizer state to divide, and is unsharded over the shard ranks only.
        let divides = opts.shard_optimizer_over_replicas && trainable;
        Ok((if divides { ranks.sharded_over_replicas()? } else { ranks }, placement.dim))
    }

    /// Returns an ignored parameter or a buffer.
    fn whole(&self, kind: fn(&mut Built) -> &mut IndexMap<String, Var>, asked: &Asked<'_>) -> Result<Tensor> {
        let &Asked { name, ref shape, init, dtype } = asked;
        let dims = shape.dims();
        if let Some(var) = kind(&mut self.0.built.lock()).get(name) {
            return asked.same_whole(var);
        }
        let initializer = self.0.settings.lock().initializer.clone();
        let request = ShardRequest { name, shape: dims, dtype, region: &Region::whole(dims), init };
        let var = initial(&*initializer, &request, None, &self.0.device)?;
        self.0.schedule.diagnostics.pass_over(var.id());
        kind(&mut self.0.built.lock()).insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }
}

impl SimpleBackend for ShardedVarMap {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(self.build(Asked { name, shape, init, dtype })?)
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
        let is_built = self.0.built.lock().params.contains_key(name);
        let initializer = self.0.settings.lock().initializer.clone();
        is_built || initializer.contains(name)
    }
}

/// Makes a variable with the initial values of a region, or with their blocks.
fn initial(
    initializer: &dyn Initializer,
    request: &ShardRequest<'_>,
    blocks: Option<&Blocks>,
    device: &Device,
) -> Result<Var> {
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
            Some(blocks) => blocks.fill(initializer, request, bytes),
            None => initializer.fill(request, bytes),
        };
    })?;
    filled?;
    Ok(to_var(shard, &region.sizes, device)?)
}
