//! Optimizers whose update of an element depends on that element's gradient and state only, so that each rank updates
//! its shards without communication.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use fsdp_core::heartbeat;
use serde_json::{Map, Value};

use super::candle_loop::params_of;
use super::disk::{DiskState, OnDisk};
use super::hyper_parameters::{HyperParameters, set_hyper, validate};
use super::moment_kind::MomentKind;
use super::reach::{Reach, check_not_empty};
use super::shard_update::ShardUpdate;
use super::sharded_optimizer::{ParamGroup, ShardedOptimizer, check_factor};
use super::state::{Moment, ParamState};
use crate::disk::StateOnDisk;
use crate::error::Result;
use crate::fsdp::FsdpParam;
use crate::storage::{share_memory, swap, take, with_slice, with_slice_mut};
use crate::warning::warn;

/// Groups of parameters with their hyper-parameters.
type Groups<C> = Vec<(Vec<Arc<FsdpParam>>, C)>;

/// A parameter with the index of its group.
type GroupedParam = (usize, Arc<FsdpParam>);

/// The update rule and hyper-parameters of an elementwise optimizer, such as [`crate::AdamWConfig`]. Only this crate
/// implements it; implement [`ShardedOptimizer`] for other optimizers.
pub trait ElementwiseRule: HyperParameters {
    /// Whether PyTorch's state dicts of this optimizer lack the step count.
    const MAY_LACK_STEP: bool = false;

    /// Returns the names of the moments.
    fn moments(&self) -> &'static [&'static str];

    /// Returns how a moment is stored.
    fn kind(&self, _name: &str, param: &FsdpParam) -> Result<MomentKind> {
        Ok(MomentKind::Full(param.var().dtype()))
    }

    /// Updates a shard in the parameter's step number `step`, from 1, by its gradient times `factor`.
    fn update(&self, step: u64, factor: f64, shard: ShardUpdate<'_>) -> candle_core::Result<()>;
}

/// An elementwise optimizer over shards, such as [`crate::AdamW`].
///
/// It also implements [`candle_nn::Optimizer`] for [`crate::ShardedVarMap::trainable_vars`].
#[derive(Debug)]
pub struct ElementwiseOptimizer<C> {
    groups: Vec<C>,
    states: Vec<ParamState>,
    /// The file of the moments, if they are on disk.
    disk: Option<DiskState>,
    reach: Reach,
}

