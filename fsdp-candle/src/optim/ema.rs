//! Exponential moving averages of parameters.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::hyper_parameters as hyper;
use super::reach::check_not_empty;
use super::state::zeros;
use crate::error::{Error, Result};
use crate::fsdp::{FsdpParam, ShardedVarMap};
use crate::storage::{copy_tensor, with_slice, with_slice_mut};

/// An exponential moving average of parameters, sharded as the parameters are, in F32: PyTorch's `AveragedModel` with
/// `get_ema_multi_avg_fn(decay)`.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
/// use fsdp_candle::{Ema, SGD, SgdConfig};
///
/// let mut optim = SGD::new(vars.trainable(), SgdConfig { lr: 1., ..SgdConfig::default() })?;
/// let mut ema = Ema::new(vars.params(), 0.75)?;
/// let before = vars.params()[0].var().to_vec2::<f32>()?[0][0];
/// for _ in 0..2 {
///     optim.step(&model.backward(&model.forward(&x)?.sum_all()?)?)?; // gradients of 3
///     ema.update()?;
/// }
/// let value = || -> candle_core::Result<f32> { Ok(vars.params()[0].var().to_vec2::<f32>()?[0][0]) };
/// assert_eq!(value()?, before - 6.);
/// // The first update copies the parameters.
/// let mean = ema.swapped(&vars, |_| Ok(value()?))?;
/// assert!((mean - (0.75 * (before - 3.) + 0.25 * (before - 6.))).abs() < 1e-6);
/// assert_eq!(value()?, before - 6.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    /// Number of updates: a scalar of F32, so that a checkpoint fills it in place.
    updates: Tensor,
    means: Vec<(Arc<FsdpParam>, Tensor)>,
}

impl Ema {
    /// Makes an average of the parameters. Before the first update it has their present values. The first update copies
    /// the parameters, and each later one keeps `decay` of the average. So call [`Ema::update`] only after optimizer
    /// steps. Fails if there are no parameters, the decay is not in 0..1 or there is not enough memory.
    pub fn new(params: Vec<Arc<FsdpParam>>, decay: f64) -> Result<Self> {
        hyper::check_range("decay", decay, (0. ..1.).contains(&decay), "in 0..1")
            .map_err(|why| Error::Argument(format!("Ema: {why}")))?;
        check_not_empty("Ema", params.is_empty())?;
        let mean = |param: Arc<FsdpParam>| {
            if let Some(blocks) = param.spec.encoding.blocks() {
                let format = blocks.format.name();
                return Err(
                    param.error(format!("it is stored as {format} and never changes: leave it out of the average"))
                );
            }
            let shard = param.shard.values()?;
            let mean = zeros(&param, "moving average", DType::F32, shard.dims())?;
            mix(&mean, 0., &shard)?;
            Ok((param, mean))
        };
        let means = params.into_iter().map(mean).collect::<Result<_>>()?;
        Ok(Ema { decay, updates: Tensor::new(0f32, &Device::Cpu)?, means })
    }

    /// Returns the number of updates.
    pub fn updates(&self) -> Result<u64> {
        Ok(self.updates.to_scalar::<f32>()? as u64)
    }

    /// Returns the decay.
    pub fn decay(&self) -> f64 {
        self.decay
    }

    /// Returns the parameters and the averages of their shards, in F32.
    pub fn means(&self) -> &[(Arc<FsdpParam>, Tensor)] {
        &self.means
    }

    pub(crate) fn count(&self) -> &Tensor {
        &self.updates
    }

    /// Updates the average; call it after a step. The first update copies the parameters. Does not communicate.
    pub fn update(&mut self) -> Result<()> {
        let updates = self.updates()?;
        let kept = if updates == 0 { 0. } else { self.decay };
        for (param, mean) in &self.means {
            mix(mean, kept, &param.shard.values()?)?;
        }
        copy_tensor(&Tensor::new((updates + 1) as f32, &Device::Cpu)?, &self.updates)?;
        Ok(())
    }

    /// Copies the average to the parameters, rounded to their dtype.
    pub fn copy_to(&self, vars: &ShardedVarMap) -> Result<()> {
        // Gathered parameters are stale.
        vars.reshard()?;
        self.means.iter().try_for_each(|(param, mean)| param.shard.update(|shard| mix(shard, 0., mean)))
    }

    /// Calls `f`, such as an evaluation, with the average in the parameters, then restores the parameters even if `f`
    /// fails. Needs a copy of this rank's shards meanwhile.
    pub fn swapped<R>(&self, vars: &ShardedVarMap, f: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let before = self.means.iter().map(|(param, _)| Ok(param.shard.values()?.copy()?));
        let before = before.collect::<Result<Vec<_>>>()?;
        let outcome = self.copy_to(vars).and_then(|()| f(self));
        vars.reshard()?;
        for ((param, _), before) in self.means.iter().zip(before) {
            param.shard.set(&before)?;
        }
        outcome
    }
}

/// Computes `kept * values + (1 - kept) * more` in place.
fn mix(values: &Tensor, kept: f64, more: &Tensor) -> candle_core::Result<()> {
    with_slice_mut(values, |kernels, values| {
        with_slice(more, |_, more| {
            if kept == 0. {
                // Zero times NaN or infinity is not zero.
                return kernels.cast(more, values);
            }
            kernels.mix(values, kept, more, 1. - kept)
        })
    })
}
