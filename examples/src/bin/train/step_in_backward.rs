//! `--optimizer-in-backward`: the optimizer steps each unit while backward goes on, so that gradients of the whole model
//! never exist.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::bail;
use candle_core::backprop::GradStore;
use fsdp_candle::{FsdpModule, GradNorm, ShardedOptimizer, ShardedVarMap, clip_grads_with_norm};
use fsdp_train::models::LanguageModel;

use crate::args::Args;
use crate::flag_types::InBackward;
use crate::optimizer::Optimizer;

/// The optimizer of a run, inside the model's hook while a backward runs.
pub(crate) struct StepInBackward {
    running: Arc<Mutex<Option<Running>>>,
    /// Largest norm, if gradients are clipped.
    max_norm: Option<f64>,
}

struct Running {
    optim: Box<dyn ShardedOptimizer>,
    norm: GradNorm,
    vars: ShardedVarMap,
    /// Largest norm, and the last step's norm.
    clip: Option<(f64, f64)>,
    /// The error of a step, which Candle's backward passes on as text.
    failed: Option<fsdp_candle::Error>,
}

impl Running {
    fn step(&mut self, mut grads: GradStore) -> fsdp_candle::Result<()> {
        self.norm.add(&grads)?;
        if let Some((max, norm)) = self.clip {
            clip_grads_with_norm(&self.vars, &mut grads, max, norm)?;
        }
        self.optim.step(&grads)
    }
}

impl StepInBackward {
    /// Sets the model's hook. Returns `None` for a run that steps after backward.
    pub(crate) fn new(args: &Args, model: &FsdpModule<LanguageModel>) -> Option<Self> {
        let max_norm = match args.optimizer_in_backward {
            InBackward::Off => return None,
            InBackward::Unclipped => None,
            InBackward::LastNorm => Some(args.clip_grad_norm),
        };
        let running = Arc::new(Mutex::new(None::<Running>));
        let shared = running.clone();
        let step = move |grads: GradStore| match &mut *shared.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(running) => running.step(grads).map_err(|error| {
                let text = error.to_string();
                running.failed = Some(error);
                candle_core::Error::msg(text)
            }),
            None => candle_core::bail!("gradients came outside of a step"),
        };
        model.set_post_accumulate_grad_hook(Some(Arc::new(step)));
        Some(StepInBackward { running, max_norm })
    }

    /// Takes the optimizer for the next backward. The first step of a run has no last norm, and is not clipped.
    pub(crate) fn begin(
        &self,
        vars: &ShardedVarMap,
        optim: &mut Optimizer,
        last_norm: Option<f64>,
    ) -> anyhow::Result<()> {
        let (norm, clip) = (GradNorm::new(vars), self.max_norm.zip(last_norm));
        let running = Running { optim: optim.take()?, norm, vars: vars.clone(), clip, failed: None };
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(())
    }

    /// Returns the error of a backward: that of the step in it, if a step failed.
    pub(crate) fn explain(&self, error: candle_core::Error) -> anyhow::Error {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.as_mut().and_then(|running| running.failed.take()) {
            Some(own) => own.into(),
            None => error.into(),
        }
    }

    /// Gives the optimizer back. Returns the norm of the gradients before clipping. Collective.
    pub(crate) fn end(&self, optim: &mut Optimizer) -> anyhow::Result<f64> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { optim: inner, norm, .. }) = running else { bail!("no step has begun") };
        optim.give(inner);
        Ok(norm.norm()?)
    }
}
