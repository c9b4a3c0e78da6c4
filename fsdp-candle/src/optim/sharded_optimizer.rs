//! The trait of optimizers over shards, groups of parameters, and several optimizers as one.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use serde_json::{Map, Value};

use super::candle_loop;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::pattern::NamePattern;
use crate::storage::with_slice_mut;

/// An optimizer over the shards of parameters, with groups of parameters and named state. State dicts, checkpoints,
/// [`crate::GradScaler`] and [`crate::check_finite`] work with it.
///
/// [`crate::AdamW`], [`crate::Adam`], [`crate::SGD`] and [`crate::Muon`] implement it. [`crate::Optimizers`] combines
/// several optimizers, and [`crate::CandleOptimizer`] wraps any [`candle_nn::Optimizer`].
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{Adam, AdamConfig, SGD, SgdConfig, ShardedOptimizer};
///
/// let adam = Adam::new(vars.trainable(), AdamConfig::default())?;
/// let sgd = SGD::new(vars.trainable(), SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
/// let mut some: Vec<Box<dyn ShardedOptimizer>> = vec![Box::new(adam), Box::new(sgd)];
/// for optim in &mut some {
///     optim.set_learning_rate(0.1);
///     assert_eq!(optim.param_groups()[0].hyper["lr"], 0.1);
///     optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
///     assert!(optim.states().iter().all(|state| state.step == 1));
/// }
/// assert!(some[0].states()[0].names().eq(["exp_avg", "exp_avg_sq"]));
/// assert!(some[1].states()[0].names().eq(["momentum_buffer"]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait ShardedOptimizer: Send {
    /// Updates every parameter that has a gradient. All ranks call it; some optimizers communicate. Fails if the shape
    /// or dtype of a gradient is not that of its parameter's shard.
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// Takes a step with the gradients of its parameters multiplied by `factor`, such as
    /// [`clip_factor`](crate::clip_factor). All ranks pass the same factor. The gradients in `grads` stay as they are.
    /// The result has the bits of a step on gradients that were multiplied and rounded to their dtype before.
    ///
    /// [`crate::AdamW`], [`crate::AdamW8bit`], [`crate::Adam`] and [`crate::SGD`] multiply as they read a gradient. The
    /// default multiplies a copy of the gradients, as [`crate::CandleOptimizer`] does. [`crate::Muon`] copies one at a
    /// time.
    ///
    /// # Errors
    /// Errors of [`ShardedOptimizer::step`]. Fails, and updates nothing, if the factor is not finite.
    fn step_scaled(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        check_factor(factor)?;
        if factor == 1. {
            return self.step(grads);
        }
        let own: HashSet<_> = self.states().iter().map(|state| state.param.var().id()).collect();
        let mut scaled = GradStore::default();
        for id in grads.get_ids() {
            let Some(grad) = grads.get_id(*id) else { continue };
            scaled.insert_id(*id, if own.contains(id) { scaled_copy(grad, factor)? } else { grad.clone() });
        }
        self.step(&scaled)
    }

    /// Runs the model's backward, which reduces the gradients, and a step. The same as
    /// `optim.step(&model.backward(&loss)?)`, with the outermost [`FsdpModule`](crate::FsdpModule) around the
    /// optimizer's parameters. Collective. The gradients are gone afterwards: to clip them, or to step several
    /// optimizers on one loss, call `model.backward(&loss)`.
    ///
    /// # Errors
    /// Errors of [`FsdpModule::backward`](crate::FsdpModule::backward) and of the step. Fails before the backward if
    /// its gradients would not be those of a step: while gradients accumulate, if a hook takes them, for a loss that a
    /// [`crate::GradScaler`] scaled, and for an optimizer of two maps. Fails if the loss reaches no parameter.
    fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        let grads = candle_loop::backward(&self.states(), loss)?;
        self.step(&grads)
    }

    /// Returns the groups in order. Each parameter is in one group.
    fn param_groups(&self) -> Vec<ParamGroup>;

    /// Changes the named hyper-parameters of each group. Ignores PyTorch's names that have no meaning here.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, when the number of maps is not the number of groups, a value is out of
    /// range, or a value asks for something that this optimizer does not compute.
    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()>;

    /// Returns the state of each parameter, in order.
    fn states(&self) -> Vec<&ParamState>;

    /// Returns the states, to set the numbers of steps.
    fn states_mut(&mut self) -> Vec<&mut ParamState>;

    /// Resets the state to that before the first step.
    fn reset(&mut self) -> Result<()>;

    /// Changes the learning rate of one group. Ignores groups that do not exist.
    fn set_group_learning_rate(&mut self, group: usize, lr: f64);

    /// Changes the learning rate of all groups.
    fn set_learning_rate(&mut self, lr: f64) {
        (0..self.param_groups().len()).for_each(|group| self.set_group_learning_rate(group, lr));
    }

    /// Returns the reason why the state cannot be saved, if the optimizer hides some.
    fn hidden_state(&self) -> Option<String> {
        None
    }
}

/// Returns an error unless a factor of gradients is finite.
pub(super) fn check_factor(factor: f64) -> Result<()> {
    match factor.is_finite() {
        true => Ok(()),
        false => Err(Error::Argument(format!(
            "step_scaled: the gradients' factor is {factor}, expected a finite number: `clip_factor` returns one"
        ))),
    }
}

/// Returns a contiguous copy of a gradient times a factor, rounded to the gradient's dtype.
pub(super) fn scaled_copy(grad: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    let copy = grad.force_contiguous()?;
    if factor != 1. {
        with_slice_mut(&copy, |kernels, values| kernels.scale(values, factor))?;
    }
    Ok(copy)
}

