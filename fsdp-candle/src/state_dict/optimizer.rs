//! The state of an optimizer.

use candle_core::{DType, Device, Tensor};
use fsdp_core::layout::Region;
use serde_json::{Map, Value, json};

use super::dict::{IncompatibleKeys, StateDict, StateTensor};
use super::model::{compare, copy};
use super::options::StateDictOptions;
use super::transfer::{Wanted, given, kept, taken};
use crate::build::ShardedVarMap;
use crate::error::{Error, Result};
use crate::optim::{AdamW, AdamWConfig, AdamWState};

/// What the names of an optimizer's tensors begin with in a checkpoint.
const OPTIM: &str = "optim.";
/// The key of the hyper-parameters.
const GROUPS: &str = "param_groups";
/// PyTorch's name for the number of steps that a parameter has taken.
const STEP: &str = "step";

/// The moments and step counts as `state.<fqn>.exp_avg`, `.exp_avg_sq` and `.step`, and the hyper-parameters as
/// `param_groups`. Collective when a full state dict is asked for.
///
/// # Errors
/// Those of the collectives.
pub fn get_optimizer_state_dict(vars: &ShardedVarMap, optim: &AdamW, options: &StateDictOptions) -> Result<StateDict> {
    Ok(kept(of(optim, options)?, vars.mesh(), options))
}

fn of(optim: &AdamW, options: &StateDictOptions) -> Result<StateDict> {
    let mut dict = StateDict::default();
    let mut names = vec![];
    for (state, fqn) in selected(optim, options) {
        dict.tensors.insert(name(&fqn, EXP_AVG), taken(&state.param, &state.exp_avg, options)?);
        dict.tensors.insert(name(&fqn, EXP_AVG_SQ), taken(&state.param, &state.exp_avg_sq, options)?);
        let step = Tensor::new(state.step as f32, &Device::Cpu)?;
        dict.tensors.insert(name(&fqn, STEP), StateTensor::whole(step));
        names.push((state.group, fqn));
    }
    dict.values.insert(GROUPS.into(), groups(optim, names));
    Ok(dict)
}

/// Copies a state dict into the optimizer, tensors as [`crate::set_model_state_dict`] does, and takes its
/// hyper-parameters.
///
/// # Errors
/// When `strict` and names differ; when a tensor has another shape, or a part that this rank does not hold; when
/// `param_groups` are not as many as the optimizer's. Nothing is changed then.
pub fn set_optimizer_state_dict(
    vars: &ShardedVarMap,
    optim: &mut AdamW,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    let mut wanted = Vec::new();
    for (state, fqn) in selected(optim, options) {
        let (shape, dtype) = (state.param.shape().dims(), state.param.dtype());
        for what in [EXP_AVG, EXP_AVG_SQ] {
            wanted.push(Wanted { name: name(&fqn, what), shape, region: state.param.region().clone(), dtype });
        }
        wanted.push(Wanted { name: name(&fqn, STEP), shape: &[], region: Region::whole(&[]), dtype: DType::F32 });
    }
    let given = given(dict, &wanted, vars.mesh(), options)?;
    let keys = compare(dict, &wanted, &given, vars, options)?;
    let configs = configs(optim.groups(), &dict.values)?;
    let mut given = given.into_iter();
    let mut next = || given.next().flatten();
    let steps = selected(optim, options)
        .map(|(state, _)| {
            for target in [&state.exp_avg, &state.exp_avg_sq] {
                if let Some(given) = next() {
                    copy(&given, target)?;
                }
            }
            next().map(|step| Ok(step.to_scalar::<f32>()? as u64)).transpose()
        })
        .collect::<Result<Vec<_>>>()?;
    let states = optim.states_mut().iter_mut().filter(|state| options.name(state.param.name()).is_some());
    for (state, step) in states.zip(steps) {
        state.step = step.unwrap_or(state.step);
    }
    optim.set_groups(configs);
    Ok(keys)
}

