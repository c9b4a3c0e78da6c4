//! `bench memory`: memory of a rank between steps and during a step, counted by the allocator of the host or the
//! device.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Optimizer as _, VarBuilder, VarMap};
use clap::ValueEnum;
use fsdp_candle::DeviceChoice;
use fsdp_candle::{
    AdamW, AdamW8bitConfig, AdamWConfig, ElementwiseOptimizer, ElementwiseRule, FsdpModule, FsdpParam, FullyShard,
    Muon, MuonConfig, Optimizers, PostAccumulateGradHook, ReduceOp, ReduceScatter, ReshardAfterForward, SgdConfig,
    ShardedOptimizer, ShardedVarMap, StateOnDisk, World,
};
use fsdp_core::{Allocator, ProcessGroup, ScatterPart, Work};
use serde::Serialize;

use crate::meter::Meter;
use crate::residual::{Residual, Shape};
use crate::{count, print};

/// Measures memory.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Sharding modes, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "zero3,zero2,plain")]
    mode: Vec<Mode>,
    /// Optimizer of the sharded modes.
    #[arg(long, value_enum, default_value_t = Optimizer::Adamw)]
    optimizer: Optimizer,
    /// Directory for the optimizer's state, instead of memory.
    #[arg(long, value_name = "DIR")]
    state_on_disk: Option<PathBuf>,
    /// Keep shards in that directory as well, in the sharded modes.
    #[arg(long, requires = "state_on_disk")]
    shards_on_disk: bool,
    /// Forwards before each backward, with summed losses.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 10))]
    passes: usize,
    /// Run these forwards in one call of the root.
    #[arg(long)]
    in_one_call: bool,
    /// Select units by name in an unwrapped model. Reduced gradients then count as transient.
    #[arg(long)]
    by_name: bool,
    /// Step the optimizer in backward, unit by unit, in the sharded modes.
    #[arg(long)]
    optimizer_in_backward: bool,
    /// Print one JSON object per mode.
    #[arg(long)]
    json: bool,
    /// Compute device.
    #[arg(long, default_value = "cpu", value_parser = fsdp_train::job::device_parser())]
    pub(crate) device: DeviceChoice,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// ZeRO-3: parameters are freed after forward and gathered again in backward.
    Zero3,
    /// ZeRO-2: parameters stay gathered between forward and backward.
    Zero2,
    /// Candle without sharding: every rank holds everything.
    Plain,
}

/// Optimizer.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Optimizer {
    /// Two moments in f32
    Adamw,
    /// Two moments in 8 bits
    Adamw8bit,
    /// Momentum in f32
    Sgd,
    /// Momentum in f32 for matrices, AdamW for the rest
    Muon,
}

impl Optimizer {
    fn of(self, vars: &ShardedVarMap, disk: Option<StateOnDisk>) -> fsdp_candle::Result<Box<dyn ShardedOptimizer>> {
        let (params, disk) = (vars.trainable(), disk.as_ref());
        Ok(match self {
            Optimizer::Adamw => make(params, AdamWConfig::default(), disk)?,
            Optimizer::Adamw8bit => make(params, AdamW8bitConfig::default(), disk)?,
            Optimizer::Sgd => make(params, SgdConfig { momentum: 0.9, ..SgdConfig::default() }, disk)?,
            Optimizer::Muon if disk.is_some() => {
                return Err(fsdp_candle::Error::Argument("Muon has no state on disk: use another optimizer".into()));
            }
            Optimizer::Muon => {
                let (matrices, rest) = params.into_iter().partition(|param| param.shape().rank() == 2);
                let muon = Muon::new(matrices, MuonConfig::default())?;
                Box::new(Optimizers::new(vec![Box::new(muon), Box::new(AdamW::new(rest, AdamWConfig::default())?)])?)
            }
        })
    }
}

fn make<C: ElementwiseRule + Send + 'static>(
    params: Vec<Arc<FsdpParam>>,
    config: C,
    disk: Option<&StateOnDisk>,
) -> fsdp_candle::Result<Box<dyn ShardedOptimizer>> {
    Ok(Box::new(match disk {
        Some(disk) => ElementwiseOptimizer::on_disk(vec![(params, config)], disk)?,
        None => ElementwiseOptimizer::new(params, config)?,
    }))
}

