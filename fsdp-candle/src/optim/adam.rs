//! Adam, AdamW and AdamW with 8-bit moments: one pass over parameter, gradient and moments.
//!
//! Kingma and Ba, "Adam" (arXiv:1412.6980); Loshchilov and Hutter, "Decoupled Weight Decay Regularization"
//! (arXiv:1711.05101); Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861). The
//! arithmetic is that of PyTorch's `torch.optim.Adam` and `torch.optim.AdamW`.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use candle_nn::ParamsAdamW;
use serde_json::{Map, Value, json};

use super::elementwise::{ElementwiseOptimizer, ElementwiseRule};
use super::hyper_parameters::{self as hyper, HyperParameters};
use super::moment_kind::{Encoding, MomentKind};
use super::shard_update::ShardUpdate;
use crate::fsdp::FsdpParam;
use crate::kernels::{AdamUpdate, SliceMut};

/// AdamW over the shards of parameters.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{AdamW, AdamWConfig};
///
/// // Two groups: biases without weight decay.
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
pub type AdamW = ElementwiseOptimizer<AdamWConfig>;

/// Adam over the shards of parameters: [`AdamW`] with weight decay added to the gradients (L2).
pub type Adam = ElementwiseOptimizer<AdamConfig>;

/// The hyper-parameters of [`AdamW`], with PyTorch's defaults.
pub type AdamWConfig = AdamParams<true>;

/// The hyper-parameters of [`Adam`], with PyTorch's defaults.
pub type AdamConfig = AdamParams<false>;

/// The hyper-parameters of Adam, whose weight decay is `DECOUPLED` in AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamParams<const DECOUPLED: bool> {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay rates of the means of gradients and squared gradients, below 1.
    pub betas: (f64, f64),
    /// Term added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: a step subtracts `lr * weight_decay` times the parameter. Otherwise an L2 penalty: this
    /// multiple of a parameter is added to its gradient.
    pub weight_decay: f64,
}

impl<const DECOUPLED: bool> Default for AdamParams<DECOUPLED> {
    fn default() -> Self {
        AdamParams { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: if DECOUPLED { 0.01 } else { 0. } }
    }
}

impl AdamW {
    /// Makes an optimizer of these parameters with a learning rate and PyTorch's other defaults, as
    /// [`candle_nn::AdamW::new_lr`]. Fails as [`AdamW::new`](ElementwiseOptimizer::new) does.
    pub fn new_lr(params: Vec<Arc<FsdpParam>>, lr: f64) -> crate::error::Result<Self> {
        Self::new(params, AdamWConfig { lr, ..AdamWConfig::default() })
    }
}

/// Candle's hyper-parameters: `AdamW::new(vars.trainable(), ParamsAdamW::default())`.
impl From<ParamsAdamW> for AdamWConfig {
    fn from(ParamsAdamW { lr, beta1, beta2, eps, weight_decay }: ParamsAdamW) -> Self {
        AdamWConfig { lr, betas: (beta1, beta2), eps, weight_decay }
    }
}

/// Names of the moments, as in PyTorch.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

impl<const DECOUPLED: bool> AdamParams<DECOUPLED> {
    /// Returns the numbers of one step, computed in f64.
    fn numbers(&self, step: u64, factor: f64) -> AdamUpdate {
        let (beta1, beta2) = self.betas;
        let step = step as f64;
        AdamUpdate {
            factor,
            l2: if DECOUPLED { 0. } else { self.weight_decay },
            decay: if DECOUPLED { 1. - self.lr * self.weight_decay } else { 1. },
            beta1,
            beta2,
            step_size: self.lr / (1. - beta1.powf(step)),
            root_bias_correction2: (1. - beta2.powf(step)).sqrt(),
            eps: self.eps,
        }
    }
}

impl<const DECOUPLED: bool> HyperParameters for AdamParams<DECOUPLED> {
    const NAME: &'static str = if DECOUPLED { "AdamW" } else { "Adam" };

    fn hyper(&self) -> Map<String, Value> {
        hyper::map([
            ("lr", self.lr.into()),
            ("betas", json!(self.betas)),
            ("eps", self.eps.into()),
            ("weight_decay", self.weight_decay.into()),
            ("decoupled_weight_decay", DECOUPLED.into()),
            ("amsgrad", false.into()),
            ("maximize", false.into()),
            ("foreach", Value::Null),
            ("capturable", false.into()),
            ("differentiable", false.into()),
            ("fused", Value::Null),
        ])
    }

    fn with(&self, hyper: &Map<String, Value>) -> std::result::Result<Self, String> {
        hyper::check_off(hyper, &["amsgrad", "maximize", "differentiable"])?;
        if hyper::flag(hyper, "decoupled_weight_decay", DECOUPLED)? != DECOUPLED {
            let (theirs, ours) = if DECOUPLED { ("Adam", "AdamW") } else { ("AdamW", "Adam") };
            return Err(format!("are those of {theirs}, expected {ours}: their weight decay differs"));
        }
        let [beta1, beta2] = hyper::numbers(hyper, "betas", [self.betas.0, self.betas.1])?;
        Ok(AdamParams {
            lr: hyper::number(hyper, "lr", self.lr)?,
            betas: (beta1, beta2),
            eps: hyper::number(hyper, "eps", self.eps)?,
            weight_decay: hyper::number(hyper, "weight_decay", self.weight_decay)?,
        })
    }

