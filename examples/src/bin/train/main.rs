//! Pre-trains or fine-tunes a language model, a classifier or an embedding model with its parameters sharded over the
//! ranks:
//! `fsdp-launch --nproc-per-node 2 train --help`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod adapters;
mod agreement;
mod args;
mod checkpoint;
mod directories;
mod evaluate;
mod export;
mod flag_types;
mod inputs;
mod memory_check;
mod objective;
mod optimizer;
mod report;
mod run_record;
mod setup;
mod step_in_backward;
mod task;
mod texts;
mod trace;
mod unused_flags;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::backprop::GradStore;
use fsdp_candle::random::{self, RngState};
use fsdp_candle::{Recurse, ReduceOp, World, clip_grad_norm, grad_norm};
use fsdp_train::command_line;
use fsdp_train::console::Console;
use fsdp_train::job;
use fsdp_train::metrics::{Rewards, StepRecord, peak_memory_bytes};
use fsdp_train::models::parallel;
use indicatif::BinaryBytes;

use args::Args;
use checkpoint::Checkpoints;
use directories::Hosts;
use export::GgufExport;
use flag_types::GradSync;
use objective::BatchLoss;
use optimizer::LossScale;
use optimizer::Optimizer;
use report::NonFiniteStep;
use report::StepLog;
use run_record::Record;
use setup::Setup;
use step_in_backward::StepInBackward;

fn main() -> ExitCode {
    let args: Args = command_line::parse();
    job::run(args.device, |world| {
        // Later collectives rely on equal settings.
        agreement::check_settings(&args, world)?;
        args.batch_shape(world)?;
        let hosts = Hosts::of(&args, world)?;
        directories::check_writable(&args, &hosts, world)?;
        let trace = trace::init(args.trace.as_deref(), world)?;
        let gguf = train(&args, hosts, world)?;
        trace.map_or(Ok(()), |trace| trace.finish(world))?;
        gguf.map_or(Ok(()), |gguf| gguf.write())
    })
}

