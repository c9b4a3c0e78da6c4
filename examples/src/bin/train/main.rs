//! Pre-trains or fine-tunes a Llama or a GPT-2 with its parameters sharded over the ranks: `fsdp-launch --nproc-per-node 2 train --help`.

mod adapters;
mod agree;
mod args;
mod checkpoint;
mod damage;
mod done;
mod logging;
mod places;
mod setup;
mod trace;

use std::process::ExitCode;
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Module, Tensor};
use clap::Parser;
use fsdp_candle::{AdamW, AdamWConfig, ReduceOp, World, clip_grad_norm, grad_norm, nn};
use fsdp_examples::job;
use fsdp_examples::metrics::{MetricsFile, StepRecord, peak_memory_bytes};
use fsdp_examples::progress::Progress;
use fsdp_examples::schedule::Schedule;
use fsdp_examples::tensorboard::EventFile;

use args::{Args, GradSync};
use checkpoint::Checkpoints;
use setup::Setup;

fn main() -> ExitCode {
    let args = Args::parse();
    job::run(|world| {
        let trace = logging::init(args.trace.as_deref(), world)?;
        train(&args, world)?;
        trace.map_or(Ok(()), |trace| trace.finish(world))
    })
}

fn train(args: &Args, world: &World) -> anyhow::Result<()> {
    // First of all, so that what is in the way shows before anything is read.
    let mut checkpoints = Checkpoints::new(args, world)?;
    let Setup { vars, model, batches, text, config } = Setup::new(args, world)?;
    let hyper = AdamWConfig { lr: args.lr, betas: args.betas, eps: args.eps, weight_decay: args.weight_decay };
    let mut optim = AdamW::new(vars.trainable(), hyper)?;
    let schedule = Schedule::new(args.lr_schedule, args.lr, args.warmup_steps, args.steps);

    let mut done = checkpoints.resume(args, &vars, &mut optim)?;
    if world.rank() == 0 && done.step >= args.steps {
        eprintln!(
            "nothing to train: step {} is done already and --steps is {}; raise it to go on",
            done.step, args.steps
        );
    }
    let mut metrics = match &args.metrics {
        Some(path) if world.rank() == 0 => Some(MetricsFile::open(path, done.step)?),
        _ => None,
    };
    let mut events = match &args.tensorboard {
        Some(directory) if world.rank() == 0 => Some(EventFile::open(directory, done.step)?),
        _ => None,
    };
    let shard_bytes = setup::shard_bytes(&vars);
    let mut progress = (world.rank() == 0).then(|| Progress::new(done.step, args.steps));
    let tokens_per_step = (world.size() * args.batch_size * args.grad_accum * args.seq_len) as f64;

    for step in done.step + 1..=args.steps {
        let _span = tracing::debug_span!("step", number = step).entered();
        let start = Instant::now();
        let lr = schedule.lr(step);
        optim.set_learning_rate(lr);

        // Forward and backward of each micro-batch; gradients come back averaged over ranks and sharded.
        let mut loss_sum = 0.;
        let mut grads: Option<GradStore> = None;
        for micro_step in 0..args.grad_accum {
            let last = micro_step + 1 == args.grad_accum;
            model.set_requires_gradient_sync(last || args.grad_sync == GradSync::Every, true);
            let (inputs, targets) = batches.micro_batch(done.sequences, micro_step);
            let inputs_bt = Tensor::from_vec(inputs, (args.batch_size, args.seq_len), world.device())?;
            let targets_bt = Tensor::from_vec(targets, (args.batch_size, args.seq_len), world.device())?;
            let loss = nn::cross_entropy(&model.forward(&inputs_bt)?, &targets_bt)?;
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
        optim.step(&grads)?;
        drop(grads);

        done.step = step;
        done.sequences += args.sequences_per_step(world.size());
        let loss = world.all_reduce(&[loss_sum / args.grad_accum as f64], ReduceOp::Avg)?[0];
        let peak = world.all_reduce(&[peak_memory_bytes() as f64], ReduceOp::Max)?[0];
        anyhow::ensure!(loss.is_finite(), "the loss is {loss} at step {step}: lower --lr or use --clip-grad-norm");
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
        if let Some(metrics) = &mut metrics {
            metrics.write(&record)?;
        }
        if let Some(events) = &mut events {
            events.write(&record)?;
        }
        if let Some(progress) = &mut progress {
            progress.step(&record);
        }
        if args.save_every > 0 && step % args.save_every == 0 && step != args.steps {
            tracing::debug_span!("save").in_scope(|| checkpoints.save(&vars, &optim, &done))?;
        }
    }
    if let Some(progress) = progress {
        progress.finish();
    }

    let saved = tracing::debug_span!("save").in_scope(|| checkpoints.save(&vars, &optim, &done))?;
    if let Some(dir) = &args.export_hf {
        checkpoint::export_hf(dir, args, world, &vars)?;
    }
    checkpoints.finish()?;
    let sample = tracing::debug_span!("sample").in_scope(|| setup::sample(&model, &batches, &text, &config, world))?;
    if world.rank() == 0 {
        println!("sample: {sample}");
        println!("checkpoint: {}", saved.display());
        if let Some(dir) = &args.export_hf {
            println!("exported: {}", dir.display());
        }
    }
    Ok(())
}
