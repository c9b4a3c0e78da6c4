//! The state of a model.

use std::collections::BTreeSet;

use candle_core::Tensor;
use fsdp_core::layout::Region;

use super::dict::{IncompatibleKeys, StateDict, StateTensor};
use super::options::StateDictOptions;
use super::transfer::{Wanted, given, kept, on_host, on_rank_0, taken};
use crate::error::Result;
use crate::fsdp::ShardedVarMap;
use crate::storage::copy_tensor;

/// Every parameter, ignored ones too, and every buffer by its FQN. Collective when a full state dict is asked for.
///
/// # Errors
/// Those of the collectives.
pub fn get_model_state_dict(vars: &ShardedVarMap, options: &StateDictOptions) -> Result<StateDict> {
    let mut dict = StateDict::default();
    for param in vars.params() {
        let Some(name) = options.name(param.name()) else { continue };
        if param.trainable() || !options.ignore_frozen_params {
            dict.tensors.insert(name.into(), taken(&param, param.var().as_tensor(), options)?);
        }
    }
    for (fqn, var) in vars.wholes() {
        let Some(name) = options.name(&fqn) else { continue };
        let shared = !options.full_state_dict && !options.cpu_offload;
        let tensor = if shared { var.as_tensor().clone() } else { on_host(var.as_tensor())? };
        dict.tensors.insert(name.into(), StateTensor::whole(tensor));
    }
    Ok(kept(dict, vars.mesh(), options))
}

/// Copies a state dict into the parameters: shards of the same mesh, or whole tensors, of which each rank takes its
/// part; rank 0's, where it is broadcast (then collective). Floating point dtypes are converted.
///
/// # Errors
/// When `strict` and names differ; when a tensor has another shape, or a part that this rank does not hold. Nothing is
/// changed then.
pub fn set_model_state_dict(
    vars: &ShardedVarMap,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let params = vars.params();
    let wholes = vars.wholes();
    let mut wanted = Vec::new();
    let mut targets = Vec::new();
    let names = |fqn: &str| options.name(fqn).map(str::to_string);
    for param in params.iter().filter(|param| param.trainable() || !options.ignore_frozen_params) {
        let Some(name) = names(param.name()) else { continue };
        let (shape, region) = (param.shape().dims(), param.region().clone());
        wanted.push(Wanted { name, shape, region, dtype: param.dtype(), required: true });
        targets.push(param.var().as_tensor());
    }
    for (fqn, var) in &wholes {
        let Some(name) = names(fqn) else { continue };
        let (shape, region, dtype) = (var.dims(), Region::whole(var.dims()), var.dtype());
        wanted.push(Wanted { name, shape, region, dtype, required: true });
        targets.push(var.as_tensor());
    }
    let given = given(dict, &wanted, vars.mesh(), options)?;
    let keys = compare(dict, &wanted, &given, vars, options)?;
    // What was gathered before the shards changed is stale.
    vars.reshard()?;
    for (target, given) in targets.into_iter().zip(given) {
        if let Some(given) = given {
            copy_tensor(&given, target)?;
        }
    }
    Ok(keys)
}

/// The names that both sides don't have.
pub(super) fn compare(
    dict: &StateDict,
    wanted: &[Wanted<'_>],
    given: &[Option<Tensor>],
    vars: &ShardedVarMap,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let known: BTreeSet<&str> = wanted.iter().map(|wanted| wanted.name.as_str()).collect();
    let left_out = |name: &str| {
        let frozen = |name| vars.get(name).is_some_and(|param| !param.trainable());
        options.ignore_frozen_params && frozen(name)
    };
    let unexpected =
        dict.tensors.keys().filter(|name| !known.contains(name.as_str()) && !left_out(name)).cloned().collect();
    let missing = wanted.iter().zip(given).filter(|(wanted, given)| given.is_none() && wanted.required);
    let missing = missing.map(|(wanted, _)| wanted.name.clone());
    let keys = IncompatibleKeys { missing: missing.collect(), unexpected };
    let same = keys == IncompatibleKeys::default();
    if options.strict && !on_rank_0(same, vars.mesh(), options)? {
        let IncompatibleKeys { missing, unexpected } = keys;
        return Err(fsdp_ckpt::Error::NameMismatch { path: "the state dict".into(), missing, unexpected }.into());
    }
    Ok(keys)
}

/// Every parameter and buffer as `model.<fqn>`, in the memory that it has: what [`fsdp_ckpt::save`] takes.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{load_model, load_optimizer, model_tensors, optimizer_tensors, AdamW, AdamWConfig};
/// use fsdp_ckpt::{save, LoadOptions, SaveState};
///
/// let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// let mut tensors = model_tensors(&vars)?;
/// tensors.extend(optimizer_tensors(&optim)?);
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-1");
/// let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
/// save(&dir, world.group(), &state)?;
///
/// // In another run, at another number of ranks: build the model and its optimizer, then
/// let source = fsdp_ckpt::open(&dir)?;
/// load_model(&vars, &*source, &LoadOptions::default())?;
/// load_optimizer(&mut optim, &*source, &LoadOptions::default())?;
/// assert_eq!(optim.states()[0].step, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn model_tensors(vars: &ShardedVarMap) -> Result<Vec<fsdp_ckpt::TensorShard>> {
    Ok(get_model_state_dict(vars, &StateDictOptions::default())?.shards(fsdp_ckpt::MODEL))
}

/// Reads every parameter's shard and every buffer from a checkpoint or model of any format, whatever mesh wrote it.
///
/// # Errors
/// Those of [`fsdp_ckpt::load`].
pub fn load_model(
    vars: &ShardedVarMap,
    source: &dyn fsdp_ckpt::TensorSource,
    options: &fsdp_ckpt::LoadOptions,
) -> Result<fsdp_ckpt::LoadReport> {
    vars.reshard()?;
    get_model_state_dict(vars, &StateDictOptions::default())?.load(fsdp_ckpt::MODEL, source, options)
}
