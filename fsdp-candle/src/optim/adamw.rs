//! AdamW on shards: one pass over parameter, gradient and moments.
//!
//! Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101); the arithmetic is that of
//! PyTorch's `torch.optim.AdamW`.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var, bail};
use candle_nn::Optimizer;
use fsdp_core::heartbeat;

use crate::error::{Error, Result};
use crate::kernels::{self, AdamWUpdate};
use crate::storage::{share_memory, swap, take, to_core_dtype, to_tensor, with_slice, with_slice_mut};
use crate::unit::FsdpParam;

/// The hyper-parameters, with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of gradients and of their squares.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, for every parameter.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// The state of one parameter: tensors of the shard's shape and dtype.
#[derive(Clone, Debug)]
pub struct AdamWState {
    /// The parameter.
    pub param: Arc<FsdpParam>,
    /// The running mean of gradients.
    pub exp_avg: Tensor,
    /// The running mean of squared gradients.
    pub exp_avg_sq: Tensor,
    /// How many steps the parameter has taken.
    pub step: u64,
    /// Its group, from 0.
    pub group: usize,
}

/// AdamW over the shards of parameters.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{AdamW, AdamWConfig};
///
/// // Two groups: no weight decay of biases.
/// let (biases, weights) = vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"));
/// let config = AdamWConfig { lr: 1e-2, ..AdamWConfig::default() };
/// let mut optim =
///     AdamW::with_groups(vec![(weights, config), (biases, AdamWConfig { weight_decay: 0., ..config })])?;
///
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// optim.set_learning_rate(1e-3);
/// optim.step(&grads)?;
/// let state = &optim.states()[1];
/// assert_eq!((state.param.name(), state.step), ("bias", 1));
/// assert_eq!(state.exp_avg.dims(), state.param.var().dims()); // a shard, as the parameter is
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It is a [`candle_nn::Optimizer`] too, made of [`crate::ShardedVarMap::trainable_vars`], but for `backward_step`,
/// which would not reduce gradients.
#[derive(Debug)]
pub struct AdamW {
    groups: Vec<AdamWConfig>,
    states: Vec<AdamWState>,
}

/// Zeros of a shard's shape and dtype.
fn moment(param: &FsdpParam) -> Result<Tensor> {
    let shard = param.var().as_tensor();
    let fail =
        |error: fsdp_core::Error| Error::Parameter { name: param.name().into(), message: format!("AdamW: {error}") };
    let kernels = kernels::of_device(shard.device())?;
    let zeros = kernels.zeros(to_core_dtype(shard.dtype())?, shard.elem_count()).map_err(fail)?;
    Ok(to_tensor(zeros, shard.dims(), shard.device())?)
}

impl AdamW {
    /// An optimizer of these parameters ([`crate::ShardedVarMap::trainable`]), with moments of zero.
    ///
    /// # Errors
    /// When there is no memory for the moments.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: AdamWConfig) -> Result<Self> {
        AdamW::with_groups(vec![(params, config)])
    }

    /// The same of several groups, each with hyper-parameters of its own.
    ///
    /// # Errors
    /// When a parameter is in two groups, or there is no memory for the moments.
    pub fn with_groups(groups: Vec<(Vec<Arc<FsdpParam>>, AdamWConfig)>) -> Result<Self> {
        let mut optim = AdamW { groups: vec![], states: vec![] };
        let mut names = HashSet::new();
        for (group, (params, config)) in groups.into_iter().enumerate() {
            optim.groups.push(config);
            for param in params {
                if !names.insert(param.name().to_string()) {
                    let message = "it is in two groups of an AdamW, or twice in one: leave one out".into();
                    return Err(Error::Parameter { name: param.name().into(), message });
                }
                let (exp_avg, exp_avg_sq) = (moment(&param)?, moment(&param)?);
                optim.states.push(AdamWState { exp_avg, exp_avg_sq, step: 0, group, param });
            }
        }
        Ok(optim)
    }

    /// Forgets all steps that were taken.
    ///
    /// # Errors
    /// When there is no memory for other moments.
    pub fn reset(&mut self) -> Result<()> {
        for state in &mut self.states {
            (state.exp_avg, state.exp_avg_sq, state.step) = (moment(&state.param)?, moment(&state.param)?, 0);
        }
        Ok(())
    }

    /// The hyper-parameters of each group.
    pub fn groups(&self) -> &[AdamWConfig] {
        &self.groups
    }

    /// Changes the learning rate of the steps to come, of all groups.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|config| config.lr = lr);
    }

    pub(crate) fn set_groups(&mut self, groups: Vec<AdamWConfig>) {
        self.groups = groups;
    }

    /// The state of every parameter, in the order in which they were given.
    pub fn states(&self) -> &[AdamWState] {
        &self.states
    }

    pub(crate) fn states_mut(&mut self) -> &mut [AdamWState] {
        &mut self.states
    }

    /// Updates every parameter that has a gradient, and tells the launcher the step's number: the most that a parameter
    /// has taken.
    ///
    /// # Errors
    /// When a gradient has another shape or dtype than its parameter's shard.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _span = tracing::debug_span!("optimizer").entered();
        let _told = heartbeat::span("optimizer", "");
        // All or nothing: what is wrong shows before anything is updated.
        for state in &self.states {
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
        for state in &mut self.states {
            let shard = state.param.var().as_tensor();
            if state.param.is_empty_with_gradient(grads) {
                state.step += 1; // as on the ranks that hold something
            }
            let Some(grad) = grads.get(shard) else { continue };
            state.step += 1;
            let grad = if share_memory(grad, shard) { grad.copy()? } else { grad.contiguous()? };
            step(&update(&self.groups[state.group], state.step), shard, &grad, [&state.exp_avg, &state.exp_avg_sq])?;
        }
        heartbeat::step(self.states.iter().map(|state| state.step).max().unwrap_or(0));
        Ok(())
    }
}

