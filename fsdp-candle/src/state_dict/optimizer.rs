//! The state of an optimizer: moments, step counts and hyper-parameters.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fsdp_ckpt::{LoadOptions, LoadReport, LoadTensor, TensorShard, TensorSource};
use fsdp_core::layout::Region;
use serde_json::{Map, Value};

use super::model::check_keys;
use super::transfer::{Expected, entries, entry, on_rank_0_only, value_entry};
use super::{IncompatibleKeys, SavedTensor, StateDict, StateDictOptions, StateTensor};
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;
use crate::optim::{ParamGroup, ParamState, ShardedOptimizer};
use crate::storage::TensorMemory;

/// Prefix of an optimizer's tensors in a checkpoint.
pub(crate) const OPTIM: &str = "optim.";
/// PyTorch's name of a parameter's step count.
const STEP: &str = "step";

/// Returns the state of each parameter by PyTorch's names (`state.<fqn>.exp_avg`, `.exp_avg_sq` and `.step` of AdamW),
/// and the hyper-parameters of each group as `param_groups`. 8-bit state is converted to f32. Collective for a full
/// state dict. Fails if the optimizer has hidden state ([`crate::CandleOptimizer`]).
pub fn get_optimizer_state_dict(
    vars: &ShardedVarMap,
    optim: &dyn ShardedOptimizer,
    options: &StateDictOptions,
) -> Result<StateDict> {
    check_visible(optim)?;
    let mut dict = StateDict::default();
    for (state, fqn) in selected(optim, options) {
        for (what, moment) in state.moments() {
            dict.tensors.insert(name(&fqn, what), entry(&state.param, &moment.tensor()?, options)?);
        }
        dict.tensors.insert(name(&fqn, STEP), StateTensor::whole(step_of(state)?));
    }
    dict.values.insert(GROUPS.into(), groups(optim, options));
    Ok(on_rank_0_only(dict, vars.mesh(), options))
}

