//! What the integration tests share: a small model in ordinary Candle code, and ranks as threads.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, World, fully_shard, nn};
use fsdp_core::process_group::{Options, local};

/// A residual MLP of Candle's own linear layers and this crate's norm.
pub(crate) struct Block {
    norm: nn::RmsNorm,
    up: candle_nn::Linear,
    down: nn::Linear,
}

impl Block {
    pub(crate) fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Block {
            norm: nn::rms_norm(width, 1e-5, vb.pp("norm"))?,
            up: candle_nn::linear(width, 3 * width, vb.pp("up"))?,
            down: nn::linear(3 * width, width, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(&self.norm.forward(x)?)?)?)?
    }
}

/// Blocks, each of them called by `call`, and a head.
pub(crate) struct Model<B> {
    pub(crate) blocks: Vec<B>,
    pub(crate) head: nn::Linear,
}

impl<B: Module> Module for Model<B> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

pub(crate) const LAYERS: usize = 3;

pub(crate) fn sharded(opts: &FullyShard, vars: &ShardedVarMap, width: usize) -> FsdpModule<Model<FsdpModule<Block>>> {
    let vb = vars.builder(DType::F32);
    let blocks = (0..LAYERS)
        .map(|i| fully_shard(opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(width, vb)).unwrap())
        .collect();
    fully_shard(opts, vb, |vb| Ok(Model { blocks, head: nn::linear(width, 2, vb.pp("head"))? })).unwrap()
}

pub(crate) fn plain(vb: VarBuilder, width: usize) -> Model<Block> {
    let blocks = (0..LAYERS).map(|i| Block::new(width, vb.pp(format!("blocks.{i}"))).unwrap()).collect();
    Model { blocks, head: nn::linear(width, 2, vb.pp("head")).unwrap() }
}

pub(crate) fn vars(world: &World) -> ShardedVarMap {
    ShardedVarMap::new(&world.mesh(&[("dp_shard", world.size())]).unwrap(), world.device())
}

/// Runs a closure on each rank of a world of threads.
pub(crate) fn ranks<T: Send>(size: usize, f: impl Fn(World) -> T + Sync) -> Vec<T> {
    local::run_with(size, Options::default(), |group| f(World::of(group)))
}

/// A batch that depends on the rank.
pub(crate) fn batch(rank: usize, width: usize) -> Tensor {
    let values: Vec<f32> = (0..4 * width).map(|i| ((i * 37 + rank * 101) % 61) as f32 / 61. - 0.5).collect();
    Tensor::from_vec(values, (4, width), &Device::Cpu).unwrap()
}
