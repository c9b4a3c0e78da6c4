//! The hyper-parameters of an optimizer's groups in state dicts and checkpoints.

use std::collections::BTreeMap;

use fsdp_ckpt::TensorSource;
use serde_json::{Map, Value};

use super::options::StateDictOptions;
use crate::error::{Error, Result};
use crate::optim::{ParamGroup, ShardedOptimizer};

/// The key of the hyper-parameters.
pub(super) const GROUPS: &str = "param_groups";
/// The key of the names of a group's parameters.
const PARAMS: &str = "params";
/// What a checkpoint calls the hyper-parameters; PyTorch's, each parameter's by itself: this, its name and theirs.
const SAVED: &str = "optim.param_groups";

/// As PyTorch has them, with the names of the parameters that the options select.
pub(super) fn groups(optim: &dyn ShardedOptimizer, options: &StateDictOptions) -> Value {
    let group = |group: ParamGroup| {
        let names: Vec<&str> = group.params.iter().filter_map(|param| options.name(param.name())).collect();
        let mut values = group.hyper;
        values.insert(PARAMS.into(), names.into());
        Value::Object(values)
    };
    optim.param_groups().into_iter().map(group).collect()
}

/// A state dict's hyper-parameters for each of these groups: of the group that the first parameter is in there, or of
/// the one at its place, where the state dict names no parameters.
pub(super) fn hyper_of(
    own: &[ParamGroup],
    value: &Value,
    options: &StateDictOptions,
) -> Result<Vec<Map<String, Value>>> {
    let found = value.as_array().filter(|found| found.len() == own.len());
    let found = found.and_then(|found| found.iter().map(Value::as_object).collect::<Option<Vec<_>>>());
    let Some(found) = found else {
        return Err(Error::Argument(format!(
            "the state dict's {GROUPS} are not {}, as many as this optimizer has: {value}",
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

/// Reads the hyper-parameters of each group from a checkpoint: ours, or PyTorch's, which has those of each parameter by
/// itself.
///
/// ```no_run
/// # use fsdp_candle::{load_optimizer, load_param_groups, AdamW};
/// # fn resume(optim: &mut AdamW) -> Result<(), Box<dyn std::error::Error>> {
/// let source = fsdp_ckpt::open("saved/step-100".as_ref())?;
/// load_optimizer(optim, &*source, &Default::default())?;
/// load_param_groups(optim, &*source)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the checkpoint has none of a parameter of this optimizer, or has others for another parameter of the same
/// group; when the optimizer does not compute what they ask for. Nothing is changed then.
pub fn load_param_groups(optim: &mut dyn ShardedOptimizer, source: &dyn TensorSource) -> Result<()> {
    let saved = of_parameters(source.values());
    let mut all = vec![];
    for group in optim.param_groups() {
        let mut hyper = None;
        for param in &group.params {
            let fail = |message: String| Error::Parameter { name: param.name().into(), message };
            let path = source.path().display();
            let Some(own) = saved.get(param.name()) else {
                return Err(fail(format!(
                    "{path} has no hyper-parameters of it: make the optimizer with those it had"
                )));
            };
            match &hyper {
                None => hyper = Some((param.name(), own)),
                Some((_, first)) if *first == own => {}
                Some((other, _)) => {
                    return Err(fail(format!(
                        "{path} has other hyper-parameters of it than of `{other}`, which is in the same group here: \
                         make groups as they were"
                    )));
                }
            }
        }
        all.push(hyper.map(|(_, hyper)| hyper.clone()).unwrap_or_default());
    }
    optim.set_hyper(&all)
}

/// The hyper-parameters of each parameter by its name.
fn of_parameters(values: &Map<String, Value>) -> BTreeMap<&str, Map<String, Value>> {
    let mut all: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (key, value) in values {
        let Some(rest) = key.strip_prefix(SAVED) else { continue };
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
