//! `bench step`: a training step of a real model with random weights, from a Hugging Face config.json. `images` has the
//! models of images.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor};
use fsdp_candle::DeviceChoice;
use fsdp_candle::activation_checkpoint::CheckpointPolicy;
use fsdp_candle::initializer::Philox;
use fsdp_candle::nn::{CrossEntropyOptions, LoraConfig, cross_entropy, is_adapter};
use fsdp_candle::{
    AdamW, AdamWConfig, ContextParallel, FsdpModule, FullyShard, MixedPrecisionPolicy, Recurse, ReduceOp,
    ShardedOptimizer, ShardedVarMap, World, clip_factor, grad_norm,
};
use fsdp_train::data::MicroBatch;
use fsdp_train::flags::{ActivationPlace, ContextExchange};
use fsdp_train::metrics::{page_faults, peak_memory_bytes};
use fsdp_train::models::{self, Base, Batch, Compute, ModelConfig, ModelOptions, Targets, TensorParallel, parallel};
use fsdp_train::ranks::Ranks;
use serde::Serialize;

use crate::communication::Clock;
use crate::images::{self, ImageConfig};
use crate::meter::Meter;
use crate::{count, plan, print};

/// Measures a training step. tests/interop/step.py measures the same in PyTorch, and `bench peers` runs both.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory with the config.json of a model: a language model that `train` supports, a ResNet with basic blocks or a
    /// ConvNeXt.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Sequences or images of a rank's batch.
    #[arg(long, default_value_t = 2, value_parser = count(1 << 16))]
    batch: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 256, value_parser = count(1 << 24))]
    seq: usize,
    /// Height and width of images.
    #[arg(long, value_name = "PIXELS", default_value_t = 64, value_parser = count(1 << 12))]
    image_size: usize,
    /// Timed steps, after a warm-up step.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Units: the blocks, `wrapped` by fully_shard or selected by `name` in an unwrapped model (decoders only).
    #[arg(long, value_parser = ["wrapped", "name"], default_value = "wrapped")]
    units: String,
    /// Dtype of gathered parameters and of compute. Gradients are summed in f32.
    #[arg(long, value_parser = ["f32", "bf16"], default_value = "f32")]
    param_dtype: String,
    /// How the blocks' matrix products are computed, as in `train`.
    #[arg(long, value_enum, default_value_t = Compute::Full)]
    compute: Compute,
    /// Train LoRA adapters of this rank only, on the layers that `train --lora-rank` adapts: projections of queries and
    /// values.
    #[arg(long, value_name = "N", value_parser = count(1 << 16))]
    lora_rank: Option<usize>,
    /// With --lora-rank: storage of the frozen weights, as in `train`.
    #[arg(long, value_enum, default_value_t = Base::F32, requires = "lora_rank")]
    base: Base,
    /// Recompute the activations of every block in backward.
    #[arg(long)]
    activation_checkpoint: bool,
    /// With --activation-checkpoint: storage of the blocks' inputs between forward and backward, as in `train`.
    #[arg(long, value_name = "none|cpu|disk:DIR", default_value = "none", requires = "activation_checkpoint")]
    activation_offload: ActivationPlace,
    /// Replicas of the sharded model (HSDP), on neighbouring ranks each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    replicate: usize,
    /// Neighbouring processes that have different experts, as in `train`.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    expert_parallel: usize,
    /// Processes that share each sequence.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    context_parallel: usize,
    /// With --context-parallel: how attention gets what other processes hold.
    #[arg(long, value_enum)]
    context_exchange: Option<ContextExchange>,
    /// Neighbouring processes that compute each layer together on the same data.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1 << 16))]
    tensor_parallel: usize,
    /// With --tensor-parallel: also split sequences.
    #[arg(long)]
    sequence_parallel: bool,
    /// Communicate by memory that NCCL allocates and registers.
    #[arg(long)]
    allocate_memory_from_process_group_for_comm: bool,
    /// Number of ranks to start. Under a launcher, the number that it has started.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) world: Option<u16>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Compute device.
    #[arg(long, default_value = "cpu", value_parser = fsdp_train::job::device_parser())]
    pub(crate) device: DeviceChoice,
}

