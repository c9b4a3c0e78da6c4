//! The sharded variables of a model, behind an ordinary [`VarBuilder`]: what [`candle_nn::VarMap`] is to one process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fsdp_core::DeviceMesh;
use fsdp_core::layout::Region;
use indexmap::IndexMap;

use super::options::UnitOptions;
use crate::adapter::{Adapters, LoraConfig, adapted_layer};
use crate::data_parallel::{DataParallel, DataParallelMeshDims};
use crate::error::{Error, Result};
use crate::graph::nodes_of;
use crate::initializer::{Initializer, Philox, ShardRequest};
use crate::kernels;
use crate::policy::ReshardAfterForward;
use crate::step::Schedule;
use crate::storage::{to_core_dtype, to_var};
use crate::tensor_parallel::Planned;
use crate::unit::{FsdpParam, Offload, ParamSpec};

/// The end of a name that no tensor has: a builder that is asked for it tells its map so.
const PROBE: &str = "fsdp_candle_whose_builder_is_this";

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
    mesh: DeviceMesh,
    ranks: Mutex<Option<Arc<DataParallel>>>,
    device: Device,
    pub(super) schedule: Arc<Schedule>,
    initializer: Mutex<Arc<dyn Initializer>>,
    frozen: Mutex<Arc<Predicate>>,
    adapters: Mutex<Option<Arc<Adapters>>>,
    pub(super) plan: Mutex<Option<Arc<Planned>>>,
    pub(super) params: Mutex<IndexMap<String, Owned>>,
    pub(super) ignored: Mutex<IndexMap<String, Var>>,
    pub(super) buffers: Mutex<IndexMap<String, Var>>,
    pub(super) building: Mutex<Vec<Building>>,
    /// Whether a builder of this map was asked for [`PROBE`].
    probed: AtomicBool,
}

type Predicate = dyn Fn(&str) -> bool + Send + Sync;

pub(super) struct Owned {
    param: Arc<FsdpParam>,
    /// The unit's name and its position in the order of calls: names alone may repeat.
    unit: (String, usize),
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
    /// shard). Initial values are drawn with seed 0 until [`ShardedVarMap::init_with`] says otherwise.
    pub fn new(mesh: &DeviceMesh, device: &Device) -> Self {
        ShardedVarMap::with_ranks(mesh, None, device)
    }

    /// An empty map for the ranks of a mesh of any dimensions, of which `dims` says what they are for: PyTorch's
    /// `dp_mesh_dims`. Collective where a role has several dimensions, or none shards.
    ///
    /// # Errors
    /// When the mesh has no such dimension, or one is named twice; those of [`ProcessGroup::split`].
    ///
    /// [`ProcessGroup::split`]: fsdp_core::ProcessGroup::split
    pub fn on(mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>, device: &Device) -> Result<Self> {
        let ranks = Arc::new(DataParallel::of_dims(mesh, dims)?);
        Ok(ShardedVarMap::with_ranks(mesh, Some(ranks), device))
    }

