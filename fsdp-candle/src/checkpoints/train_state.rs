//! The state of a training run, for saves and resumes.

use std::collections::BTreeSet;

use candle_core::Tensor;
use fsdp_ckpt::{LoadOptions, LoadTensor, ModelPrefix, Strict, TensorShard, TensorSource};
use fsdp_core::{MeshLayout, ProcessGroup};
use glob::Pattern;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::agree::agree;
use super::directory::step_of;
use super::values::{Assign, NamedValue, to_save};
use crate::error::{Error, Result};
use crate::fsdp::{ShardedVarMap, listed};
use crate::optim::{Ema, GradScaler, GradScalerState, ShardedOptimizer, ValuesOf, check_finite};
use crate::state_dict::{
    GROUPS, OPTIM, OptimizerState, SavedTensor, StateDictOptions, get_ema_state_dict, group_values, hyper_of_groups,
    model_state, saved_hyper, set_steps,
};

/// Name of the number of steps.
const STEP: &str = "step";
/// Prefix of a moving average.
const EMA: &str = "ema.";
/// Prefix of a loss scale's state, whose names are those of PyTorch's `GradScaler.state_dict()`.
const SCALER: &str = "scaler.";
/// First words of names that this module gives.
const RESERVED: [&str; 5] = ["model", "optim", "ema", "scaler", STEP];

/// Everything that a training run consists of, to save and to resume with a
/// [`CheckpointManager`](crate::CheckpointManager). PyTorch's `Stateful` and the `AppState` of its tutorials.
///
/// Write a function that returns it, and pass its result to saves and resumes alike. A resume compares all names with
/// the checkpoint's, so nothing is lost by forgetting it.
///
/// | call | names in the checkpoint |
/// |---|---|
/// | [`new`](TrainState::new) | `model.<fqn>` |
/// | [`optimizer`](TrainState::optimizer) | `optim.state.<fqn>.exp_avg`, `optim.param_groups` |
/// | [`ema`](TrainState::ema) | `ema.<fqn>`, `ema.n_averaged` |
/// | [`scaler`](TrainState::scaler) | `scaler.scale`, `scaler._growth_tracker` and others |
/// | [`value`](TrainState::value), [`rank_value`](TrainState::rank_value) | the value's name |
/// | [`part`](TrainState::part) | the names of the part, after `<name>.` |
/// | [`CheckpointManager::save`](crate::CheckpointManager::save) | `step` |
pub struct TrainState<'a> {
    /// The state's own part first.
    parts: Vec<Part<'a>>,
    values: Vec<NamedValue<'a>>,
    may_lack: Vec<String>,
    may_hold: Vec<String>,
    /// First invalid call.
    invalid: Option<String>,
}

/// A model with its optimizers, moving average and loss scale.
struct Part<'a> {
    /// Beginning of its names.
    prefix: String,
    vars: &'a ShardedVarMap,
    optimizers: Vec<&'a mut (dyn ShardedOptimizer + 'a)>,
    ema: Option<&'a Ema>,
    scaler: Option<&'a mut GradScaler>,
}

impl<'a> TrainState<'a> {
    /// Makes the state of a model: all its parameters and buffers.
    pub fn new(vars: &'a ShardedVarMap) -> Self {
        let own = Part { prefix: String::new(), vars, optimizers: vec![], ema: None, scaler: None };
        TrainState { parts: vec![own], values: vec![], may_lack: vec![], may_hold: vec![], invalid: None }
    }