impl Args {
    /// Sets how the units of a model communicate.
    fn apply<M>(&self, model: &FsdpModule<M>) -> anyhow::Result<()> {
        let from_process_group = self.allocate_memory_from_process_group_for_comm;
        let set = model.set_allocate_memory_from_process_group_for_comm(from_process_group, Recurse::Yes);
        set.context("--allocate-memory-from-process-group-for-comm")
    }
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
    #[serde(flatten)]
    rate: Rate,
    /// Floating point operations per second of a rank in the fastest step, for `bench plan --device cpu --flops`. `None`
    /// where plans don't count them: for images and adapters.
    #[serde(skip_serializing_if = "Option::is_none")]
    flops_per_rank: Option<f64>,
    /// Bytes that rank 0 has allocated.
    allocated: Allocated,
    /// Peak resident memory of each process.
    peak_rss_bytes: Vec<u64>,
    /// Page faults of each process in the median step: memory that came from the system.
    page_faults: Vec<u64>,
    /// Loss of the last step, to compare runs.
    loss: f64,
    grad_norm: f64,
}

/// Tokens or images of all ranks in a second.
#[derive(Clone, Copy, Serialize)]
enum Rate {
    #[serde(rename = "tokens_per_s")]
    Tokens(f64),
    #[serde(rename = "images_per_s")]
    Images(f64),
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
    let size = world.size();
    ensure!(
        args.world.is_none_or(|wanted| usize::from(wanted) == size),
        "there are {size} ranks, not {}: start them with fsdp-launch --nproc-per-node {0}",
        args.world.unwrap_or_default()
    );
    let setup = Setup::new(args, world)?;
    match ImageConfig::from_dir(&args.model)? {
        Some(config) => run_images(&setup, &config),
        None => run_language_model(&setup),
    }
}

/// A run's ranks, and its parameters before the model is built.
struct Setup<'a> {
    args: &'a Args,
    world: &'a World,
    ranks: Ranks,
    vars: ShardedVarMap,
    opts: FullyShard,
    meter: Meter,
    /// Bytes allocated before the model.
    before: usize,
}

impl<'a> Setup<'a> {
    fn new(args: &'a Args, world: &'a World) -> anyhow::Result<Self> {
        let meter = Meter::of(world.device())?;
        let before = meter.current()?;
        let ranks = Ranks::new(world.size(), args.replicate, args.context_parallel, args.tensor_parallel)?;
        let ranks = ranks.with_experts(args.expert_parallel)?;
        let vars = ranks.vars(world)?;
        vars.init_with(Philox::new(0))?;
        let param_dtype = if args.param_dtype == "bf16" { DType::BF16 } else { DType::F32 };
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(param_dtype),
            reduce_dtype: Some(DType::F32),
            ..Default::default()
        };
        let base = args.base;
        let store = move |name: &str, shape: &[usize]| base.format(name, shape).filter(|_| !is_adapter(name));
        let opts = FullyShard::new(&vars).mp_policy(policy).store(store);
        Ok(Setup { args, world, ranks, vars, opts, meter, before })
    }
}

