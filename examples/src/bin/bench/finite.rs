//! `bench finite`: what it costs to know that all numbers are finite: in each step, where the norm of the gradients
//! tells, and before a save.

use std::path::PathBuf;
use std::time::Instant;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, ReduceOp, ShardedVarMap, ValuesOf, World, check_finite, fully_shard, grad_norm,
    model_tensors, nn, optimizer_tensors,
};
use fsdp_ckpt::{SaveState, save};
use fsdp_examples::console::Console;
use serde::Serialize;

use crate::ckpt::Scratch;
use crate::memory::Block;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Width of the model; each of its layers is a unit of 8 * width^2 parameters.
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Layers.
    #[arg(long, default_value_t = 6)]
    layers: usize,
    /// Rows of a rank's batch.
    #[arg(long, default_value_t = 512)]
    rows: usize,
    /// Runs of each.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Where to write; a directory there is made and removed again.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Median seconds, of the slowest rank.
#[derive(Serialize)]
struct Report {
    world: usize,
    /// f32 parameters of the whole model; there are two moments of each.
    model_bytes: usize,
    /// Forward, backward, norm and the optimizer's step.
    step_s: f64,
    /// The norm of the gradients, which clipping wants as well: all that a step does to know that they are finite.
    norm_s: f64,
    /// Weights and moments to disk.
    save_s: f64,
    /// The look at weights and moments before.
    check_s: f64,
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", world.size())])?, world.device());
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let blocks = (0..args.layers)
        .map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(args.width, vb)))
        .collect::<fsdp_candle::Result<Vec<_>>>()?;
    let model = fully_shard(&opts, vb, |vb| Ok((blocks, nn::rms_norm(args.width, 1e-5, vb.pp("norm"))?)))?;
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    let x = Tensor::ones((args.rows, args.width), DType::F32, world.device())?;
    let scratch = Scratch::new(&args.dir, world)?;

    let mut times = [const { Vec::new() }; 4];
    for run in 0..args.runs {
        let start = Instant::now();
        let y = model
            .call(|(blocks, norm)| norm.forward(&blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?))?;
        let grads = model.backward(&y.sqr()?.mean_all()?)?;
        let norm = Instant::now();
        grad_norm(&vars, &grads)?;
        times[1].push(norm.elapsed().as_secs_f64());
        optim.step(&grads)?;
        times[0].push(start.elapsed().as_secs_f64());
        drop((y, grads));

        let mut tensors = model_tensors(&vars)?;
        tensors.extend(optimizer_tensors(&optim)?);
        let state = SaveState { mesh: vars.mesh().layout().clone(), tensors, values: Default::default() };
        let dir = scratch.0.join(format!("step-{run}"));
        world.group().barrier().wait()?;
        let start = Instant::now();
        save(&dir, &**world.group(), &state)?;
        times[2].push(start.elapsed().as_secs_f64());
        scratch.remove(&dir, world)?;

        let start = Instant::now();
        check_finite(&vars, &[ValuesOf::Parameters, ValuesOf::Moments(&optim)])?;
        times[3].push(start.elapsed().as_secs_f64());
    }
    let mut medians = [0.; 4];
    for (median, times) in medians.iter_mut().zip(&times) {
        let mut times = world.all_reduce(times, ReduceOp::Max)?;
        times.sort_by(f64::total_cmp);
        *median = times[times.len() / 2];
    }
    let [step_s, norm_s, save_s, check_s] = medians;
    let model_bytes = 8 * args.width * args.width * args.layers * 4;
    if world.rank() == 0 {
        print(args, &Report { world: world.size(), model_bytes, step_s, norm_s, save_s, check_s })?;
    }
    Ok(())
}

fn print(args: &Args, report: &Report) -> anyhow::Result<()> {
    if args.json {
        Console::Stdout.line(serde_json::to_string(report)?);
        return Ok(());
    }
    let Report { world, model_bytes, step_s, norm_s, save_s, check_s } = report;
    Console::Stdout
        .line(format_args!("{world} ranks, {:.1} MiB of parameters", *model_bytes as f64 / f64::from(1 << 20)));
    let line = |what: &str, whole: f64, part: f64, of: &str| {
        let share = 100. * part / whole;
        Console::Stdout.line(format_args!(
            "{what} {:>9.3} ms, of that {:>7.3} ms ({:.2} %) {of}",
            1e3 * whole,
            1e3 * part,
            share
        ));
    };
    line("step", *step_s, *norm_s, "for the norm of the gradients");
    line("save", save_s + check_s, *check_s, "for the look at weights and moments");
    Ok(())
}
