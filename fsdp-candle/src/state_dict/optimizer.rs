//! The state of an optimizer.

use candle_core::{DType, Device, Tensor};
use fsdp_ckpt::{LoadOptions, LoadReport, LoadTensor, TensorShard, TensorSource};
use fsdp_core::layout::Region;
use serde_json::{Map, Value};

use super::dict::{IncompatibleKeys, StateDict, StateTensor};
use super::hyper::{GROUPS, groups, hyper_of};
use super::model::compare;
use super::options::StateDictOptions;
use super::transfer::{Wanted, given, kept, taken, value_given};
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;
use crate::optim::{ParamState, ShardedOptimizer};
use crate::storage::TensorMemory;

/// What the names of an optimizer's tensors begin with in a checkpoint.
pub(super) const OPTIM: &str = "optim.";
/// PyTorch's name for the number of steps that a parameter has taken.
const STEP: &str = "step";

/// What an optimizer keeps for each parameter, by PyTorch's names (`state.<fqn>.exp_avg`, `.exp_avg_sq` and `.step` of
/// AdamW), and the hyper-parameters of each group as `param_groups`. What is kept in 8 bits is there in f32. Collective
/// when a full state dict is asked for.
///
/// # Errors
/// Those of the collectives; when the optimizer keeps something that nobody sees ([`crate::CandleOptimizer`]).
pub fn get_optimizer_state_dict(
    vars: &ShardedVarMap,
    optim: &dyn ShardedOptimizer,
    options: &StateDictOptions,
) -> Result<StateDict> {
    can_be_seen(optim)?;
    let mut dict = StateDict::default();
    for (state, fqn) in selected(optim, options) {
        for (what, moment) in state.moments() {
            dict.tensors.insert(name(&fqn, what), taken(&state.param, &moment.tensor()?, options)?);
        }
        dict.tensors.insert(name(&fqn, STEP), StateTensor::whole(step_of(state)?));
    }
    dict.values.insert(GROUPS.into(), groups(optim, options));
    Ok(kept(dict, vars.mesh(), options))
}

/// Copies a state dict into the optimizer, tensors as [`crate::set_model_state_dict`] does, and takes its
/// hyper-parameters: a group gets those of the group that its first parameter is in there.
///
/// # Errors
/// When `strict` and names differ; when a tensor has another shape, or a part that this rank does not hold; when
/// `param_groups` are not as many as the optimizer's, or hold what it does not compute; when the optimizer keeps
/// something that nobody sees. Nothing is changed then.
pub fn set_optimizer_state_dict(
    vars: &ShardedVarMap,
    optim: &mut dyn ShardedOptimizer,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    can_be_seen(optim)?;
    let before: Vec<_> = optim.param_groups().into_iter().map(|group| group.hyper).collect();
    // Before all else: hyper-parameters may say what is kept.
    let given = value_given(dict, GROUPS, vars.mesh(), options)?;
    if let Some(hyper) = given.map(|value| hyper_of(&optim.param_groups(), &value, options)).transpose()? {
        optim.set_hyper(&hyper)?;
    }
    set_tensors(vars, optim, dict, options).or_else(|error| {
        optim.set_hyper(&before)?;
        Err(error)
    })
}

fn set_tensors(
    vars: &ShardedVarMap,
    optim: &mut dyn ShardedOptimizer,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let mut wanted = Vec::new();
    for (state, fqn) in selected(optim, options) {
        let (shape, required) = (state.param.shape().dims(), true);
        for (what, moment) in state.moments() {
            let (name, region, dtype) = (name(&fqn, what), state.param.region().clone(), moment.dtype());
            wanted.push(Wanted { name, shape, region, dtype, required });
        }
        let (name, required) = (name(&fqn, STEP), !state.may_lack_step);
        wanted.push(Wanted { name, shape: &[], region: Region::whole(&[]), dtype: DType::F32, required });
    }
    let given = given(dict, &wanted, vars.mesh(), options)?;
    let keys = compare(dict, &wanted, &given, vars, options)?;
    let mut given = given.into_iter();
    let mut next = || given.next().flatten();
    let mut steps = vec![];
    for (state, _) in selected(optim, options) {
        for (_, moment) in state.moments() {
            if let Some(given) = next() {
                moment.set(&given)?;
            }
        }
        steps.push(next().map(|step| step.to_scalar::<f32>()).transpose()?);
    }
    let states = optim.states_mut().into_iter().filter(|state| options.name(state.param.name()).is_some());
    for (state, step) in states.zip(steps) {
        state.step = step.map_or_else(|| begun(state), |step| step as u64);
    }
    Ok(keys)
}

