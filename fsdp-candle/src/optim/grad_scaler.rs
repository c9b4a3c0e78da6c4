//! Loss scaling for f16, with one verdict over all ranks: PyTorch's `ShardedGradScaler`.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use fsdp_core::ReduceOp;
use fsdp_core::process_group::{Signature, Subject};

use super::adamw::AdamW;
use super::clip::{powers, scale};
use crate::build::ShardedVarMap;
use crate::error::{Error, Result};
use crate::kernels::NormType;

/// Scales losses up so that small gradients survive f16, gradients back down, and skips steps whose gradients
/// overflowed on any rank.
///
/// As `torch.amp.GradScaler`: after an overflow the scale is multiplied by 0.5, after 2000 good steps by 2.
///
/// ```
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
/// # let world = World::single()?;
/// # let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)])?, world.device());
/// # let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear_no_bias(4, 2, vb))?;
/// # let weight = vars.params()[0].var().clone();
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
/// use fsdp_candle::{clip_grad_norm, AdamW, AdamWConfig, GradScaler};
///
/// let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
/// let mut scaler = GradScaler::default();
/// for overflow in [false, true] {
///     let loss = model.forward(&x)?.sum_all()?;
///     let loss = if overflow { (loss * f64::INFINITY)? } else { loss };
///     let mut grads = model.backward(&scaler.scale(&loss)?)?;
///     scaler.unscale(&vars, &mut grads)?;
///     clip_grad_norm(&vars, &mut grads, 1.0)?;
///     let stepped = scaler.step(&mut optim, &grads)?;
///     assert_eq!(stepped, !overflow);
/// }
/// assert_eq!(scaler.current_scale(), 65536. / 2.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct GradScaler {
    scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
    good_steps: u32,
    /// What the last `unscale` found, until a step uses it.
    overflowed: Option<bool>,
}

impl Default for GradScaler {
    fn default() -> Self {
        Self::new(65536.)
    }
}

impl GradScaler {
    /// A scaler that starts at `scale`.
    pub fn new(scale: f64) -> Self {
        GradScaler {
            scale,
            growth_factor: 2.,
            backoff_factor: 0.5,
            growth_interval: 2000,
            good_steps: 0,
            overflowed: None,
        }
    }

    /// After how many good steps in a row the scale doubles.
    pub fn growth_interval(mut self, steps: u32) -> Self {
        self.growth_interval = steps.max(1);
        self
    }

    /// The scale of the next loss.
    pub fn current_scale(&self) -> f64 {
        self.scale
    }

    /// The loss times the scale: what backward takes.
    ///
    /// # Errors
    /// Candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok((loss * self.scale)?)
    }

    /// Divides the sharded gradients by the scale, and finds out whether any rank's hold an infinity or a NaN; all
    /// ranks that a trainable parameter lives on get the same answer. Collective. Ignored parameters' gradients are the
    /// caller's.
    ///
    /// # Errors
    /// Those of the all-reduce, and when it is called twice before a step.
    pub fn unscale(&mut self, vars: &ShardedVarMap, grads: &mut GradStore) -> Result<bool> {
        if self.overflowed.is_some() {
            return Err(Error::Argument(
                "GradScaler::unscale was called twice: call step before the next unscale".into(),
            ));
        }
        let params = vars.trainable();
        let own: Vec<_> = params.iter().filter_map(|param| grads.get(param.var())).collect();
        let finite = powers(own.iter().copied(), NormType::Infinity)?.iter().all(|largest| largest.is_finite());
        own.iter().try_for_each(|grad| scale(grad, 1. / self.scale))?;
        // From the smallest mesh to the largest, whose ranks are those of all: each of them covers the map's.
        let mut meshes = vars.all_ranks()?;
        meshes.sort_by_key(|ranks| ranks.mesh().size());
        let subject = Subject::new("GradScaler's verdict", []);
        let mut overflowed = u32::from(!finite);
        for group in meshes.iter().flat_map(|ranks| std::iter::once(ranks.shard()).chain(ranks.replicate())) {
            let group = group.signed(Signature::new(&subject, []));
            overflowed = group.all_reduce_scalar(overflowed, ReduceOp::Max)?;
        }
        self.overflowed = Some(overflowed != 0);
        Ok(overflowed != 0)
    }

    /// Steps the optimizer unless the gradients overflowed, and sets the next scale. Tells whether it stepped.
    ///
    /// # Errors
    /// The optimizer's, and when the gradients were not unscaled.
    pub fn step(&mut self, optim: &mut AdamW, grads: &GradStore) -> Result<bool> {
        let Some(overflowed) = self.overflowed.take() else {
            return Err(Error::Argument("GradScaler::step needs unscaled gradients: call unscale first".into()));
        };
        if overflowed {
            self.scale *= self.backoff_factor;
            self.good_steps = 0;
            return Ok(false);
        }
        optim.step(grads)?;
        self.good_steps += 1;
        if self.good_steps == self.growth_interval {
            self.scale *= self.growth_factor;
            self.good_steps = 0;
        }
        Ok(true)
    }
}
