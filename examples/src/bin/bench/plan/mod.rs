//! `bench plan`: memory, time and the best mesh of a training run, predicted by arithmetic.
//!
//! `model` lists the layers and their sizes, `framework` and `on_device` the bytes that they keep and move, and
//! `hardware` the rates of devices and links. `memory` and `time` compute a [`Setup`], `setup` searches for the best
//! one, and `report` prints it.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use framework::{Checkpoint, Framework};
use fsdp_candle::ReshardAfterForward;
use fsdp_train::flags::{not_negative, positive, reshard};
use fsdp_train::models::{Base, ModelConfig, parallel};
use hardware::{Device, GIGA, Given, Links, Mesh, Precision};
use model::{Model, TensorRanks};
use report::Report;
use setup::Setup;

use crate::{count, print};

mod framework;
mod hardware;
mod memory;
mod model;
mod on_device;
mod report;
mod setup;
#[cfg(test)]
mod tests;
mod time;

/// Plans a training run.
#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  Does a model fit on eight H100, and how fast would it be?
    bench plan --model DIR --device h100-sxm --ranks-per-host 8 --batch 2 --seq 8192
  The same on sixteen hosts, with copies that are sharded over one host each:
    bench plan --model DIR --device h100-sxm --ranks-per-host 8 --hosts 16 --replicate 16 --batch 2 --seq 8192
  Each layer over the eight ranks of a host, and sequences split between layers:
    bench plan --model DIR --device h100-sxm --hosts 8 --tensor-parallel 8 --sequence-parallel
  Two ranks on this machine's CPU, which reach 0.09 TFLOP/s each by `bench step`:
    bench plan --model DIR --device cpu --flops 0.09 --ranks-per-host 2

How it is computed, and how far off it was where it was compared with runs: docs/planning.md.")]
pub(crate) struct Args {
    /// Directory with the config.json of a model that `train` supports, or the file itself. No weights are read.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Sequences of a rank's batch.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 16))]
    batch: usize,
    /// Tokens per sequence [default: the model's longest, at most 8192]
    #[arg(long, value_parser = count(1 << 24))]
    seq: Option<usize>,

    /// Ranks per host, one per device.
    #[arg(long, default_value_t = 8, value_parser = count(1 << 16), help_heading = "Mesh")]
    ranks_per_host: usize,
    /// Number of hosts.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 16), help_heading = "Mesh")]
    hosts: usize,
    /// Replicas of the model (HSDP), on neighbouring ranks each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 20), help_heading = "Mesh")]
    replicate: usize,
    /// Ranks that share each sequence, and gather the keys and values of a layer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16), help_heading = "Mesh")]
    context_parallel: usize,
    /// Neighbouring ranks that compute each layer together on the same batch (decoders only).
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16), help_heading = "Mesh")]
    tensor_parallel: usize,
    /// Ranks that have different experts, to which tokens are sent (mixtures of experts only).
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16), help_heading = "Mesh")]
    expert_parallel: usize,
    /// With --tensor-parallel: also split sequences.
    #[arg(long, help_heading = "Mesh")]
    sequence_parallel: bool,

    /// Compute device.
    #[arg(long, value_enum, help_heading = "Device")]
    device: hardware::DeviceName,
    /// Peak TFLOP/s of matrix products, instead of the table's value. For cpu, the TFLOP/s that it reaches.
    #[arg(long, value_parser = positive, help_heading = "Device")]
    flops: Option<f64>,
    /// Device memory in GB (10^9 bytes), instead of the table's value.
    #[arg(long, value_name = "GB", value_parser = positive, help_heading = "Device")]
    memory: Option<f64>,
    /// Memory bandwidth in GB/s, instead of the table's value. Optional for cpu, where no operation is then bound by
    /// it.
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Device")]
    memory_bandwidth: Option<f64>,
    /// Share of the peak that matrix products reach [default: 0.55; 0.75 on a100-80; 1 on cpu]
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Device")]
    products_share: Option<f64>,

    /// Bus bandwidth in GB/s of collectives between the ranks of a host [default: 0.8 of NVLink's; 5 on cpu]
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Links")]
    intra: Option<f64>,
    /// GB/s of a rank's network card to other hosts [default: 40, which is 0.8 of 400 Gbit/s; 1 on cpu]
    #[arg(long, value_name = "GB/S", value_parser = positive, help_heading = "Links")]
    inter: Option<f64>,
    /// Microseconds per hop in a ring.
    #[arg(long, value_name = "US", default_value_t = 10., value_parser = not_negative, help_heading = "Links")]
    latency: f64,

    /// Dtype of gathered parameters and of compute [default: bf16; f32 on cpu]
    #[arg(long, value_enum, help_heading = "Training")]
    param_dtype: Option<Precision>,
    /// Dtype in which gradients are reduced.
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Training")]
    reduce_dtype: Precision,
    /// Dtype of shards, their gradients and AdamW's moments.
    #[arg(long, value_enum, default_value_t = Precision::F32, help_heading = "Training")]
    shard_dtype: Precision,
    /// Storage of a frozen base, of which only small adapters are trained, as `train --base`. Memory and time of the
    /// adapters are not counted.
    #[arg(long, value_enum, conflicts_with = "framework", help_heading = "Training")]
    base: Option<Base>,
    /// The optimizer steps in backward, unit by unit.
    #[arg(long, conflicts_with = "base", help_heading = "Training")]
    optimizer_in_backward: bool,
    /// The optimizer's state is on disk. Time of the disk is not counted.
    #[arg(long, conflicts_with = "base", help_heading = "Training")]
    state_on_disk: bool,
    /// Shards are on disk as well.
    #[arg(long, requires = "state_on_disk", help_heading = "Training")]
    shards_on_disk: bool,
    /// Activations that are recomputed in backward.
    #[arg(long, value_enum, default_value_t = Checkpoint::None, help_heading = "Training")]
    activation_checkpoint: Checkpoint,
    /// The inputs of recomputed blocks are in host memory or on disk. Time of their copies is not counted.
    #[arg(long, conflicts_with = "framework", help_heading = "Training")]
    activation_offload: bool,
    /// cuDNN computes attention, as in a build with the feature `cudnn` where cuDNN is installed.
    #[arg(long, help_heading = "Training")]
    cudnn: bool,
    /// All-gathers and reduce-scatters use memory that is registered with NCCL, as in `train`.
    #[arg(long, help_heading = "Training")]
    allocate_memory_from_process_group_for_comm: bool,
    /// Gathered parameters between forward and backward, as in `train`.
    #[arg(long, value_name = "default|always|never|K", default_value = "default", value_parser = reshard)]
    #[arg(help_heading = "Training")]
    reshard_after_forward: ReshardAfterForward,
    /// Framework, which determines the activations that are kept for backward.
    #[arg(long, value_enum, default_value_t = Framework::Candle, help_heading = "Training")]
    framework: Framework,
    /// Reserve of the allocator as a share of the bytes in use [default: 0.1; 0 on cpu; 0.15 for pytorch]
    #[arg(long, value_name = "X", value_parser = not_negative, help_heading = "Training")]
    reserve: Option<f64>,

    /// Number of fastest meshes, policies and batches to show.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count(1 << 16))]
    top: usize,
    /// Print one JSON object with bytes, seconds and operations.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (models, seq) = models(args)?;
    let setup = setup(args, &models, seq)?;
    let report = Report::new(&setup, args.top);
    match args.json {
        true => print(serde_json::to_string(&report)?),
        false => print(report::table(&report, &setup)),
    }
}

