//! AdamW on shards with moments in 8 bits.
//!
//! Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).

use candle_core::{DType, Result};
use serde_json::{Map, Value};

use super::adam::{AdamWConfig, MOMENTS, adam};
use super::moment::Moment;
use super::packed::PackedOf;
use super::per_shard::{Hyper, Rule, ShardOptimizer, Stepping};
use crate::error::Error;
use crate::fsdp::FsdpParam;
use crate::kernels::SliceMut;

/// [`crate::AdamW`] whose moments are kept in 8 bits: a quarter of the memory, 2.03 bytes an element in the place of 8.
///
/// Each block of 256 elements of a shard has a scale in F32, its largest magnitude. The running mean of gradients has a
/// sign and 7 bits over six decades below the scale, and the root of that of their squares 8 bits over seven: within a
/// factor of ten of its block's largest, rounding changes a mean by at most 0.7 % of that largest and a root by at most
/// 0.35 %, and in each decade below by twice as much of that decade's largest. A step computes in F32 with what it has
/// decoded. Parameters of few elements (norms, biases) keep moments in their own dtype.
///
/// State dicts and checkpoints hold the moments in F32, as AdamW's: each goes on from the other's, at any number of
/// ranks. At the same number nothing is rounded again, so a run goes on with the same bits; other shards have other
/// blocks, and are rounded once more. Parameters are F32, BF16 or F16; others are refused, unless they are of few
/// elements.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
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
pub type AdamW8bit = ShardOptimizer<AdamW8bitConfig>;

/// The hyper-parameters of [`AdamW8bit`]: AdamW's, and from which size on moments are in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bitConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay of the running mean of gradients and of their squares, below 1.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: a step takes `lr * weight_decay` of each parameter away.
    pub weight_decay: f64,
    /// Parameters of fewer elements, over all ranks, keep moments in their own dtype.
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

impl Hyper for AdamW8bitConfig {
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

impl Rule for AdamW8bitConfig {
    fn moments(&self) -> &'static [&'static str] {
        &MOMENTS
    }

    fn moment(&self, name: &str, param: &FsdpParam) -> crate::error::Result<Moment> {
        if param.shape().elem_count() < self.min_8bit_size {
            return Moment::zeros(param);
        }
        let dtype = param.var().dtype();
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            let message = format!(
                "it is {dtype:?}, and moments in 8 bits are of F32, BF16 or F16: leave it to AdamW, or raise \
                 `min_8bit_size` above its {} elements",
                param.shape().elem_count()
            );
            return Err(Error::Parameter { name: param.name().into(), message });
        }
        Moment::packed(param, if name == MOMENTS[0] { PackedOf::Values } else { PackedOf::Roots })
    }

    fn update(&self, step: u64, shard: Stepping<'_>) -> Result<()> {
        let update = self.adamw().numbers().update(step);
        let Stepping { kernels, param, grad, parts } = shard;
        match <[SliceMut<'_>; 4]>::try_from(parts) {
            Ok(moments) => kernels.adam_8bit(&update, param, grad, moments),
            Err(parts) => adam(&update, Stepping { kernels, param, grad, parts }),
        }
    }
}