impl Optimizer for AdamW {
    type Config = AdamWConfig;

    /// An optimizer of these shards ([`crate::ShardedVarMap::trainable_vars`]). Plain variables belong into an
    /// optimizer of `candle_nn`'s own.
    fn new(vars: Vec<Var>, config: AdamWConfig) -> candle_core::Result<Self> {
        let param = |var: &Var| match FsdpParam::of_shard(var) {
            Some(param) => Ok(param),
            None => bail!(
                "fsdp_candle::AdamW: a variable of shape {:?} is no shard of a ShardedVarMap: pass \
                 `vars.trainable_vars()`, and \
                 plain variables (ignored parameters) to candle_nn::AdamW",
                var.dims()
            ),
        };
        Ok(AdamW::new(vars.iter().map(param).collect::<candle_core::Result<_>>()?, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(AdamW::step(self, grads)?)
    }

    /// The first group's.
    fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0., |config| config.lr)
    }

    fn set_learning_rate(&mut self, lr: f64) {
        AdamW::set_learning_rate(self, lr);
    }

    /// Refused: the loss's own backward reduces no gradients.
    fn backward_step(&mut self, _: &Tensor) -> candle_core::Result<()> {
        bail!(
            "fsdp_candle::AdamW::backward_step would take gradients that no rank has reduced: call \
             `optim.step(&model.backward(&loss)?)` with the outermost FsdpModule"
        )
    }
}

/// The numbers of one step, worked out in f64.
fn update(config: &AdamWConfig, step: u64) -> AdamWUpdate {
    let (beta1, beta2) = config.betas;
    let step = step as f64;
    AdamWUpdate {
        decay: 1. - config.lr * config.weight_decay,
        beta1,
        beta2,
        step_size: config.lr / (1. - beta1.powf(step)),
        root_bias_correction2: (1. - beta2.powf(step)).sqrt(),
        eps: config.eps,
    }
}

/// Steps a shard and its moments, whose memory is taken out of the tensors meanwhile: a gradient may lie in any of
/// them.
fn step(update: &AdamWUpdate, shard: &Tensor, grad: &Tensor, moments: [&Tensor; 2]) -> candle_core::Result<()> {
    let [mean, square] = moments;
    let (mut means, mut squares) = (take(mean)?, take(square)?);
    let elements = 0..shard.elem_count();
    let stepped = with_slice_mut(shard, |kernels, param| {
        with_slice(grad, |_, grad| {
            let means = kernels.slice_mut((&mut means).into(), elements.clone())?;
            let squares = kernels.slice_mut((&mut squares).into(), elements)?;
            kernels.adamw(update, param, grad, [means, squares])
        })
    });
    swap(mean, means)?;
    swap(square, squares)?;
    stepped
}