    /// Adds an optimizer of the model: its moments, step counts and hyper-parameters of each group. A resume sets the
    /// learning rate to that of the checkpoint. Several optimizers of one model have different parameters.
    pub fn optimizer(mut self, optim: &'a mut (dyn ShardedOptimizer + 'a)) -> Self {
        self.parts[0].optimizers.push(optim);
        self
    }

    /// Adds a moving average of the model.
    pub fn ema(mut self, ema: &'a mut Ema) -> Self {
        self.parts[0].ema = Some(ema);
        self
    }

    /// Adds a loss scale.
    pub fn scaler(mut self, scaler: &'a mut GradScaler) -> Self {
        self.parts[0].scaler = Some(scaler);
        self
    }

    /// Adds a value of the caller, which is the same on every rank: a position in the data, a schedule, the state of a
    /// generator. It is saved as JSON. The number of steps needs no value.
    pub fn value<T: Serialize + DeserializeOwned>(self, name: &str, value: &'a mut T) -> Self {
        self.named_value(name, false, value)
    }

    /// Adds a value of which each rank has its own, saved as an array by rank. To resume at another world size, read
    /// the array as a `Vec` by [`TrainState::value`].
    pub fn rank_value<T: Serialize + DeserializeOwned>(self, name: &str, value: &'a mut T) -> Self {
        self.named_value(name, true, value)
    }

    fn named_value<T: Serialize + DeserializeOwned>(mut self, name: &str, per_rank: bool, value: &'a mut T) -> Self {
        self.check_name(name);
        self.values.push(NamedValue { name: name.into(), per_rank, value });
        self
    }

    /// Adds another model with its own optimizers, such as a critic. Names in the checkpoint begin with `<name>.`.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let root = tempfile::tempdir()?;
    /// # let (world, vars, _model, _x) = one_layer(nn::linear)?;
    /// # let (_, critic, _critic, _x) = one_layer(nn::linear)?;
    /// use fsdp_candle::{CheckpointManager, SGD, SgdConfig, TrainState};
    ///
    /// let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    /// let mut sgd = SGD::new(critic.trainable(), SgdConfig::default())?;
    /// let state = TrainState::new(&vars)
    ///     .optimizer(&mut optim)
    ///     .part("critic", TrainState::new(&critic).optimizer(&mut sgd));
    /// let path = CheckpointManager::new(&world, root.path()).save(1, state)?;
    /// assert!(fsdp_ckpt::open(&path)?.tensors().contains_key("critic.model.weight"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn part(mut self, name: &str, part: TrainState<'a>) -> Self {
        self.check_name(name);
        let under = |inner: &str| format!("{name}.{inner}");
        let TrainState { parts, values, may_lack, may_hold, invalid } = part;
        self.parts.extend(parts.into_iter().map(|part| Part { prefix: under(&part.prefix), ..part }));
        self.values.extend(values.into_iter().map(|value| NamedValue { name: under(&value.name), ..value }));
        self.may_lack.extend(may_lack.iter().map(|pattern| under(pattern)));
        self.may_hold.extend(may_hold.iter().map(|pattern| under(pattern)));
        self.invalid = self.invalid.or(invalid);
        self
    }

    /// Lets a resume keep the present values of names that the checkpoint lacks. `pattern` is a name in the checkpoint,
    /// see [`TrainState`]; `*` matches any characters, `?` one.
    pub fn allow_missing(mut self, pattern: &str) -> Self {
        self.may_lack.push(pattern.into());
        self
    }

    /// Lets a resume leave out names that only the checkpoint has. `pattern` is as in [`TrainState::allow_missing`].
    pub fn allow_unexpected(mut self, pattern: &str) -> Self {
        self.may_hold.push(pattern.into());
        self
    }

    /// Notes a name of the caller that is empty or reserved.
    fn check_name(&mut self, name: &str) {
        let first = name.split('.').next().unwrap_or_default();
        let why = match name {
            STEP => "`step` is saved by `CheckpointManager::save`: take it from the result of `resume`".to_string(),
            _ if first.is_empty() => format!("the name {name:?} is empty: name each value and part"),
            _ if RESERVED.contains(&first) => {
                format!("the name `{name}` of a value or part begins with `{first}`, which is reserved: choose another")
            }
            _ => return,
        };
        self.invalid.get_or_insert(why);
    }

    /// Returns this rank's tensors. Fails if a call was invalid or two tensors have one name.
    pub(super) fn tensors(&self) -> Result<Vec<TensorShard>> {
        if let Some(why) = &self.invalid {
            return Err(Error::Argument(why.clone()));
        }
        let tensors = self.saved(OptimizerState::to_save)?.0;
        let mut names = BTreeSet::new();
        let values = self.values.iter().map(|value| &value.name);
        if let Some(twice) = tensors.iter().map(|tensor| &tensor.fqn).chain(values).find(|name| !names.insert(*name)) {
            return Err(Error::Argument(format!(
                "two parts of the training state are called `{twice}`: name each once, and let one optimizer update a \
                 parameter"
            )));
        }
        Ok(tensors.into_iter().map(SavedTensor::shard).collect())
    }

    /// Returns all tensors, and the step counts of each optimizer.
    fn saved(
        &self,
        state_of: fn(&dyn ShardedOptimizer) -> Result<OptimizerState>,
    ) -> Result<(Vec<SavedTensor>, Vec<Vec<Tensor>>)> {
        let (mut all, mut steps) = (vec![], vec![]);
        for Part { prefix, vars, optimizers, ema, .. } in &self.parts {
            let mut own = model_state(vars);
            if let Some(ema) = ema {
                own.extend(get_ema_state_dict(vars, ema, &StateDictOptions::default())?.saved(EMA));
            }
            for optim in optimizers {
                let state = state_of(&**optim)?;
                own.extend(state.tensors);
                steps.push(state.steps);
            }
            all.extend(own.into_iter().map(|saved| SavedTensor { fqn: format!("{prefix}{}", saved.fqn), ..saved }));
        }
        Ok((all, steps))
    }

    /// Returns the values to save on rank 0, which has those of all ranks. Collective.
    pub(super) fn values_to_save(&self, step: usize, group: &ProcessGroup) -> Result<Map<String, Value>> {
        let mut values = to_save(&self.values, group)?;
        values.insert(STEP.into(), step.into());
        for Part { prefix, optimizers, scaler, .. } in &self.parts {
            let groups = optimizers.iter().flat_map(|optim| match group_values(&**optim) {
                Value::Array(groups) => groups,
                _ => vec![],
            });
            if !optimizers.is_empty() {
                values.insert(format!("{prefix}{OPTIM}{GROUPS}"), groups.collect());
            }
            if let Some(scaler) = scaler {
                let state = scaler_values(&scaler.state());
                values.extend(state.map(|(name, value)| (format!("{prefix}{SCALER}{name}"), value)));
            }
        }
        Ok(values)
    }

    /// Returns a mesh of all ranks: that of the first model that is on all, or a line.
    pub(super) fn mesh(&self, group: &ProcessGroup) -> Result<MeshLayout> {
        let all = self.parts.iter().map(|part| part.vars.mesh().layout()).find(|mesh| mesh.size() == group.size());
        all.map_or_else(|| Ok(MeshLayout::new(&[("ranks", group.size())])?), |mesh| Ok(mesh.clone()))
    }

    /// Returns whether [`TrainState::check_finite`] checks all tensors.
    pub(super) fn is_all_checked(&self) -> bool {
        self.parts.iter().all(|part| part.ema.is_none())
    }

    /// Fails if a parameter, buffer or moment is not finite. Collective.
    pub(super) fn check_finite(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| {
            let moments = part.optimizers.iter().map(|optim| ValuesOf::Moments(&**optim));
            check_finite(part.vars, &std::iter::once(ValuesOf::Parameters).chain(moments).collect::<Vec<_>>())
        })
    }

    /// Loads a checkpoint and returns its step. If names differ on any rank, changes nothing on all. Collective.
    pub(super) fn load(&mut self, source: &dyn TensorSource, group: &ProcessGroup) -> Result<usize> {
        let before: Vec<_> = self.optimizers().map(|optim| groups_of(&**optim)).collect();
        let loaded = self.load_with_hyper(source, group);
        if loaded.is_err() {
            self.optimizers().zip(&before).try_for_each(|(optim, before)| optim.set_hyper(before))?;
        }
        loaded
    }

    /// Loads a checkpoint. After an error, hyper-parameters may have changed.
    fn load_with_hyper(&mut self, source: &dyn TensorSource, group: &ProcessGroup) -> Result<usize> {
        let fits = self.set_hyper(source).and_then(|()| {
            // Hyper-parameters first: they decide which moments exist.
            let (tensors, steps) = self.saved(OptimizerState::to_load)?;
            self.check_names(source, &tensors)?;
            Ok((tensors, steps, self.scaler_states(source)?, step_in(source)?))
        });
        let (tensors, steps, scalers, step) = agree(group, "resume", fits)?;
        let parsed = self.values.iter_mut().filter_map(|value| {
            let json = source.values().get(&value.name)?;
            Some(value.parse(json, group).map_err(|why| Error::Argument(format!("{}: {why}", source.path().display()))))
        });
        let assign: Vec<Assign<'_>> = agree(group, "resume", parsed.collect())?;
        let own = fill(&self.parts, tensors, source);
        agree(group, "load the tensors", own)?;
        let optimizers = self.parts.iter_mut().flat_map(|part| part.optimizers.iter_mut());
        let set = optimizers.zip(steps).try_for_each(|(optim, steps)| set_steps(&mut **optim, steps, source.path()));
        let set = set.and_then(|()| {
            let scalers_of_parts = self.parts.iter_mut().filter_map(|part| part.scaler.as_mut());
            scalers_of_parts.zip(scalers).try_for_each(|(scaler, state)| scaler.load_state(state))
        });
        agree(group, "set the step counts", set)?;
        assign.into_iter().for_each(|assign| assign());
        Ok(step)
    }

    fn optimizers<'s>(&'s mut self) -> impl Iterator<Item = &'s mut &'a mut (dyn ShardedOptimizer + 'a)> {
        self.parts.iter_mut().flat_map(|part| part.optimizers.iter_mut())
    }

    /// Sets the hyper-parameters that the checkpoint has. [`TrainState::check_names`] names those that it lacks.
    fn set_hyper(&mut self, source: &dyn TensorSource) -> Result<()> {
        for Part { prefix, optimizers, .. } in &mut self.parts {
            let saved = saved_hyper(source, prefix);
            for optim in optimizers {
                let hyper = hyper_of_groups(&optim.param_groups(), &saved, source.path())?;
                optim
                    .set_hyper(&hyper)
                    .map_err(|error| Error::Argument(format!("{}: {error}", source.path().display())))?;
            }
        }
        Ok(())
    }

    /// Fails if names of tensors or values differ from the checkpoint's.
    fn check_names(&self, source: &dyn TensorSource, tensors: &[SavedTensor]) -> Result<()> {
        let (may_lack, may_hold) = (patterns(&self.may_lack)?, patterns(&self.may_hold)?);
        let prefixes = ModelPrefix::of(source, tensors.iter().map(|tensor| tensor.fqn.as_str()));
        let held = source.tensors().keys().chain(source.unreadable().keys());
        let held: BTreeSet<String> = held.map(|name| prefixes.state_name(name).into_owned()).collect();
        let mut missing: Vec<String> = vec![];
        let required = tensors.iter().filter(|tensor| tensor.required && !held.contains(&tensor.fqn));
        missing.extend(required.map(|tensor| tensor.fqn.clone()));
        let wanted: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.fqn.as_str()).collect();
        let mut unexpected: Vec<String> = held.iter().filter(|name| !wanted.contains(name.as_str())).cloned().collect();

        let values = source.values();
        let mut known: BTreeSet<String> = self.values.iter().map(|value| value.name.clone()).collect();
        missing.extend(known.iter().filter(|name| !values.contains_key(*name)).cloned());
        known.insert(STEP.into());
        for Part { prefix, optimizers, scaler, .. } in &self.parts {
            let groups = format!("{prefix}{OPTIM}{GROUPS}");
            let saved = saved_hyper(source, prefix);
            let params = optimizers.iter().flat_map(|optim| optim.param_groups()).flat_map(|group| group.params);
            let without = params.filter(|param| !saved.contains_key(param.name()));
            match saved.is_empty() {
                true => missing.extend((!optimizers.is_empty()).then(|| groups.clone())),
                false => missing.extend(without.map(|param| format!("{groups}.{}", param.name()))),
            }
            if !optimizers.is_empty() {
                let of_groups = |key: &&String| key.strip_prefix(&groups).is_some_and(is_end_of_word);
                known.extend(values.keys().filter(of_groups).cloned());
            }
            if let Some(scaler) = scaler {
                let scale = format!("{prefix}{SCALER}scale");
                missing.extend((!values.contains_key(&scale)).then_some(scale));
                known.extend(scaler_values(&scaler.state()).map(|(name, _)| format!("{prefix}{SCALER}{name}")));
            }
        }
        unexpected.extend(values.keys().filter(|name| !known.contains(*name)).cloned());

        missing.retain(|name| !matches_any(&may_lack, name));
        unexpected.retain(|name| !matches_any(&may_hold, name));
        let mut faults = vec![];
        if let [first, ..] = &missing[..] {
            faults.push(format!(
                "it lacks {}: build what was saved, or call `allow_missing({first:?})` to keep the present value",
                listed(&missing)
            ));
        }
        if let [first, ..] = &unexpected[..] {
            faults.push(format!(
                "it holds {}, which the training state does not name: {}, or call `allow_unexpected({first:?})` to leave \
                 it out",
                listed(&unexpected),
                way_to_name(first, values.contains_key(first))
            ));
        }
        match faults.is_empty() {
            true => Ok(()),
            false => Err(Error::Argument(format!(
                "{} does not fit the training state: {}",
                source.path().display(),
                faults.join("; ")
            ))),
        }
    }

    /// Returns the state of each loss scale.
    fn scaler_states(&self, source: &dyn TensorSource) -> Result<Vec<GradScalerState>> {
        let scalers = self.parts.iter().filter_map(|part| Some((&part.prefix, part.scaler.as_ref()?)));
        let state = |(prefix, scaler): (&String, &&'a mut GradScaler)| {
            let value = |name: &str| source.values().get(&format!("{prefix}{SCALER}{name}"));
            let read = |name: &str, now: f64| match value(name) {
                None => Ok(now),
                Some(value) => value.as_f64().ok_or_else(|| {
                    let path = source.path().display();
                    Error::Argument(format!("{path}: `{prefix}{SCALER}{name}` is {value}, expected a number"))
                }),
            };
            let now = scaler.state();
            Ok(GradScalerState {
                scale: read("scale", now.scale)?,
                growth_factor: read("growth_factor", now.growth_factor)?,
                backoff_factor: read("backoff_factor", now.backoff_factor)?,
                growth_interval: read("growth_interval", now.growth_interval.into())? as u32,
                growth_tracker: read("_growth_tracker", now.growth_tracker.into())? as u32,
            })
        };
        scalers.map(state).collect()
    }
}