/// A group of parameters: one of PyTorch's `param_groups`.
#[derive(Clone, Debug)]
pub struct ParamGroup {
    /// Hyper-parameters by PyTorch's names, such as `lr` and `betas`.
    pub hyper: Map<String, Value>,
    /// Parameters of the group, in the optimizer's order.
    pub params: Vec<Arc<FsdpParam>>,
}

/// Groups parameters by name: first the parameters that no pattern matches, then one group for each list of patterns. A
/// pattern matches a whole name or its end. A parameter belongs to the first list that matches. Fails if a pattern
/// matches no parameter, or only parameters of an earlier group.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// use fsdp_candle::{group_by_name, AdamW, AdamWConfig, NamePattern};
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::layer_norm(4, 1e-5, vb))?;
///
/// let biases = [NamePattern::new("bias")?];
/// let [rest, biases] = group_by_name(vars.trainable(), [&biases[..]])?.try_into().unwrap();
/// let config = AdamWConfig::default();
/// let optim = AdamW::with_groups(vec![(rest, config), (biases, AdamWConfig { weight_decay: 0., ..config })])?;
/// assert_eq!(optim.param_groups()[1].params[0].name(), "bias");
/// # use fsdp_candle::ShardedOptimizer;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn group_by_name<'a>(
    params: Vec<Arc<FsdpParam>>,
    parts: impl IntoIterator<Item = &'a [NamePattern]>,
) -> Result<Vec<Vec<Arc<FsdpParam>>>> {
    let example = params.first().map_or_else(|| "none".to_string(), |param| format!("`{}`", param.name()));
    let (mut rest, mut groups) = (params, vec![]);
    for patterns in parts {
        for pattern in patterns {
            if !rest.iter().any(|param| pattern.matches_end(param.name())) {
                return Err(Error::Argument(format!(
                    "`{pattern}` matches no trainable parameter outside the earlier groups; a name is {example}"
                )));
            }
        }
        let group;
        (group, rest) =
            rest.into_iter().partition(|param| patterns.iter().any(|pattern| pattern.matches_end(param.name())));
        groups.push(group);
    }
    groups.insert(0, rest);
    Ok(groups)
}

/// Several optimizers of different parameters as one. Their groups follow one another, as in PyTorch's
/// `get_optimizer_state_dict` of a list.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{AdamW, AdamWConfig, Muon, MuonConfig, Optimizers, ShardedOptimizer};
///
/// let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
/// let muon = Muon::new(matrices, MuonConfig { lr: 0.02, ..MuonConfig::default() })?;
/// let mut optim = Optimizers::new(vec![Box::new(muon), Box::new(AdamW::new(rest, AdamWConfig::default())?)])?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.param_groups()[0].params[0].name(), "weight");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Optimizers(Vec<Box<dyn ShardedOptimizer>>);

impl Optimizers {
    /// Combines optimizers, stepped in this order. Fails if there are none, or if two optimizers have the same
    /// parameter.
    pub fn new(optimizers: Vec<Box<dyn ShardedOptimizer>>) -> Result<Self> {
        if optimizers.is_empty() {
            return Err(Error::Argument("Optimizers: expected at least one optimizer, found none".into()));
        }
        let mut names = HashSet::new();
        for group in optimizers.iter().flat_map(|optim| optim.param_groups()) {
            for param in group.params {
                if !names.insert(param.name().to_string()) {
                    return Err(param.error("two optimizers update it: leave it out of one"));
                }
            }
        }
        Ok(Optimizers(optimizers))
    }
}

impl ShardedOptimizer for Optimizers {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.0.iter_mut().try_for_each(|optim| optim.step(grads))
    }

    fn step_scaled(&mut self, grads: &GradStore, factor: f64) -> Result<()> {
        self.0.iter_mut().try_for_each(|optim| optim.step_scaled(grads, factor))
    }

    fn param_groups(&self) -> Vec<ParamGroup> {
        self.0.iter().flat_map(|optim| optim.param_groups()).collect()
    }

    fn set_hyper(&mut self, groups: &[Map<String, Value>]) -> Result<()> {
        let before: Vec<Vec<_>> =
            self.0.iter().map(|optim| optim.param_groups().into_iter().map(|group| group.hyper).collect()).collect();
        let expected: usize = before.iter().map(Vec::len).sum();
        if groups.len() != expected {
            return Err(Error::Argument(format!(
                "{} groups of hyper-parameters, expected {expected} for these optimizers",
                groups.len()
            )));
        }
        let mut rest = groups;
        for at in 0..self.0.len() {
            let (own, others) = rest.split_at(before[at].len());
            rest = others;
            if let Err(error) = self.0[at].set_hyper(own) {
                // Restores the optimizers that have changed.
                self.0[..at].iter_mut().zip(&before).try_for_each(|(optim, before)| optim.set_hyper(before))?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn states(&self) -> Vec<&ParamState> {
        self.0.iter().flat_map(|optim| optim.states()).collect()
    }

    fn states_mut(&mut self) -> Vec<&mut ParamState> {
        self.0.iter_mut().flat_map(|optim| optim.states_mut()).collect()
    }

    fn reset(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|optim| optim.reset())
    }

    fn set_group_learning_rate(&mut self, group: usize, lr: f64) {
        let mut group = group;
        for optim in &mut self.0 {
            let own = optim.param_groups().len();
            if group < own {
                return optim.set_group_learning_rate(group, lr);
            }
            group -= own;
        }
    }

    fn hidden_state(&self) -> Option<String> {
        self.0.iter().find_map(|optim| optim.hidden_state())
    }
}
