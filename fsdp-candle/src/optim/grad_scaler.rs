//! Loss scaling for f16, with one result over all ranks: PyTorch's `ShardedGradScaler`.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use fsdp_core::ReduceOp;
use fsdp_core::process_group::{Signature, Subject};

use super::candle_loop::note_scaled;
use super::clip_grad::{powers, scale};
use super::sharded_optimizer::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;
use crate::kernels::NormType;

/// Scales losses up, so that small gradients survive f16, and gradients back down. Skips steps whose gradients
/// overflowed on any rank.
///
/// As in `torch.amp.GradScaler`, the scale is multiplied by 0.5 after an overflow and by 2 after 2000 good steps.
///
/// ```
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, model, x) = one_layer(nn::linear_no_bias)?;
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
///     let stepped = scaler.step(&mut optim, &grads)?; // each optimizer that has a share of these gradients
///     assert_eq!(stepped, !overflow);
///     scaler.update()?;
/// }
/// assert_eq!(scaler.current_scale(), 65536. / 2.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct GradScaler {
    enabled: bool,
    state: GradScalerState,
    /// Shards whose gradients were unscaled since the last update.
    unscaled: HashMap<TensorId, Unscaled>,
    /// Whether any of them overflowed; `None` before `unscale` is called.
    any_overflowed: Option<bool>,
}

/// The state of a gradient since the last update.
#[derive(Clone, Copy, Debug)]
struct Unscaled {
    /// Whether it, or a gradient unscaled with it, overflowed on any rank.
    overflowed: bool,
    /// Whether an optimizer stepped on it or skipped it.
    stepped: bool,
}

/// The state of a [`GradScaler`] in a checkpoint: PyTorch's `state_dict`.
///
/// ```
/// use fsdp_candle::{GradScaler, GradScalerState};
///
/// let mut scaler = GradScaler::default();
/// assert_eq!((scaler.state().scale, scaler.state().growth_tracker), (65536., 0));
/// let saved = GradScalerState { scale: 1024., growth_tracker: 7, ..scaler.state() };
/// scaler.load_state(saved)?;
/// assert_eq!(scaler.current_scale(), 1024.);
/// assert!(scaler.load_state(GradScalerState { scale: 0., ..saved }).is_err());
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerState {
    /// Scale of the next loss.
    pub scale: f64,
    /// Factor after enough good steps, above 1.
    pub growth_factor: f64,
    /// Factor after an overflow, below 1.
    pub backoff_factor: f64,
    /// Number of good steps in a row before the scale grows, at least 1.
    pub growth_interval: u32,
    /// Number of good steps since the scale last changed: PyTorch's `_growth_tracker`.
    pub growth_tracker: u32,
}

impl Default for GradScalerState {
    /// Returns PyTorch's defaults.
    fn default() -> Self {
        GradScalerState {
            scale: 65536.,
            growth_factor: 2.,
            backoff_factor: 0.5,
            growth_interval: 2000,
            growth_tracker: 0,
        }
    }
}

impl GradScalerState {
    fn check(&self) -> Result<()> {
        let GradScalerState { scale, growth_factor, backoff_factor, growth_interval, .. } = *self;
        let fail = |why: String| Err(Error::Argument(why));
        if !is_scale(scale) {
            return fail(format!("a loss scale of {scale}, expected a positive number within f32"));
        }
        if !(growth_factor > 1. && growth_factor.is_finite()) {
            return fail(format!("a growth factor of {growth_factor}, expected a number above 1"));
        }
        if !(backoff_factor > 0. && backoff_factor < 1.) {
            return fail(format!("a backoff factor of {backoff_factor}, expected a number between 0 and 1"));
        }
        if growth_interval == 0 {
            return fail("a growth interval of 0 steps, expected at least 1".into());
        }
        Ok(())
    }
}

impl Default for GradScaler {
    fn default() -> Self {
        Self::new(GradScalerState::default().scale)
    }
}

impl GradScaler {
    /// Makes a scaler that starts at `scale`, with PyTorch's factors.
    pub fn new(scale: f64) -> Self {
        GradScaler {
            enabled: true,
            state: GradScalerState { scale, ..GradScalerState::default() },
            unscaled: HashMap::new(),
            any_overflowed: None,
        }
    }