/// Bytes on the rank that needs most.
#[derive(Serialize)]
struct Report {
    mode: Mode,
    world: usize,
    /// f32 parameters of the model.
    model_bytes: u64,
    /// f32 parameters of a unit.
    unit_bytes: u64,
    /// Resident between steps: parameters, gradients and optimizer state.
    resident_bytes: u64,
    /// Largest excess of a step over the resident bytes.
    transient_bytes: u64,
    /// Bytes in use after each phase, without pooled buffers.
    phases: Phases,
}

/// Bytes in use after the phases of a step.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Phases {
    /// Parameters, after the model is built.
    build: u64,
    /// Parameters and moments, after the optimizer is created.
    optimizer: u64,
    /// After forward.
    forward: u64,
    /// After backward, with gradients.
    backward: u64,
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    for &mode in &args.mode {
        let (resident, transient, phases) = match mode {
            Mode::Plain => plain(args, world)?,
            Mode::Zero3 => sharded(args, world, ReshardAfterForward::Always)?,
            Mode::Zero2 => sharded(args, world, ReshardAfterForward::Never)?,
        };
        let most = world.all_reduce(&[resident as f64, transient as f64], ReduceOp::Max)?;
        let report = Report {
            mode,
            world: world.size(),
            model_bytes: args.shape.model_bytes(),
            unit_bytes: args.shape.unit_bytes(),
            resident_bytes: most[0] as u64,
            transient_bytes: most[1] as u64,
            phases,
        };
        if world.rank() == 0 {
            show(&report, args)?;
        }
    }
    Ok(())
}

