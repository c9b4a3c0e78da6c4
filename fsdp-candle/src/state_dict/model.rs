//! The state of a model and of a moving average.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_ckpt::{LoadTensor, TensorShard};
use fsdp_core::layout::Region;

use super::transfer::{Expected, decided_by_rank_0, entries, entry, on_host, on_rank_0_only};
use super::{IncompatibleKeys, SavedTensor, StateDict, StateDictOptions, StateTensor};
use crate::error::Result;
use crate::fsdp::{FsdpParam, ShardedVarMap};
use crate::optim::Ema;
use crate::storage::{TensorMemory, copy_tensor};

/// Returns every parameter, ignored ones too, and every buffer by its FQN. A shard on disk is copied
/// ([`ShardedVarMap::store_on_disk`]); [`model_tensors`] copies none. A parameter that is stored in blocks
/// ([`FullyShard::store`](crate::FullyShard::store)) is a tensor of bytes called `<fqn>.nf4` or `<fqn>.int8`.
/// Collective for a full state dict.
pub fn get_model_state_dict(vars: &ShardedVarMap, options: &StateDictOptions) -> Result<StateDict> {
    let mut dict = StateDict::default();
    for param in vars.params() {
        let Some(name) = options.name(param.name()) else { continue };
        if param.trainable() || !options.ignore_frozen_params {
            dict.tensors.insert(param.stored_name(name), entry(&param, &param.shard.values()?, options)?);
        }
    }
    for (fqn, var) in vars.wholes() {
        let Some(name) = options.name(&fqn) else { continue };
        let shared = !options.full_state_dict && !options.cpu_offload;
        let tensor = if shared { var.as_tensor().clone() } else { on_host(var.as_tensor())? };
        dict.tensors.insert(name.into(), StateTensor::whole(tensor));
    }
    Ok(on_rank_0_only(dict, vars.mesh(), options))
}

/// Copies a state dict into the parameters: shards of the same mesh, or whole tensors, of which each rank takes its
/// part. With `broadcast_from_rank0`, takes rank 0's state dict (then collective). Converts floating-point dtypes.
/// Fails, and changes nothing, if `strict` is set and names differ, a tensor has another shape, or a shard is not this
/// rank's.
pub fn set_model_state_dict(
    vars: &ShardedVarMap,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let params = vars.params();
    let wholes = vars.wholes();
    let mut expected = Vec::new();
    let mut targets = Vec::new();
    let names = |fqn: &str| options.name(fqn).map(str::to_string);
    for param in params.iter().filter(|param| param.trainable() || !options.ignore_frozen_params) {
        let Some(name) = names(param.name()).map(|name| param.stored_name(&name)) else { continue };
        let (shape, region) = (param.stored_shape(), param.stored_region().clone());
        expected.push(Expected { name, shape, region, dtype: param.dtype(), required: true });
        targets.push(Target::Shard(param));
    }
    for (fqn, var) in &wholes {
        let Some(name) = names(fqn) else { continue };
        let (shape, region, dtype) = (var.dims(), Region::whole(var.dims()), var.dtype());
        expected.push(Expected { name, shape, region, dtype, required: true });
        targets.push(Target::Whole(var));
    }
    let found = entries(dict, &expected, vars.mesh(), options)?;
    let keys = check_keys(dict, &expected, &found, vars, options)?;
    // Gathered parameters are stale.
    vars.reshard()?;
    for (target, entry) in targets.into_iter().zip(found) {
        match (target, entry) {
            (Target::Shard(param), Some(entry)) => param.shard.set(&entry)?,
            (Target::Whole(var), Some(entry)) => copy_tensor(&entry, var)?,
            (_, None) => {}
        }
    }
    Ok(keys)
}