    /// Makes a scaler that does nothing, so that the same training loop runs in f32: PyTorch's
    /// `GradScaler(enabled=False)`.
    pub fn disabled() -> Self {
        GradScaler { enabled: false, ..Self::new(1.) }
    }

    /// Returns whether the scaler is enabled.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the scale of the next loss; 1 if the scaler is disabled.
    pub fn current_scale(&self) -> f64 {
        if self.enabled { self.state.scale } else { 1. }
    }

    /// Sets the scale of the next loss: PyTorch's `update(new_scale)`. Fails unless the scale is a positive number
    /// within f32.
    pub fn set_scale(&mut self, scale: f64) -> Result<()> {
        self.set(GradScalerState { scale, ..self.state })
    }

    /// Sets the factor after enough good steps. Fails unless the factor is above 1.
    pub fn set_growth_factor(&mut self, factor: f64) -> Result<()> {
        self.set(GradScalerState { growth_factor: factor, ..self.state })
    }

    /// Sets the factor after an overflow. Fails unless the factor is between 0 and 1.
    pub fn set_backoff_factor(&mut self, factor: f64) -> Result<()> {
        self.set(GradScalerState { backoff_factor: factor, ..self.state })
    }

    /// Sets the number of good steps in a row before the scale grows. Fails if the number is 0.
    pub fn set_growth_interval(&mut self, steps: u32) -> Result<()> {
        self.set(GradScalerState { growth_interval: steps, ..self.state })
    }

    fn set(&mut self, state: GradScalerState) -> Result<()> {
        state.check()?;
        self.state = state;
        Ok(())
    }

    /// Returns the state for a checkpoint. Call it between steps.
    pub fn state(&self) -> GradScalerState {
        self.state
    }

    /// Restores a state. A disabled scaler stays disabled. Fails, and changes nothing, if a value is out of range.
    pub fn load_state(&mut self, state: GradScalerState) -> Result<()> {
        self.set(state)?;
        self.clear();
        Ok(())
    }

    fn clear(&mut self) {
        self.unscaled.clear();
        self.any_overflowed = None;
    }

