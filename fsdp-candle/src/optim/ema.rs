//! A running mean of the parameters themselves.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::hyper;
use crate::error::{Error, Result};
use crate::fsdp::FsdpParam;
use crate::fsdp::ShardedVarMap;
use crate::kernels;
use crate::storage::{copy_tensor, to_core_dtype, to_tensor, with_slice, with_slice_mut};

/// An exponential moving average of parameters, sharded as they are and in F32: PyTorch's `AveragedModel` with
/// `get_ema_multi_avg_fn(decay)`.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
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
/// // The first update takes the parameters as they are.
/// let mean = ema.swapped(&vars, |_| Ok(value()?))?;
/// assert!((mean - (0.75 * (before - 3.) + 0.25 * (before - 6.))).abs() < 1e-6);
/// assert_eq!(value()?, before - 6.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ema {
    decay: f64,
    /// How often it was updated: a scalar of F32, so that a checkpoint fills it in place.
    updates: Tensor,
    means: Vec<(Arc<FsdpParam>, Tensor)>,
}

impl Ema {
    /// The mean of these parameters, which begins as they are. Of a mean an update keeps `decay`.
    ///
    /// # Errors
    /// When the decay is not in 0..1, or there is no memory for the mean.
    pub fn new(params: Vec<Arc<FsdpParam>>, decay: f64) -> Result<Self> {
        hyper::check("decay", decay, (0. ..1.).contains(&decay), "in 0..1")
            .map_err(|why| Error::Argument(format!("an Ema's {why}")))?;
        let mean = |param: Arc<FsdpParam>| {
            let shard = param.var().as_tensor();
            let kernels = kernels::of_device(shard.device())?;
            let fail = |error: fsdp_core::Error| Error::Parameter {
                name: param.name().into(),
                message: format!("its moving average: {error}"),
            };
            let zeros = kernels.zeros(to_core_dtype(DType::F32)?, shard.elem_count()).map_err(fail)?;
            let mean = to_tensor(zeros, shard.dims(), shard.device())?;
            mix(&mean, 0., shard)?;
            Ok((param, mean))
        };
        let means = params.into_iter().map(mean).collect::<Result<_>>()?;
        Ok(Ema { decay, updates: Tensor::new(0f32, &Device::Cpu)?, means })
    }

    /// How often it was updated.
    ///
    /// # Errors
    /// Candle's.
    pub fn updates(&self) -> Result<u64> {
        Ok(self.updates.to_scalar::<f32>()? as u64)
    }

    /// What of the mean an update keeps.
    pub fn decay(&self) -> f64 {
        self.decay
    }

    /// The parameters, and the means of their shards, in F32.
    pub fn means(&self) -> &[(Arc<FsdpParam>, Tensor)] {
        &self.means
    }

    pub(crate) fn count(&self) -> &Tensor {
        &self.updates
    }

    /// Moves the mean towards the parameters: call it after a step. The first time they are the mean. No communication.
    ///
    /// # Errors
    /// Candle's.
    pub fn update(&mut self) -> Result<()> {
        let updates = self.updates()?;
        let kept = if updates == 0 { 0. } else { self.decay };
        for (param, mean) in &self.means {
            mix(mean, kept, param.var())?;
        }
        copy_tensor(&Tensor::new((updates + 1) as f32, &Device::Cpu)?, &self.updates)?;
        Ok(())
    }

    /// Sets the parameters to the mean, rounded to their dtype, whatever they were.
    ///
    /// # Errors
    /// Candle's.
    pub fn copy_to(&self, vars: &ShardedVarMap) -> Result<()> {
        // What was gathered before is stale.
        vars.reshard()?;
        self.means.iter().try_for_each(|(param, mean)| mix(param.var(), 0., mean))
    }

    /// Calls `f`, an evaluation say, with the mean in the parameters, and puts the parameters back as they were,
    /// whether it fails or not. Meanwhile a rank has its shards once more.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn swapped<R>(&self, vars: &ShardedVarMap, f: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let before = self.means.iter().map(|(param, _)| Ok(param.var().as_tensor().copy()?));
        let before = before.collect::<Result<Vec<_>>>()?;
        let outcome = self.copy_to(vars).and_then(|()| f(self));
        vars.reshard()?;
        for ((param, _), before) in self.means.iter().zip(before) {
            copy_tensor(&before, param.var())?;
        }
        outcome
    }
}

/// Keeps a share of values, and takes the rest of others.
fn mix(values: &Tensor, kept: f64, more: &Tensor) -> Result<()> {
    Ok(with_slice_mut(values, |kernels, values| {
        with_slice(more, |_, more| {
            if kept == 0. {
                // Zero times what is not finite is not zero.
                return kernels.cast(more, values);
            }
            kernels.mix(values, kept, more, 1. - kept)
        })
    })?)
}
