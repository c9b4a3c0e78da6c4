//! Pre-trains or fine-tunes a language model with its parameters sharded over the ranks:
//! `fsdp-launch --nproc-per-node 2 train --help`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod adapters;
mod agree;
mod alike;
mod args;
mod bad_step;
mod checkpoint;
mod damage;
mod done;
mod export;
mod exported;
mod feed;
mod gradcheck;
mod health;
mod logging;
mod memory;
mod places;
mod setup;
mod step_log;
mod steps;
mod trace;
mod values;
mod writable;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::backprop::GradStore;
use clap::Parser;
use fsdp_candle::{AdamW, AdamWConfig, Recurse, ReduceOp, World, clip_grad_norm, grad_norm};
use fsdp_examples::console::Console;
use fsdp_examples::job;
use fsdp_examples::metrics::{StepRecord, peak_memory_bytes};
use fsdp_examples::models;
use fsdp_examples::schedule::Schedule;

use args::{Args, GradSync};
use bad_step::BadStep;
use checkpoint::Checkpoints;
use setup::Setup;
use step_log::StepLog;

fn main() -> ExitCode {
    let args = Args::parse();
    job::run(|world| {
        // First of all: what follows counts on it.
        alike::settings(&args, world)?;
        args.batch_shape(world)?;
        writable::check(&args, world)?;
        let trace = logging::init(args.trace.as_deref(), world)?;
        train(&args, world)?;
        trace.map_or(Ok(()), |trace| trace.finish(world))
    })
}

fn train(args: &Args, world: &World) -> anyhow::Result<()> {
    // Before all else, so that what is in the way shows before anything is read.
    let mut checkpoints = Checkpoints::new(args, world)?;
    let Setup { vars, model, feed, text, config } = Setup::new(args, world)?;
    let hyper = AdamWConfig { lr: args.lr, betas: args.betas, eps: args.eps, weight_decay: args.weight_decay };
    let mut optim = AdamW::new(vars.trainable(), hyper)?;
    let schedule = Schedule::new(args.lr_schedule, args.lr, args.warmup_steps, args.steps);

    let mut done = checkpoints.resume(args, &vars, &mut optim)?;
    if world.rank() == 0 && done.step >= args.steps {
        Console::Stderr.line(format_args!(
            "nothing to train: step {} is done already and --steps is {}; raise it to go on",
            done.step, args.steps
        ));
    }
    if args.gradcheck && done.step < args.steps {
        tracing::debug_span!("gradcheck").in_scope(|| gradcheck::check(args, &model, &feed, done.sequences, world))?;
    }
    let mut log = if world.rank() == 0 { Some(StepLog::open(args, done.step)?) } else { None };
    let shard_bytes = setup::shard_bytes(&vars);
    let tokens_per_step = feed.batches().tokens_per_step() as f64;

    for step in done.step + 1..=args.steps {
        let _span = tracing::debug_span!("step", number = step).entered();
        let start = Instant::now();
        let lr = schedule.lr(step);
        optim.set_learning_rate(lr);

        // Forward and backward of each micro-batch; gradients come back averaged over ranks and sharded.
        let counted = feed.counted(done.sequences, world)?;
        let mut loss_sum = 0.;
        let mut grads: Option<GradStore> = None;
        for micro_step in 0..args.grad_accum {
            let last = micro_step + 1 == args.grad_accum;
            model.set_requires_gradient_sync(last || args.grad_sync == GradSync::Every, Recurse::Yes);
            let (inputs_bt, targets_bt) = feed.micro_batch(done.sequences, micro_step, world)?;
            let loss = models::loss(&model, &inputs_bt, &targets_bt, counted)?;
            loss_sum += f64::from(loss.to_scalar::<f32>()?);
            let new = model.backward(&(loss / args.grad_accum as f64)?)?;
            match &mut grads {
                Some(grads) => grads.extend(new)?,
                None => grads = Some(new),
            }
        }
        let Some(mut grads) = grads else { anyhow::bail!("--grad-accum is at least 1") };
        let norm = match args.clip_grad_norm {
            0. => grad_norm(&vars, &grads)?,
            max => clip_grad_norm(&vars, &mut grads, max)?,
        };
        // What is not finite on one rank makes the mean so: all ranks stop together, while the weights are good.
        let own_loss = loss_sum / args.grad_accum as f64;
        let means = world.all_reduce(&[own_loss, norm], ReduceOp::Avg)?;
        let loss = means[0];
        if !means.iter().all(|mean| mean.is_finite()) {
            let bad = BadStep { step, loss, own_loss, norm, grads: &grads };
            anyhow::bail!(bad.explain(world, &vars, &optim, &mut checkpoints)?);
        }
        optim.step(&grads)?;
        drop(grads);

        done.step = step;
        done.sequences += feed.batches().sequences_per_step();
        let peak = world.all_reduce(&[peak_memory_bytes() as f64], ReduceOp::Max)?[0];
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step,
            loss,
            grad_norm: norm,
            lr,
            step_time_s: seconds,
            tokens_per_s: tokens_per_step / seconds,
            peak_mem_bytes: peak as u64,
            shard_bytes,
        };
        if let Some(log) = &mut log {
            log.step(&record);
        }
        if args.save_every > 0 && step % args.save_every == 0 && step != args.steps {
            tracing::debug_span!("save").in_scope(|| checkpoints.save(&vars, &optim, &done))?;
        }
    }
    if let Some(log) = log {
        log.finish();
    }

    let saved = tracing::debug_span!("save").in_scope(|| checkpoints.save(&vars, &optim, &done))?;
    checkpoints.export(args, &vars, &done)?;
    checkpoints.finish()?;
    let sample = tracing::debug_span!("sample").in_scope(|| setup::sample(&model, &feed, &text, &config, world))?;
    if world.rank() == 0 {
        Console::Stdout.line(format_args!("sample: {sample}"));
        Console::Stdout.line(format_args!("checkpoint: {}", saved.display()));
        if let Some(dir) = &args.export_hf {
            Console::Stdout.line(format_args!("exported: {}", dir.display()));
        }
    }
    Ok(())
}
