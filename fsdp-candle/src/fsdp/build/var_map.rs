//! The sharded variables of a model, behind an ordinary [`VarBuilder`]: what [`candle_nn::VarMap`] is to one process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Var};
use candle_nn::VarBuilder;
use fsdp_core::{DeviceMesh, ProcessGroup};
use indexmap::IndexMap;

use super::options::UnitOptions;
use crate::adapter::{Adapters, LoraConfig, adapted_layer};
use crate::data_parallel::{DataParallel, DataParallelMeshDims};
use crate::error::Result;
use crate::fsdp::step::Schedule;
use crate::fsdp::unit::FsdpParam;
use crate::initializer::{Initializer, Philox};
use crate::tensor_parallel::Planned;

/// The end of a name that no tensor has: a builder that is asked for it tells its map so.
pub(super) const PROBE: &str = "fsdp_candle_whose_builder_is_this";

/// All parameters of a model, each rank holding its shards. Cheap to clone; clones are the same map.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// use fsdp_candle::initializer::Philox;
///
/// let world = World::single()?;
/// let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// vars.init_with(Philox::new(42)); // the same values at every number of ranks
/// vars.freeze(|fqn| fqn.starts_with("embed"));
/// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///     Ok((nn::embedding(10, 4, vb.pp("embed"))?, nn::linear(4, 2, vb.pp("head"))?))
/// })?;
/// assert_eq!((vars.params().len(), vars.trainable().len()), (3, 2));
///
/// let ids = Tensor::new(&[[1u32, 2]], world.device())?;
/// let y = model.call(|(embed, head)| head.forward(&embed.forward(&ids)?))?;
/// let grads = model.backward(&y.sum_all()?)?;
/// assert!(grads.get(vars.get("embed.weight").unwrap().var()).is_none());
/// vars.release_buffers(); // before an evaluation on other shapes, say
/// println!("{vars}"); // units, parameters, placements, bytes
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ShardedVarMap(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) mesh: DeviceMesh,
    ranks: Mutex<Option<Arc<DataParallel>>>,
    /// Roles of some of the mesh's dimensions, as they were given and as they are on the whole mesh.
    widened: Mutex<Vec<[Arc<DataParallel>; 2]>>,
    pub(super) device: Device,
    pub(super) schedule: Arc<Schedule>,
    pub(super) initializer: Mutex<Arc<dyn Initializer>>,
    pub(super) frozen: Mutex<Arc<Predicate>>,
    pub(super) adapters: Mutex<Option<Arc<Adapters>>>,
    pub(super) plan: Mutex<Option<Arc<Planned>>>,
    pub(super) params: Mutex<IndexMap<String, Owned>>,
    pub(super) ignored: Mutex<IndexMap<String, Var>>,
    pub(super) buffers: Mutex<IndexMap<String, Var>>,
    pub(super) building: Mutex<Vec<Building>>,
    /// Whether a builder of this map was asked for [`PROBE`].
    pub(super) probed: AtomicBool,
}

type Predicate = dyn Fn(&str) -> bool + Send + Sync;

pub(super) struct Owned {
    pub(super) param: Arc<FsdpParam>,
    /// The unit's name and its position in the order of calls: names alone may repeat.
    pub(super) unit: (String, usize),
}

/// A `fully_shard` call whose closure runs.
pub(super) struct Building {
    pub(super) name: String,
    pub(super) serial: usize,
    pub(super) opts: UnitOptions,
    pub(super) ranks: Arc<DataParallel>,
    pub(super) params: Vec<Arc<FsdpParam>>,
}

impl ShardedVarMap {
    /// An empty map for the ranks of a mesh, those that train copies of one model: 1-D (shard), or 2-D (replicate,
    /// shard). [`ShardedVarMap::of_world`] takes all ranks of a job. Initial values are drawn with seed 0 until
    /// [`ShardedVarMap::init_with`] says otherwise.
    pub fn new(mesh: &DeviceMesh, device: &Device) -> Self {
        ShardedVarMap::with_ranks(mesh, None, device)
    }

    /// An empty map for the ranks of a mesh of any dimensions, of which `dims` says what they are for: PyTorch's
    /// `dp_mesh_dims`. Collective.
    ///
    /// # Errors
    /// When the mesh has no such dimension, one is named twice, or ranks pass different ones; those of
    /// [`ProcessGroup::split`].
    pub fn on(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>, device: &Device) -> Result<Self> {
        let ranks = Arc::new(DataParallel::of_dims(mesh, dims)?);
        Ok(ShardedVarMap::with_ranks(mesh, Some(ranks), device))
    }

