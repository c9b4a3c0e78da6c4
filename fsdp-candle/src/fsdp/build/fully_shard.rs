//! `fully_shard`: one call makes one unit. `shard`: one call makes all of a model's.

use std::sync::Arc;

use candle_nn::VarBuilder;
use fsdp_core::DeviceMesh;

use super::by_name::ByName;
use super::options::{ShardPlacement, UnitOptions};
use super::transaction::OpenUnit;
use super::var_map::ShardedVarMap;
use crate::data_parallel::{DataParallel, DataParallelMeshDims};
use crate::diagnostics::is_freed_storage_error;
use crate::error::{Error, Result};
use crate::extension::AllGatherExtension;
use crate::fsdp::module::FsdpModule;
use crate::fsdp::policy::{MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward};
use crate::fsdp::unit::{FsdpParam, ParamGroup, ROOT, UnitId};

/// What is wrong with a builder of Candle's own.
const FOREIGN_BUILDER: &str = "it has no parameters, for its VarBuilder is not of the ShardedVarMap that FullyShard \
     was made of. VarBuilder::from_varmap, from_mmaped_safetensors, from_tensors and the like make whole tensors that \
     nothing shards, reduces or trains: pass `vars.builder(dtype)`. Weights of a Hugging Face directory come by \
     `vars.init_with(initializer::Pretrained::open(dir)?)` before the model is built, those of a checkpoint by \
     `load_model` after";

/// What is wrong with patterns where modules are wrapped.
const FOR_SHARD: &str = "its options have patterns of units by name (`FullyShard::units`), which are for `shard`: call \
     that, or take options without them";

/// How many names a warning lists.
const MOST_NAMES: usize = 8;

/// The options of [`fully_shard`] and [`shard`], shared by the calls of one model.
#[derive(Clone)]
pub struct FullyShard {
    vars: ShardedVarMap,
    unit: UnitOptions,
    units: Vec<String>,
}

impl FullyShard {
    /// The defaults: the map's mesh, own dtypes, dimension 0, parameters freed after forward but for the root's.
    pub fn new(vars: &ShardedVarMap) -> Self {
        FullyShard { vars: vars.clone(), unit: UnitOptions::default(), units: vec![] }
    }

    /// Another mesh than the map's: 1-D, or 2-D as (replicate, shard). It has all ranks that train copies of the model
    /// (those of the map's data-parallel dimensions), but for frozen parameters.
    ///
    /// # Errors
    /// When the mesh has another number of dimensions.
    pub fn mesh(mut self, mesh: &DeviceMesh) -> Result<Self> {
        self.unit.ranks = Some(Arc::new(DataParallel::of(mesh)?));
        Ok(self)
    }

    /// Dimensions of another mesh than the map's, or others of the map's: PyTorch's `mesh` and `dp_mesh_dims`.
    /// Collective.
    ///
    /// # Errors
    /// When the mesh has no such dimension, one is named twice, or ranks pass different ones; those of
    /// [`ProcessGroup::split`].
    ///
    /// [`ProcessGroup::split`]: fsdp_core::ProcessGroup::split
    pub fn mesh_dims(mut self, mesh: &DeviceMesh, dims: &DataParallelMeshDims<'_>) -> Result<Self> {
        self.unit.ranks = Some(Arc::new(DataParallel::of_dims(mesh, dims)?));
        Ok(self)
    }

    /// The dtypes of compute and communication.
    pub fn mp_policy(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.unit.mp_policy = policy;
        self
    }

    /// What becomes of the unsharded parameters between forward and backward.
    pub fn reshard_after_forward(mut self, policy: ReshardAfterForward) -> Self {
        self.unit.reshard_after_forward = policy;
        self
    }

    /// Where shards, sharded gradients and optimizer state live. On a CPU device both policies are the same.
    pub fn offload_policy(mut self, policy: OffloadPolicy) -> Self {
        self.unit.offload_policy = policy;
        self
    }

    /// Chooses the dimension, and maybe the mesh, that each parameter is sharded along.
    pub fn shard_placement_fn(
        mut self,
        choose: impl Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync + 'static,
    ) -> Self {
        self.unit.shard_placement_fn = Some(Arc::new(choose));
        self
    }

