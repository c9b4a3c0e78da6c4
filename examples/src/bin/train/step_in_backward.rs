//! `--optimizer-in-backward`: the optimizer steps each unit while backward goes on, so that gradients of the whole model
//! never exist. A step that waits for a disk runs on a thread of its own, while backward computes the next unit.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::bail;
use candle_core::backprop::GradStore;
use fsdp_candle::{FsdpModule, GradNorm, ShardedOptimizer, ShardedVarMap, clip_factor};
use fsdp_train::models::LanguageModel;

use crate::args::Args;
use crate::flag_types::InBackward;
use crate::optimizer::Optimizer;

/// The optimizer of a run, inside the model's hook while a backward runs.
pub(crate) struct StepInBackward {
    running: Arc<Mutex<Option<Running>>>,
    /// Largest norm, if gradients are clipped.
    max_norm: Option<f64>,
    /// Whether the optimizer waits for a disk.
    on_disk: bool,
}

struct Running {
    /// `None` while a thread steps.
    optim: Option<Box<dyn ShardedOptimizer>>,
    /// The step of the unit before, with state on disk.
    stepping: Option<JoinHandle<Stepped>>,
    on_disk: bool,
    norm: GradNorm,
    /// Largest norm, and the last step's norm.
    clip: Option<(f64, f64)>,
    /// The error of a step, which Candle's backward passes on as text.
    failed: Option<fsdp_candle::Error>,
}

/// The optimizer, and the outcome of its step.
type Stepped = (Box<dyn ShardedOptimizer>, fsdp_candle::Result<()>);

impl Running {
    /// Steps a unit, or begins to.
    fn step(&mut self, grads: GradStore) -> fsdp_candle::Result<()> {
        self.norm.add(&grads)?;
        let factor = self.clip.map_or(1., |(max, norm)| clip_factor(max, norm));
        self.wait()?;
        let Some(mut optim) = self.optim.take() else { return Ok(()) };
        let step = move || {
            let stepped = optim.step_scaled(&grads, factor);
            (optim, stepped)
        };
        if self.on_disk {
            self.stepping = Some(std::thread::spawn(step));
            return Ok(());
        }
        let (optim, stepped) = step();
        self.optim = Some(optim);
        stepped
    }

    /// Waits for the step of the unit before, and returns its error.
    fn wait(&mut self) -> fsdp_candle::Result<()> {
        let Some(thread) = self.stepping.take() else { return Ok(()) };
        let (optim, stepped) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        self.optim = Some(optim);
        stepped
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
        Some(StepInBackward { running, max_norm, on_disk: args.offload.disk().is_some() })
    }

    /// Takes the optimizer for the next backward. The first step of a run has no last norm, and is not clipped.
    pub(crate) fn begin(
        &self,
        vars: &ShardedVarMap,
        optim: &mut Optimizer,
        last_norm: Option<f64>,
    ) -> anyhow::Result<()> {
        let (norm, clip) = (GradNorm::new(vars), self.max_norm.zip(last_norm));
        let (optim, on_disk) = (optim.take(), self.on_disk);
        let running = Running { optim, stepping: None, on_disk, norm, clip, failed: None };
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(())
    }

    /// Returns the error of a backward: that of the step in it, if a step failed.
    pub(crate) fn explain(&self, error: candle_core::Error) -> anyhow::Error {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.as_mut().and_then(|running| running.failed.take().or_else(|| running.wait().err())) {
            Some(own) => own.into(),
            None => error.into(),
        }
    }

    /// Waits for the last step, and gives the optimizer back. Returns the norm of the gradients before clipping.
    /// Collective.
    pub(crate) fn end(&self, optim: &mut Optimizer) -> anyhow::Result<f64> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut running) = running else { bail!("no step has begun") };
        running.wait()?;
        running.optim.into_iter().for_each(|inner| optim.give(inner));
        Ok(running.norm.norm()?)
    }
}
