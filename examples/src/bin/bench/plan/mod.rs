//! `bench plan`: memory, time and the best layout of a training run, by arithmetic alone.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use framework::{Checkpoint, Framework};
use fsdp_examples::models::ModelConfig;
use hardware::{Device, GIGA, Given, Links, Mesh, Precision};
use model::Model;
use report::Report;
use setup::{Reshard, Setup};

use crate::{count, print};

mod framework;
mod hardware;
mod memory;
mod model;
mod report;
mod setup;
#[cfg(test)]
mod tests;
mod time;
mod unfused;

/// What to plan.
#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  Does a model fit on eight H100, and how fast would it be?
    bench plan --model DIR --device h100-sxm --ranks-per-host 8 --batch 2 --seq 8192
  The same on sixteen hosts, with copies that are sharded over one host each:
    bench plan --model DIR --device h100-sxm --ranks-per-host 8 --hosts 16 --replicate 16 --batch 2 --seq 8192
  Two ranks on this machine's CPU, which reach 0.09 TFLOP/s each by `bench step`:
    bench plan --model DIR --device cpu --flops 0.09 --ranks-per-host 2

How it is computed, and how far off it was where it was compared with runs: docs/planning.md.")]
pub(crate) struct Args {
    /// Directory with a config.json of a model that `train` knows, or the file itself. No weights are read.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Sequences of a rank's batch.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 16))]
    batch: usize,
    /// Tokens of a sequence [default: the model's longest, at most 8192]
    #[arg(long, value_parser = count(1 << 24))]
    seq: Option<usize>,

    /// Ranks of a host, one a device.
    #[arg(long, default_value_t = 8, value_parser = count(1 << 16), help_heading = "Mesh")]
    ranks_per_host: usize,
    /// Hosts.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 16), help_heading = "Mesh")]
    hosts: usize,
    /// Copies of the model (HSDP), each sharded over ranks / N neighbouring ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 20), help_heading = "Mesh")]
    replicate: usize,

    /// What a rank computes on.
    #[arg(long, value_enum, help_heading = "Device")]
    device: hardware::DeviceName,
    /// TFLOP/s of the device's matrix products at its peak, in place of the table's; of a CPU, those that it reaches.
    #[arg(long, value_parser = positive, help_heading = "Device")]
    flops: Option<f64>,
    /// GB of the device's memory (10^9 bytes), in place of the table's.
    #[arg(long, value_name = "GB", value_parser = positive, help_heading = "Device")]
    memory: Option<f64>,
    /// GB/s of the device's memory, in place of the table's. Of a CPU it may be left out: then nothing is bound by it.
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Device")]
    memory_bandwidth: Option<f64>,
    /// The share of the peak that matrix products reach [default: 0.55; 0.75 on a100-80; 1 on cpu]
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Device")]
    products_share: Option<f64>,

    /// GB/s that a collective reaches between the ranks of a host (bus bandwidth) [default: 0.8 of NVLink's; 5 on cpu]
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Links")]
    intra: Option<f64>,
    /// GB/s that a rank's card reaches to other hosts [default: 40, which is 0.8 of 400 Gbit/s; 1 on cpu]
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Links")]
    inter: Option<f64>,
    /// Microseconds of a hop in a ring.
    #[arg(long, value_name = "US", default_value_t = 10., value_parser = not_negative, help_heading = "Links")]
    latency: f64,