fn show(report: &Report, args: &Args) -> anyhow::Result<()> {
    if args.json {
        return print(serde_json::to_string(report)?);
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    print(format_args!(
        "{:<6} {} ranks, {} units of {:.2} MiB: {:>8.2} MiB between steps, {:>8.2} MiB more during one",
        format!("{:?}", report.mode).to_lowercase(),
        report.world,
        args.shape.layers,
        mib(report.unit_bytes),
        mib(report.resident_bytes),
        mib(report.transient_bytes)
    ))
}

const STEPS: usize = 3;

/// Samples the allocator whenever a unit's gradients are complete. Resident bytes grow during backward as sharded
/// gradients appear. Each sample subtracts those that certainly exist, all but those of the pending reduction. A sample
/// may be too large by one unit's share, and is never too small.
struct Sampler {
    meter: Meter,
    samples: Mutex<Samples>,
}

#[derive(Default)]
struct Samples {
    /// Bytes of parameters and moments.
    state: usize,
    /// Bytes of one unit's sharded gradients, and the number of units.
    share: usize,
    units: usize,
    reductions: usize,
    most: usize,
}

impl Sampler {
    fn begin(&self, state: usize, share: usize, units: usize) -> Result<()> {
        *self.lock() = Samples { state, share, units, ..Samples::default() };
        self.meter.reset()
    }

    fn look(&self) -> Result<usize> {
        let mut samples = self.lock();
        let gradients = samples.reductions.saturating_sub(1).min(samples.units) * samples.share;
        samples.most = samples.most.max(self.meter.peak()?.saturating_sub(samples.state + gradients));
        samples.reductions += 1;
        self.meter.reset()?;
        Ok(samples.most)
    }

    fn lock(&self) -> MutexGuard<'_, Samples> {
        locked(&self.samples)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReduceScatter for Sampler {
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        // A device error here also fails the reduction, which reports it.
        drop(self.look());
        ranks.reduce_scatter(parts, op, memory)
    }
}

fn sharded(args: &Args, world: &World, reshard: ReshardAfterForward) -> anyhow::Result<(usize, usize, Phases)> {
    let meter = Meter::of(world.device())?;
    let before = meter.current()?;
    let in_use = || Ok::<_, candle_core::Error>(meter.current()?.saturating_sub(before) as u64);
    let mut phases = Phases::default();
    let vars = ShardedVarMap::of_world(world)?;
    let disk = args.state_on_disk.as_ref().map(StateOnDisk::new);
    if args.shards_on_disk
        && let Some(disk) = &disk
    {
        vars.store_on_disk(disk)?;
    }
    let opts = FullyShard::new(&vars).reshard_after_forward(reshard);
    let vb = vars.builder(DType::F32);
    let sampler = Arc::new(Sampler { meter: Meter::of(world.device())?, samples: Mutex::default() });
    let (model, share): (Box<dyn Trained>, usize) = if args.by_name {
        (Box::new(args.shape.by_name(&opts, vb)?), 0)
    } else {
        let model = args.shape.sharded(&opts, vb)?;
        let blocks = &model.inner().blocks;
        for block in blocks {
            block.set_custom_reduce_scatter(Some(sampler.clone()));
        }
        let share = blocks.first().map_or(0, |block| {
            block.params().iter().map(|param| param.region().elements() * param.dtype().size_in_bytes()).sum()
        });
        (Box::new(model), share)
    };
    phases.build = in_use()?;
    let optim = args.optimizer.of(&vars, disk)?;
    let optim = Arc::new(Mutex::new(optim));
    let in_backward = args.optimizer_in_backward;
    if in_backward {
        let optim = optim.clone();
        let step = move |grads: GradStore| Ok(locked(&optim).step(&grads)?);
        model.set_hook(Arc::new(step));
    }
    // Then no sharded gradients stay.
    let share = if in_backward { 0 } else { share };
    phases.optimizer = in_use()?;
    let x = args.shape.batch(1, world.device())?;
    let state = meter.current()?;
    let (mut resident, mut transient) = (0, 0);
    for _ in 0..STEPS {
        sampler.begin(state, share, args.shape.layers)?;
        let loss = model.loss(&x, args.passes, args.in_one_call)?;
        let grads = model.gradients(&loss)?;
        drop(loss);
        if !in_backward {
            locked(&optim).step(&grads)?;
        }
        transient = sampler.look()?;
        vars.release_buffers();
        resident = meter.current()?.saturating_sub(before);
        drop(grads);
    }
    let loss = model.loss(&x, args.passes, args.in_one_call)?;
    vars.release_buffers();
    phases.forward = in_use()?;
    let grads = model.gradients(&loss)?;
    drop(loss);
    vars.release_buffers();
    phases.backward = in_use()?;
    drop(grads);
    Ok((resident, transient, phases))
}

/// The model, with either kind of unit.
trait Trained {
    /// Returns the summed loss of `passes` forwards.
    fn loss(&self, x: &Tensor, passes: usize, in_one_call: bool) -> Result<Tensor>;

    fn gradients(&self, loss: &Tensor) -> Result<GradStore>;

    fn set_hook(&self, hook: Arc<dyn PostAccumulateGradHook>);
}

impl<B: Module> Trained for FsdpModule<Residual<B>> {
    fn loss(&self, x: &Tensor, passes: usize, in_one_call: bool) -> Result<Tensor> {
        match in_one_call {
            true => self.call(|model| loss_of(model, x, passes)),
            false => loss_of(self, x, passes),
        }
    }

    fn gradients(&self, loss: &Tensor) -> Result<GradStore> {
        self.backward(loss)
    }

    fn set_hook(&self, hook: Arc<dyn PostAccumulateGradHook>) {
        self.set_post_accumulate_grad_hook(Some(hook));
    }
}

fn loss_of(model: &impl Module, x: &Tensor, passes: usize) -> Result<Tensor> {
    let mut sum = model.forward(x)?.sqr()?.mean_all()?;
    for _ in 1..passes {
        sum = (sum + model.forward(x)?.sqr()?.mean_all()?)?;
    }
    Ok(sum)
}

fn plain(args: &Args, world: &World) -> anyhow::Result<(usize, usize, Phases)> {
    let meter = Meter::of(world.device())?;
    let before = meter.current()?;
    let in_use = || Ok::<_, candle_core::Error>(meter.current()?.saturating_sub(before) as u64);
    let mut phases = Phases::default();
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, world.device());
    let model = args.shape.plain(vb)?;
    phases.build = in_use()?;
    let mut optim = candle_nn::AdamW::new(vars.all_vars(), candle_nn::ParamsAdamW::default())?;
    phases.optimizer = in_use()?;
    let x = args.shape.batch(1, world.device())?;
    let (mut resident, mut peak) = (0, 0);
    for _ in 0..STEPS {
        meter.reset()?;
        let loss = loss_of(&model, &x, args.passes)?;
        phases.forward = in_use()?;
        let grads = loss.backward()?;
        drop(loss);
        phases.backward = in_use()?;
        optim.step(&grads)?;
        peak = meter.peak()?.saturating_sub(before);
        resident = meter.current()?.saturating_sub(before);
        drop(grads);
    }
    Ok((resident, peak.saturating_sub(resident), phases))
}