    fn check(&self) -> std::result::Result<(), String> {
        hyper::at_least_zero(&[("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)])?;
        let betas = [self.betas.0, self.betas.1];
        betas.iter().try_for_each(|&beta| hyper::check_range("betas", beta, (0. ..1.).contains(&beta), "in 0..1"))
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }
}

impl<const DECOUPLED: bool> ElementwiseRule for AdamParams<DECOUPLED> {
    fn moments(&self) -> &'static [&'static str] {
        &MOMENTS
    }

    fn update(&self, step: u64, factor: f64, shard: ShardUpdate<'_>) -> Result<()> {
        adam(&self.numbers(step, factor), shard)
    }
}

fn adam(update: &AdamUpdate, shard: ShardUpdate<'_>) -> Result<()> {
    let ShardUpdate { kernels, param, grad, parts } = shard;
    match <[SliceMut<'_>; 2]>::try_from(parts) {
        Ok(moments) => kernels.adam(update, param, grad, moments),
        Err(parts) => bail!("{} moments for Adam, expected two", parts.len()),
    }
}

/// [`crate::AdamW`] with moments in 8 bits: 2.03 bytes an element instead of 8.
///
/// Each block of 256 elements has an F32 scale, its largest magnitude. The mean of gradients has a sign and 7 bits over
/// six decades below the scale; the square root of the mean of squares has 8 bits over seven decades. Within a factor
/// of ten of the block's largest magnitude, rounding changes a mean by at most 0.7 % of that magnitude and a root by at
/// most 0.35 %. Each lower decade has twice that share of the decade's largest magnitude. A step computes in F32.
/// Parameters with few elements (norms, biases) keep moments in their own dtype.
///
/// State dicts and checkpoints hold the moments in F32, as AdamW's do, so either optimizer resumes from the other's, at
/// any number of ranks. At the same number of ranks nothing is rounded again and a run resumes with the same bits.
/// Other shards have other blocks, which are rounded once more. Parameters are F32, BF16 or F16; other dtypes are
/// refused unless the parameter has few elements.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(64, 64, vb))?;
/// # let x = Tensor::ones((3, 64), DType::F32, world.device())?;
/// use fsdp_candle::{AdamW8bit, AdamW8bitConfig};
///
/// let mut optim = AdamW8bit::new(vars.trainable(), AdamW8bitConfig::default())?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// let bytes: Vec<_> = optim.states().iter().map(|state| (state.param.name(), state.bytes())).collect();
/// assert_eq!(bytes, [("weight", 2 * (4096 + 4 * 16)), ("bias", 2 * 4 * 64)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type AdamW8bit = ElementwiseOptimizer<AdamW8bitConfig>;

/// The hyper-parameters of [`AdamW8bit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bitConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay rates of the means of gradients and squared gradients, below 1.
    pub betas: (f64, f64),
    /// Term added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: a step subtracts `lr * weight_decay` times the parameter.
    pub weight_decay: f64,
    /// Parameters with fewer elements, over all ranks, keep moments in their own dtype.
    pub min_8bit_size: usize,
}

impl Default for AdamW8bitConfig {
    fn default() -> Self {
        AdamW8bitConfig::of(AdamWConfig::default(), 4096)
    }
}

impl AdamW8bitConfig {
    fn of(config: AdamWConfig, min_8bit_size: usize) -> Self {
        let AdamWConfig { lr, betas, eps, weight_decay } = config;
        AdamW8bitConfig { lr, betas, eps, weight_decay, min_8bit_size }
    }

    fn adamw(&self) -> AdamWConfig {
        let AdamW8bitConfig { lr, betas, eps, weight_decay, .. } = *self;
        AdamWConfig { lr, betas, eps, weight_decay }
    }
}

impl HyperParameters for AdamW8bitConfig {
    const NAME: &'static str = "AdamW8bit";

    fn hyper(&self) -> Map<String, Value> {
        self.adamw().hyper()
    }

    fn with(&self, hyper: &Map<String, Value>) -> std::result::Result<Self, String> {
        Ok(AdamW8bitConfig::of(self.adamw().with(hyper)?, self.min_8bit_size))
    }

    fn check(&self) -> std::result::Result<(), String> {
        self.adamw().check()
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }
}

impl ElementwiseRule for AdamW8bitConfig {
    fn moments(&self) -> &'static [&'static str] {
        &MOMENTS
    }

    fn kind(&self, name: &str, param: &FsdpParam) -> crate::error::Result<MomentKind> {
        let dtype = param.var().dtype();
        if param.shape().elem_count() < self.min_8bit_size {
            return Ok(MomentKind::Full(dtype));
        }
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(param.error(format!(
                "it is {dtype:?}, expected F32, BF16 or F16 for 8-bit moments: use AdamW for it, or raise \
                 `min_8bit_size` above its {} elements",
                param.shape().elem_count()
            )));
        }
        Ok(MomentKind::Quantized(if name == MOMENTS[0] { Encoding::Values } else { Encoding::SquareRoots }))
    }

    fn update(&self, step: u64, factor: f64, shard: ShardUpdate<'_>) -> Result<()> {
        let update = self.adamw().numbers(step, factor);
        let ShardUpdate { kernels, param, grad, parts } = shard;
        match <[SliceMut<'_>; 4]>::try_from(parts) {
            Ok(moments) => kernels.adam_8bit(&update, param, grad, moments),
            Err(parts) => adam(&update, ShardUpdate { kernels, param, grad, parts }),
        }
    }
}