    /// The dtype of gathered parameters and of compute [default: bf16; f32 on cpu]
    #[arg(long, value_enum, help_heading = "Training")]
    param_dtype: Option<Precision>,
    /// The dtype in which gradients are reduced.
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Training")]
    reduce_dtype: Precision,
    /// The dtype of shards, their gradients and AdamW's moments.
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Training")]
    shard_dtype: Precision,
    /// What runs again in backward.
    #[arg(long, value_enum, default_value_t = Checkpoint::None, help_heading = "Training")]
    activation_checkpoint: Checkpoint,
    /// What becomes of gathered parameters between forward and backward, as `train` has it.
    #[arg(long, value_name = "default|always|never|K", default_value = "default", value_parser = Reshard::parse)]
    #[arg(help_heading = "Training")]
    reshard_after_forward: Reshard,
    /// Whose training it is: what is kept for backward differs.
    #[arg(long, value_enum, default_value_t = Framework::Candle, help_heading = "Training")]
    framework: Framework,
    /// What the allocator holds besides, as a share of what is in use [default: 0.1; 0 on cpu; 0.15 for pytorch]
    #[arg(long, value_name = "X", value_parser = not_negative, help_heading = "Training")]
    reserve: Option<f64>,

    /// How many of the fastest meshes, policies and batches are shown.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count(1 << 16))]
    top: usize,
    /// Print one JSON object: bytes, seconds, operations.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (model, seq) = model(args)?;
    let setup = setup(args, &model, seq)?;
    let report = Report::new(&setup, args.top);
    match args.json {
        true => print(serde_json::to_string(&report)?),
        false => print(report::table(&report, &setup)),
    }
}

/// The tokens of a sequence, where nobody says it.
const USUAL_SEQ: usize = 8192;

fn model(args: &Args) -> anyhow::Result<(Model, usize)> {
    let config = config(&args.model)?;
    let seq = args.seq.unwrap_or(config.max_positions().min(USUAL_SEQ));
    let model = Model::new(&config, seq).with_context(|| format!("in {}", args.model.display()))?;
    Ok((model, seq))
}

fn config(path: &Path) -> anyhow::Result<ModelConfig> {
    if path.is_dir() { ModelConfig::from_dir(path) } else { ModelConfig::from_file(path) }
}

/// Floating point operations of a token in a step, forward and backward.
pub(crate) fn operations(config: &ModelConfig, seq: usize) -> anyhow::Result<f64> {
    Ok(Model::new(config, seq)?.operations())
}

fn setup<'a>(args: &Args, model: &'a Model, seq: usize) -> anyhow::Result<Setup<'a>> {
    let on_cpu = args.device == hardware::DeviceName::Cpu;
    let compute = args.param_dtype.unwrap_or(if on_cpu { Precision::F32 } else { Precision::Bf16 });
    let framework = args.framework.on(args.device);
    let given = Given {
        flops: args.flops,
        memory: args.memory,
        memory_bandwidth: args.memory_bandwidth,
        products: args.products_share,
    };
    let ranks = args.ranks_per_host * args.hosts;
    ensure!(ranks <= MOST_RANKS, "{ranks} ranks are more than `bench plan` takes, which is {MOST_RANKS}");
    let mesh = Mesh {
        ranks_per_host: args.ranks_per_host,
        hosts: args.hosts,
        shard: (ranks / args.replicate).max(1),
        replicate: args.replicate,
    };
    let setup = Setup {
        model,
        mesh,
        device: Device::new(args.device, compute, given)?,
        links: Links {
            intra: GIGA * args.intra.unwrap_or(args.device.intra()),
            inter: GIGA * args.inter.unwrap_or(args.device.inter()),
            latency: args.latency / 1e6,
        },
        framework,
        batch: args.batch,
        seq,
        compute,
        reduce: args.reduce_dtype,
        shards: args.shard_dtype,
        checkpoint: args.activation_checkpoint,
        reshard: args.reshard_after_forward,
        reserve: args.reserve.unwrap_or(framework.reserve()),
    };
    setup.check()?;
    Ok(setup)
}

/// More than there are.
const MOST_RANKS: usize = 1 << 20;

fn positive(text: &str) -> Result<f64, String> {
    number(text, "a number above 0", |x| x > 0.)
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, "a number of at least 0", |x| x >= 0.)
}

fn number(text: &str, what: &str, wanted: impl Fn(f64) -> bool) -> Result<f64, String> {
    text.trim().parse().ok().filter(|&x: &f64| x.is_finite() && wanted(x)).ok_or_else(|| format!("it must be {what}"))
}
