//! AdamW on shards: one pass over parameter, gradient and moments.
//!
//! Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101); the arithmetic is that of
//! PyTorch's `torch.optim.AdamW`.

use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, InplaceOp2, Layout, Tensor, Var, bail};
use candle_nn::Optimizer;
use fsdp_core::{Buffer, heartbeat};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::storage::{poison, swap, to_core_dtype, to_tensor};
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
/// let mut groups = [AdamW::new(weights, config)?, AdamW::new(biases, AdamWConfig { weight_decay: 0., ..config })?];
///
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// for optim in &mut groups {
///     optim.set_learning_rate(1e-3);
///     optim.step(&grads)?;
/// }
/// let state = &groups[1].states()[0];
/// assert_eq!((state.param.name(), state.step), ("bias", 1));
/// assert_eq!(state.exp_avg.dims(), state.param.var().dims()); // a shard, as the parameter is
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It is a [`candle_nn::Optimizer`] too, made of [`crate::ShardedVarMap::trainable_vars`], but for `backward_step`,
/// which would not reduce gradients.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    states: Vec<AdamWState>,
}

/// Zeros of a shard's shape and dtype.
fn moment(param: &FsdpParam) -> Result<Tensor> {
    let shard = param.var().as_tensor();
    let fail =
        |error: fsdp_core::Error| Error::Parameter { name: param.name().into(), message: format!("AdamW: {error}") };
    let zeros = Buffer::try_zeros(to_core_dtype(shard.dtype())?, shard.elem_count()).map_err(fail)?;
    Ok(to_tensor(zeros, shard.dims(), shard.device())?)
}

impl AdamW {
    /// An optimizer of these parameters ([`crate::ShardedVarMap::trainable`]), with moments of zero.
    ///
    /// # Errors
    /// When there is no memory for the moments.
    pub fn new(params: Vec<Arc<FsdpParam>>, config: AdamWConfig) -> Result<Self> {
        let states = params
            .into_iter()
            .map(|param| Ok(AdamWState { exp_avg: moment(&param)?, exp_avg_sq: moment(&param)?, step: 0, param }))
            .collect::<Result<_>>()?;
        Ok(AdamW { config, states })
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Changes the learning rate of the steps to come.
    pub fn set_learning_rate(&mut self, lr: f64) {
        self.config.lr = lr;
    }

    pub(crate) fn set_config(&mut self, config: AdamWConfig) {
        self.config = config;
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
            let update = Update::new(&self.config, state.step);
            // The moments' memory moves through the operation, which can borrow one tensor mutably only.
            let moments = (swap(&state.exp_avg, poison())?, swap(&state.exp_avg_sq, poison())?);
            let op = Step { update, moments: Mutex::new(moments) };
            let stepped = shard.inplace_op2(&grad.contiguous()?, &op);
            let moments = op.moments.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            swap(&state.exp_avg, moments.0)?;
            swap(&state.exp_avg_sq, moments.1)?;
            stepped?;
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

    fn learning_rate(&self) -> f64 {
        self.config.lr
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
#[derive(Clone, Copy)]
struct Update {
    decay: f64,
    beta1: f64,
    beta2: f64,
    step_size: f64,
    root_bias_correction2: f64,
    eps: f64,
}

impl Update {
    fn new(config: &AdamWConfig, step: u64) -> Self {
        let (beta1, beta2) = config.betas;
        let step = step as f64;
        Update {
            decay: 1. - config.lr * config.weight_decay,
            beta1,
            beta2,
            step_size: config.lr / (1. - beta1.powf(step)),
            root_bias_correction2: (1. - beta2.powf(step)).sqrt(),
            eps: config.eps,
        }
    }
}

macro_rules! kernel {
    ($name:ident, $real:ty) => {
        fn $name<T: Copy>(
            update: Update,
            (params, grads, means, squares): (&mut [T], &[T], &mut [T], &mut [T]),
            (get, put): (impl Fn(T) -> $real, impl Fn($real) -> T),
        ) {
            let (decay, beta1, beta2) = (update.decay as $real, update.beta1 as $real, update.beta2 as $real);
            let (one_minus_beta1, one_minus_beta2) = ((1. - update.beta1) as $real, (1. - update.beta2) as $real);
            let step_size = update.step_size as $real;
            let root_correction = update.root_bias_correction2 as $real;
            let eps = update.eps as $real;
            for (((p, &g), m), v) in params.iter_mut().zip(grads).zip(means).zip(squares) {
                let g = get(g);
                let mean = beta1 * get(*m) + one_minus_beta1 * g;
                let square = beta2 * get(*v) + one_minus_beta2 * g * g;
                *m = put(mean);
                *v = put(square);
                *p = put(get(*p) * decay - step_size * mean / (square.sqrt() / root_correction + eps));
            }
        }
    };
}
kernel!(step_f32, f32);
kernel!(step_f64, f64);

struct Step {
    update: Update,
    moments: Mutex<(CpuStorage, CpuStorage)>,
}

impl InplaceOp2 for Step {
    fn name(&self) -> &'static str {
        "adamw-step"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (Some((p0, p1)), Some((g0, g1))) = (layout.contiguous_offsets(), grad_layout.contiguous_offsets()) else {
            bail!("shards and their gradients are contiguous")
        };
        let mut moments = self.moments.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (means, squares) = &mut *moments;
        match (param, grad, means, squares) {
            (CpuStorage::F32(p), CpuStorage::F32(g), CpuStorage::F32(m), CpuStorage::F32(v)) => {
                step_f32(self.update, (&mut p[p0..p1], &g[g0..g1], m, v), (|x| x, |x| x));
            }
            (CpuStorage::F64(p), CpuStorage::F64(g), CpuStorage::F64(m), CpuStorage::F64(v)) => {
                step_f64(self.update, (&mut p[p0..p1], &g[g0..g1], m, v), (|x| x, |x| x));
            }
            (CpuStorage::BF16(p), CpuStorage::BF16(g), CpuStorage::BF16(m), CpuStorage::BF16(v)) => {
                step_f32(self.update, (&mut p[p0..p1], &g[g0..g1], m, v), (bf16::to_f32, bf16::from_f32));
            }
            (CpuStorage::F16(p), CpuStorage::F16(g), CpuStorage::F16(m), CpuStorage::F16(v)) => {
                step_f32(self.update, (&mut p[p0..p1], &g[g0..g1], m, v), (f16::to_f32, f16::from_f32));
            }
            _ => bail!("a shard, its gradient and its moments have one floating point dtype"),
        }
        Ok(())
    }
}