/// The state of every parameter in the memory that it has, as `optim.state.<fqn>.exp_avg` and so on: what
/// [`fsdp_ckpt::save`] takes. What is kept in 8 bits is saved in f32, a tensor at a time.
///
/// # Errors
/// When the optimizer keeps something that nobody sees ([`crate::CandleOptimizer`]).
pub fn optimizer_tensors(optim: &dyn ShardedOptimizer) -> Result<Vec<TensorShard>> {
    can_be_seen(optim)?;
    let mut shards = vec![];
    for state in optim.states() {
        let (fqn, shape) = (state.param.name(), state.param.shape().dims().to_vec());
        for (what, moment) in state.moments() {
            let (fqn, region) = (saved_name(fqn, what), state.param.region().clone());
            shards.push(TensorShard { fqn, shape: shape.clone(), region, data: moment.memory() });
        }
        let data = std::sync::Arc::new(TensorMemory(step_of(state)?));
        shards.push(TensorShard { fqn: saved_name(fqn, STEP), shape: vec![], region: Region::whole(&[]), data });
    }
    Ok(shards)
}

/// The hyper-parameters as a checkpoint's `optim.param_groups`, for [`fsdp_ckpt::SaveState::values`].
pub fn optimizer_values(optim: &dyn ShardedOptimizer) -> Map<String, Value> {
    Map::from_iter([(format!("{OPTIM}{GROUPS}"), groups(optim, &StateDictOptions::default()))])
}

/// Reads what the optimizer keeps from a checkpoint of any format, whatever mesh wrote it, and whatever groups its
/// parameters were in. The optimizer keeps its hyper-parameters: [`crate::load_param_groups`] reads them.
///
/// # Errors
/// Those of [`fsdp_ckpt::load`]; when a step count is no number of steps; when the optimizer keeps something that
/// nobody sees.
pub fn load_optimizer(
    optim: &mut dyn ShardedOptimizer,
    source: &dyn TensorSource,
    options: &LoadOptions,
) -> Result<LoadReport> {
    can_be_seen(optim)?;
    let mut targets = vec![];
    let mut steps = vec![];
    for state in optim.states() {
        let (fqn, shape) = (state.param.name(), state.param.shape().dims().to_vec());
        for (what, moment) in state.moments() {
            let (fqn, region) = (saved_name(fqn, what), state.param.region().clone());
            targets.push(LoadTensor { fqn, shape: shape.clone(), region, data: moment.memory() });
        }
        let fqn = saved_name(fqn, STEP);
        let is_there = !state.may_lack_step || source.tensors().contains_key(&fqn);
        let step = Tensor::new(begun(state) as f32, &Device::Cpu)?;
        if is_there {
            let data = std::sync::Arc::new(TensorMemory(step.clone()));
            targets.push(LoadTensor { fqn, shape: vec![], region: Region::whole(&[]), data });
        }
        steps.push(step);
    }
    let report = fsdp_ckpt::load(source, &targets, options)?;
    for (state, step) in optim.states_mut().into_iter().zip(steps) {
        let step = step.to_scalar::<f32>()?;
        if !(step >= 0. && step.fract() == 0.) {
            return Err(Error::Parameter {
                name: state.param.name().into(),
                message: format!("{} says that it has taken {step} steps", source.path().display()),
            });
        }
        state.step = step as u64;
    }
    Ok(report)
}

fn can_be_seen(optim: &dyn ShardedOptimizer) -> Result<()> {
    optim.hidden_state().map_or(Ok(()), |why| Err(Error::Argument(why)))
}

/// PyTorch's SGD and Muon do not count: what they have saved has begun.
fn begun(state: &ParamState) -> u64 {
    if state.may_lack_step { state.step.max(1) } else { state.step }
}

fn step_of(state: &ParamState) -> candle_core::Result<Tensor> {
    Tensor::new(state.step as f32, &Device::Cpu)
}

fn name(fqn: &str, what: &str) -> String {
    format!("state.{fqn}.{what}")
}

fn saved_name(fqn: &str, what: &str) -> String {
    format!("{OPTIM}{}", name(fqn, what))
}

/// The states that the options select, and what their parameters are called.
fn selected<'a>(
    optim: &'a dyn ShardedOptimizer,
    options: &'a StateDictOptions,
) -> impl Iterator<Item = (&'a ParamState, String)> + 'a {
    optim.states().into_iter().filter_map(|state| Some((state, options.name(state.param.name())?.to_string())))
}