fn run_language_model(setup: &Setup<'_>) -> anyhow::Result<()> {
    let Setup { args, world, ranks, vars, opts, .. } = setup;
    let config = ModelConfig::from_dir(&args.model)?;
    let (vocabulary, positions) = (config.vocab_size(), config.max_positions());
    ensure!(args.seq <= positions, "--seq {} is beyond the model's {positions} positions", args.seq);
    parallel::check(&config, args.tensor_parallel)?;
    parallel::check_experts(&config, args.expert_parallel)?;
    let (context, tensor) = (args.context_parallel, args.tensor_parallel);
    parallel::check_sequence(context, tensor, args.sequence_parallel, ("--seq", args.seq))?;
    let exchange = args.context_exchange.unwrap_or(ContextExchange::Gather).into();
    ensure!(
        args.context_exchange.is_none() || args.context_parallel > 1,
        "--context-exchange has no effect without --context-parallel: leave it out"
    );
    parallel::check_context(&config, context, tensor, exchange)?;
    let context = ranks.context(vars, exchange)?;
    let per_token = plan::operations(&config, args.seq)? / (ranks.tensor * ranks.context) as f64;
    parallel::place_experts(&config, vars, ranks.expert_mesh(vars)?)?;
    let of_layers = ranks.tensor_mesh(vars)?;
    let checkpoints = CheckpointPolicy::every(args.activation_checkpoint.into());
    let options = ModelOptions {
        dtype: DType::F32,
        positions: args.seq,
        checkpoints: args.activation_offload.offload(checkpoints, world)?,
        dropout: models::Dropout::default(),
        parallel: of_layers.map(|mesh| TensorParallel::new(mesh, args.sequence_parallel)).transpose()?,
    };
    args.compute.apply(vars)?;
    if let Some(rank) = args.lora_rank {
        let targets = Targets::queries_and_values()?;
        vars.freeze(|name| !is_adapter(name))?;
        vars.adapt(LoraConfig { rank, alpha: 2. * rank as f64 }, move |layer| targets.matches(layer))?;
    }
    let batch = || token_batch(args, ranks.data_rank(world.rank()), vocabulary, context.as_ref(), world.device());
    let tokens = args.batch * args.seq;
    let measured = |loss: &dyn Fn(&Batch) -> Result<Tensor>, backward: &dyn Fn(&Tensor) -> Result<GradStore>| {
        let operations = args.lora_rank.is_none().then_some(tokens as f64 * per_token);
        measure(setup, &Subject { samples: (tokens, Rate::Tokens), operations, batch: &batch, loss, backward })
    };
    match (args.units.as_str(), &config) {
        ("name", ModelConfig::Decoder(config)) => {
            let model = models::build_by_name(config, opts.clone(), vars, options)?;
            args.apply(&model)?;
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
            let model = models::build(&config, opts, vars, options)?;
            args.apply(&model)?;
            let loss = |batch: &Batch| models::loss(&model, batch);
            measured(&loss, &|loss| model.backward(loss))
        }
    }
}

/// Pseudo-random ids that differ between ranks with different data.
fn token_batch(
    args: &Args,
    reader: usize,
    vocabulary: usize,
    context: Option<&ContextParallel>,
    device: &Device,
) -> Result<Batch> {
    let id = |at: usize| ((at * 7919 + reader) % vocabulary) as u32;
    let tokens = args.batch * args.seq;
    let read = MicroBatch {
        inputs: (0..tokens).map(id).collect(),
        targets: (1..=tokens).map(id).collect(),
        counted: tokens as u64,
        filled: vec![args.seq; args.batch],
        ..MicroBatch::default()
    };
    Batch::new(read, device, context)
}

fn run_images(setup: &Setup<'_>, config: &ImageConfig) -> anyhow::Result<()> {
    let Setup { args, world, ranks, vars, opts, .. } = setup;
    for (flag, is_set) in [
        ("--units name", args.units == "name"),
        ("--lora-rank", args.lora_rank.is_some()),
        ("--activation-checkpoint", args.activation_checkpoint),
        ("--tensor-parallel", args.tensor_parallel > 1),
        ("--context-parallel", args.context_parallel > 1),
        ("--expert-parallel", args.expert_parallel > 1),
    ] {
        ensure!(!is_set, "{flag} is for language models, found a model of images in {}", args.model.display());
    }
    let model = config.build(opts, vars.builder(DType::F32))?;
    args.apply(&model)?;
    let size = (args.batch, args.image_size);
    measure(
        setup,
        &Subject {
            samples: (args.batch, Rate::Images),
            operations: None,
            batch: &|| images::batch(config, size, ranks.data_rank(world.rank()), world.device()),
            loss: &|(images, classes)| cross_entropy(&model.forward(images)?, classes),
            backward: &|loss| model.backward(loss),
        },
    )
}

/// The measured model, whose batch is a `B`.
struct Subject<'a, B> {
    /// Number of tokens or images in a rank's batch.
    samples: (usize, fn(f64) -> Rate),
    /// Floating point operations of a rank's step, if known.
    operations: Option<f64>,
    batch: &'a dyn Fn() -> Result<B>,
    loss: &'a dyn Fn(&B) -> Result<Tensor>,
    backward: &'a dyn Fn(&Tensor) -> Result<GradStore>,
}