impl<C: ElementwiseRule> ElementwiseOptimizer<C> {
    /// Makes an optimizer of these parameters ([`crate::ShardedVarMap::trainable`]), with a state of zeros. Make it
    /// after the model. Fails if there are no parameters, a hyper-parameter is out of range or there is not enough
    /// memory.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: impl Into<C>) -> Result<Self> {
        Self::with_groups(vec![(params, config.into())])
    }

    /// Makes an optimizer of several groups, each with its own hyper-parameters. [`crate::group_by_name`] makes groups
    /// by parameter names. Fails if all groups are empty, a parameter is in two groups, a hyper-parameter is out of
    /// range, or there is not enough memory.
    pub fn with_groups(groups: Vec<(Vec<Arc<FsdpParam>>, C)>) -> Result<Self> {
        let (groups, params) = checked(groups)?;
        let state = |(group, param): GroupedParam| {
            let moments = moments(&groups[group], &param)?;
            Ok(ParamState::of(param, group, moments, C::MAY_LACK_STEP))
        };
        let states = params.into_iter().map(state).collect::<Result<Vec<_>>>()?;
        Ok(ElementwiseOptimizer { groups, reach: Reach::of(&states), states, disk: None })
    }

    /// Makes an optimizer of several groups with its moments on disk. Parameters and gradients stay in memory. A step
    /// gives the same bits as with moments in memory. State dicts and checkpoints are the same as well, so either
    /// resumes from the other's. Moments are copied a block at a time into a checkpoint, and a tensor at a time out of
    /// one.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// # let dir = std::env::temp_dir();
    /// use fsdp_candle::{AdamW, AdamWConfig, StateOnDisk};
    ///
    /// let groups = vec![(vars.trainable(), AdamWConfig::default())];
    /// let mut optim = AdamW::on_disk(groups, &StateOnDisk::new(dir))?;
    /// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
    /// let weight = &optim.states()[0];
    /// assert_eq!((weight.bytes(), weight.bytes_on_disk()), (0, 2 * 4 * 8));
    /// assert_eq!(weight.tensor("exp_avg")?.dims(), weight.param.var().dims()); // a copy
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`crate::Error::StateOnDisk`] if the directory's disk lacks space or fails, and
    /// [`crate::Error::Parameter`] if a shard is not in host memory. Fails as [`ElementwiseOptimizer::with_groups`]
    /// does.
    pub fn on_disk(groups: Vec<(Vec<Arc<FsdpParam>>, C)>, disk: &StateOnDisk) -> Result<Self> {
        Self::in_file(groups, |params| DiskState::create(params, disk))
    }

    /// Makes an optimizer whose moments are in the file that `create` makes for parameters and the kinds of their
    /// moments.
    pub(super) fn in_file(
        groups: Groups<C>,
        create: impl FnOnce(&[(Arc<FsdpParam>, Vec<MomentKind>)]) -> Result<(DiskState, Vec<Vec<OnDisk>>)>,
    ) -> Result<Self> {
        let (groups, params) = checked(groups)?;
        let kinds = |(group, param): &GroupedParam| {
            let config = &groups[*group];
            let kinds = config.moments().iter().map(|name| config.kind(name, param)).collect::<Result<_>>()?;
            Ok((param.clone(), kinds))
        };
        let (disk, moments) = create(&params.iter().map(kinds).collect::<Result<Vec<_>>>()?)?;
        let state = |((group, param), moments): (GroupedParam, Vec<OnDisk>)| {
            let moments = groups[group].moments().iter().copied().zip(moments.into_iter().map(Moment::OnDisk));
            ParamState::of(param, group, moments.collect(), C::MAY_LACK_STEP)
        };
        let states: Vec<ParamState> = params.into_iter().zip(moments).map(state).collect();
        Ok(ElementwiseOptimizer { groups, reach: Reach::of(&states), states, disk: Some(disk) })
    }

    #[cfg(test)]
    pub(super) fn disk(&self) -> &DiskState {
        self.disk.as_ref().unwrap()
    }

    /// Resets the state to that before the first step.
    pub fn reset(&mut self) -> Result<()> {
        if let Some(disk) = &self.disk {
            disk.reset()?;
        }
        for state in &mut self.states {
            if self.disk.is_none() {
                state.moments = moments(&self.groups[state.group], &state.param)?;
            }
            state.step = 0;
        }
        Ok(())
    }

    /// Returns the hyper-parameters of each group.
    pub fn groups(&self) -> &[C] {
        &self.groups
    }

    /// Changes the learning rate of all groups.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|config| *config.lr() = lr);
    }

    /// Returns the state of every parameter, in the order of construction.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// Updates every parameter that has a gradient. Reports the largest step count to the launcher. Fails, and updates
    /// nothing, if the shape or dtype of a gradient is not that of its parameter's shard, and if all gradients are of
    /// another map. Warns if none is of the optimizer's parameters. If a disk with the moments
    /// fails, the parameters and moments are neither those before the step nor those after: load a checkpoint.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step_by(grads, 1.)
    }

    fn step_by(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        check_factor(factor)?;
        let _span = tracing::debug_span!("optimizer").entered();
        let _reported = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        self.reach.begin_step(&self.states, grads)?;
        let mut on_disk = vec![false; self.states.len()];
        for (state, on_disk) in self.states.iter_mut().zip(&mut on_disk) {
            if matches!(state.moments[..], [(_, Moment::OnDisk(_)), ..]) {
                *on_disk = count_step(state, grads);
                continue;
            }
            let Some(grad) = next_gradient(state, grads)? else { continue };
            let config = &self.groups[state.group];
            let moments: Vec<&Moment> = state.moments().map(|(_, moment)| moment).collect();
            let step = state.step;
            let update =
                |shard: &Tensor| with_state(shard, &grad, &moments, |shard| config.update(step, factor, shard));
            state.param.shard.update(update)?;
        }
        if let Some(disk) = &self.disk {
            let params: Vec<&FsdpParam> = self.states.iter().map(|state| &*state.param).collect();
            let update = |at: usize, shard: ShardUpdate<'_>| {
                let state = &self.states[at];
                self.groups[state.group].update(state.step, factor, shard)
            };
            disk.step(&params, &on_disk, |at| gradient(&self.states[at], grads), update)?;
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }

    /// Runs the model's backward, which reduces the gradients, and a step: see
    /// [`ShardedOptimizer::backward_step`]. Collective.
    ///
    /// ```
    /// # use fsdp_candle::doc_example::*;
    /// # let (world, vars, model, x) = one_layer(nn::linear)?;
    /// let mut optim = AdamW::new_lr(vars.trainable(), 0.1)?;
    /// let loss = model.forward(&x)?.sqr()?.mean_all()?;
    /// optim.backward_step(&loss)?;
    /// assert_eq!(optim.states()[0].step, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        ShardedOptimizer::backward_step(self, loss)
    }
}

