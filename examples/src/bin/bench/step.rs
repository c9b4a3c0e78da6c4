//! `bench step`: a training step of a real model with random weights, from a Hugging Face config.json.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor};
use fsdp_candle::DeviceChoice;
use fsdp_candle::initializer::Philox;
use fsdp_candle::nn::CrossEntropyOptions;
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, MixedPrecisionPolicy, ReduceOp, ShardedVarMap, World, clip_grad_norm,
};
use fsdp_train::metrics::peak_memory_bytes;
use fsdp_train::models::{self, Batch, ModelConfig, ModelOptions, Rows, TensorParallel, parallel};
use fsdp_train::ranks::Ranks;
use serde::Serialize;

use crate::communication::Clock;
use crate::meter::Meter;
use crate::{count, plan, print};

/// Measures a training step.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory with the config.json of a model that `train` supports.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Sequences of a rank's batch.
    #[arg(long, default_value_t = 2, value_parser = count(1 << 16))]
    batch: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 256, value_parser = count(1 << 24))]
    seq: usize,
    /// Timed steps, after a warm-up step.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Units: the blocks, `wrapped` by fully_shard or selected by `name` in an unwrapped model (decoders only).
    #[arg(long, value_parser = ["wrapped", "name"], default_value = "wrapped")]
    units: String,
    /// Dtype of gathered parameters and of compute. Gradients are summed in f32.
    #[arg(long, value_parser = ["f32", "bf16"], default_value = "f32")]
    param_dtype: String,
    /// Recompute the activations of every block in backward.
    #[arg(long)]
    activation_checkpoint: bool,
    /// Replicas of the sharded model (HSDP), on neighbouring ranks each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    replicate: usize,
    /// Neighbouring processes that compute each layer together on the same data.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    tensor_parallel: usize,
    /// With --tensor-parallel: also split sequences.
    #[arg(long)]
    sequence_parallel: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Compute device.
    #[arg(long, default_value = "cpu", value_parser = fsdp_train::job::device_parser())]
    pub(crate) device: DeviceChoice,
}

/// Median times of the slowest rank in seconds. Each median is separate, so the parts need not add up to the step. On a
/// device, forward and backward are the times in which their operations were issued.
#[derive(Serialize)]
struct Report {
    world: usize,
    parameters: u64,
    step_s: f64,
    /// Fastest step.
    best_step_s: f64,
    forward_s: f64,
    backward_s: f64,
    /// Clipping and AdamW.
    optimizer_s: f64,
    /// Collectives, one after another, including waits for other ranks.
    communication_s: f64,
    /// Waits of the training thread for collectives.
    exposed_s: f64,
    tokens_per_s: f64,
    /// Floating point operations per second of a rank in the fastest step, for `bench plan --device cpu --flops`.
    flops_per_rank: f64,
    /// Bytes that rank 0 has allocated.
    allocated: Allocated,
    /// Peak resident memory of each process.
    peak_rss_bytes: Vec<u64>,
    /// Loss of the last step, to compare runs.
    loss: f64,
    grad_norm: f64,
}

/// Bytes beyond those that the program had before the model.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Allocated {
    /// Sharded parameters and the model's tables.
    parameters: u64,
    /// Optimizer state.
    optimizer: u64,
    /// After a step: parameters, gradients and optimizer state.
    between_steps: u64,
    /// Peak.
    peak: u64,
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let config = ModelConfig::from_dir(&args.model)?;
    let (vocabulary, positions) = (config.vocab_size(), config.max_positions());
    ensure!(args.seq <= positions, "--seq {} is beyond the model's {positions} positions", args.seq);
    parallel::check(&config, args.tensor_parallel)?;
    if args.sequence_parallel {
        parallel::check_sequence(args.tensor_parallel, ("--seq", args.seq))?;
    }
    let parameters = config.size(None).base as u64;
    let operations = plan::operations(&config, args.seq)?;
    let meter = Meter::of(world.device())?;
    let before = meter.current()?;
    let ranks = Ranks::new(world.size(), args.replicate, args.tensor_parallel)?;
    let vars = ranks.vars(world)?;
    vars.init_with(Philox::new(0));
    let of_layers = ranks.tensor_mesh(&vars)?;
    let options = ModelOptions {
        dtype: DType::F32,
        positions: args.seq,
        checkpoints: fsdp_candle::activation_checkpoint::CheckpointPolicy::every(args.activation_checkpoint.into()),
        dropout: models::Dropout::default(),
        parallel: of_layers.map(|mesh| TensorParallel::new(mesh, args.sequence_parallel)).transpose()?,
    };
    let param_dtype = if args.param_dtype == "bf16" { DType::BF16 } else { DType::F32 };
    let policy =
        MixedPrecisionPolicy { param_dtype: Some(param_dtype), reduce_dtype: Some(DType::F32), ..Default::default() };
    let opts = FullyShard::new(&vars).mp_policy(policy);
    let measured = |loss: &dyn Fn(&Batch) -> Result<Tensor>, backward: &dyn Fn(&Tensor) -> Result<GradStore>| {
        let subject = Subject { vocabulary, parameters, operations, before, meter: &meter, loss, backward };
        measure(args, world, &vars, &subject)
    };
    match (args.units.as_str(), &config) {
        ("name", ModelConfig::Decoder(config)) => {
            let model = models::build_by_name(config, opts, &vars, options)?;
            let loss = |batch: &Batch| {
                let options = CrossEntropyOptions::default();
                let losses =
                    model.call(|model| model.cross_entropy(&batch.ids, &batch.rows, &batch.targets, &options))?;
                Ok(losses.0)
            };
            measured(&loss, &|loss| model.backward(loss))
        }
        ("name", _) => bail!("--units name is for decoders, found another model in {}", args.model.display()),
        _ => {
            let model = models::build(&config, &opts, &vars, options)?;
            let loss = |batch: &Batch| models::loss(&model, batch);
            measured(&loss, &|loss| model.backward(loss))
        }
    }
}

