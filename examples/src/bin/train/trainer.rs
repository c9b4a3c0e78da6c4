//! The training loop's parts: what a run holds between its steps, and what it does with it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use candle_core::backprop::GradStore;
use fsdp_candle::random::{self, RngState};
use fsdp_candle::{Recurse, ReduceOp, ShardedVarMap, World, clip_factor, grad_norm};
use fsdp_train::console::Console;
use fsdp_train::metrics::{DataRecord, Rewards, StepRecord, peak_memory_bytes};
use indicatif::BinaryBytes;

use crate::adapters::Adapters;
use crate::args::Args;
use crate::balance::Balance;
use crate::checkpoint::{Checkpoints, Position};
use crate::directories::Hosts;
use crate::export::{self, GgufExport};
use crate::flag_types::GradSync;
use crate::objective::BatchLoss;
use crate::optimizer::{LossScale, Optimizer};
use crate::report::{NonFiniteStep, StepLog};
use crate::run_record::Record;
use crate::setup::{self, Setup};
use crate::step_in_backward::StepInBackward;
use crate::task::{Model, Task};

/// A run: the model, its optimizer and its data, and where the run writes.
///
/// All methods are collective, except where they say otherwise.
pub(crate) struct Trainer<'a> {
    args: &'a Args,
    world: &'a World,
    /// Measurements, on rank 0 from the first step on.
    log: Option<StepLog>,
    done: Position,
    record: Record,
    in_backward: Option<StepInBackward>,
    optim: Optimizer,
    adapters: Option<Adapters>,
    balance: Balance,
    task: Box<dyn Task>,
    model: Model,
    vars: ShardedVarMap,
    checkpoints: Checkpoints<'a>,
    loss_scale: LossScale,
    /// Ranks that read different data.
    data_ranks: usize,
    /// Bytes of parameters, gradients and optimizer state on this rank.
    shard_bytes: u64,
}

/// Sums over the micro-batches of a step.
struct Accumulated {
    grads: GradStore,
    /// Loss of this rank.
    loss: f64,
    /// Mean rewards of this rank's pairs.
    rewards: Option<Rewards>,
}

impl<'a> Trainer<'a> {
    /// Builds the model, and loads the checkpoint to resume from, if any.
    pub(crate) fn new(args: &'a Args, hosts: Hosts, world: &'a World) -> anyhow::Result<Self> {
        let data_ranks = args.ranks(world)?.data();
        let mut loss_scale = LossScale::new(args);
        let mut checkpoints = Checkpoints::new(args, hosts, world)?;
        let Setup { config, vars, model, task, adapters } = Setup::new(args, world)?;
        let mut optim = Optimizer::new(args, &vars)?;
        let in_backward = StepInBackward::new(args, &model);
        if let (Some(dir), 0) = (args.offload.disk(), world.rank()) {
            let bytes = BinaryBytes(optim.bytes_on_disk());
            Console::Stderr.line(format_args!("optimizer state on disk: {bytes} for rank 0, in {}", dir.display()));
        }
        let record = Record::new(args, &config, &*task, adapters.as_ref(), optim.get())?;
        let done = checkpoints.resume(args, &vars, optim.get_mut(), &mut loss_scale, &record, &*task)?;
        let shard_bytes = setup::shard_bytes(&vars) + task.shard_bytes() + optim.bytes() as u64;
        Ok(Trainer {
            args,
            world,
            log: None,
            done,
            record,
            in_backward,
            optim,
            adapters,
            balance: Balance::new(args.router_bias_rate, &vars)?,
            task,
            model,
            vars,
            checkpoints,
            loss_scale,
            data_ranks,
            shard_bytes,
        })
    }

    /// Returns the number of the next step, or `None` after the last.
    pub(crate) fn next_step(&self) -> Option<usize> {
        (self.done.step < self.args.steps).then_some(self.done.step + 1)
    }

    /// Does what comes before the first step of this start: checks gradients, opens the files of measurements,
    /// evaluates a model that has taken no step, and prints a sample.
    pub(crate) fn begin(&mut self) -> anyhow::Result<()> {
        let (args, world, is_first_rank) = (self.args, self.world, self.world.rank() == 0);
        let has_steps = self.next_step().is_some();
        if is_first_rank && !has_steps {
            Console::Stderr.line(format_args!(
                "nothing to train: the checkpoint is at step {} and --steps is {}; raise --steps to continue",
                self.done.step, args.steps
            ));
        }
        if args.gradcheck && has_steps {
            let check = || self.task.check_gradients(args, &self.model, self.done.sequences, world);
            tracing::debug_span!("gradcheck").in_scope(check)?;
        }
        self.log = if is_first_rank { Some(StepLog::open(args, self.done.step)?) } else { None };
        if self.done.step == 0 {
            self.evaluate()?;
        }
        if self.task.samples_first() && has_steps {
            self.sample("sample before training")?;
        }
        Ok(())
    }