fn moments<C: ElementwiseRule>(config: &C, param: &FsdpParam) -> Result<Vec<(&'static str, Moment)>> {
    let moment = |&name| Ok((name, Moment::zeros_of(param, config.kind(name, param)?)?));
    config.moments().iter().map(moment).collect()
}

/// Checks groups. Returns their hyper-parameters, and the parameters with the index of the group.
fn checked<C: ElementwiseRule>(groups: Groups<C>) -> Result<(Vec<C>, Vec<GroupedParam>)> {
    check_unique(C::NAME, &groups)?;
    warn_of_half_masters(C::NAME, &groups);
    let (mut configs, mut all) = (vec![], vec![]);
    for (group, (params, config)) in groups.into_iter().enumerate() {
        validate(&config)?;
        configs.push(config);
        all.extend(params.into_iter().map(|param| (group, param)));
    }
    check_not_empty(C::NAME, all.is_empty())?;
    Ok((configs, all))
}

impl<C: ElementwiseRule> ShardedOptimizer for ElementwiseOptimizer<C> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        ElementwiseOptimizer::step(self, grads)
    }

    fn step_scaled(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        self.step_by(grads, factor)
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        param_groups(&self.groups, &self.states)
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let groups = set_hyper::<C>(&self.groups, groups)?;
        if self.disk.is_some() {
            check_moments(&groups, &self.states)?;
        }
        for state in &mut self.states {
            // Keep other moments: earlier hyper-parameters may return.
            let config = &groups[state.group];
            let missing = config.moments().iter().filter(|name| state.names().all(|own| own != **name));
            let missing =
                missing.map(|&name| Ok((name, Moment::zeros_of(&state.param, config.kind(name, &state.param)?)?)));
            let missing = missing.collect::<Result<Vec<_>>>()?;
            state.moments.extend(missing);
        }
        self.groups = groups;
        Ok(())
    }

    fn states(&self) -> Vec<&ParamState> {
        self.states.iter().collect()
    }

    fn states_mut(&mut self) -> Vec<&mut ParamState> {
        self.states.iter_mut().collect()
    }

    fn reset(&mut self) -> Result<()> {
        ElementwiseOptimizer::reset(self)
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        self.groups.get_mut(group).into_iter().for_each(|config| *config.lr() = lr);
    }
}

impl<C: ElementwiseRule> candle_nn::Optimizer for ElementwiseOptimizer<C> {
    type Config = C;

    /// Makes an optimizer of these shards ([`crate::ShardedVarMap::trainable_vars`]). Use `candle_nn`'s optimizers for
    /// plain variables.
    fn new(vars: Vec<Var>, config: C) -> candle_core::Result<Self> {
        Ok(Self::new(params_of(C::NAME, &vars)?, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(ElementwiseOptimizer::step(self, grads)?)
    }

    /// Returns the learning rate of the first group.
    fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0., |config| *config.clone().lr())
    }

    fn set_learning_rate(&mut self, lr: f64) {
        ElementwiseOptimizer::set_learning_rate(self, lr);
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ok(ElementwiseOptimizer::backward_step(self, loss)?)
    }
}

/// Returns an error when hyper-parameters need a moment that has no place on disk.
fn check_moments<C: ElementwiseRule>(groups: &[C], states: &[ParamState]) -> Result<()> {
    for state in states {
        let missing = groups[state.group].moments().iter().find(|name| state.names().all(|own| own != **name));
        if let Some(name) = missing {
            let message = format!(
                "its state on disk has no place for `{name}`, which the new hyper-parameters need: make the optimizer \
                 with these hyper-parameters"
            );
            return Err(state.param.error(message));
        }
    }
    Ok(())
}

