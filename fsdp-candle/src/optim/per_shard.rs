//! Optimizers that step each shard by itself: the update of an element follows from what this rank has.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var, bail};
use fsdp_core::heartbeat;
use serde_json::{Map, Value};

use super::group::ParamGroup;
use super::moment::Moment;
use super::sharded::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::kernels::{Kernels, Slice, SliceMut};
use crate::storage::{share_memory, swap, take, with_slice, with_slice_mut};

/// The hyper-parameters of an optimizer that steps each shard by itself, as [`crate::AdamWConfig`] is. Only this crate
/// has some: other optimizers implement [`ShardedOptimizer`].
pub trait ShardRule: Rule {}
impl<R: Rule> ShardRule for R {}

/// A shard that is stepped, and the kernels to do it with.
pub struct Stepping<'a> {
    pub(super) kernels: &'a dyn Kernels,
    pub(super) param: SliceMut<'a>,
    pub(super) grad: Slice<'a>,
    /// Those of all moments in order.
    pub(super) parts: Vec<SliceMut<'a>>,
}

/// Hyper-parameters.
pub trait Hyper: Copy + Debug + Default + PartialEq + Send + 'static {
    /// The optimizer's name.
    const NAME: &'static str;

    /// By PyTorch's names, and PyTorch's others.
    fn hyper(&self) -> Map<String, Value>;

    /// With those that are named.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    fn with(&self, hyper: &Map<String, Value>) -> std::result::Result<Self, String>;

    /// What is wrong with them, in words.
    ///
    /// # Errors
    /// As it says.
    fn check(&self) -> std::result::Result<(), String>;

    /// The learning rate.
    fn lr(&mut self) -> &mut f64;
}

/// How a shard is stepped.
pub trait Rule: Hyper {
    /// Whether PyTorch's state dicts of this optimizer are without the number of steps.
    const MAY_LACK_STEP: bool = false;

    /// The names of the tensors that are kept.
    fn moments(&self) -> &'static [&'static str];

    /// One of them before the first step.
    ///
    /// # Errors
    /// When there is no memory for it.
    fn moment(&self, _name: &str, param: &FsdpParam) -> Result<Moment> {
        Moment::zeros(param)
    }

    /// Steps a shard whose parameter takes its step number `step`, from 1.
    ///
    /// # Errors
    /// The kernels'.
    fn update(&self, step: u64, shard: Stepping<'_>) -> candle_core::Result<()>;
}

/// An optimizer that steps each shard by itself: [`crate::AdamW`] explains it.
///
/// It is a [`candle_nn::Optimizer`] too, made of [`crate::ShardedVarMap::trainable_vars`], but for `backward_step`,
/// which would not reduce gradients.
#[derive(Debug)]
pub struct ShardOptimizer<C> {
    groups: Vec<C>,
    states: Vec<ParamState>,
}

impl<C: ShardRule> ShardOptimizer<C> {
    /// An optimizer of these parameters ([`crate::ShardedVarMap::trainable`]), with a state of zeros.
    ///
    /// # Errors
    /// When a hyper-parameter is out of range, or there is no memory for the state.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: C) -> Result<Self> {
        Self::with_groups(vec![(params, config)])
    }

    /// The same of several groups, each with hyper-parameters of its own. [`crate::group_by_name`] makes some by
    /// parameters' names.
    ///
    /// # Errors
    /// When a parameter is in two groups or a hyper-parameter out of range, or there is no memory for the state.
    pub fn with_groups(groups: Vec<(Vec<Arc<FsdpParam>>, C)>) -> Result<Self> {
        unique(C::NAME, &groups)?;
        let mut optim = ShardOptimizer { groups: vec![], states: vec![] };
        for (group, (params, config)) in groups.into_iter().enumerate() {
            checked(&config)?;
            optim.groups.push(config);
            for param in params {
                let moments = moments(&config, &param)?;
                optim.states.push(ParamState::of(param, group, moments, C::MAY_LACK_STEP));
            }
        }
        Ok(optim)
    }

    /// Forgets all steps that were taken.
    ///
    /// # Errors
    /// When there is no memory for other state.
    pub fn reset(&mut self) -> Result<()> {
        for state in &mut self.states {
            let moments = moments(&self.groups[state.group], &state.param)?;
            state.set_moments(moments);
            state.step = 0;
        }
        Ok(())
    }

    /// The hyper-parameters of each group.
    pub fn groups(&self) -> &[C] {
        &self.groups
    }

    /// Changes the learning rate of the steps to come, of all groups.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|config| *config.lr() = lr);
    }

    /// The state of every parameter, in the order in which they were given.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// Updates every parameter that has a gradient, and tells the launcher the step's number: the most that a parameter
    /// has taken.
    ///
    /// # Errors
    /// When a gradient has another shape or dtype than its parameter's shard. Nothing is updated then.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _span = tracing::debug_span!("optimizer").entered();
        let _told = heartbeat::span("optimizer", "");
        check_gradients(self.states.iter(), grads)?;
        for state in &mut self.states {
            let Some(grad) = next_gradient(state, grads)? else { continue };
            let config = &self.groups[state.group];
            let moments: Vec<&Moment> = state.moments().map(|(_, moment)| moment).collect();
            with_state(state.param.var(), &grad, &moments, |shard| config.update(state.step, shard))?;
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }
}

