//! `fully_shard`: one call makes one unit.

use std::sync::Arc;

use candle_nn::VarBuilder;
use fsdp_core::DeviceMesh;

use crate::data_parallel::{DataParallel, ShardMesh};
use crate::extension::AllGatherExtension;
use crate::group::{GroupSpec, ParamGroup};
use crate::module::{FsdpModule, is_of_poison};
use crate::policy::{MixedPrecisionPolicy, NamePredicate, OffloadPolicy, ReshardAfterForward};
use crate::var_map::ShardedVarMap;
use crate::{Error, Result};

/// What the root unit is called in messages.
pub(crate) const ROOT: &str = "(root)";

/// What is wrong with a builder of Candle's own.
const FOREIGN_BUILDER: &str = "it has no parameters, for its VarBuilder is not of the ShardedVarMap that FullyShard \
     was made of. VarBuilder::from_varmap, from_mmaped_safetensors, from_tensors and the like make whole tensors that \
     nothing shards, reduces or trains: pass `vars.builder(dtype)`. Weights of a Hugging Face directory come by \
     `vars.init_with(initializer::Pretrained::open(dir)?)` before the model is built, those of a checkpoint by \
     `load_model` after";

/// How a parameter is sharded.
///
/// ```
/// use fsdp_candle::{ShardMesh, ShardPlacement};
/// use fsdp_core::process_group::local;
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// local::run(4, |group| {
///     let world = World::of(group);
///     // Experts are sharded over pairs of ranks, all else over all four.
///     let pairs = world.mesh(&[("expert", 2), ("within", 2)])?;
///     let pairs = ShardMesh::of_dims(&pairs, Some("expert"), "within")?;
///     let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 4)])?, world.device());
///     let opts = FullyShard::new(&vars).shard_placement_fn(move |fqn, shape| match fqn {
///         _ if fqn.starts_with("expert") => Some(ShardPlacement { dim: 0, mesh: Some(pairs.clone()) }),
///         _ if shape.len() == 2 => Some(ShardPlacement::from(1)), // by columns
///         _ => None,
///     });
///     let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///         Ok((nn::linear(8, 8, vb.pp("gate"))?, nn::linear_no_bias(8, 8, vb.pp("expert"))?))
///     })?;
///     let shards: Vec<_> = model.params().iter().map(|param| param.var().dims().to_vec()).collect();
///     assert_eq!(shards, [vec![8, 2], vec![2], vec![4, 8]]);
///     Ok::<_, fsdp_candle::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ShardPlacement {
    /// The tensor dimension that is cut. One other than 0 must divide evenly.
    pub dim: usize,
    /// Another mesh than the unit's. It has all ranks of the map's mesh, but for frozen parameters.
    pub mesh: Option<ShardMesh>,
}

impl From<usize> for ShardPlacement {
    fn from(dim: usize) -> Self {
        ShardPlacement { dim, mesh: None }
    }
}

/// Chooses how a parameter is sharded by its FQN and shape; `None`: along dimension 0 on the unit's mesh.
pub type ShardPlacementFn = Arc<dyn Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync>;

/// Chooses the all-gather extension by FQN.
pub type ExtensionFn = Arc<dyn Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync>;

/// The options of [`fully_shard`], shared by the calls of one model.
#[derive(Clone)]
pub struct FullyShard {
    pub(crate) vars: ShardedVarMap,
    pub(crate) ranks: Option<Arc<DataParallel>>,
    pub(crate) mp_policy: MixedPrecisionPolicy,
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) shard_placement_fn: Option<ShardPlacementFn>,
    pub(crate) ignored_params: Option<NamePredicate>,
    pub(crate) extension: Option<ExtensionFn>,
}

impl FullyShard {
    /// The defaults: the map's mesh, own dtypes, dimension 0, parameters freed after forward but for the root's.
    pub fn new(vars: &ShardedVarMap) -> Self {
        FullyShard {
            vars: vars.clone(),
            ranks: None,
            mp_policy: MixedPrecisionPolicy::default(),
            reshard_after_forward: ReshardAfterForward::default(),
            shard_placement_fn: None,
            ignored_params: None,
            extension: None,
        }
    }

    /// Another mesh than the map's: 1-D, or 2-D as (replicate, shard). It has all ranks of the map's, but for frozen
    /// parameters.
    ///
    /// # Errors
    /// When the mesh has another number of dimensions.
    pub fn mesh(mut self, mesh: &DeviceMesh) -> Result<Self> {
        self.ranks = Some(Arc::new(DataParallel::of(mesh)?));
        Ok(self)
    }

    /// The dtypes of compute and communication.
    pub fn mp_policy(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.mp_policy = policy;
        self
    }

    /// What becomes of the unsharded parameters between forward and backward.
    pub fn reshard_after_forward(mut self, policy: ReshardAfterForward) -> Self {
        self.reshard_after_forward = policy;
        self
    }

    /// Where shards, gradients and optimizer state live. On a CPU device both policies are the same.
    pub fn offload_policy(self, _policy: OffloadPolicy) -> Self {
        self
    }

    /// Chooses the dimension, and maybe the mesh, that each parameter is sharded along.
    pub fn shard_placement_fn(
        mut self,
        choose: impl Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync + 'static,
    ) -> Self {
        self.shard_placement_fn = Some(Arc::new(choose));
        self
    }

    /// Leaves the parameters whose FQN `ignored` accepts alone: whole on every rank, as plain variables ([`ShardedVarMap::ignored`]) whose gradients are not reduced.
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
        self.ignored_params = Some(Arc::new(ignored));
        self
    }

    /// Chooses what travels in the all-gather of each parameter.
    pub fn all_gather_extension(
        mut self,
        choose: impl Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync + 'static,
    ) -> Self {
        self.extension = Some(Arc::new(choose));
        self
    }

    pub(crate) fn ranks(&self) -> Result<Arc<DataParallel>> {
        match &self.ranks {
            Some(ranks) => Ok(ranks.clone()),
            None => Ok(self.vars.ranks()?),
        }
    }
}

/// Builds a module with `build` and makes a unit of the parameters that it asks `vb` for, but for those that units inside it have already taken: apply it
/// bottom-up, as PyTorch's `fully_shard`. To make one unit of several modules, build a tuple of them and take it apart with [`FsdpModule::into_parts`].
///
/// The module is built as on PyTorch's meta device: each rank makes its shards only, and the tensors that the layers hold have no memory until the unit runs.
///
/// # Errors
/// Those of `build`, and when it asks for a parameter that another unit owns, that no memory can hold, or that is
/// trained on a mesh without some ranks of the map's; all name the unit. When `vb` is a builder of something else than the
/// options' map ([`ShardedVarMap::builder`]), and so would make a unit of no parameters.
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
    let prefix = vb.prefix();
    let name = if prefix.is_empty() { ROOT.to_string() } else { prefix };
    let vars = &opts.vars;
    let ranks = opts.ranks()?;
    if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
        ranks.neighbours(size)?;
    }
    let unit = vars.begin_unit(&name, opts, &ranks);
    let inner = build(vb.clone()).map_err(|cause| {
        let cause = match is_of_poison(&cause) {
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
    let params = unit.close();
    let context = vars.context().clone();
    let spec = GroupSpec {
        name,
        index: context.next_index(),
        params,
        mp_policy: opts.mp_policy.clone(),
        reshard_after_forward: opts.reshard_after_forward,
    };
    let group = ParamGroup::new(spec, &context);
    tracing::debug!(unit = group.name(), parameters = group.params().len(), "fully_shard");
    context.add(group.clone());
    Ok(FsdpModule::new(inner, group, context))
}