    fn with_ranks(mesh: &DeviceMesh, ranks: Option<Arc<DataParallel>>, device: &Device) -> Self {
        ShardedVarMap(Arc::new(Inner {
            mesh: mesh.clone(),
            ranks: Mutex::new(ranks),
            widened: Mutex::default(),
            device: device.clone(),
            schedule: Arc::new(Schedule::of_rank(mesh.rank(), device)),
            initializer: Mutex::new(Arc::new(Philox::new(0))),
            frozen: Mutex::new(Arc::new(|_| false)),
            adapters: Mutex::default(),
            plan: Mutex::default(),
            params: Mutex::default(),
            ignored: Mutex::default(),
            buffers: Mutex::default(),
            building: Mutex::default(),
            probed: AtomicBool::new(false),
        }))
    }

    /// Where parameters built from now on get their values.
    pub fn init_with(&self, initializer: impl Initializer + 'static) {
        *lock(&self.0.initializer) = Arc::new(initializer);
    }

    /// Freezes the parameters built from now on whose FQN `frozen` accepts: they are sharded and gathered, and get no
    /// gradient. [`ShardedVarMap::set_requires_grad`] does it to those that are built.
    pub fn freeze(&self, frozen: impl Fn(&str) -> bool + Send + Sync + 'static) {
        *lock(&self.0.frozen) = Arc::new(frozen);
    }

    /// Gives low-rank adapters to the layers built from now on whose FQN `targets` accepts: [`crate::nn::Linear`] and
    /// [`crate::nn::Conv1D`], made by `nn`'s functions from a builder. Nothing changes in the model. Other layers get
    /// none, whatever their names; [`ShardedVarMap::adapted`] tells which have one.
    ///
    /// To train the adapters alone, [freeze](ShardedVarMap::freeze) the rest.
    ///
    /// ```
    /// # use candle_core::{DType, Module};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// vars.freeze(|name| !nn::is_adapter(name));
    /// vars.adapt(nn::LoraConfig { rank: 2, alpha: 4. }, |layer| layer.ends_with("q_proj"));
    /// let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
    ///     Ok((nn::linear(8, 6, vb.pp("q_proj"))?, nn::linear(8, 6, vb.pp("k_proj"))?))
    /// })?;
    /// assert_eq!(vars.adapted(), ["q_proj"]);
    /// assert_eq!(vars.trainable().len(), 2); // q_proj.lora_A.weight, q_proj.lora_B.weight
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adapt(&self, config: LoraConfig, targets: impl Fn(&str) -> bool + Send + Sync + 'static) {
        *lock(&self.0.adapters) = Some(Arc::new(Adapters { config, targets: Box::new(targets) }));
    }

    /// The FQNs of the layers that have an adapter, in the order in which they were built.
    pub fn adapted(&self) -> Vec<String> {
        lock(&self.0.params).keys().filter_map(|name| adapted_layer(name)).map(String::from).collect()
    }