/// Copies a state dict into the optimizer, tensors as [`crate::set_model_state_dict`] does, and hyper-parameters. A
/// group takes the hyper-parameters of the saved group that contains its first parameter.
///
/// # Errors
/// Returns an error, and changes nothing, when:
///
/// - `strict` is set and names differ;
/// - a tensor has another shape, or a shard is not this rank's;
/// - the number of `param_groups` differs, or they ask for something that the optimizer does not compute;
/// - the optimizer has hidden state.
pub fn set_optimizer_state_dict(
    vars: &ShardedVarMap,
    optim: &mut dyn ShardedOptimizer,
    dict: &StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys> {
    check_visible(optim)?;
    let before: Vec<_> = optim.param_groups().into_iter().map(|group| group.hyper).collect();
    // Hyper-parameters first: they decide which moments exist.
    let value = value_entry(dict, GROUPS, vars.mesh(), options)?;
    if let Some(hyper) = value.map(|value| hyper_of(&optim.param_groups(), &value, options)).transpose()? {
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
    let mut expected = Vec::new();
    for (state, fqn) in selected(optim, options) {
        let (shape, required) = (state.param.shape().dims(), true);
        for (what, moment) in state.moments() {
            let (name, region, dtype) = (name(&fqn, what), state.param.region().clone(), moment.dtype());
            expected.push(Expected { name, shape, region, dtype, required });
        }
        let (name, required) = (name(&fqn, STEP), !state.may_lack_step);
        expected.push(Expected { name, shape: &[], region: Region::whole(&[]), dtype: DType::F32, required });
    }
    let found = entries(dict, &expected, vars.mesh(), options)?;
    let keys = check_keys(dict, &expected, &found, vars, options)?;
    let mut found = found.into_iter();
    let mut next = || found.next().flatten();
    let mut steps = vec![];
    for (state, _) in selected(optim, options) {
        for (_, moment) in state.moments() {
            if let Some(entry) = next() {
                moment.set(&entry)?;
            }
        }
        steps.push(next().map(|step| step.to_scalar::<f32>()).transpose()?);
    }
    let states = optim.states_mut().into_iter().filter(|state| options.name(state.param.name()).is_some());
    for (state, step) in states.zip(steps) {
        state.step = step.map_or_else(|| steps_taken(state), |step| step as u64);
    }
    Ok(keys)
}

/// Returns the state of every parameter as `optim.state.<fqn>.exp_avg` and so on, in the optimizer's memory: the input
/// of [`fsdp_ckpt::save`]. 8-bit state is saved in f32, one tensor at a time. Fails if the optimizer has hidden state
/// ([`crate::CandleOptimizer`]).
pub fn optimizer_tensors(optim: &dyn ShardedOptimizer) -> Result<Vec<TensorShard>> {
    Ok(OptimizerState::to_save(optim)?.tensors.into_iter().map(SavedTensor::shard).collect())
}

/// The state of an optimizer in a checkpoint, as `optim.state.<fqn>.exp_avg` and so on.
pub(crate) struct OptimizerState {
    /// Moments in the optimizer's memory, and step counts in `steps`.
    pub(crate) tensors: Vec<SavedTensor>,
    /// Step count of each parameter: a scalar of F32, for [`set_steps`].
    pub(crate) steps: Vec<Tensor>,
}

impl OptimizerState {
    /// Makes the state to save. Fails if the optimizer has hidden state.
    pub(crate) fn to_save(optim: &dyn ShardedOptimizer) -> Result<Self> {
        Self::with_steps(optim, |state| state.step)
    }

    /// Makes the state to load. Fails if the optimizer has hidden state.
    pub(crate) fn to_load(optim: &dyn ShardedOptimizer) -> Result<Self> {
        Self::with_steps(optim, steps_taken)
    }

    fn with_steps(optim: &dyn ShardedOptimizer, step: fn(&ParamState) -> u64) -> Result<Self> {
        check_visible(optim)?;
        let (mut tensors, mut steps) = (vec![], vec![]);
        for state in optim.states() {
            let (fqn, shape) = (state.param.name(), state.param.shape().dims().to_vec());
            for (what, moment) in state.moments() {
                let (fqn, region) = (saved_name(fqn, what), state.param.region().clone());
                let (shape, memory) = (shape.clone(), moment.memory());
                tensors.push(SavedTensor { fqn, shape, region, memory, required: true });
            }
            let step = Tensor::new(step(state) as f32, &Device::Cpu)?;
            tensors.push(SavedTensor {
                fqn: saved_name(fqn, STEP),
                shape: vec![],
                region: Region::whole(&[]),
                memory: Arc::new(TensorMemory(step.clone())),
                required: !state.may_lack_step,
            });
            steps.push(step);
        }
        Ok(OptimizerState { tensors, steps })
    }
}

/// Sets the step counts that were loaded from `path`. Fails if one is not a whole number.
pub(crate) fn set_steps(optim: &mut dyn ShardedOptimizer, steps: Vec<Tensor>, path: &Path) -> Result<()> {
    for (state, step) in optim.states_mut().into_iter().zip(steps) {
        let step = step.to_scalar::<f32>()?;
        if !(step >= 0. && step.fract() == 0.) {
            let path = path.display();
            return Err(state.param.error(format!("{path} has a step count of {step}, expected a whole number")));
        }
        state.step = step as u64;
    }
    Ok(())
}

/// Returns the hyper-parameters as a checkpoint's `optim.param_groups`, for [`fsdp_ckpt::SaveState::values`].
pub fn optimizer_values(optim: &dyn ShardedOptimizer) -> Map<String, Value> {
    Map::from_iter([(format!("{OPTIM}{GROUPS}"), group_values(optim))])
}

/// Returns the hyper-parameters of each group, with the names of its parameters.
pub(crate) fn group_values(optim: &dyn ShardedOptimizer) -> Value {
    groups(optim, &StateDictOptions::default())
}

/// Loads the state of an optimizer from a checkpoint of any format, saved on any mesh and with any groups. Does not
/// change hyper-parameters: [`crate::load_param_groups`] loads them. Fails if a step count is not a whole number or the
/// optimizer has hidden state.
pub fn load_optimizer(
    optim: &mut dyn ShardedOptimizer,
    source: &dyn TensorSource,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let OptimizerState { tensors, steps } = OptimizerState::to_load(optim)?;
    let is_there = |saved: &SavedTensor| saved.required || source.tensors().contains_key(&saved.fqn);
    let targets: Vec<LoadTensor> = tensors.into_iter().filter(is_there).map(SavedTensor::target).collect();
    let report = fsdp_ckpt::load(source, &targets, options)?;
    set_steps(optim, steps, source.path())?;
    Ok(report)
}

fn check_visible(optim: &dyn ShardedOptimizer) -> Result<()> {
    optim.hidden_state().map_or(Ok(()), |why| Err(Error::Argument(why)))
}

/// PyTorch's SGD and Muon do not save step counts; a saved state has taken at least one step.
fn steps_taken(state: &ParamState) -> u64 {
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

/// Returns the states that the options select, and the names of their parameters.
fn selected<'a>(
    optim: &'a dyn ShardedOptimizer,
    options: &'a StateDictOptions,
) -> impl Iterator<Item = (&'a ParamState, String)> + 'a {
    optim.states().into_iter().filter_map(|state| Some((state, options.name(state.param.name())?.to_string())))
}

/// Key of the hyper-parameters.
pub(crate) const GROUPS: &str = "param_groups";
/// Key of the names of a group's parameters.
const PARAMS: &str = "params";

/// Returns the groups in PyTorch's format, with the names of the parameters that the options select.
pub(super) fn groups(optim: &dyn ShardedOptimizer, options: &StateDictOptions) -> Value {
    let group = |group: ParamGroup| {
        let names: Vec<&str> = group.params.iter().filter_map(|param| options.name(param.name())).collect();
        let mut values = group.hyper;
        values.insert(PARAMS.into(), names.into());
        Value::Object(values)
    };
    optim.param_groups().into_iter().map(group).collect()
}

/// Returns a state dict's hyper-parameters for each of these groups: those of the saved group that contains the group's
/// first parameter, or of the saved group at the same index if the state dict does not name it.
pub(super) fn hyper_of(
    own: &[ParamGroup],
    value: &Value,
    options: &StateDictOptions,
) -> Result<Vec<Map<String, Value>>> {
    let found = value.as_array().filter(|found| found.len() == own.len());
    let found = found.and_then(|found| found.iter().map(Value::as_object).collect::<Option<Vec<_>>>());
    let Some(found) = found else {
        return Err(Error::Argument(format!(
            "the state dict's {GROUPS} are not the {} groups of this optimizer: {value}",
            own.len()
        )));
    };
    let hyper = |(at, group): (usize, &ParamGroup)| {
        let first = group.params.first().and_then(|param| options.name(param.name()));
        let has = |group: &&&Map<String, Value>| {
            let names = group.get(PARAMS).and_then(Value::as_array);
            names.is_some_and(|names| names.iter().any(|name| name.as_str() == first))
        };
        (*first.and_then(|_| found.iter().find(has)).unwrap_or(&found[at])).clone()
    };
    Ok(own.iter().enumerate().map(hyper).collect())
}

/// Loads the hyper-parameters of each group from a checkpoint of this crate, or of PyTorch, which saves them for each
/// parameter.
///
/// ```no_run
/// # use fsdp_candle::{load_optimizer, load_param_groups, AdamW};
/// # fn resume(optim: &mut AdamW) -> Result<(), Box<dyn std::error::Error>> {
/// let source = fsdp_ckpt::open("saved/step-100")?;
/// load_optimizer(optim, &*source, &Default::default())?;
/// load_param_groups(optim, &*source)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns an error, and changes nothing, when the checkpoint lacks a parameter of this optimizer, parameters of one
/// group have different hyper-parameters, or the optimizer does not compute what they ask for.
pub fn load_param_groups(optim: &mut dyn ShardedOptimizer, source: &dyn TensorSource) -> Result<()> {
    let saved = saved_hyper(source, "");
    let groups = optim.param_groups();
    if let Some(param) = groups.iter().flat_map(|group| &group.params).find(|param| !saved.contains_key(param.name())) {
        let path = source.path().display();
        return Err(param.error(format!("{path} has no hyper-parameters of it: set them when you make the optimizer")));
    }
    optim.set_hyper(&hyper_of_groups(&groups, &saved, source.path())?)
}

/// Returns the saved hyper-parameters of each group. Leaves out parameters that have none.
pub(crate) fn hyper_of_groups(
    groups: &[ParamGroup],
    saved: &BTreeMap<&str, Map<String, Value>>,
    path: &Path,
) -> Result<Vec<Map<String, Value>>> {
    let mut all = vec![];
    for group in groups {
        let mut hyper = None;
        for param in &group.params {
            let path = path.display();
            let Some(own) = saved.get(param.name()) else { continue };
            match &hyper {
                None => hyper = Some((param.name(), own)),
                Some((_, first)) if *first == own => {}
                Some((other, _)) => {
                    return Err(param.error(format!(
                        "{path} has other hyper-parameters for it than for `{other}` of the same group: use the saved \
                         groups"
                    )));
                }
            }
        }
        all.push(hyper.map(|(_, hyper)| hyper.clone()).unwrap_or_default());
    }
    Ok(all)
}

/// Returns a checkpoint's hyper-parameters of each parameter by its name. Names in the checkpoint begin with `prefix`.
/// PyTorch's checkpoints append each parameter's name and the hyper-parameter's.
pub(crate) fn saved_hyper<'a>(source: &'a dyn TensorSource, prefix: &str) -> BTreeMap<&'a str, Map<String, Value>> {
    let saved = format!("{prefix}{OPTIM}{GROUPS}");
    let mut all: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (key, value) in source.values() {
        let Some(rest) = key.strip_prefix(&saved) else { continue };
        if let Some((fqn, name)) = rest.strip_prefix('.').and_then(|rest| rest.rsplit_once('.')) {
            all.entry(fqn).or_default().insert(name.into(), value.clone());
        }
        for group in value.as_array().filter(|_| rest.is_empty()).into_iter().flatten() {
            let Some(mut hyper) = group.as_object().cloned() else { continue };
            let names = hyper.remove(PARAMS);
            let names = group[PARAMS].as_array().filter(|_| names.is_some());
            all.extend(names.into_iter().flatten().filter_map(Value::as_str).map(|name| (name, hyper.clone())));
        }
    }
    all
}
