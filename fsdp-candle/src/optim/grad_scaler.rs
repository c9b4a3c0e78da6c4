//! Loss scaling for f16, with one verdict over all ranks: PyTorch's `ShardedGradScaler`.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use fsdp_core::ReduceOp;
use fsdp_core::process_group::{Signature, Subject};

use super::clip::{powers, scale};
use super::sharded::ShardedOptimizer;
use super::state::ParamState;
use crate::error::{Error, Result};
use crate::fsdp::ShardedVarMap;
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
    /// The shards whose gradients were unscaled since the last update.
    unscaled: HashMap<TensorId, Unscaled>,
    /// Whether any of them overflowed, if `unscale` was called since then.
    any_overflowed: Option<bool>,
}

/// What became of a gradient since the last update.
#[derive(Clone, Copy, Debug)]
struct Unscaled {
    /// Whether it, or one that was unscaled with it, overflowed on any rank.
    overflowed: bool,
    /// Whether an optimizer stepped on it, or was kept from that.
    stepped: bool,
}

/// What a run that goes on has to know of its [`GradScaler`]: PyTorch's `state_dict`.
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
    /// The scale of the next loss.
    pub scale: f64,
    /// What the scale is multiplied by after enough good steps, above 1.
    pub growth_factor: f64,
    /// What it is multiplied by after an overflow, below 1.
    pub backoff_factor: f64,
    /// How many good steps in a row are enough, at least 1.
    pub growth_interval: u32,
    /// How many good steps there have been since the scale last changed: PyTorch's `_growth_tracker`.
    pub growth_tracker: u32,
}