/// Default limit of the sequence length.
const USUAL_SEQ: usize = 8192;

/// The model, and the part of a tensor-parallel rank.
struct Models {
    whole: Model,
    part: Model,
}

fn models(args: &Args) -> anyhow::Result<(Models, usize)> {
    let config = config(&args.model)?;
    ensure!(
        !matches!(&config, ModelConfig::Decoder(config) if config.latent.is_some() || config.has_sinks),
        "`bench plan` does not know the memory of latent attention and of attention sinks, as of deepseek_v2, deepseek_v3 \
         and gpt_oss: measure a smaller model of the same shape with `bench step`"
    );
    let seq = args.seq.unwrap_or(config.max_positions().min(USUAL_SEQ));
    let ranks = TensorRanks { count: args.tensor_parallel, sequence: args.sequence_parallel };
    parallel::check(&config, ranks.count)?;
    parallel::check_experts(&config, args.expert_parallel)?;
    let context = || format!("in {}", args.model.display());
    let whole = Model::new(&config, seq).with_context(context)?;
    let mut part = Model::of_rank(&config, seq, ranks).with_context(context)?;
    part.place_experts(args.expert_parallel);
    Ok((Models { whole, part }, seq))
}

fn config(path: &Path) -> anyhow::Result<ModelConfig> {
    if path.is_dir() { ModelConfig::from_dir(path) } else { ModelConfig::from_file(path) }
}

/// Returns the floating point operations per token of a step, forward and backward.
pub(crate) fn operations(config: &ModelConfig, seq: usize) -> anyhow::Result<f64> {
    Ok(Model::new(config, seq)?.operations())
}

fn setup<'a>(args: &Args, models: &'a Models, seq: usize) -> anyhow::Result<Setup<'a>> {
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
        shard: (ranks / args.replicate / args.tensor_parallel).max(1),
        context: args.context_parallel,
        tensor: args.tensor_parallel,
        expert: args.expert_parallel,
        replicate: args.replicate,
    };
    let setup = Setup {
        model: &models.part,
        whole: &models.whole,
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
        base: args.base,
        in_backward: args.optimizer_in_backward,
        on_disk: args.state_on_disk,
        shards_on_disk: args.shards_on_disk,
        checkpoint: args.activation_checkpoint,
        offload: args.activation_offload,
        reshard: args.reshard_after_forward,
        cudnn: args.cudnn,
        registered: args.allocate_memory_from_process_group_for_comm,
        reserve: args.reserve.unwrap_or(framework.reserve()),
    };
    setup.check()?;
    parallel::check_sequence(args.context_parallel, args.tensor_parallel, args.sequence_parallel, ("--seq", seq))?;
    Ok(setup)
}

/// Upper limit of the number of ranks.
const MOST_RANKS: usize = 1 << 20;