    /// An ordinary builder whose parameters land here: the only kind that [`crate::fully_shard`] takes, inside whose
    /// closure parameters are asked for.
    ///
    /// It is what `VarBuilder::from_varmap` is to one process. In place of `from_mmaped_safetensors` comes
    /// [`ShardedVarMap::init_with`] with [`Pretrained`](crate::initializer::Pretrained), before the model is built:
    /// each rank then reads its own shards alone.
    pub fn builder(&self, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, self.0.device.clone())
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.0.mesh
    }

    /// Every parameter, in the order in which it was built: the same on all ranks.
    pub fn params(&self) -> Vec<Arc<FsdpParam>> {
        lock(&self.0.params).values().map(|owned| owned.param.clone()).collect()
    }

    /// The parameters that get gradients: what an optimizer is made of.
    pub fn trainable(&self) -> Vec<Arc<FsdpParam>> {
        self.params().into_iter().filter(|param| param.trainable()).collect()
    }

    /// Their shards: what an optimizer of `candle_nn`'s kind is made of.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
    /// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// use candle_nn::Optimizer;
    ///
    /// let mut optim = candle_nn::SGD::new(vars.trainable_vars(), 0.1)?;
    /// // In place of `optim.backward_step(&loss)`, which does not reduce:
    /// let grads = model.backward(&model.forward(&x)?.sqr()?.sum_all()?)?;
    /// optim.step(&grads)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trainable_vars(&self) -> Vec<Var> {
        self.trainable().iter().map(|param| param.var().clone()).collect()
    }

    /// The parameter called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<FsdpParam>> {
        lock(&self.0.params).get(name).map(|owned| owned.param.clone())
    }

    /// Frees the buffers that are kept for the next step, which then allocates them anew.
    pub fn release_buffers(&self) {
        self.0.schedule.pool().clear();
    }

    /// Frees the full parameters of every unit: what was gathered before the shards changed is stale.
    pub(crate) fn reshard(&self) -> Result<()> {
        Ok(self.0.schedule.reshard_all()?)
    }

    /// The mesh in its roles.
    pub(crate) fn ranks(&self) -> Result<Arc<DataParallel>> {
        let known = lock(&self.0.ranks).clone();
        let ranks = match known {
            Some(ranks) => ranks,
            None => Arc::new(DataParallel::of(&self.0.mesh)?),
        };
        Ok(lock(&self.0.ranks).get_or_insert(ranks).clone())
    }

    /// Roles on the whole mesh, where they are of some of its dimensions: what a unit is sharded over says nothing of
    /// the others, which may have cut its parameters.
    pub(super) fn on_whole_mesh(&self, ranks: Arc<DataParallel>) -> Arc<DataParallel> {
        let mut known = lock(&self.0.widened);
        if let Some([_, whole]) = known.iter().find(|[given, _]| Arc::ptr_eq(given, &ranks)) {
            return whole.clone();
        }
        let Some(whole) = ranks.widened(&self.0.mesh) else { return ranks };
        // Units with the same roles communicate together.
        let own = lock(&self.0.ranks).clone().filter(|own| own.is_like(&whole));
        let whole = own.unwrap_or_else(|| Arc::new(whole));
        known.push([ranks, whole.clone()]);
        whole
    }

    /// The ranks that train copies of the model: gradients must reach all of them.
    pub(super) fn copies(&self) -> DeviceMesh {
        self.ranks().map_or_else(|_| self.0.mesh.clone(), |ranks| ranks.data().clone())
    }

    /// The meshes that trainable parameters are on, in the order in which they came: which they are does not depend on
    /// a rank's gradients. Without any, the map's.
    pub(crate) fn all_ranks(&self) -> Result<Vec<Arc<DataParallel>>> {
        let mut all = vec![];
        for param in self.trainable() {
            if !all.iter().any(|ranks| Arc::ptr_eq(ranks, param.ranks())) {
                all.push(param.ranks().clone());
            }
        }
        if all.is_empty() {
            all.push(self.ranks()?);
        }
        Ok(all)
    }

    /// The tensor-parallel ranks, where there is a plan.
    pub(crate) fn parallel_ranks(&self) -> Option<ProcessGroup> {
        lock(&self.0.plan).as_ref().and_then(|plan| plan.ranks().cloned())
    }

    pub(crate) fn schedule(&self) -> &Arc<Schedule> {
        &self.0.schedule
    }

    /// Whether `vb` is a builder of this map, renamed or not. Candle has no way to ask a builder where it gets its
    /// tensors.
    pub(super) fn is_behind(&self, vb: &VarBuilder<'_>) -> bool {
        self.0.probed.store(false, Ordering::Relaxed);
        vb.contains_tensor(PROBE);
        self.0.probed.swap(false, Ordering::Relaxed)
    }

    /// The parameters that `ignored_params` left alone: whole on every rank.
    pub fn ignored(&self) -> Vec<(String, Var)> {
        lock(&self.0.ignored).iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }

    /// What is neither sharded nor trained: running statistics, which layers of Candle's own (`BatchNorm`) ask for as
    /// `running_mean` and `running_var` and update in forward. Each rank keeps those of its own batches, whole;
    /// [`ShardedVarMap::average_buffers`] makes them one. State dicts and checkpoints hold them. A checkpointed closure
    /// runs twice and updates them twice.
    pub fn buffers(&self) -> Vec<(String, Var)> {
        lock(&self.0.buffers).iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }

    /// All that is held whole: ignored parameters and buffers.
    pub(crate) fn wholes(&self) -> Vec<(String, Var)> {
        let mut all = self.ignored();
        all.extend(self.buffers());
        all
    }
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
