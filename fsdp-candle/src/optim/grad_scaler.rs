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
    state: GradScalerState,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
    /// What the last `unscale` found, until a step uses it.
    overflowed: Option<bool>,
}

/// What a run that goes on has to know of its [`GradScaler`]: `scale` and `_growth_tracker` of PyTorch's `state_dict`.
///
/// ```
/// use fsdp_candle::{GradScaler, GradScalerState};
///
/// let mut scaler = GradScaler::default();
/// assert_eq!(scaler.state(), GradScalerState { scale: 65536., growth_tracker: 0 });
/// scaler.load_state(GradScalerState { scale: 1024., growth_tracker: 7 })?;
/// assert_eq!(scaler.current_scale(), 1024.);
/// assert!(scaler.load_state(GradScalerState { scale: 0., growth_tracker: 7 }).is_err());
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerState {
    /// The scale of the next loss.
    pub scale: f64,
    /// How many good steps there have been since the scale last changed.
    pub growth_tracker: u32,
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
            state: GradScalerState { scale, growth_tracker: 0 },
            growth_factor: 2.,
            backoff_factor: 0.5,
            growth_interval: 2000,
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
        self.state.scale
    }

    /// What a checkpoint is to keep. Take it between steps.
    pub fn state(&self) -> GradScalerState {
        self.state
    }

    /// Goes on as the scaler did whose state this is.
    ///
    /// # Errors
    /// When the scale is no positive number that f32 has room for. Nothing is changed then.
    pub fn load_state(&mut self, state: GradScalerState) -> Result<()> {
        if !is_scale(state.scale) {
            let scale = state.scale;
            return Err(Error::Argument(format!("a loss scale of {scale}: it must be a positive number within f32")));
        }
        (self.state, self.overflowed) = (state, None);
        Ok(())
    }

    /// The loss times the scale: what backward takes.
    ///
    /// # Errors
    /// Candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok((loss * self.state.scale)?)
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
        own.iter().try_for_each(|grad| scale(grad, 1. / self.state.scale))?;
        // From the smallest mesh to the largest, whose ranks are those of all: each of them covers the map's
        // data-parallel ranks, beside which others have the other parts.
        let mut meshes = vars.all_ranks()?;
        meshes.sort_by_key(|ranks| ranks.data().size());
        let subject = Subject::new("GradScaler's verdict", []);
        let mut overflowed = u32::from(!finite);
        let own = vars.ranks()?;
        let data = meshes.iter().flat_map(|ranks| std::iter::once(ranks.shard()).chain(ranks.replicate()));
        for group in own.other_groups().chain(data) {
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
        if !overflowed {
            optim.step(grads)?;
        }
        self.update(overflowed);
        Ok(!overflowed)
    }

    /// Sets the next scale. As in PyTorch, it does not grow beyond f32.
    fn update(&mut self, overflowed: bool) {
        let GradScalerState { scale, growth_tracker } = &mut self.state;
        *growth_tracker += 1;
        if overflowed {
            (*scale, *growth_tracker) = (*scale * self.backoff_factor, 0);
        } else if *growth_tracker >= self.growth_interval {
            let grown = *scale * self.growth_factor;
            (*scale, *growth_tracker) = (if is_scale(grown) { grown } else { *scale }, 0);
        }
    }
}

/// Whether losses, which are f32, can be multiplied and gradients divided by it.
fn is_scale(scale: f64) -> bool {
    let single = scale as f32;
    single > 0. && single.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(scaler: &mut GradScaler, verdicts: impl IntoIterator<Item = bool>) -> (f64, u32) {
        verdicts.into_iter().for_each(|overflowed| scaler.update(overflowed));
        (scaler.state().scale, scaler.state().growth_tracker)
    }

    #[test]
    fn the_scale_grows_after_good_steps_in_a_row_and_falls_after_a_bad_one() {
        let mut scaler = GradScaler::new(64.).growth_interval(3);
        assert_eq!(after(&mut scaler, [false; 2]), (64., 2));
        assert_eq!(after(&mut scaler, [true]), (32., 0));
        assert_eq!(after(&mut scaler, [false; 3]), (64., 0));
        assert_eq!(after(&mut scaler, [false; 7]), (256., 1));
        assert_eq!(after(&mut scaler, [true; 3]), (32., 0));
    }

    #[test]
    fn one_that_goes_on_has_the_scales_of_one_that_never_stopped() {
        let verdicts = [false, false, true, false, false, false, false, true, false];
        for stop in 0..verdicts.len() {
            let mut undisturbed = GradScaler::new(8.).growth_interval(3);
            after(&mut undisturbed, verdicts[..stop].iter().copied());
            let mut resumed = GradScaler::new(1.).growth_interval(3);
            resumed.load_state(undisturbed.state()).unwrap();
            for &overflowed in &verdicts[stop..] {
                assert_eq!(after(&mut resumed, [overflowed]), after(&mut undisturbed, [overflowed]));
            }
        }
    }

    #[test]
    fn a_tracker_of_a_longer_interval_is_due_at_once() {
        let mut scaler = GradScaler::new(1.).growth_interval(3);
        scaler.load_state(GradScalerState { scale: 4., growth_tracker: 100 }).unwrap();
        assert_eq!(after(&mut scaler, [false]), (8., 0));
    }

    #[test]
    fn scales_stay_within_f32() {
        let largest = 2f64.powi(127);
        let mut scaler = GradScaler::new(largest).growth_interval(1);
        assert_eq!(after(&mut scaler, [false, false]), (largest, 0));
        let before = scaler.state();
        for scale in [0., -1., f64::NAN, f64::INFINITY, 2. * largest, 1e-60] {
            let error = scaler.load_state(GradScalerState { scale, growth_tracker: 1 }).unwrap_err().to_string();
            assert!(error.contains("a loss scale of"), "{error}");
            assert_eq!(scaler.state(), before);
        }
    }
}
