//! A complete program that trains a sharded model: `fsdp-launch --nproc-per-node 2 minimal`. With a directory as
//! argument, it saves checkpoints there, and resumes from the newest.

use std::io::{Write, stdout};

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, CheckpointManager, FsdpModule, FullyShard, ShardedVarMap, TrainState, clip_grad_norm,
    fully_shard, nn,
};

const WIDTH: usize = 64;
const LAYERS: usize = 4;

/// An ordinary Candle module without any code for sharding.
struct Block {
    norm: nn::RmsNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(&self.norm.forward(x)?)?)?)?
    }
}

struct Model {
    blocks: Vec<FsdpModule<Block>>,
    head: nn::Linear,
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

fn main() -> anyhow::Result<()> {
    let world = fsdp_candle::init()?;
    let vars = ShardedVarMap::of_world(&world)?;
    let vb = vars.builder(DType::F32);
    let opts = FullyShard::new(&vars);

    // Bottom-up: each block is a unit, and the root has the remaining parameters.
    let block = |i: usize| {
        fully_shard(&opts, vb.pp(format!("blocks.{i}")), |vb| {
            Ok(Block {
                norm: nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
                up: nn::linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
                down: nn::linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
            })
        })
    };
    let blocks = (0..LAYERS).map(block).collect::<fsdp_candle::Result<_>>()?;
    let model = fully_shard(&opts, vb.clone(), |vb| Ok(Model { blocks, head: nn::linear(WIDTH, 1, vb.pp("head"))? }))?;
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig { lr: 1e-3, ..Default::default() })?;

    let mut checkpoints = std::env::args().nth(1).map(|dir| CheckpointManager::new(&world, dir).keep_newest(2));
    let mut done = 0;
    if let Some(checkpoints) = &mut checkpoints {
        let resumed = checkpoints.resume(TrainState::new(&vars).optimizer(&mut optim))?;
        done = resumed.map_or(0, |from| from.step);
    }
    for step in done + 1..=100 {
        // Each rank has its own data. The task is to predict the first number of a row.
        let seed = (step * world.size() + world.rank()) as u32;
        let numbers: Vec<f32> =
            (0..32 * WIDTH as u32).map(|i| ((seed * 7919 + i * 104729) % 1009) as f32 / 504.5 - 1.).collect();
        let x = Tensor::from_vec(numbers, (32, WIDTH), world.device())?;
        let y = x.narrow(1, 0, 1)?;

        let loss = (model.forward(&x)? - y)?.sqr()?.mean_all()?;
        let mut grads = model.backward(&loss)?;
        let norm = clip_grad_norm(&vars, &mut grads, 1.0)?;
        optim.step(&grads)?;
        if let Some(checkpoints) = &mut checkpoints
            && step % 20 == 0
        {
            checkpoints.save(step, TrainState::new(&vars).optimizer(&mut optim))?;
        }
        if world.rank() == 0 && step % 20 == 0 {
            let loss = loss.to_scalar::<f32>()?;
            // `println!` would panic on a full disk.
            let _ = writeln!(stdout(), "step {step:3}  loss {loss:.4}  gradient norm {norm:.3}");
        }
    }
    Ok(())
}