impl Default for GradScalerState {
    /// PyTorch's.
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
            return fail(format!("a loss scale of {scale}: it must be a positive number within f32"));
        }
        if !(growth_factor > 1. && growth_factor.is_finite()) {
            return fail(format!("a GradScaler's growth factor of {growth_factor}: it must be above 1"));
        }
        if !(backoff_factor > 0. && backoff_factor < 1.) {
            return fail(format!("a GradScaler's backoff factor of {backoff_factor}: it must be between 0 and 1"));
        }
        if growth_interval == 0 {
            return fail("a GradScaler's growth interval of 0 steps: it must be at least 1".into());
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
    /// A scaler that starts at `scale`, with PyTorch's factors.
    pub fn new(scale: f64) -> Self {
        GradScaler {
            enabled: true,
            state: GradScalerState { scale, ..GradScalerState::default() },
            unscaled: HashMap::new(),
            any_overflowed: None,
        }
    }

    /// A scaler that does nothing: losses and gradients stay as they are, and each step is taken. So a training loop is
    /// the same in f32: PyTorch's `GradScaler(enabled=False)`.
    pub fn disabled() -> Self {
        GradScaler { enabled: false, ..Self::new(1.) }
    }

    /// Whether it does anything.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The scale of the next loss; 1 where it is disabled.
    pub fn current_scale(&self) -> f64 {
        if self.enabled { self.state.scale } else { 1. }
    }

    /// Sets the scale of the next loss: PyTorch's `update(new_scale)`.
    ///
    /// # Errors
    /// When it is no positive number that f32 has room for.
    pub fn set_scale(&mut self, scale: f64) -> Result<()> {
        self.set(GradScalerState { scale, ..self.state })
    }

    /// Sets what the scale is multiplied by after enough good steps.
    ///
    /// # Errors
    /// When it is not above 1.
    pub fn set_growth_factor(&mut self, factor: f64) -> Result<()> {
        self.set(GradScalerState { growth_factor: factor, ..self.state })
    }

    /// Sets what the scale is multiplied by after an overflow.
    ///
    /// # Errors
    /// When it is not between 0 and 1.
    pub fn set_backoff_factor(&mut self, factor: f64) -> Result<()> {
        self.set(GradScalerState { backoff_factor: factor, ..self.state })
    }

    /// Sets after how many good steps in a row the scale grows.
    ///
    /// # Errors
    /// When it is 0.
    pub fn set_growth_interval(&mut self, steps: u32) -> Result<()> {
        self.set(GradScalerState { growth_interval: steps, ..self.state })
    }

    fn set(&mut self, state: GradScalerState) -> Result<()> {
        state.check()?;
        self.state = state;
        Ok(())
    }

    /// What a checkpoint is to keep, with the factors and the interval. Take it between steps.
    pub fn state(&self) -> GradScalerState {
        self.state
    }

    /// Goes on as the scaler did whose state this is. One that is disabled stays so.
    ///
    /// # Errors
    /// When the scale is no positive number that f32 has room for, or a factor or the interval is out of range. Nothing
    /// is changed then.
    pub fn load_state(&mut self, state: GradScalerState) -> Result<()> {
        self.set(state)?;
        self.forget();
        Ok(())
    }

    fn forget(&mut self) {
        self.unscaled.clear();
        self.any_overflowed = None;
    }

    /// The loss times the scale: what backward takes.
    ///
    /// # Errors
    /// Candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.enabled {
            return Ok(loss.clone());
        }
        Ok((loss * self.state.scale)?)
    }

    /// Divides the sharded gradients by the scale, and finds out whether any rank's hold an infinity or a NaN; all
    /// ranks that a trainable parameter lives on get the same answer. Collective, unless it is disabled. Ignored
    /// parameters' gradients are the caller's.
    ///
    /// # Errors
    /// Those of the all-reduce, and when it is called twice for a parameter before an update.
    pub fn unscale(&mut self, vars: &ShardedVarMap, grads: &mut GradStore) -> Result<bool> {
        let params = vars.trainable();
        let ids: Vec<TensorId> = params.iter().map(|param| param.var().id()).collect();
        if ids.iter().any(|id| self.unscaled.contains_key(id)) {
            return Err(Error::Argument(
                "GradScaler::unscale was called twice for the same parameters: call step and update before the next \
                 unscale"
                    .into(),
            ));
        }
        let overflowed = self.enabled && self.unscale_now(vars, grads)?;
        self.unscaled.extend(ids.into_iter().map(|id| (id, Unscaled { overflowed, stepped: false })));
        self.any_overflowed = Some(overflowed || self.any_overflowed == Some(true));
        Ok(overflowed)
    }

    fn unscale_now(&self, vars: &ShardedVarMap, grads: &mut GradStore) -> Result<bool> {
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
        Ok(overflowed != 0)
    }

    /// Steps the optimizer unless gradients of its parameters overflowed, or others that were unscaled by the same
    /// call. Tells whether it stepped. Several optimizers may have a share of the same gradients; those of gradients
    /// that were unscaled by other calls step.
    ///
    /// # Errors
    /// The optimizer's; when the gradient of one of its parameters was not unscaled since the last update, or was
    /// stepped on since then. Nothing is updated then. One that is disabled has only the optimizer's.
    pub fn step(&mut self, optim: &mut dyn ShardedOptimizer, grads: &GradStore) -> Result<bool> {
        let overflowed = self.enabled && self.verdict(&optim.states(), grads)?;
        if !overflowed {
            optim.step(grads)?;
        }
        for state in optim.states() {
            if let Some(unscaled) = self.unscaled.get_mut(&state.param.var().id()) {
                unscaled.stepped = true;
            }
        }
        Ok(!overflowed)
    }

    /// Whether the gradients of these parameters overflowed: the same on every rank, whatever it holds of them.
    fn verdict(&self, states: &[&ParamState], grads: &GradStore) -> Result<bool> {
        let mut found = None;
        for ParamState { param, .. } in states {
            let unscaled = self.unscaled.get(&param.var().id());
            let why = match unscaled {
                None => Some("call unscale first, with the map that has it: its gradient is not unscaled"),
                Some(Unscaled { stepped: true, .. }) => Some("call update: it has taken its step since the last one"),
                Some(_) => None,
            };
            let has_gradient = || grads.get(param.var()).is_some() || param.is_empty_with_gradient(grads);
            if let Some(why) = why.filter(|_| has_gradient()) {
                let message = format!("GradScaler::step: {why}");
                return Err(Error::Parameter { name: param.name().into(), message });
            }
            found = found.max(unscaled.map(|unscaled| unscaled.overflowed));
        }
        // An optimizer may have nothing on this rank, and something on others.
        let nothing = || Error::Argument("GradScaler::step needs unscaled gradients: call unscale first".into());
        found.or(self.any_overflowed).ok_or_else(nothing)
    }

    /// Sets the next scale, by what was found since the last update. Call it once a step, after all optimizers have
    /// stepped. As in PyTorch, the scale does not grow beyond f32.
    ///
    /// # Errors
    /// When no gradients were unscaled since the last one, unless it is disabled.
    pub fn update(&mut self) -> Result<()> {
        match self.any_overflowed {
            Some(overflowed) if self.enabled => self.next(overflowed),
            None if self.enabled => {
                return Err(Error::Argument(
                    "GradScaler::update has nothing to go by: call unscale and step first".into(),
                ));
            }
            _ => {}
        }
        self.forget();
        Ok(())
    }

    fn next(&mut self, overflowed: bool) {
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

/// Whether losses, which are f32, can be multiplied and gradients divided by it.
fn is_scale(scale: f64) -> bool {
    let single = scale as f32;
    single > 0. && single.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(scaler: &mut GradScaler, verdicts: impl IntoIterator<Item = bool>) -> (f64, u32) {
        verdicts.into_iter().for_each(|overflowed| scaler.next(overflowed));
        (scaler.state().scale, scaler.state().growth_tracker)
    }

    fn every(growth_interval: u32, scale: f64) -> GradScaler {
        let mut scaler = GradScaler::new(scale);
        scaler.set_growth_interval(growth_interval).unwrap();
        scaler
    }

    #[test]
    fn the_scale_grows_after_good_steps_in_a_row_and_falls_after_a_bad_one() {
        let mut scaler = every(3, 64.);
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
            let mut undisturbed = every(3, 8.);
            after(&mut undisturbed, verdicts[..stop].iter().copied());
            let mut resumed = every(3, 1.);
            resumed.load_state(undisturbed.state()).unwrap();
            for &overflowed in &verdicts[stop..] {
                assert_eq!(after(&mut resumed, [overflowed]), after(&mut undisturbed, [overflowed]));
            }
        }
    }

    #[test]
    fn a_tracker_of_a_longer_interval_is_due_at_once() {
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
    fn factors_are_those_that_were_set_and_in_range() {
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
    fn one_that_is_disabled_changes_nothing() {
        let mut scaler = GradScaler::disabled();
        let loss = Tensor::new(3f32, &candle_core::Device::Cpu).unwrap();
        assert_eq!(scaler.scale(&loss).unwrap().id(), loss.id());
        let before = scaler.state();
        scaler.update().unwrap();
        assert_eq!((scaler.is_enabled(), scaler.current_scale(), scaler.state()), (false, 1., before));
        assert!(GradScaler::default().update().unwrap_err().to_string().contains("call unscale and step first"));
    }
}
