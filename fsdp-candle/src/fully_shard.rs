//! `fully_shard`: one call makes one unit.

use std::sync::Arc;

use candle_nn::VarBuilder;

use crate::group::ParamGroup;
use crate::module::FsdpModule;
use crate::policy::{MixedPrecisionPolicy, ReshardAfterForward};
use crate::var_map::ShardedVarMap;
use crate::{Error, Result};

/// The options of [`fully_shard`], shared by the calls of one model.
#[derive(Clone)]
pub struct FullyShard {
    pub(crate) vars: ShardedVarMap,
    pub(crate) mp_policy: MixedPrecisionPolicy,
    pub(crate) reshard_after_forward: ReshardAfterForward,
}

impl FullyShard {
    /// The defaults: own dtypes, parameters freed after forward but for the root's.
    pub fn new(vars: &ShardedVarMap) -> Self {
        FullyShard {
            vars: vars.clone(),
            mp_policy: MixedPrecisionPolicy::default(),
            reshard_after_forward: ReshardAfterForward::default(),
        }
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
}

/// Builds a module with `build` and makes a unit of the parameters that it asks `vb` for, but for those that units inside it have already taken: apply it
/// bottom-up, as PyTorch's `fully_shard`.
///
/// The module is built as on PyTorch's meta device: each rank makes its shards only, and the tensors that the layers hold have no memory until the unit runs.
///
/// # Errors
/// Those of `build`, and when it asks for a parameter that another unit owns.
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
    let name = if prefix.is_empty() { "(root)".to_string() } else { prefix };
    let vars = &opts.vars;
    vars.begin_unit(&name, opts);
    let built = build(vb);
    let params = vars.end_unit(built.is_ok());
    let inner = built?;
    let context = vars.context().clone();
    if params.is_empty() && context.groups().iter().any(|group| group.name() == name) {
        return Err(Error::Unit {
            unit: name,
            message:
                "fully_shard was already applied here and left no parameters to take; apply it once to each module"
                    .into(),
        });
    }
    let group = ParamGroup::new(
        name,
        context.next_index(),
        params,
        opts.mp_policy,
        opts.reshard_after_forward,
        vars.shard_ranks()?,
        &context,
    );
    tracing::debug!(unit = group.name(), parameters = group.params().len(), "fully_shard");
    context.add(group.clone());
    Ok(FsdpModule::new(inner, group, Arc::clone(&context)))
}
