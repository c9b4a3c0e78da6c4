//! `bench memory`: what a rank keeps between steps, and what a step needs on top, counted by the allocator.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, ReshardAfterForward, ShardedVarMap, World, fully_shard, nn};
use serde::Serialize;

use crate::ALLOCATOR;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Width of the model; each of its layers is a unit of 8 * width^2 parameters.
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Layers.
    #[arg(long, default_value_t = 6)]
    layers: usize,
    /// Keep unsharded parameters between forward and backward (ZeRO-2) instead of freeing them (ZeRO-3).
    #[arg(long)]
    keep: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Bytes, of the rank that needs most.
#[derive(Serialize)]
struct Report {
    world: usize,
    /// f32 parameters of the whole model.
    model_bytes: u64,
    /// f32 parameters of one unit.
    unit_bytes: u64,
    /// Resident between steps: shards of parameters, gradients and two moments.
    resident_bytes: u64,
    /// The most that a step has beyond that.
    transient_bytes: u64,
}

/// A residual MLP. It keeps nothing but its layers: activations of one row are small beside the parameters.
struct Block {
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Block {
            up: nn::linear_no_bias(width, 4 * width, vb.pp("up"))?,
            down: nn::linear_no_bias(4 * width, width, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(x)?)?)?
    }
}

pub(crate) fn run(args: &Args, world: &World) -> anyhow::Result<()> {
    let before = ALLOCATOR.current_usage();
    let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", world.size())])?, world.device());
    let policy = if args.keep { ReshardAfterForward::Never } else { ReshardAfterForward::Always };
    let opts = FullyShard::new(&vars).reshard_after_forward(policy);
    let vb = vars.builder(DType::F32);
    let blocks = (0..args.layers)
        .map(|i| fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(args.width, vb)))
        .collect::<fsdp_candle::Result<Vec<_>>>()?;
    let model = fully_shard(&opts, vb, |vb| Ok((blocks, nn::rms_norm(args.width, 1e-5, vb.pp("norm"))?)))?;
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    let x = Tensor::ones((1, args.width), DType::F32, world.device())?;

    let (mut resident, mut peak) = (0, 0);
    for _ in 0..3 {
        ALLOCATOR.reset_peak_usage();
        let y = model
            .call(|(blocks, norm)| norm.forward(&blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?))?;
        let loss = y.sqr()?.mean_all()?;
        let grads = model.backward(&loss)?;
        drop((y, loss));
        optim.step(&grads)?;
        peak = ALLOCATOR.peak_usage() - before;
        vars.release_buffers();
        resident = ALLOCATOR.current_usage() - before;
        drop(grads);
    }
    let numbers = world.all_reduce(&[resident as f64, (peak - resident) as f64], fsdp_candle::ReduceOp::Max)?;
    let elements = |params: &[std::sync::Arc<fsdp_candle::FsdpParam>]| -> u64 {
        params.iter().map(|param| param.shape().elem_count() as u64 * 4).sum()
    };
    let report = Report {
        world: world.size(),
        model_bytes: elements(&vars.params()),
        unit_bytes: model.inner().0.first().map_or(0, |block| elements(block.params())),
        resident_bytes: numbers[0] as u64,
        transient_bytes: numbers[1] as u64,
    };
    if world.rank() != 0 {
        return Ok(());
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "{} ranks, {} layers of {:.2} MiB, {:.2} MiB of parameters",
            report.world,
            args.layers,
            mib(report.unit_bytes),
            mib(report.model_bytes)
        );
        println!("resident on a rank between steps:  {:>8.2} MiB", mib(report.resident_bytes));
        println!("needed on top during a step:       {:>8.2} MiB", mib(report.transient_bytes));
    }
    Ok(())
}