/// Returns an error when a parameter is in two groups.
pub(super) fn check_unique<C>(name: &str, groups: &[(Vec<Arc<FsdpParam>>, C)]) -> Result<()> {
    let mut names = HashSet::new();
    match groups.iter().flat_map(|(params, _)| params).find(|param| !names.insert(param.name())) {
        Some(param) => Err(param.error(format!("it is in the groups of {name} twice: leave it out of one"))),
        None => Ok(()),
    }
}

/// Warns of parameters of F16 or BF16, which lose small updates by rounding. Rank 0 warns for all.
pub(super) fn warn_of_half_masters<C>(name: &str, groups: &[(Vec<Arc<FsdpParam>>, C)]) {
    let params = groups.iter().flat_map(|(params, _)| params);
    let halves: Vec<_> = params.filter(|param| matches!(param.dtype(), DType::F16 | DType::BF16)).collect();
    if let Some(first) = halves.first()
        && first.device_mesh().rank() == 0
    {
        warn(&format!(
            "{name}: the master copies of {} parameters, such as `{}`, are {:?}, which rounds small updates away.\n\
             Build the model from F32 (`builder(DType::F32)`), and compute in half precision by \
             MixedPrecisionPolicy::param_dtype",
            halves.len(),
            first.name(),
            first.dtype()
        ));
    }
}

/// Returns the groups of an optimizer with these states.
pub(super) fn param_groups<C: HyperParameters>(configs: &[C], states: &[ParamState]) -> Vec<ParamGroup> {
    let group = |config: &C| ParamGroup { hyper: config.hyper(), params: vec![] };
    let mut groups: Vec<_> = configs.iter().map(group).collect();
    states.iter().for_each(|state| groups[state.group].params.push(state.param.clone()));
    groups
}

/// Checks all gradients before any update.
pub(super) fn check_gradients<'a>(states: impl Iterator<Item = &'a ParamState>, grads: &GradStore) -> Result<()> {
    for state in states {
        let shard = state.param.var().as_tensor();
        let Some(grad) = grads.get(shard) else { continue };
        if grad.dtype() != shard.dtype() || grad.shape() != shard.shape() {
            return Err(state.param.error(format!(
                "its shard is {:?} {:?}, its gradient {:?} {:?}: use gradients of FsdpModule::backward",
                shard.dtype(),
                shard.dims(),
                grad.dtype(),
                grad.dims()
            )));
        }
    }
    Ok(())
}

/// Counts a parameter's next step, and returns its gradient.
pub(super) fn next_gradient(state: &mut ParamState, grads: &GradStore) -> candle_core::Result<Option<Tensor>> {
    count_step(state, grads);
    gradient(state, grads)
}

/// Counts a parameter's next step if it has a gradient. Returns whether it has. Counts a step of an empty shard as
/// well, as other ranks do.
fn count_step(state: &mut ParamState, grads: &GradStore) -> bool {
    let has_gradient = grads.get(state.param.var()).is_some();
    if has_gradient || state.param.is_empty_with_gradient(grads) {
        state.step += 1;
    }
    has_gradient
}

/// Returns a parameter's gradient, contiguous and in memory other than the shard's.
fn gradient(state: &ParamState, grads: &GradStore) -> candle_core::Result<Option<Tensor>> {
    let shard = state.param.var().as_tensor();
    let copied = |grad: &Tensor| if share_memory(grad, shard) { grad.copy() } else { grad.contiguous() };
    grads.get(shard).map(copied).transpose()
}

/// Calls `f` with a shard, its gradient and its moments. Takes the moments' memory out of the tensors meanwhile,
/// because a gradient may share it.
pub(super) fn with_state(
    shard: &Tensor,
    grad: &Tensor,
    moments: &[&Moment],
    f: impl FnOnce(ShardUpdate<'_>) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let parts: Vec<&Tensor> = moments.iter().flat_map(|moment| moment.parts()).collect();
    let mut taken = parts.iter().map(|part| take(part)).collect::<candle_core::Result<Vec<_>>>()?;
    let done = with_slice_mut(shard, |kernels, param| {
        with_slice(grad, |_, grad| {
            let slices = taken.iter_mut().zip(&parts);
            let slices = slices.map(|(memory, part)| kernels.slice_mut(memory.into(), 0..part.elem_count()));
            f(ShardUpdate { kernels, param, grad, parts: slices.collect::<candle_core::Result<_>>()? })
        })
    });
    parts.into_iter().zip(taken).try_for_each(|(part, memory)| swap(part, memory).map(drop))?;
    done
}