/// Fills the tensors that the checkpoint has.
fn fill(parts: &[Part<'_>], tensors: Vec<SavedTensor>, source: &dyn TensorSource) -> Result<()> {
    // Gathered parameters are stale.
    parts.iter().try_for_each(|part| part.vars.reshard())?;
    let targets: Vec<LoadTensor> = tensors.into_iter().map(SavedTensor::target).collect();
    // The names were compared already.
    fsdp_ckpt::load(source, &targets, &LoadOptions { strict: Strict::Neither, ..LoadOptions::default() })?;
    Ok(())
}

fn groups_of(optim: &dyn ShardedOptimizer) -> Vec<Map<String, Value>> {
    optim.param_groups().into_iter().map(|group| group.hyper).collect()
}

/// Returns the state of a loss scale by PyTorch's names.
fn scaler_values(state: &GradScalerState) -> [(&'static str, Value); 5] {
    [
        ("scale", state.scale.into()),
        ("growth_factor", state.growth_factor.into()),
        ("backoff_factor", state.backoff_factor.into()),
        ("growth_interval", state.growth_interval.into()),
        ("_growth_tracker", state.growth_tracker.into()),
    ]
}

/// Returns whether the rest of a name begins with a dot or is empty.
fn is_end_of_word(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('.')
}

/// Returns the number of steps of a checkpoint: its value, or the number at the end of its name.
fn step_in(source: &dyn TensorSource) -> Result<usize> {
    let value = source.values().get(STEP);
    let step = match value {
        Some(value) => value.as_u64().map(|step| step as usize),
        None => step_of(source.path()),
    };
    step.ok_or_else(|| {
        let found = value.map_or("no value `step`".into(), |value| format!("`step` as {value}"));
        Error::Argument(format!(
            "{} holds {found}: expected a number of steps, or a number at the end of the directory's name",
            source.path().display()
        ))
    })
}

fn patterns(texts: &[String]) -> Result<Vec<Pattern>> {
    let read = |text: &String| {
        Pattern::new(text).map_err(|error| Error::Argument(format!("`{text}` is not a pattern of names: {error}")))
    };
    texts.iter().map(read).collect()
}

fn matches_any(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

/// Says how to add a name of a checkpoint to a training state.
fn way_to_name(name: &str, is_value: bool) -> String {
    let first = name.split('.').next().unwrap_or_default();
    match first {
        "model" => "build the model that was saved".into(),
        "optim" => "add its optimizer by `optimizer`".into(),
        "ema" => "add the moving average by `ema`".into(),
        "scaler" => "add the loss scale by `scaler`".into(),
        _ if is_value => format!("add it by `value({name:?}, ..)`"),
        _ => format!("add the model by `part({first:?}, ..)`"),
    }
}