    fn with_ranks(mesh: &DeviceMesh, ranks: Option<Arc<DataParallel>>, device: &Device) -> Self {
        ShardedVarMap(Arc::new(Inner {
            mesh: mesh.clone(),
            ranks: Mutex::new(ranks),
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
    /// gradient.
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
        Ok(self.0.schedule.units().iter().try_for_each(|unit| unit.reshard())?)
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

    /// The ranks that train copies of the model: gradients must reach all of them.
    fn copies(&self) -> DeviceMesh {
        self.ranks().map_or_else(|_| self.0.mesh.clone(), |ranks| ranks.data().clone())
    }

    /// The map's mesh, and the others that trainable parameters are on, in the order in which they came: which they are
    /// does not depend on a rank's gradients.
    pub(crate) fn all_ranks(&self) -> Result<Vec<Arc<DataParallel>>> {
        let mut all = vec![self.ranks()?];
        for param in self.trainable() {
            if !all.iter().any(|ranks| Arc::ptr_eq(ranks, param.ranks())) {
                all.push(param.ranks().clone());
            }
        }
        Ok(all)
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

    fn build(&self, name: &str, shape: Shape, init: Init, dtype: DType) -> Result<Tensor> {
        let fail = |message: String| Error::Parameter { name: name.into(), message };
        let (unit, opts, ranks) = match lock(&self.0.building).last() {
            Some(unit) => ((unit.name.clone(), unit.serial), unit.opts.clone(), unit.ranks.clone()),
            None => {
                return Err(fail(
                    "it was asked for outside fully_shard: build the module inside the closure of a fully_shard call"
                        .into(),
                ));
            }
        };
        if let Some(param) = self.shared(name, &shape, dtype, &unit)? {
            return Ok(param.full().clone());
        }
        if !dtype.is_float() {
            return Err(fail(format!("parameters are floating point; it was asked for as {dtype:?}")));
        }
        let dims = shape.dims();
        self.check_size(name, dims, dtype)?;
        if is_buffer(name) {
            return self.whole(&self.0.buffers, name, dims, init, dtype);
        }
        if opts.ignored_params.as_ref().is_some_and(|ignored| ignored(name)) {
            return self.whole(&self.0.ignored, name, dims, init, dtype);
        }
        let placement = opts.shard_placement_fn.as_ref().and_then(|choose| choose(name, dims)).unwrap_or_default();
        let ranks = placement.mesh.map_or(ranks, |mesh| mesh.0);
        let dim = placement.dim;
        if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
            ranks.neighbours(size)?;
        }
        let plan = lock(&self.0.plan).clone();
        let parallel = plan.map_or(Ok(None), |plan| plan.of(name, dims))?;
        let local = parallel.as_ref().map_or(dims.to_vec(), |parallel| parallel.local(dims));
        // The user's choice is made without our lock.
        let frozen = lock(&self.0.frozen).clone();
        let trainable = !frozen(name);
        let adapters = lock(&self.0.adapters).clone();
        if trainable {
            ranks.check_covers(&self.copies()).map_err(fail)?;
        }
        let (region, layout) = ranks.lay_out(name, (dims, &local), dim, parallel.as_deref())?;
        let request = ShardRequest { name, shape: dims, dtype, region: &region, init };
        let shard = self.initial(&request, opts.offload_policy.home(&self.0.device))?;
        let schedule = &self.0.schedule;
        let offload = Offload::of(&shard, opts.offload_policy, &self.0.device, schedule.downloads())?;
        // As it was built, unless the policy has another.
        let compute_dtype = opts.mp_policy.param_dtype_of(name).unwrap_or(dtype);
        let spec = ParamSpec {
            name: name.into(),
            region,
            shard_dim: dim,
            layout,
            ranks,
            parallel,
            compute_dtype,
            trainable,
            extension: opts.extension.as_ref().and_then(|choose| choose(name)),
            adapter: adapters.and_then(|adapters| adapters.of(name)),
            offload,
            shape,
        };
        let nodes = nodes_of(&self.0.device, &local.into(), compute_dtype, trainable, schedule.listener())?;
        let param = FsdpParam::new(spec, shard, nodes, schedule.pool().clone())?;
        lock(&self.0.params).insert(name.into(), Owned { param: param.clone(), unit });
        if let Some(unit) = lock(&self.0.building).last_mut() {
            unit.params.push(param.clone());
        }
        Ok(param.full().clone())
    }

    /// The parameter of this name, if the same unit has it already.
    fn shared(
        &self,
        name: &str,
        shape: &Shape,
        dtype: DType,
        unit: &(String, usize),
    ) -> Result<Option<Arc<FsdpParam>>> {
        let all = lock(&self.0.params);
        let Some(owned) = all.get(name) else { return Ok(None) };
        let message = if owned.unit != *unit {
            format!(
                "it already belongs to FSDP unit `{}` and was asked for again by unit `{}`: apply fully_shard once to \
                 each module, bottom-up, and hand the built \
                 submodules on",
                owned.unit.0, unit.0
            )
        } else if owned.param.shape() != shape || owned.param.dtype() != dtype {
            format!(
                "it is shared inside unit `{}` as {:?} {:?} and as {:?} {dtype:?}: shared parameters have one shape \
                 and dtype",
                unit.0,
                owned.param.shape().dims(),
                owned.param.dtype(),
                shape.dims()
            )
        } else {
            return Ok(Some(owned.param.clone()));
        };
        Err(Error::Parameter { name: name.into(), message })
    }

    /// An ignored parameter or a buffer.
    fn whole(
        &self,
        all: &Mutex<IndexMap<String, Var>>,
        name: &str,
        dims: &[usize],
        init: Init,
        dtype: DType,
    ) -> Result<Tensor> {
        if let Some(var) = lock(all).get(name) {
            if (var.dims(), var.dtype()) == (dims, dtype) {
                return Ok(var.as_tensor().clone());
            }
            let message = format!(
                "it is held whole, and was asked for as {:?} {:?} and as {dims:?} {dtype:?}: shared tensors have one \
                 shape and dtype",
                var.dims(),
                var.dtype()
            );
            return Err(Error::Parameter { name: name.into(), message });
        }
        let request = ShardRequest { name, shape: dims, dtype, region: &Region::whole(dims), init };
        let var = self.initial(&request, &self.0.device)?;
        lock(all).insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }

    /// Fails for a parameter that no memory can hold, before any is asked for.
    fn check_size(&self, name: &str, dims: &[usize], dtype: DType) -> Result<()> {
        let bytes = dims.iter().try_fold(dtype.size_in_bytes(), |bytes, &size| bytes.checked_mul(size.max(1)));
        if bytes.is_some_and(|bytes| bytes <= isize::MAX as usize) {
            return Ok(());
        }
        let message =
            format!("of shape {dims:?} and {dtype:?} it is larger than memory can be: check the model's sizes");
        Err(Error::Parameter { name: name.into(), message })
    }

    /// A variable on a device with the initial values of a region.
    fn initial(&self, request: &ShardRequest<'_>, device: &Device) -> Result<Var> {
        let initializer = lock(&self.0.initializer).clone();
        initializer.check(request)?;
        let kernels = kernels::of_device(device)?;
        let memory = kernels.zeros(to_core_dtype(request.dtype)?, request.region.elements());
        let mut shard =
            memory.map_err(|error| Error::Parameter { name: request.name.into(), message: error.to_string() })?;
        let mut filled = Ok(());
        kernels.write((&mut shard).into(), &mut |bytes| filled = initializer.fill(request, bytes))?;
        filled?;
        Ok(to_var(shard, &request.region.sizes, device)?)
    }
}

impl SimpleBackend for ShardedVarMap {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        Ok(self.build(name, shape, init, dtype)?)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        Err(Error::Parameter {
            name: name.into(),
            message: "a sharded parameter needs its shape: ask with `get` instead of `get_unchecked`".into(),
        }
        .into())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        if name.ends_with(PROBE) {
            self.0.probed.store(true, Ordering::Relaxed);
            return false;
        }
        let initializer = lock(&self.0.initializer).clone();
        lock(&self.0.params).contains_key(name) || initializer.contains(name)
    }
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether a tensor of this name is a buffer, which forward updates and no optimizer does: those that PyTorch registers
/// as buffers and Candle's `BatchNorm` asks its builder for.
fn is_buffer(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
}
