//! `fully_shard`: one call makes one unit.

use std::sync::Arc;

use candle_nn::VarBuilder;
use fsdp_core::DeviceMesh;

use super::options::{ShardPlacement, UnitOptions};
use super::transaction::OpenUnit;
use super::var_map::ShardedVarMap;
use crate::data_parallel::DataParallel;
use crate::diagnostics::is_of_poison;
use crate::error::{Error, Result};
use crate::extension::AllGatherExtension;
use crate::module::FsdpModule;
use crate::policy::{MixedPrecisionPolicy, OffloadPolicy, ReshardAfterForward};
use crate::unit::{ParamGroup, ROOT, UnitId};

/// What is wrong with a builder of Candle's own.
const FOREIGN_BUILDER: &str = "it has no parameters, for its VarBuilder is not of the ShardedVarMap that FullyShard \
     was made of. VarBuilder::from_varmap, from_mmaped_safetensors, from_tensors and the like make whole tensors that \
     nothing shards, reduces or trains: pass `vars.builder(dtype)`. Weights of a Hugging Face directory come by \
     `vars.init_with(initializer::Pretrained::open(dir)?)` before the model is built, those of a checkpoint by \
     `load_model` after";

/// The options of [`fully_shard`], shared by the calls of one model.
#[derive(Clone)]
pub struct FullyShard {
    vars: ShardedVarMap,
    unit: UnitOptions,
}

impl FullyShard {
    /// The defaults: the map's mesh, own dtypes, dimension 0, parameters freed after forward but for the root's.
    pub fn new(vars: &ShardedVarMap) -> Self {
        FullyShard { vars: vars.clone(), unit: UnitOptions::default() }
    }

    /// Another mesh than the map's: 1-D, or 2-D as (replicate, shard). It has all ranks of the map's, but for frozen
    /// parameters.
    ///
    /// # Errors
    /// When the mesh has another number of dimensions.
    pub fn mesh(mut self, mesh: &DeviceMesh) -> Result<Self> {
        self.unit.ranks = Some(Arc::new(DataParallel::of(mesh)?));
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

    /// Where shards, gradients and optimizer state live. On a CPU device both policies are the same.
    pub fn offload_policy(self, _policy: OffloadPolicy) -> Self {
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
    let FullyShard { vars, unit: opts } = opts;
    let prefix = vb.prefix();
    let name = if prefix.is_empty() { ROOT.to_string() } else { prefix };
    let ranks = match &opts.ranks {
        Some(ranks) => ranks.clone(),
        None => vars.ranks()?,
    };
    if let ReshardAfterForward::To(size) = opts.reshard_after_forward {
        ranks.neighbours(size)?;
    }
    let unit = OpenUnit::begin(vars, &name, opts, &ranks);
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
    let schedule = vars.schedule();
    let id = UnitId { index: schedule.next_index(), name: name.into() };
    let group = ParamGroup::new(id, params, opts.mp_policy.clone(), schedule.pool().clone());
    tracing::debug!(unit = group.name(), parameters = group.params().len(), "fully_shard");
    schedule.add(group.clone(), opts.reshard_after_forward);
    Ok(FsdpModule::new(inner, group, schedule.clone()))
}