fn moments<C: Rule>(config: &C, param: &FsdpParam) -> Result<Vec<(&'static str, Moment)>> {
    config.moments().iter().map(|&name| Ok((name, config.moment(name, param)?))).collect()
}

impl<C: ShardRule> ShardedOptimizer for ShardOptimizer<C> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        ShardOptimizer::step(self, grads)
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        param_groups(&self.groups, &self.states)
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let groups = set_hyper::<C>(&self.groups, groups)?;
        for state in &mut self.states {
            // What was kept stays: hyper-parameters that were before may come again.
            let config = &groups[state.group];
            let missing = config.moments().iter().filter(|name| state.names().all(|own| own != **name));
            let missing = missing.map(|&name| Ok((name, config.moment(name, &state.param)?)));
            let missing = missing.collect::<Result<Vec<_>>>()?;
            state.add_moments(missing);
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
        ShardOptimizer::reset(self)
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        self.groups.get_mut(group).into_iter().for_each(|config| *config.lr() = lr);
    }
}

impl<C: ShardRule> candle_nn::Optimizer for ShardOptimizer<C> {
    type Config = C;

    /// An optimizer of these shards ([`crate::ShardedVarMap::trainable_vars`]). Plain variables belong into an
    /// optimizer of `candle_nn`'s own.
    fn new(vars: Vec<Var>, config: C) -> candle_core::Result<Self> {
        let param = |var: &Var| match FsdpParam::of_shard(var) {
            Some(param) => Ok(param),
            None => bail!(
                "fsdp_candle::{}: a variable of shape {:?} is no shard of a ShardedVarMap: pass \
                 `vars.trainable_vars()`, and plain variables (ignored parameters) to an optimizer of candle_nn's own",
                C::NAME,
                var.dims()
            ),
        };
        Ok(Self::new(vars.iter().map(param).collect::<candle_core::Result<_>>()?, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(ShardOptimizer::step(self, grads)?)
    }

    /// The first group's.
    fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0., |config| *config.clone().lr())
    }

    fn set_learning_rate(&mut self, lr: f64) {
        ShardOptimizer::set_learning_rate(self, lr);
    }

    /// Refused: the loss's own backward reduces no gradients.
    fn backward_step(&mut self, _: &Tensor) -> candle_core::Result<()> {
        bail!(
            "fsdp_candle::{}::backward_step would take gradients that no rank has reduced: call \
             `optim.step(&model.backward(&loss)?)` with the outermost FsdpModule",
            C::NAME
        )
    }
}

/// An error where a parameter is in two groups.
pub(super) fn unique<C>(name: &str, groups: &[(Vec<Arc<FsdpParam>>, C)]) -> Result<()> {
    let mut names = HashSet::new();
    match groups.iter().flat_map(|(params, _)| params).find(|param| !names.insert(param.name())) {
        Some(param) => Err(Error::Parameter {
            name: param.name().into(),
            message: format!("it is in two groups of {name}, or twice in one: leave one out"),
        }),
        None => Ok(()),
    }
}