    /// Takes the next step, and writes its measurements.
    pub(crate) fn step(&mut self) -> anyhow::Result<()> {
        let step = self.done.step + 1;
        let start = Instant::now();
        let lr = self.optim.set_learning_rates(step);
        let Accumulated { mut grads, loss: own_loss, rewards } = self.accumulate(step)?;
        let overflowed = self.loss_scale.unscale(&self.vars, &mut grads)?;
        let norm = self.norm(step, &grads)?;

        // A non-finite value on any rank makes the mean non-finite. All ranks then stop before the weights change.
        // With f16, non-finite gradients may only have overflowed.
        let own: Vec<f64> = [own_loss, norm].into_iter().chain(rewards.iter().flat_map(Rewards::values)).collect();
        let means = self.world.all_reduce(&own, ReduceOp::Avg)?;
        let loss = means[0];
        if !(loss.is_finite() && (means[1].is_finite() || overflowed)) {
            let grads = if self.in_backward.is_none() { Some(&grads) } else { None };
            let bad = NonFiniteStep { step, loss, own_loss, norm, grads, loss_scale: self.loss_scale.current() };
            anyhow::bail!(bad.explain(self.world, &self.vars, self.optim.get(), &mut self.checkpoints)?);
        }
        let factor = self.clip_factor(norm);
        let skipped = match self.in_backward {
            Some(_) => Ok(None),
            None => self.loss_scale.step(self.optim.get_mut(), &grads, factor),
        };
        let skipped = skipped.map_err(|error| self.checkpoints.explain_failed_step(step, error))?;
        drop(grads);
        let experts = self.balance.step(self.model.inner(), skipped.is_some(), self.world)?;

        let tokens = self.task.tokens(self.done.sequences);
        let sequences = self.done.sequences + self.task.sequences_per_step();
        self.done = Position { step, sequences, grad_norm: Some(norm) };
        let data = self.task.data_record();
        let waited = data.as_ref().map(|data| data.data_wait_s);
        let own: Vec<f64> = [peak_memory_bytes() as f64].into_iter().chain(waited).collect();
        let most = self.world.all_reduce(&own, ReduceOp::Max)?;
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step,
            loss,
            grad_norm: norm,
            lr,
            step_time_s: seconds,
            tokens_per_s: tokens / seconds,
            peak_mem_bytes: most[0] as u64,
            shard_bytes: self.shard_bytes,
            rewards: rewards.map(|_| Rewards::from(std::array::from_fn(|i| means[2 + i]))),
            experts,
            data: data.map(|data| DataRecord { data_wait_s: most[1], ..data }),
        };
        if let Some(log) = &mut self.log {
            skipped.iter().for_each(|why| log.note(step, why));
            log.step(&record);
        }
        Ok(())
    }

    /// Runs forward and backward on each micro-batch of a step.
    ///
    /// Backward averages gradients over ranks and shards them. The loss of a step is the mean over the counted tokens or
    /// pairs of all ranks and micro-batches, so the mean of a micro-batch is weighted by its share of them.
    /// Tensor-parallel ranks have the same tokens and the same loss.
    fn accumulate(&mut self, step: usize) -> anyhow::Result<Accumulated> {
        let (args, sequences) = (self.args, self.done.sequences);
        let syncs_every = args.grad_sync.unwrap_or(GradSync::Every) == GradSync::Every;
        let share = self.task.counted(sequences)?.max(1) as f64 / self.data_ranks as f64;
        let (mut own_loss, mut rewards) = (0., None);
        let mut grads: Option<GradStore> = None;
        for micro_step in 0..args.grad_accum {
            let last = micro_step + 1 == args.grad_accum;
            self.model.set_requires_gradient_sync(last || syncs_every, Recurse::Yes);
            if let Some(in_backward) = &self.in_backward {
                self.model.set_is_last_backward(last);
                if last {
                    in_backward.begin(&self.vars, &mut self.optim, self.done.grad_norm)?;
                }
            }
            self.model.inner().set_training(true);
            let first_row = self.task.first_row(sequences, micro_step);
            random::set_rng_state(RngState { first_row, ..RngState::new(args.seed) });
            let BatchLoss { loss, weight, rewards: of_batch } =
                self.task.loss(&self.model, sequences, micro_step, self.world)?;
            let is_counted = weight > 0;
            let weight = weight as f64 / share;
            rewards = of_batch.map(|of_batch| rewards.unwrap_or_default() + of_batch * weight);
            // All ranks must run the same backward, but Candle would end the graph at a number of 0.
            let weighted = if is_counted { (&loss * weight)? } else { (&loss * &loss.zeros_like()?)? };
            let new = self.model.backward(&self.loss_scale.scale(weighted)?);
            let new = new.map_err(|error| match &self.in_backward {
                Some(in_backward) => self.checkpoints.explain_failed_step(step, in_backward.explain(error)),
                None => error.into(),
            })?;
            // Read after backward, because reading waits for the device.
            own_loss += weight * f64::from(loss.to_scalar::<f32>()?);
            match &mut grads {
                Some(grads) => grads.extend(new)?,
                None => grads = Some(new),
            }
            self.model.inner().set_training(false);
        }
        Ok(Accumulated { grads: grads.context("--grad-accum is at least 1")?, loss: own_loss, rewards })
    }

    /// Returns the norm of the gradients, which an optimizer that stepped in backward has read.
    fn norm(&mut self, step: usize, grads: &GradStore) -> anyhow::Result<f64> {
        match &self.in_backward {
            Some(in_backward) => {
                let norm = in_backward.end(&mut self.optim);
                norm.map_err(|error| self.checkpoints.explain_failed_step(step, error))
            }
            None => Ok(grad_norm(&self.vars, grads)?),
        }
    }

    /// Returns the factor that clips gradients of this norm to --clip-grad-norm.
    fn clip_factor(&self, norm: f64) -> f64 {
        match self.args.clip_grad_norm {
            0. => 1.,
            max => clip_factor(max, norm),
        }
    }

    /// Evaluates the model if an evaluation is due after the steps taken.
    pub(crate) fn evaluate(&mut self) -> anyhow::Result<()> {
        let evaluate = || self.task.evaluate(&self.model, self.done.step, self.world);
        let evaluated = tracing::debug_span!("eval").in_scope(evaluate)?;
        if let (Some(evaluated), Some(log)) = (evaluated, &mut self.log) {
            log.eval(&evaluated);
        }
        Ok(())
    }

    /// Saves a checkpoint if --save-every asks for one. The last step's is left to [`Trainer::finish`].
    pub(crate) fn save_if_due(&mut self) -> anyhow::Result<()> {
        let (step, every) = (self.done.step, self.args.save_every);
        if every > 0 && step.is_multiple_of(every) && step != self.args.steps {
            tracing::debug_span!("save").in_scope(|| self.save())?;
        }
        Ok(())
    }

    /// Saves a checkpoint, or starts a save in the background. Returns its path.
    fn save(&mut self) -> anyhow::Result<PathBuf> {
        self.checkpoints.save(&self.vars, self.optim.get(), &self.loss_scale, &self.done, &self.record, &*self.task)
    }

    /// Saves the last checkpoint, and exports the model. Returns what this rank still has to write.
    pub(crate) fn finish(mut self) -> anyhow::Result<Option<GgufExport>> {
        if let Some(summary) = self.log.take().and_then(|log| log.data_summary()) {
            Console::Stderr.line(summary);
        }
        let saved = tracing::debug_span!("save").in_scope(|| {
            let saved = self.save()?;
            // Exports only after the checkpoint is complete.
            self.checkpoints.finish()?;
            anyhow::Ok(saved)
        })?;
        self.export()?;
        self.sample("sample")?;
        if self.world.rank() == 0 {
            Console::Stdout.line(format_args!("checkpoint: {}", saved.display()));
            if let Some(dir) = &self.args.export_hf {
                Console::Stdout.line(format_args!("exported: {}", dir.display()));
            }
        }
        Ok(self.gguf_export(&saved))
    }

    fn export(&self) -> anyhow::Result<()> {
        let (adapters, texts) = (self.adapters.as_ref(), self.task.export(self.args)?);
        let (dirs, step) = (&self.checkpoints.dirs, self.done.step);
        export::export(self.args, self.world, &self.vars, adapters, texts, dirs, step)
    }

    fn gguf_export(&self, checkpoint: &Path) -> Option<GgufExport> {
        GgufExport::new(self.args, self.world, self.adapters.as_ref(), checkpoint)
    }

    /// Prints a sample of the model's outputs.
    fn sample(&self, title: &str) -> anyhow::Result<()> {
        let sample = tracing::debug_span!("sample").in_scope(|| self.task.sample(&self.model, self.world))?;
        if self.world.rank() == 0 {
            Console::Stdout.line(format_args!("{title}: {sample}"));
        }
        Ok(())
    }
}