/// The destination of an entry of a state dict.
enum Target<'a> {
    Shard(&'a FsdpParam),
    Whole(&'a Tensor),
}

/// Returns the names that only one side has. With `strict`, such names are an error.
pub(super) fn check_keys(
    dict: &StateDict,
    expected: &[Expected<'_>],
    found: &[Option<Tensor>],
    vars: &ShardedVarMap,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let known: BTreeSet<&str> = expected.iter().map(|expected| expected.name.as_str()).collect();
    let left_out = |name: &str| {
        let frozen = |name| vars.get(name).is_some_and(|param| !param.trainable());
        options.ignore_frozen_params && frozen(name)
    };
    let unexpected =
        dict.tensors.keys().filter(|name| !known.contains(name.as_str()) && !left_out(name)).cloned().collect();
    let missing = expected.iter().zip(found).filter(|(expected, entry)| entry.is_none() && expected.required);
    let missing = missing.map(|(expected, _)| expected.name.clone());
    let keys = IncompatibleKeys { missing: missing.collect(), unexpected };
    let same = keys == IncompatibleKeys::default();
    if options.strict && !decided_by_rank_0(same, vars.mesh(), options)? {
        let IncompatibleKeys { missing, unexpected } = keys;
        return Err(fsdp_ckpt::Error::NameMismatch { path: "the state dict".into(), missing, unexpected }.into());
    }
    Ok(keys)
}

/// Returns every parameter and buffer as `model.<fqn>`, in the model's memory or file: the input of
/// [`fsdp_ckpt::save`].
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
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
/// // In another run, at any number of ranks, after the model and its optimizer are built:
/// let source = fsdp_ckpt::open(&dir)?;
/// load_model(&vars, &*source, &LoadOptions::default())?;
/// load_optimizer(&mut optim, &*source, &LoadOptions::default())?;
/// assert_eq!(optim.states()[0].step, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn model_tensors(vars: &ShardedVarMap) -> Result<Vec<TensorShard>> {
    Ok(model_state(vars).into_iter().map(SavedTensor::shard).collect())
}

/// Loads every parameter's shard and every buffer from a checkpoint or model of any format, saved on any mesh.
pub fn load_model(
    vars: &ShardedVarMap,
    source: &dyn fsdp_ckpt::TensorSource,
    options: &fsdp_ckpt::LoadOptions,
) -> Result<fsdp_ckpt::LoadReport> {
    vars.reshard()?;
    let targets: Vec<LoadTensor> = model_state(vars).into_iter().map(SavedTensor::target).collect();
    Ok(fsdp_ckpt::load(source, &targets, options)?)
}

/// Returns every parameter and buffer of a model as `model.<fqn>`, in the order of names.
pub(crate) fn model_state(vars: &ShardedVarMap) -> Vec<SavedTensor> {
    let fqn = |name: &str| format!("{}{name}", fsdp_ckpt::MODEL);
    let params = vars.params().into_iter().map(move |param| SavedTensor {
        fqn: fqn(&param.stored_name(param.name())),
        shape: param.stored_shape().to_vec(),
        region: param.stored_region().clone(),
        memory: param.shard.memory(),
        required: true,
    });
    let wholes = vars.wholes().into_iter().map(move |(name, var)| SavedTensor {
        fqn: fqn(&name),
        shape: var.dims().to_vec(),
        region: Region::whole(var.dims()),
        memory: Arc::new(TensorMemory(var.into_inner())),
        required: true,
    });
    let mut all: Vec<SavedTensor> = params.chain(wholes).collect();
    all.sort_by(|a, b| a.fqn.cmp(&b.fqn));
    all
}

/// Number of updates, by the name in PyTorch's `AveragedModel`.
const UPDATES: &str = "n_averaged";

/// Returns the average of each parameter by its FQN, in F32, and the number of updates as `n_averaged`. Collective for
/// a full state dict.
///
/// To save it, pass [`StateDict::shards`] of a sharded state dict, with a prefix, beside the model's.
/// [`StateDict::load`] loads it in place, at any number of ranks.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{get_ema_state_dict, model_tensors, Ema, StateDictOptions};
/// use fsdp_ckpt::{save, SaveState};
///
/// let mut ema = Ema::new(vars.params(), 0.999)?;
/// ema.update()?;
/// let options = StateDictOptions::default();
/// let mut tensors = model_tensors(&vars)?;
/// tensors.extend(get_ema_state_dict(&vars, &ema, &options)?.shards("ema."));
/// let root = tempfile::tempdir()?;
/// let dir = root.path().join("step-1");
/// let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
/// save(&dir, world.group(), &state)?;
///
/// let again = Ema::new(vars.params(), 0.999)?;
/// get_ema_state_dict(&vars, &again, &options)?.load("ema.", &*fsdp_ckpt::open(&dir)?, &Default::default())?;
/// assert_eq!(again.updates()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn get_ema_state_dict(vars: &ShardedVarMap, ema: &Ema, options: &StateDictOptions) -> Result<StateDict> {
    let mut dict = StateDict::default();
    for (param, mean) in ema.means() {
        if let Some(name) = options.name(param.name()) {
            dict.tensors.insert(name.into(), entry(param, mean, options)?);
        }
    }
    dict.tensors.insert(UPDATES.into(), StateTensor::whole(ema.count().clone()));
    Ok(on_rank_0_only(dict, vars.mesh(), options))
}

/// Copies a state dict into the moving average, as [`crate::set_model_state_dict`] does into parameters.
pub fn set_ema_state_dict(
    vars: &ShardedVarMap,
    ema: &mut Ema,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let (mut expected, mut targets) = (vec![], vec![]);
    for (param, mean) in ema.means() {
        let Some(name) = options.name(param.name()).map(str::to_string) else { continue };
        let (shape, region) = (param.shape().dims(), param.region().clone());
        expected.push(Expected { name, shape, region, dtype: DType::F32, required: true });
        targets.push(mean);
    }
    let (name, region) = (UPDATES.to_string(), Region::whole(&[]));
    expected.push(Expected { name, shape: &[], region, dtype: DType::F32, required: true });
    targets.push(ema.count());
    let found = entries(dict, &expected, vars.mesh(), options)?;
    let keys = check_keys(dict, &expected, &found, vars, options)?;
    for (target, entry) in targets.into_iter().zip(found) {
        entry.map_or(Ok(()), |entry| copy_tensor(&entry, target))?;
    }
    Ok(keys)
}