/// Trains, and returns what this rank still has to write.
fn train(args: &Args, hosts: Hosts, world: &World) -> anyhow::Result<Option<GgufExport>> {
    // Conflicting flags fail before anything is read.
    evaluate::check_gradcheck_flags(args)?;
    unused_flags::check_unused_flags(args)?;
    task::check_flags(args)?;
    if args.sequence_parallel {
        parallel::check_sequence(args.tensor_parallel, ("--seq-len", args.seq_len))?;
    }
    let args = &inputs::fetch(args, world)?;
    export::check_gguf(args, world)?;
    let ranks = args.ranks(world)?;
    let mut loss_scale = LossScale::new(args)?;
    let mut checkpoints = Checkpoints::new(args, hosts, world)?;
    let Setup { config, vars, model, task, adapters } = Setup::new(args, world)?;
    let mut optim = Optimizer::new(args, &vars)?;
    let in_backward = StepInBackward::new(args, &model);
    if let (Some(dir), 0) = (args.offload.disk(), world.rank()) {
        let bytes = BinaryBytes(optim.bytes_on_disk());
        Console::Stderr.line(format_args!("optimizer state on disk: {bytes} for rank 0, in {}", dir.display()));
    }
    let run = Record::new(args, &config, &*task, adapters.as_ref(), optim.get())?;

    let mut done = checkpoints.resume(args, &vars, optim.get_mut(), &mut loss_scale, &run)?;
    if world.rank() == 0 && done.step >= args.steps {
        Console::Stderr.line(format_args!(
            "nothing to train: the checkpoint is at step {} and --steps is {}; raise --steps to continue",
            done.step, args.steps
        ));
    }
    if args.gradcheck && done.step < args.steps {
        tracing::debug_span!("gradcheck").in_scope(|| task.check_gradients(args, &model, done.sequences, world))?;
    }
    let mut log = if world.rank() == 0 { Some(StepLog::open(args, done.step)?) } else { None };
    let shard_bytes = setup::shard_bytes(&vars) + task.shard_bytes() + optim.bytes() as u64;
    let sample = || tracing::debug_span!("sample").in_scope(|| task.sample(&model, world));
    let evaluate = |step: usize, log: &mut Option<StepLog>| -> anyhow::Result<()> {
        let evaluated = tracing::debug_span!("eval").in_scope(|| task.evaluate(&model, step, world))?;
        if let (Some(evaluated), Some(log)) = (evaluated, log) {
            log.eval(&evaluated);
        }
        Ok(())
    };
    if done.step == 0 {
        evaluate(0, &mut log)?;
    }
    if task.samples_first() && done.step < args.steps {
        let sample = sample()?;
        if world.rank() == 0 {
            Console::Stdout.line(format_args!("sample before training: {sample}"));
        }
    }

    for step in done.step + 1..=args.steps {
        let _span = tracing::debug_span!("step", number = step).entered();
        let start = Instant::now();
        let lr = optim.set_learning_rates(step);

        // Backward averages gradients over ranks and shards them. The loss of a step is the mean over the counted
        // tokens or pairs of all ranks and micro-batches, so the mean of a micro-batch is weighted by its share of them.
        // Tensor-parallel ranks have the same tokens and the same loss.
        let share = task.counted(done.sequences)?.max(1) as f64 / ranks.data() as f64;
        let (mut own_loss, mut rewards) = (0., None);
        let mut grads: Option<GradStore> = None;
        for micro_step in 0..args.grad_accum {
            let last = micro_step + 1 == args.grad_accum;
            model.set_requires_gradient_sync(
                last || args.grad_sync.unwrap_or(GradSync::Every) == GradSync::Every,
                Recurse::Yes,
            );
            if let Some(in_backward) = &in_backward {
                model.set_is_last_backward(last);
                if last {
                    in_backward.begin(&vars, &mut optim, done.grad_norm)?;
                }
            }
            model.inner().set_training(true);
            let first_row = task.first_row(done.sequences, micro_step);
            random::set_rng_state(RngState { first_row, ..RngState::new(args.seed) });
            let BatchLoss { loss, weight, rewards: of_batch } = task.loss(&model, done.sequences, micro_step, world)?;
            // The loss of a batch without counted tokens is 0. Candle would end the graph at a weight of 0, but all
            // ranks must run the same backward.
            let weight = weight.max(1) as f64 / share;
            rewards = of_batch.map(|of_batch| rewards.unwrap_or_default() + of_batch * weight);
            let new = model.backward(&loss_scale.scale((&loss * weight)?)?).map_err(|error| match &in_backward {
                Some(in_backward) => checkpoints.explain_failed_step(step, in_backward.explain(error)),
                None => error.into(),
            })?;
            // Read after backward, because reading waits for the device.
            own_loss += weight * f64::from(loss.to_scalar::<f32>()?);
            match &mut grads {
                Some(grads) => grads.extend(new)?,
                None => grads = Some(new),
            }
            model.inner().set_training(false);
        }
        let Some(mut grads) = grads else { anyhow::bail!("--grad-accum is at least 1") };
        let overflowed = loss_scale.unscale(&vars, &mut grads)?;
        let norm = match (&in_backward, args.clip_grad_norm) {
            (Some(in_backward), _) => {
                in_backward.end(&mut optim).map_err(|error| checkpoints.explain_failed_step(step, error))?
            }
            (None, 0.) => grad_norm(&vars, &grads)?,
            (None, max) => clip_grad_norm(&vars, &mut grads, max)?,
        };
        // A non-finite value on any rank makes the mean non-finite. All ranks then stop before the weights change.
        // With f16, non-finite gradients may only have overflowed.
        let own: Vec<f64> = [own_loss, norm].into_iter().chain(rewards.iter().flat_map(Rewards::values)).collect();
        let means = world.all_reduce(&own, ReduceOp::Avg)?;
        let loss = means[0];
        if !(loss.is_finite() && (means[1].is_finite() || overflowed)) {
            let grads = if in_backward.is_none() { Some(&grads) } else { None };
            let bad = NonFiniteStep { step, loss, own_loss, norm, grads, loss_scale: loss_scale.current() };
            anyhow::bail!(bad.explain(world, &vars, optim.get(), &mut checkpoints)?);
        }
        let skipped = match in_backward {
            Some(_) => Ok(None),
            None => loss_scale.step(optim.get_mut(), &grads),
        };
        let skipped = skipped.map_err(|error| checkpoints.explain_failed_step(step, error))?;
        drop(grads);

        let tokens = task.tokens(done.sequences);
        done.step = step;
        done.grad_norm = Some(norm);
        done.sequences += task.sequences_per_step();
        let peak = world.all_reduce(&[peak_memory_bytes() as f64], ReduceOp::Max)?[0];
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step,
            loss,
            grad_norm: norm,
            lr,
            step_time_s: seconds,
            tokens_per_s: tokens / seconds,
            peak_mem_bytes: peak as u64,
            shard_bytes,
            rewards: rewards.map(|_| Rewards::from(std::array::from_fn(|i| means[2 + i]))),
        };
        if let Some(log) = &mut log {
            skipped.iter().for_each(|why| log.note(step, why));
            log.step(&record);
        }
        evaluate(step, &mut log)?;
        if args.save_every > 0 && step % args.save_every == 0 && step != args.steps {
            tracing::debug_span!("save").in_scope(|| checkpoints.save(&vars, optim.get(), &loss_scale, &done, &run))?;
        }
    }
    drop(log);

    let saved = tracing::debug_span!("save").in_scope(|| {
        let saved = checkpoints.save(&vars, optim.get(), &loss_scale, &done, &run)?;
        // Exports only after the checkpoint is complete.
        checkpoints.finish()?;
        anyhow::Ok(saved)
    })?;
    export::export(args, world, &vars, adapters.as_ref(), task.export(args)?, &checkpoints.dirs, done.step)?;
    let sample = sample()?;
    if world.rank() == 0 {
        Console::Stdout.line(format_args!("sample: {sample}"));
        Console::Stdout.line(format_args!("checkpoint: {}", saved.display()));
        if let Some(dir) = &args.export_hf {
            Console::Stdout.line(format_args!("exported: {}", dir.display()));
        }
    }
    Ok(GgufExport::new(args, world, adapters.as_ref(), &saved))
}
