//! `bench finite`: the cost of the checks for NaN and infinity. Each step checks the gradient norm, and each save
//! checks all values.

use std::path::PathBuf;
use std::time::Instant;

use candle_core::{DType, Module};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, ReduceOp, ShardedVarMap, ValuesOf, World, check_finite, grad_norm, model_tensors,
    optimizer_tensors,
};
use fsdp_ckpt::{SaveState, save};
use serde::Serialize;

use crate::ckpt::Scratch;
use crate::residual::Shape;
use crate::{count, print};

/// Measures the checks.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Rows of a rank's batch.
    #[arg(long, default_value_t = 512, value_parser = count(1 << 24))]
    rows: usize,
    /// Number of runs.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Parent of a temporary directory for the files.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Median times of the slowest rank in seconds.
#[derive(Serialize)]
struct Report {
    world: usize,
    /// Bytes of the f32 parameters. The optimizer has two moments of each.
    model_bytes: u64,
    /// Forward, backward, norm and optimizer step.
    step_s: f64,
    /// Gradient norm, which also serves clipping. A step needs no other check.
    norm_s: f64,
    /// Saving weights and moments.
    save_s: f64,
    /// Checking weights and moments before the save.
    check_s: f64,
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let vars = ShardedVarMap::of_world(world)?;
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let model = args.shape.sharded(&opts, vb)?;
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    let x = args.shape.batch(args.rows, world.device())?;
    let scratch = Scratch::new(&args.dir, world)?;

    let mut times = [const { Vec::new() }; 4];
    for run in 0..args.runs {
        let start = Instant::now();
        let y = model.forward(&x)?;
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
        save(&dir, world.group(), &state)?;
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
    let model_bytes = args.shape.model_bytes();
    if world.rank() == 0 {
        show(args, &Report { world: world.size(), model_bytes, step_s, norm_s, save_s, check_s })?;
    }
    Ok(())
}

fn show(args: &Args, report: &Report) -> anyhow::Result<()> {
    if args.json {
        return print(serde_json::to_string(report)?);
    }
    let Report { world, model_bytes, step_s, norm_s, save_s, check_s } = report;
    print(format_args!("{world} ranks, {:.1} MiB of parameters", *model_bytes as f64 / f64::from(1 << 20)))?;
    let line = |what: &str, whole: f64, part: f64, of: &str| {
        let share = 100. * part / whole;
        print(format_args!("{what} {:>9.3} ms, of that {:>7.3} ms ({share:.2} %) {of}", 1e3 * whole, 1e3 * part))
    };
    line("step", *step_s, *norm_s, "for the norm of the gradients")?;
    line("save", save_s + check_s, *check_s, "to check weights and moments")
}