/// An error where a hyper-parameter is out of range.
pub(super) fn checked<C: Hyper>(config: &C) -> Result<()> {
    config.check().map_err(|why| Error::Argument(format!("{}: {why}", C::NAME)))
}

/// Groups of an optimizer that has these states.
pub(super) fn param_groups<C: Hyper>(configs: &[C], states: &[ParamState]) -> Vec<ParamGroup> {
    let group = |config: &C| ParamGroup { hyper: config.hyper(), params: vec![] };
    let mut groups: Vec<_> = configs.iter().map(group).collect();
    states.iter().for_each(|state| groups[state.group].params.push(state.param.clone()));
    groups
}

/// The groups with other hyper-parameters.
pub(super) fn set_hyper<C: Hyper>(now: &[C], groups: &[Map<String, Value>]) -> Result<Vec<C>> {
    if groups.len() != now.len() {
        return Err(Error::Argument(format!(
            "{} groups of hyper-parameters are not {}, as many as this optimizer has",
            groups.len(),
            now.len()
        )));
    }
    let with = |(at, (now, hyper)): (usize, (&C, &Map<String, Value>))| {
        let fail = |why: String| Error::Argument(format!("the hyper-parameters of group {at} ({}) {why}", C::NAME));
        let new = now.with(hyper).map_err(fail)?;
        new.check().map_err(|why| fail(format!("can't be: {why}")))?;
        Ok(new)
    };
    now.iter().zip(groups).enumerate().map(with).collect()
}

/// All or nothing: what is wrong with gradients shows before anything is updated.
pub(super) fn check_gradients<'a>(states: impl Iterator<Item = &'a ParamState>, grads: &GradStore) -> Result<()> {
    for state in states {
        let shard = state.param.var().as_tensor();
        let Some(grad) = grads.get(shard) else { continue };
        if grad.dtype() != shard.dtype() || grad.shape() != shard.shape() {
            return Err(Error::Parameter {
                name: state.param.name().into(),
                message: format!(
                    "its shard is {:?} {:?}, its gradient {:?} {:?}: take gradients from FsdpModule::backward",
                    shard.dtype(),
                    shard.dims(),
                    grad.dtype(),
                    grad.dims()
                ),
            });
        }
    }
    Ok(())
}

/// The gradient of a parameter that takes its next step, contiguous and in memory that is not the shard's. A step of an
/// empty shard is counted, as on the ranks that hold something.
pub(super) fn next_gradient(state: &mut ParamState, grads: &GradStore) -> candle_core::Result<Option<Tensor>> {
    let shard = state.param.var().as_tensor();
    let grad = grads.get(shard);
    if grad.is_some() || state.param.is_empty_with_gradient(grads) {
        state.step += 1;
    }
    grad.map(|grad| if share_memory(grad, shard) { grad.copy() } else { grad.contiguous() }).transpose()
}

/// Calls `f` with a shard, its gradient and the parts of its moments, whose memory is taken out of the tensors
/// meanwhile: a gradient may lie in any of them.
pub(super) fn with_state(
    shard: &Tensor,
    grad: &Tensor,
    moments: &[&Moment],
    f: impl FnOnce(Stepping<'_>) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let parts: Vec<&Tensor> = moments.iter().flat_map(|moment| moment.parts()).collect();
    let mut taken = parts.iter().map(|part| take(part)).collect::<candle_core::Result<Vec<_>>>()?;
    let done = with_slice_mut(shard, |kernels, param| {
        with_slice(grad, |_, grad| {
            let slices = taken.iter_mut().zip(&parts);
            let slices = slices.map(|(memory, part)| kernels.slice_mut(memory.into(), 0..part.elem_count()));
            f(Stepping { kernels, param, grad, parts: slices.collect::<candle_core::Result<_>>()? })
        })
    });
    parts.into_iter().zip(taken).try_for_each(|(part, memory)| swap(part, memory).map(drop))?;
    done
}