    /// Multiplies the loss by the scale, for backward.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.enabled {
            return Ok(loss.clone());
        }
        let scaled = (loss * self.state.scale)?;
        note_scaled(&scaled);
        Ok(scaled)
    }

    /// Divides the sharded gradients by the scale and returns whether a gradient of any rank is not finite. All ranks
    /// that hold a trainable parameter get the same result. Collective, unless the scaler is disabled. Does not unscale
    /// gradients of ignored parameters. Fails if it is called twice for a parameter before an update.
    pub fn unscale(&mut self, vars: &ShardedVarMap, grads: &mut GradStore) -> Result<bool> {
        let params = vars.trainable();
        if params.is_empty() {
            return Err(Error::Argument(
                "GradScaler::unscale: the map has no trainable parameters, so no gradient would be unscaled: pass the map \
                 that the model was built from"
                    .into(),
            ));
        }
        let ids: Vec<TensorId> = params.iter().map(|param| param.var().id()).collect();
        if ids.iter().any(|id| self.unscaled.contains_key(id)) {
            return Err(Error::Argument(
                "GradScaler::unscale was called twice for a parameter: call step and update before the next unscale"
                    .into(),
            ));
        }
        let overflowed = self.enabled && self.divide(vars, grads)?;
        self.unscaled.extend(ids.into_iter().map(|id| (id, Unscaled { overflowed, stepped: false })));
        self.any_overflowed = Some(overflowed || self.any_overflowed == Some(true));
        Ok(overflowed)
    }

    fn divide(&self, vars: &ShardedVarMap, grads: &mut GradStore) -> Result<bool> {
        let params = vars.trainable();
        let own: Vec<_> = params.iter().filter_map(|param| grads.get(param.var())).collect();
        let finite = powers(own.iter().copied(), NormType::Infinity)?.iter().all(|largest| largest.is_finite());
        own.iter().try_for_each(|grad| scale(grad, 1. / self.state.scale))?;
        // From the smallest mesh to the largest. Each mesh covers the map's data-parallel ranks, and the other groups
        // cover the other parts.
        let mut meshes = vars.all_ranks()?;
        meshes.sort_by_key(|ranks| ranks.data.size());
        let subject = Subject::new("GradScaler overflow check", []);
        let mut overflowed = u32::from(!finite);
        let own = vars.ranks()?;
        let data = meshes.iter().flat_map(|ranks| std::iter::once(&ranks.shard).chain(ranks.replicate()));
        for group in own.other_groups().chain(data) {
            let group = group.signed(Signature::new(&subject, []));
            overflowed = group.all_reduce_scalar(overflowed, ReduceOp::Max)?;
        }
        Ok(overflowed != 0)
    }

    /// Steps the optimizer unless gradients that were unscaled together with its own overflowed. Returns whether it
    /// stepped. Several optimizers may share gradients; an overflow in another `unscale` call does not skip the step.
    ///
    /// # Errors
    /// Returns the optimizer's errors. Also returns an error, and updates nothing, when a gradient was not unscaled
    /// since the last update or was already stepped on; a disabled scaler does not check this.
    pub fn step(&mut self, optim: &mut dyn ShardedOptimizer, grads: &GradStore) -> Result<bool> {
        self.step_scaled(optim, grads, 1.)
    }

    /// [`GradScaler::step`] by [`ShardedOptimizer::step_scaled`], such as with a [`clip_factor`](crate::clip_factor).
    /// The factor does not divide by the scale: [`GradScaler::unscale`] does.
    pub fn step_scaled(&mut self, optim: &mut dyn ShardedOptimizer, grads: &GradStore, factor: f64) -> Result<bool> {
        let overflowed = self.enabled && self.has_overflowed(&optim.states(), grads)?;
        if !overflowed {
            optim.step_scaled(grads, factor)?;
        }
        for state in optim.states() {
            if let Some(unscaled) = self.unscaled.get_mut(&state.param.var().id()) {
                unscaled.stepped = true;
            }
        }
        Ok(!overflowed)
    }

    /// Returns whether the gradients of these parameters overflowed, the same on every rank.
    fn has_overflowed(&self, states: &[&ParamState], grads: &GradStore) -> Result<bool> {
        let mut found = None;
        for ParamState { param, .. } in states {
            let unscaled = self.unscaled.get(&param.var().id());
            let why = match unscaled {
                None => Some("its gradient is not unscaled: call unscale first, with the map of the parameter"),
                Some(Unscaled { stepped: true, .. }) => Some("it has already stepped: call update first"),
                Some(_) => None,
            };
            let has_gradient = || grads.get(param.var()).is_some() || param.is_empty_with_gradient(grads);
            if let Some(why) = why.filter(|_| has_gradient()) {
                return Err(param.error(format!("GradScaler::step: {why}")));
            }
            found = found.max(unscaled.map(|unscaled| unscaled.overflowed));
        }
        // An optimizer may have no parameters on this rank, but some on others.
        let nothing = || Error::Argument("GradScaler::step without unscaled gradients: call unscale first".into());
        found.or(self.any_overflowed).ok_or_else(nothing)
    }

    /// Updates the scale. Call it once a step, after all optimizers. As in PyTorch, the scale does not exceed f32.
    /// Fails if no gradients were unscaled since the last update, unless the scaler is disabled.
    pub fn update(&mut self) -> Result<()> {
        match self.any_overflowed {
            Some(overflowed) if self.enabled => self.update_scale(overflowed),
            None if self.enabled => {
                return Err(Error::Argument(
                    "GradScaler::update without unscaled gradients: call unscale and step first".into(),
                ));
            }
            _ => {}
        }
        self.clear();
        Ok(())
    }

    fn update_scale(&mut self, overflowed: bool) {
        let GradScalerState { scale, growth_factor, backoff_factor, growth_interval, growth_tracker } = &mut self.state;
        *growth_tracker += 1;
        if overflowed {
            (*scale, *growth_tracker) = (*scale * *backoff_factor, 0);
        } else if *growth_tracker >= *growth_interval {
            let grown = *scale * *growth_factor;
            (*scale, *growth_tracker) = (if is_scale(grown) { grown } else { *scale }, 0);
        }
    }
}

