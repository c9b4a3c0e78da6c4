//! Stochastic gradient descent. The arithmetic is that of PyTorch's `torch.optim.SGD`.

use candle_core::Result;
use serde_json::{Map, Value};

use super::elementwise::{ElementwiseOptimizer, ElementwiseRule};
use super::hyper_parameters::{self as hyper, HyperParameters};
use super::shard_update::ShardUpdate;
use crate::kernels::SgdUpdate;

/// Stochastic gradient descent over the shards of parameters, with optional momentum and Nesterov momentum.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear)?;
/// use fsdp_candle::{SGD, SgdConfig};
///
/// let config = SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, ..SgdConfig::default() };
/// let mut optim = SGD::new(vars.trainable(), config)?;
/// optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?;
/// assert_eq!(optim.states()[1].tensor("momentum_buffer")?.to_vec1::<f32>()?, [3., 3.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type SGD = ElementwiseOptimizer<SgdConfig>;

/// The hyper-parameters of [`SGD`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Momentum factor; 0 keeps no buffer.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// L2 penalty: this multiple of a parameter is added to its gradient.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum, which needs momentum and no dampening.
    pub nesterov: bool,
}

/// A learning rate, without momentum: `SGD::new(vars.trainable(), 0.1)`, as Candle's.
impl From<f64> for SgdConfig {
    fn from(lr: f64) -> Self {
        SgdConfig { lr, ..SgdConfig::default() }
    }
}

impl Default for SgdConfig {
    fn default() -> Self {
        SgdConfig { lr: 1e-3, momentum: 0., dampening: 0., weight_decay: 0., nesterov: false }
    }
}

impl HyperParameters for SgdConfig {
    const NAME: &'static str = "SGD";

    fn hyper(&self) -> Map<String, Value> {
        hyper::map([
            ("lr", self.lr.into()),
            ("momentum", self.momentum.into()),
            ("dampening", self.dampening.into()),
            ("weight_decay", self.weight_decay.into()),
            ("nesterov", self.nesterov.into()),
            ("maximize", false.into()),
            ("foreach", Value::Null),
            ("differentiable", false.into()),
            ("fused", Value::Null),
        ])
    }

    fn with(&self, hyper: &Map<String, Value>) -> std::result::Result<Self, String> {
        hyper::check_off(hyper, &["maximize", "differentiable"])?;
        Ok(SgdConfig {
            lr: hyper::number(hyper, "lr", self.lr)?,
            momentum: hyper::number(hyper, "momentum", self.momentum)?,
            dampening: hyper::number(hyper, "dampening", self.dampening)?,
            weight_decay: hyper::number(hyper, "weight_decay", self.weight_decay)?,
            nesterov: hyper::flag(hyper, "nesterov", self.nesterov)?,
        })
    }

    fn check(&self) -> std::result::Result<(), String> {
        hyper::at_least_zero(&[("lr", self.lr), ("momentum", self.momentum), ("weight_decay", self.weight_decay)])?;
        match self.nesterov && (self.momentum <= 0. || self.dampening != 0.) {
            true => Err(format!(
                "Nesterov momentum needs `momentum` above 0, found {}, and no `dampening`, found {}",
                self.momentum, self.dampening
            )),
            false => Ok(()),
        }
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }
}

impl ElementwiseRule for SgdConfig {
    const MAY_LACK_STEP: bool = true;

    fn moments(&self) -> &'static [&'static str] {
        if self.momentum == 0. { &[] } else { &["momentum_buffer"] }
    }

    fn update(&self, step: u64, factor: f64, shard: ShardUpdate<'_>) -> Result<()> {
        let ShardUpdate { kernels, param, grad, parts } = shard;
        // The first gradient becomes the buffer, without dampening.
        let (kept, taken) = if step > 1 { (self.momentum, 1. - self.dampening) } else { (0., 1.) };
        let nesterov = self.nesterov.then_some(self.momentum);
        let update = SgdUpdate { factor, l2: self.weight_decay, kept, taken, nesterov, lr: self.lr };
        kernels.sgd(&update, param, grad, parts.into_iter().next().filter(|_| self.momentum != 0.))
    }
}