    /// Whether the replicas of a 2-D mesh (HSDP) divide each shard among them: each holds a part of it, with the
    /// gradient and optimizer state of that part, and updates it. Not at first. Memory for state is then divided by all
    /// ranks, while all-gathers and reduce-scatters of units stay among the shard ranks.
    ///
    /// Where a root's forward begins, the replicas gather the shards of the units inside it, in the dtype that travels.
    /// They keep them until a backward has handed out gradients, or a forward without a graph ends: micro-batches that
    /// hand out none ([`set_requires_gradient_sync`](FsdpModule::set_requires_gradient_sync),
    /// [`set_requires_all_reduce`](FsdpModule::set_requires_all_reduce),
    /// [`set_is_last_backward`](FsdpModule::set_is_last_backward)) gather once, and nobody may write to a parameter
    /// between them. In place of the all-reduce over replicas comes a reduce-scatter, so that as many bytes travel as
    /// with whole shards. Parameters that are frozen when they are built stay whole shards.
    ///
    /// Losses, gradients and checkpoints are those of HSDP; dimensions other than 0 must divide evenly over all ranks.
    /// The mesh replicates along one dimension, left of the one that shards, or not at all, and then nothing changes.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, Placement, ShardedVarMap, World};
    /// use fsdp_core::process_group::local;
    ///
    /// local::run(4, |group| {
    ///     let world = World::of(group);
    ///     let mesh = world.mesh(&[("dp_replicate", 2), ("dp_shard", 2)])?;
    ///     let vars = ShardedVarMap::new(&mesh, world.device());
    ///     let opts = FullyShard::new(&vars).shard_optimizer_over_replicas(true);
    ///     let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 8, vb))?;
    ///     let weight = &model.params()[0];
    ///     assert_eq!(weight.var().dims(), [2, 4]); // of 8 rows, of which both ranks of a shard have 4
    ///     assert_eq!(weight.placements()[0], Placement::StridedShard { dim: 0, split_factor: 2 });
    ///     let grads = model.backward(&model.forward(&Tensor::ones((3, 4), DType::F32, world.device())?)?.sum_all()?)?;
    ///     assert_eq!(grads.get(weight.var()).unwrap().dims(), [2, 4]);
    ///     Ok::<_, fsdp_candle::Error>(())
    /// })
    /// .into_iter()
    /// .collect::<Result<Vec<_>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn shard_optimizer_over_replicas(mut self, divide: bool) -> Self {
        self.unit.shard_optimizer_over_replicas = divide;
        self
    }

    /// Leaves the parameters whose FQN `ignored` accepts alone: whole on every rank, as plain variables
    /// ([`ShardedVarMap::ignored`]) whose gradients are not reduced.
    ///
    /// ```
    /// # use candle_core::{DType, Module, Tensor};
    /// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
    /// # let world = World::single()?;
    /// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
    /// let opts = FullyShard::new(&vars).ignored_params(|fqn| fqn.ends_with("bias"));
    /// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
    /// assert_eq!(model.params().len(), 1);
    /// let (name, bias) = vars.ignored().remove(0);
    /// assert_eq!(name, "bias");
    /// let x = Tensor::ones((3, 4), DType::F32, world.device())?;
    /// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
    /// assert_eq!(grads.get(&bias).unwrap().to_vec1::<f32>()?, [3.; 2]); // of this rank's batch alone
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ignored_params(mut self, ignored: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.unit.ignored_params = Some(Arc::new(ignored));
        self
    }

    /// The modules that [`shard`] makes units of, by patterns of their FQNs: `model.layers.*` makes a unit of each
    /// layer. A `*` stands for any characters between two dots, `**` for any number of names (`**.blocks.*`), `?` and
    /// `[0-9]` for one character. A parameter belongs to the innermost module that a pattern matches.
    pub fn units(mut self, patterns: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Chooses what travels in the all-gather of each parameter.
    pub fn all_gather_extension(
        mut self,
        choose: impl Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync + 'static,
    ) -> Self {
        self.unit.extension = Some(Arc::new(choose));
        self
    }
}