fn measure<B>(setup: &Setup<'_>, subject: &Subject<'_, B>) -> anyhow::Result<()> {
    let &Setup { args, world, ref ranks, ref vars, ref meter, before, .. } = setup;
    let in_use = || meter.current().map(|bytes| bytes.saturating_sub(before) as u64);
    let mut allocated = Allocated { parameters: in_use()?, ..Allocated::default() };
    let hyper = AdamWConfig { lr: 3e-4, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() };
    let mut optim = AdamW::new(vars.trainable(), hyper)?;
    allocated.optimizer = in_use()?.saturating_sub(allocated.parameters);
    meter.reset()?;

    let batch = (subject.batch)()?;
    let clock = Clock::start().context("counting what is communicated")?;
    let mut times = [const { Vec::new() }; 6];
    let (mut loss, mut norm, mut faults) = (0., 0., vec![]);
    for step in 0..=args.steps {
        world.group().barrier().wait()?;
        let faults_so_far = page_faults();
        let (start, so_far) = (Instant::now(), clock.read());
        let of_batch = (subject.loss)(&batch)?;
        let forward = start.elapsed();
        let grads = (subject.backward)(&of_batch)?;
        let backward = start.elapsed();
        norm = grad_norm(vars, &grads)?;
        optim.step_scaled(&grads, clip_factor(1., norm))?;
        world.device().synchronize()?;
        let end = start.elapsed();
        let new_faults = page_faults() - faults_so_far;
        loss = f64::from(of_batch.to_scalar::<f32>()?);
        if step == args.steps {
            allocated.peak = meter.peak()?.saturating_sub(before) as u64;
            drop(of_batch);
            vars.release_buffers();
            allocated.between_steps = in_use()?;
        }
        if step > 0 {
            faults.push(new_faults);
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
    faults.sort_unstable();
    let median = faults[faults.len() / 2];
    let counts = world.group().gather_values(vec![peak_memory_bytes() as i64, median as i64])?;
    let of_ranks = |at: usize| counts.iter().skip(at).step_by(2).map(|count| *count as u64).collect();
    let loss = world.all_reduce(&[loss], ReduceOp::Avg)?[0];
    if world.rank() != 0 {
        return Ok(());
    }
    let [step_s, forward_s, backward_s, optimizer_s, communication_s, exposed_s] = medians;
    let (samples, rate) = subject.samples;
    let report = Report {
        world: world.size(),
        parameters: vars.params().iter().map(|param| param.shape().elem_count() as u64).sum(),
        step_s,
        best_step_s,
        forward_s,
        backward_s,
        optimizer_s,
        communication_s,
        exposed_s,
        flops_per_rank: subject.operations.map(|operations| operations / best_step_s),
        allocated,
        rate: rate((ranks.data() * samples) as f64 / step_s),
        peak_rss_bytes: of_ranks(0),
        page_faults: of_ranks(1),
        loss,
        grad_norm: norm,
    };
    if args.json {
        return print(serde_json::to_string(&report)?);
    }
    let mib = |bytes: &u64| format!("{:.0}", *bytes as f64 / f64::from(1 << 20));
    let rate = match report.rate {
        Rate::Tokens(rate) => format!("{rate:.0} tokens/s"),
        Rate::Images(rate) => format!("{rate:.1} images/s"),
    };
    let flops = report.flops_per_rank.map(|flops| format!("; {:.3} TFLOP/s a rank at best", flops / 1e12));
    print(format_args!(
        "{} ranks, {:.1} million parameters: {step_s:.3} s a step (best {best_step_s:.3}): forward {forward_s:.3}, \
         backward {backward_s:.3}, optimizer {optimizer_s:.3}; collectives {communication_s:.3}, of which compute \
         waits {exposed_s:.3}; {rate}{}; peak memory {} MiB",
        report.world,
        report.parameters as f64 / 1e6,
        flops.unwrap_or_default(),
        report.peak_rss_bytes.iter().map(mib).collect::<Vec<_>>().join(" and ")
    ))
}