/// The measured model.
struct Subject<'a> {
    vocabulary: usize,
    parameters: u64,
    /// Floating point operations per token.
    operations: f64,
    /// Bytes allocated before the model.
    before: usize,
    meter: &'a Meter,
    loss: &'a dyn Fn(&Batch) -> Result<Tensor>,
    backward: &'a dyn Fn(&Tensor) -> Result<GradStore>,
}

fn measure(args: &Args, world: &World, vars: &ShardedVarMap, subject: &Subject<'_>) -> anyhow::Result<()> {
    let &Subject { vocabulary, parameters, operations, before, meter, loss: loss_of, backward: backward_of } = subject;
    let in_use = || meter.current().map(|bytes| bytes.saturating_sub(before) as u64);
    let mut allocated = Allocated { parameters: in_use()?, ..Allocated::default() };
    let hyper = AdamWConfig { lr: 3e-4, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() };
    let mut optim = AdamW::new(vars.trainable(), hyper)?;
    allocated.optimizer = in_use()?.saturating_sub(allocated.parameters);
    meter.reset()?;

    // Pseudo-random ids that differ between ranks with different data.
    let ranks = Ranks::new(world.size(), args.replicate, args.tensor_parallel)?;
    let reader = ranks.data_rank(world.rank());
    let id = |at: usize| ((at * 7919 + reader) % vocabulary) as u32;
    let ids: Vec<u32> = (0..=args.batch * args.seq).map(id).collect();
    let batch = |from: usize| {
        let ids = ids[from..from + args.batch * args.seq].to_vec();
        Tensor::from_vec(ids, (args.batch, args.seq), &Device::Cpu)
    };
    let counted = (args.batch * args.seq) as u64;
    let batch = Batch {
        ids: batch(0)?.to_device(world.device())?,
        targets: batch(1)?,
        counted,
        rows: Rows::default(),
        pairs: None,
    };

    let clock = Clock::start().context("counting what is communicated")?;
    let mut times = [const { Vec::new() }; 6];
    let (mut loss, mut grad_norm) = (0., 0.);
    for step in 0..=args.steps {
        world.group().barrier().wait()?;
        let (start, so_far) = (Instant::now(), clock.read());
        let of_batch = loss_of(&batch)?;
        let forward = start.elapsed();
        let mut grads = backward_of(&of_batch)?;
        let backward = start.elapsed();
        grad_norm = clip_grad_norm(vars, &mut grads, 1.)?;
        optim.step(&grads)?;
        world.device().synchronize()?;
        let end = start.elapsed();
        loss = f64::from(of_batch.to_scalar::<f32>()?);
        if step == args.steps {
            allocated.peak = meter.peak()?.saturating_sub(before) as u64;
            drop(of_batch);
            vars.release_buffers();
            allocated.between_steps = in_use()?;
        }
        if step > 0 {
            let now = clock.read();
            let (all, exposed) = (now.all - so_far.all, now.exposed - so_far.exposed);
            let of_step = [end, forward, backward - forward, end - backward, all, exposed];
            for (times, time) in times.iter_mut().zip(of_step) {
                times.push(time.as_secs_f64());
            }
        }
    }
    let mut best_step_s = 0.;
    let mut medians = [0.; 6];
    for (i, times) in times.iter().enumerate() {
        let mut times = world.all_reduce(times, ReduceOp::Max)?;
        times.sort_by(f64::total_cmp);
        medians[i] = times[times.len() / 2];
        if i == 0 {
            best_step_s = times[0];
        }
    }
    let peaks = world.group().gather_values(vec![peak_memory_bytes() as i64])?;
    let loss = world.all_reduce(&[loss], ReduceOp::Avg)?[0];
    if world.rank() != 0 {
        return Ok(());
    }
    let [step_s, forward_s, backward_s, optimizer_s, communication_s, exposed_s] = medians;
    let report = Report {
        world: world.size(),
        parameters,
        step_s,
        best_step_s,
        forward_s,
        backward_s,
        optimizer_s,
        communication_s,
        exposed_s,
        flops_per_rank: (args.batch * args.seq) as f64 * operations / (ranks.tensor as f64 * best_step_s),
        allocated,
        tokens_per_s: (ranks.data() * args.batch * args.seq) as f64 / step_s,
        peak_rss_bytes: peaks.iter().map(|peak| *peak as u64).collect(),
        loss,
        grad_norm,
    };
    if args.json {
        return print(serde_json::to_string(&report)?);
    }
    let mib = |bytes: &u64| format!("{:.0}", *bytes as f64 / f64::from(1 << 20));
    print(format_args!(
        "{} ranks, {:.1} million parameters: {step_s:.3} s a step (best {best_step_s:.3}): forward {forward_s:.3}, \
         backward {backward_s:.3}, optimizer {optimizer_s:.3}; collectives {communication_s:.3}, of which compute \
         waits {exposed_s:.3}; {:.0} tokens/s; {:.3} TFLOP/s a rank at best; peak memory {} MiB",
        report.world,
        report.parameters as f64 / 1e6,
        report.tokens_per_s,
        report.flops_per_rank / 1e12,
        report.peak_rss_bytes.iter().map(mib).collect::<Vec<_>>().join(" and ")
    ))
}