/// Builds a module with `build` and makes a unit of the parameters that it asks `vb` for, but for those that units
/// inside it have already taken: apply it bottom-up, as PyTorch's `fully_shard`. To make one unit of several modules,
/// build a tuple of them and take it apart with [`FsdpModule::into_parts`].
///
/// The module is built as on PyTorch's meta device: each rank makes its shards only, and the tensors that the layers
/// hold have no memory until the unit runs.
///
/// # Errors
/// Those of `build`, and when it asks for a parameter that another unit owns, that no memory can hold, or that is
/// trained on a mesh without some ranks of the map's; all name the unit. When `vb` is a builder of something else than
/// the options' map ([`ShardedVarMap::builder`]), and so would make a unit of no parameters.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// let world = World::single().unwrap();
/// let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", world.size())]).unwrap(), world.device());
/// let opts = FullyShard::new(&vars);
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 2, vb)).unwrap();
/// let loss = model.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap()).unwrap().mean_all().unwrap();
/// let grads = model.backward(&loss).unwrap();
/// assert_eq!(grads.get(vars.trainable()[0].var()).unwrap().dims(), [2, 4]);
/// ```
pub fn fully_shard<M>(
    opts: &FullyShard,
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<FsdpModule<M>> {
    if !opts.units.is_empty() {
        return Err(Error::Unit { unit: name_of(&vb), message: FOR_SHARD.into() });
    }
    make(opts, vb, build)
}

/// Builds a model that knows nothing of FSDP, and makes units of its modules by their names
/// ([`FullyShard::units`]); what belongs to none of them is a unit of its own, as [`fully_shard`] makes it.
///
/// Its layers are those of [`nn`](crate::nn): `use fsdp_candle::nn as candle_nn;` in the model's file is all that
/// changes there. Nobody calls the units, so that each is gathered when one of its layers first computes, in forward
/// and in backward, and the next one with it, in the order of the last time. After forward it is freed when a layer of
/// a unit beside it computes, or the forward ends; in backward each parameter when its gradient is whole.
///
/// What no layer of `nn` holds is *raw*: tensors that the model multiplies by hand, and layers of other crates. Nobody
/// tells of their uses, so they stay in the unit around, whatever the patterns say: [`FsdpModule::unmanaged_parameters`]
/// lists them, and more than 1 % of the model is warned of. A tensor that a layer of `nn` holds and the model also uses
/// by hand is there in the layer's forward alone: leave its module out of the patterns, or wrap it in [`fully_shard`].
///
/// Units of both kinds may be mixed: modules that `build` hands to [`fully_shard`] are units that are called.
/// Checkpoint ([`activation_checkpoint`](crate::activation_checkpoint)) a layer at a time: units that a closure uses
/// are all gathered while it runs again. Of the policy, inputs are cast where a module is called, and so not at the
/// borders of units by name.
///
/// # Errors
/// As [`fully_shard`], and for a pattern that is none, or matches no module.
///
/// ```
/// use candle_core::{DType, Module, Tensor};
/// use fsdp_candle::{shard, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
///
/// mod model {
/// #   use ::candle_nn::VarBuilder;
/// #   use candle_core::{Module, Result, Tensor};
///     use fsdp_candle::nn as candle_nn; // the one line that differs
///
///     pub struct Model {
///         embed: candle_nn::Embedding,
///         layers: Vec<candle_nn::Linear>,
///         head: candle_nn::Linear,
///     }
///
///     impl Model {
///         pub fn new(layers: usize, vb: VarBuilder) -> Result<Self> {
///             let layer = |i| candle_nn::linear(8, 8, vb.pp(format!("model.layers.{i}")));
///             Ok(Model {
///                 embed: candle_nn::embedding(10, 8, vb.pp("model.embed"))?,
///                 layers: (0..layers).map(layer).collect::<Result<_>>()?,
///                 head: candle_nn::linear(8, 10, vb.pp("head"))?,
///             })
///         }
///     }
///
///     impl Module for Model {
///         fn forward(&self, ids: &Tensor) -> Result<Tensor> {
///             let x = self.layers.iter().try_fold(self.embed.forward(ids)?, |x, layer| layer.forward(&x))?;
///             self.head.forward(&x)
///         }
///     }
/// }
///
/// let opts = FullyShard::new(&vars).units(["model.layers.*"]);
/// let model = shard(&opts, vars.builder(DType::F32), |vb| model::Model::new(3, vb))?;
/// assert_eq!(model.units().len(), 4); // three layers, and the root
/// assert!(model.unmanaged_parameters().is_empty());
/// let logits = model.forward(&Tensor::new(&[1u32, 2, 3], world.device())?)?;
/// model.backward(&logits.sqr()?.mean_all()?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn shard<M>(
    opts: &FullyShard,
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<FsdpModule<M>> {
    make(opts, vb, build)
}

fn name_of(vb: &VarBuilder<'_>) -> String {
    let prefix = vb.prefix();
    if prefix.is_empty() { ROOT.to_string() } else { prefix }
}

/// Makes a unit, and those by name inside it.
fn make<M>(
    opts: &FullyShard,
    vb: VarBuilder<'static>,
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> Result<FsdpModule<M>> {
    let FullyShard { vars, unit: opts, units: patterns } = opts;
    let name = name_of(&vb);
    let ranks = match &opts.ranks {
        Some(ranks) => vars.on_whole_mesh(ranks.clone()),
        None => vars.ranks()?,
    };
    if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
        ranks.neighbours(size)?;
    }
    let unit = OpenUnit::begin(vars, &name, opts, &ranks);
    let inner = build(vb.clone()).map_err(|cause| {
        let cause = match is_freed_storage_error(&cause) {
            true => {
                cause.context("a parameter's values are not there while a model is built: compute on them in forward")
            }
            false => cause,
        };
        Error::Build { unit: name.clone(), cause: Box::new(cause.into()) }
    })?;
    if unit.is_empty() && !vars.is_behind(&vb) {
        return Err(Error::Unit { unit: name, message: FOREIGN_BUILDER.into() });
    }
    if let Some(param) = unit.params().iter().find(|param| !param.is_served()) {
        return Err(Error::Parameter { name: param.name().into(), message: not_served(param) });
    }
    let ByName { units, own, raw } = ByName::of(&unit.params(), &vb.prefix(), patterns)?;
    unit.close();
    let schedule = vars.schedule();
    let group = |name: String, params| {
        let id = UnitId { index: schedule.next_index(), name: name.into() };
        let group = ParamGroup::new(id, params, opts.mp_policy.clone(), schedule.pool().clone());
        tracing::debug!(unit = group.name(), parameters = group.params().len(), "fully_shard");
        group
    };
    let called = schedule.next_index() + units.len();
    for (name, params) in units {
        schedule.add_by_name(group(name, params), opts.reshard_after_forward, called);
    }
    let group = group(name, own);
    schedule.add(group.clone(), opts.reshard_after_forward);
    if vars.mesh().rank() == 0 {
        warn_of_raw(group.name(), &raw, &vars.params());
    }
    Ok(FsdpModule::new(inner, group, schedule.clone(), raw))
}

/// What is wrong with a parameter that a plan names and whose layer does nothing about it.
fn not_served(param: &FsdpParam) -> String {
    let style = param.parallel().map_or("parallel", |parallel| parallel.style().name());
    format!(
        "the plan makes its module {style}, and what holds it knows nothing of tensor parallelism: build the module \
         from `linear`, `embedding` and the like of fsdp_candle::nn, or leave it out of the plan"
    )
}

/// Says which parameters stay gathered against the patterns, where they are many.
fn warn_of_raw(unit: &str, raw: &[Arc<FsdpParam>], all: &[Arc<FsdpParam>]) {
    let bytes = |params: &[Arc<FsdpParam>]| -> usize {
        params.iter().map(|param| param.unsharded_shape().elem_count() * param.compute_dtype().size_in_bytes()).sum()
    };
    let (raw_bytes, all_bytes) = (bytes(raw), bytes(all));
    if raw_bytes > all_bytes / 100 {
        let names: Vec<&str> = raw.iter().take(MOST_NAMES).map(|param| param.name()).collect();
        tracing::warn!(
            unit,
            parameters = raw.len(),
            bytes = raw_bytes,
            of = all_bytes,
            "no layer of fsdp_candle::nn holds these parameters, so they stay gathered from the beginning of forward \
             to the end of backward: {}{}. Build the model from the layers of fsdp_candle::nn (`use fsdp_candle::nn as \
             candle_nn;`), or wrap their modules in fully_shard",
            names.join(", "),
            if raw.len() > MOST_NAMES { ", ..." } else { "" }
        );
    }
}