/// The state of every parameter in the memory that it has, as `optim.state.<fqn>.exp_avg` and so on: what
/// [`fsdp_ckpt::save`] takes.
pub fn optimizer_tensors(optim: &AdamW) -> Result<Vec<fsdp_ckpt::TensorShard>> {
    Ok(of(optim, &StateDictOptions::default())?.shards(OPTIM))
}

/// The hyper-parameters as a checkpoint's `optim.param_groups`, for [`fsdp_ckpt::SaveState::values`].
pub fn optimizer_values(optim: &AdamW) -> Map<String, Value> {
    let names = optim.states().iter().map(|state| (state.group, state.param.name().to_string()));
    Map::from_iter([(format!("{OPTIM}{GROUPS}"), groups(optim, names))])
}

/// Reads the moments and step counts from a checkpoint of any format, whatever mesh wrote it. The optimizer keeps its
/// hyper-parameters.
///
/// # Errors
/// Those of [`fsdp_ckpt::load`]; when a step count is no number of steps.
pub fn load_optimizer(
    optim: &mut AdamW,
    source: &dyn fsdp_ckpt::TensorSource,
    options: &fsdp_ckpt::LoadOptions,
) -> Result<fsdp_ckpt::LoadReport> {
    let dict = of(optim, &StateDictOptions::default())?;
    let report = dict.load(OPTIM, source, options)?;
    for state in optim.states_mut() {
        if let Some(step) = dict.tensors.get(&name(state.param.name(), STEP)) {
            let step = step.tensor.to_scalar::<f32>()?;
            if !(step >= 0. && step.fract() == 0.) {
                return Err(Error::Parameter {
                    name: state.param.name().into(),
                    message: format!("{} says that it has taken {step} steps", source.path().display()),
                });
            }
            state.step = step as u64;
        }
    }
    Ok(report)
}

/// PyTorch's names of the moments.
const EXP_AVG: &str = "exp_avg";
const EXP_AVG_SQ: &str = "exp_avg_sq";

fn name(fqn: &str, what: &str) -> String {
    format!("state.{fqn}.{what}")
}

/// The states that the options select, and what their parameters are called.
fn selected<'a>(
    optim: &'a AdamW,
    options: &'a StateDictOptions,
) -> impl Iterator<Item = (&'a AdamWState, String)> + 'a {
    optim.states().iter().filter_map(|state| Some((state, options.name(state.param.name())?.to_string())))
}

/// As PyTorch has them. `names` are those of all parameters, with their groups.
fn groups(optim: &AdamW, names: impl IntoIterator<Item = (usize, String)>) -> Value {
    let mut params = vec![vec![]; optim.groups().len()];
    names.into_iter().for_each(|(group, name)| params[group].push(name));
    optim.groups().iter().zip(params).map(|(config, params)| group(config, params)).collect()
}

fn group(config: &AdamWConfig, params: Vec<String>) -> Value {
    json!({
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "params": params,
    })
}

/// The hyper-parameters with those that a state dict has.
fn configs(now: &[AdamWConfig], values: &Map<String, Value>) -> Result<Vec<AdamWConfig>> {
    let Some(groups) = values.get(GROUPS) else { return Ok(now.to_vec()) };
    let fail = |why: String| Error::Argument(format!("the state dict's {GROUPS} {why}: {groups}"));
    let found = groups.as_array().filter(|found| found.len() == now.len());
    let found = found.ok_or_else(|| fail(format!("are not {}, as many as this optimizer has", now.len())))?;
    let configs = now.iter().zip(found).map(|(now, group)| config(now, group));
    configs.collect::<Option<_>>().ok_or_else(|| fail("hold something that is no number".into()))
}

fn config(now: &AdamWConfig, group: &Value) -> Option<AdamWConfig> {
    let number = |value: &Value, or: f64| match value {
        Value::Null => Some(or),
        value => value.as_f64(),
    };
    Some(AdamWConfig {
        lr: number(&group["lr"], now.lr)?,
        betas: (number(&group["betas"][0], now.betas.0)?, number(&group["betas"][1], now.betas.1)?),
        eps: number(&group["eps"], now.eps)?,
        weight_decay: number(&group["weight_decay"], now.weight_decay)?,
    })
}