/// Returns whether `scale` can multiply losses, which are f32.
fn is_scale(scale: f64) -> bool {
    let single = scale as f32;
    single > 0. && single.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(scaler: &mut GradScaler, overflows: impl IntoIterator<Item = bool>) -> (f64, u32) {
        overflows.into_iter().for_each(|overflowed| scaler.update_scale(overflowed));
        (scaler.state().scale, scaler.state().growth_tracker)
    }

    fn every(growth_interval: u32, scale: f64) -> GradScaler {
        let mut scaler = GradScaler::new(scale);
        scaler.set_growth_interval(growth_interval).unwrap();
        scaler
    }

    #[test]
    fn the_scale_grows_after_good_steps_and_shrinks_after_an_overflow() {
        let mut scaler = every(3, 64.);
        assert_eq!(after(&mut scaler, [false; 2]), (64., 2));
        assert_eq!(after(&mut scaler, [true]), (32., 0));
        assert_eq!(after(&mut scaler, [false; 3]), (64., 0));
        assert_eq!(after(&mut scaler, [false; 7]), (256., 1));
        assert_eq!(after(&mut scaler, [true; 3]), (32., 0));
    }

    #[test]
    fn a_restored_state_continues_the_scales() {
        let overflows = [false, false, true, false, false, false, false, true, false];
        for stop in 0..overflows.len() {
            let mut uninterrupted = every(3, 8.);
            after(&mut uninterrupted, overflows[..stop].iter().copied());
            let mut resumed = every(3, 1.);
            resumed.load_state(uninterrupted.state()).unwrap();
            for &overflowed in &overflows[stop..] {
                assert_eq!(after(&mut resumed, [overflowed]), after(&mut uninterrupted, [overflowed]));
            }
        }
    }

    #[test]
    fn a_longer_tracker_grows_at_once() {
        let mut scaler = every(3, 1.);
        scaler.load_state(GradScalerState { scale: 4., growth_tracker: 100, ..scaler.state() }).unwrap();
        assert_eq!(after(&mut scaler, [false]), (8., 0));
    }

    #[test]
    fn scales_stay_within_f32() {
        let largest = 2f64.powi(127);
        let mut scaler = every(1, largest);
        assert_eq!(after(&mut scaler, [false, false]), (largest, 0));
        let before = scaler.state();
        for scale in [0., -1., f64::NAN, f64::INFINITY, 2. * largest, 1e-60] {
            let error =
                scaler.load_state(GradScalerState { scale, growth_tracker: 1, ..before }).unwrap_err().to_string();
            assert!(error.contains("a loss scale of"), "{error}");
            assert_eq!(scaler.state(), before);
        }
    }

    #[test]
    fn factors_are_set_and_checked() {
        let mut scaler = every(1, 8.);
        scaler.set_growth_factor(3.).unwrap();
        scaler.set_backoff_factor(0.25).unwrap();
        assert_eq!(after(&mut scaler, [false]), (24., 0));
        assert_eq!(after(&mut scaler, [true]), (6., 0));
        scaler.set_scale(5.).unwrap();
        let before = scaler.state();
        let refused = [
            scaler.set_growth_factor(1.),
            scaler.set_growth_factor(f64::NAN),
            scaler.set_backoff_factor(1.),
            scaler.set_backoff_factor(0.),
            scaler.set_growth_interval(0),
            scaler.set_scale(f64::INFINITY),
            scaler.load_state(GradScalerState { growth_factor: 0.5, ..before }),
        ];
        assert!(refused.iter().all(Result::is_err));
        assert_eq!(scaler.state(), before);
    }

    #[test]
    fn a_disabled_scaler_changes_nothing() {
        let mut scaler = GradScaler::disabled();
        let loss = Tensor::new(3f32, &candle_core::Device::Cpu).unwrap();
        assert_eq!(scaler.scale(&loss).unwrap().id(), loss.id());
        let before = scaler.state();
        scaler.update().unwrap();
        assert_eq!((scaler.is_enabled(), scaler.current_scale(), scaler.state()), (false, 1., before));
        assert!(GradScaler::default().update().unwrap_err().to_string().contains("call unscale and step first"));
    }
}
