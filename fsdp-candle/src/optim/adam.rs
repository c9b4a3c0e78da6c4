//! Adam and AdamW on shards: one pass over parameter, gradient and moments.
//!
//! Kingma and Ba, "Adam" (arXiv:1412.6980); Loshchilov and Hutter, "Decoupled Weight Decay Regularization"
//! (arXiv:1711.05101). The arithmetic is that of PyTorch's `torch.optim.Adam` and `torch.optim.AdamW`.

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use super::hyper;
use super::per_shard::{Hyper, Rule, ShardOptimizer, Stepping};
use crate::kernels::{AdamUpdate, SliceMut};

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
/// assert_eq!(state.tensor("exp_avg")?.dims(), state.param.var().dims()); // a shard, as the parameter is
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type AdamW = ShardOptimizer<AdamWConfig>;

/// Adam over the shards of parameters: [`AdamW`], but that weight decay is added to gradients (L2).
pub type Adam = ShardOptimizer<AdamConfig>;

/// The hyper-parameters of [`AdamW`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay of the running mean of gradients and of their squares, below 1.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: a step takes `lr * weight_decay` of each parameter away.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// The hyper-parameters of [`Adam`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay of the running mean of gradients and of their squares, below 1.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// L2: so much of a parameter is added to its gradient.
    pub weight_decay: f64,
}

impl Default for AdamConfig {
    fn default() -> Self {
        AdamConfig { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0. }
    }
}

/// The names of the moments, which are PyTorch's.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// What Adam and AdamW share.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    pub(super) lr: f64,
    pub(super) betas: (f64, f64),
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    pub(super) decoupled: bool,
}

impl Numbers {
    pub(super) fn hyper(&self) -> Map<String, Value> {
        hyper::map([
            ("lr", self.lr.into()),
            ("betas", json!(self.betas)),
            ("eps", self.eps.into()),
            ("weight_decay", self.weight_decay.into()),
            ("decoupled_weight_decay", self.decoupled.into()),
            ("amsgrad", false.into()),
            ("maximize", false.into()),
            ("foreach", Value::Null),
            ("capturable", false.into()),
            ("differentiable", false.into()),
            ("fused", Value::Null),
        ])
    }

    pub(super) fn with(self, hyper: &Map<String, Value>) -> std::result::Result<Self, String> {
        hyper::all_off(hyper, &["amsgrad", "maximize", "differentiable"])?;
        if hyper::switch(hyper, "decoupled_weight_decay", self.decoupled)? != self.decoupled {
            let (theirs, ours) = if self.decoupled { ("Adam", "AdamW") } else { ("AdamW", "Adam") };
            return Err(format!("are of an {theirs} and this is an {ours}: their weight decay is another"));
        }
        let [beta1, beta2] = hyper::numbers(hyper, "betas", [self.betas.0, self.betas.1])?;
        Ok(Numbers {
            lr: hyper::number(hyper, "lr", self.lr)?,
            betas: (beta1, beta2),
            eps: hyper::number(hyper, "eps", self.eps)?,
            weight_decay: hyper::number(hyper, "weight_decay", self.weight_decay)?,
            ..self
        })
    }

    pub(super) fn check(&self) -> std::result::Result<(), String> {
        hyper::at_least_zero(&[("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)])?;
        let betas = [self.betas.0, self.betas.1];
        betas.iter().try_for_each(|&beta| hyper::check("betas", beta, (0. ..1.).contains(&beta), "in 0..1"))
    }

    /// The numbers of one step, worked out in f64.
    pub(super) fn update(&self, step: u64) -> AdamUpdate {
        let (beta1, beta2) = self.betas;
        let step = step as f64;
        AdamUpdate {
            l2: if self.decoupled { 0. } else { self.weight_decay },
            decay: if self.decoupled { 1. - self.lr * self.weight_decay } else { 1. },
            beta1,
            beta2,
            step_size: self.lr / (1. - beta1.powf(step)),
            root_bias_correction2: (1. - beta2.powf(step)).sqrt(),
            eps: self.eps,
        }
    }
}

macro_rules! rule {
    ($config:ident, $name:literal, decoupled: $decoupled:literal) => {
        impl $config {
            pub(super) fn numbers(&self) -> Numbers {
                let $config { lr, betas, eps, weight_decay } = *self;
                Numbers { lr, betas, eps, weight_decay, decoupled: $decoupled }
            }

            fn of(numbers: Numbers) -> Self {
                let Numbers { lr, betas, eps, weight_decay, .. } = numbers;
                $config { lr, betas, eps, weight_decay }
            }
        }

        impl Hyper for $config {
            const NAME: &'static str = $name;

            fn hyper(&self) -> Map<String, Value> {
                self.numbers().hyper()
            }

            fn with(&self, hyper: &Map<String, Value>) -> std::result::Result<Self, String> {
                self.numbers().with(hyper).map($config::of)
            }

            fn check(&self) -> std::result::Result<(), String> {
                self.numbers().check()
            }

            fn lr(&mut self) -> &mut f64 {
                &mut self.lr
            }
        }

        impl Rule for $config {
            fn moments(&self) -> &'static [&'static str] {
                &MOMENTS
            }

            fn update(&self, step: u64, shard: Stepping<'_>) -> Result<()> {
                adam(&self.numbers().update(step), shard)
            }
        }
    };
}
rule!(AdamWConfig, "AdamW", decoupled: true);
rule!(AdamConfig, "Adam", decoupled: false);

pub(super) fn adam(update: &AdamUpdate, shard: Stepping<'_>) -> Result<()> {
    let Stepping { kernels, param, grad, parts } = shard;
    match <[SliceMut<'_>; 2]>::try_from(parts) {
        Ok(moments) => kernels.adam(update, param, grad, moments),
        Err(parts) => bail!("{} moments for Adam, which has two", parts.len()),
    }
}
