//! The model of `bench memory` and `bench finite`: residual MLPs, each a unit, and a norm.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{FsdpModule, FullyShard, fully_shard, nn, shard};

use crate::count;

/// Size of the model.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Shape {
    /// Width of the model. Each layer is a unit of 8 * width^2 parameters.
    #[arg(long, default_value_t = 512, value_parser = count(1 << 16))]
    width: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 6, value_parser = count(1 << 16))]
    pub(crate) layers: usize,
}

impl Shape {
    /// Returns the bytes of a unit's f32 parameters.
    pub(crate) fn unit_bytes(self) -> u64 {
        (8 * self.width * self.width * 4) as u64
    }

    /// Returns the bytes of the model's f32 parameters.
    pub(crate) fn model_bytes(self) -> u64 {
        self.unit_bytes() * self.layers as u64 + 4 * self.width as u64
    }

    pub(crate) fn sharded(
        self,
        opts: &FullyShard,
        vb: VarBuilder<'static>,
    ) -> Result<FsdpModule<Residual<FsdpModule<Block>>>> {
        let block = |i| fully_shard(opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(self.width, vb));
        let blocks = (0..self.layers).map(block).collect::<fsdp_candle::Result<_>>()?;
        Ok(fully_shard(opts, vb, |vb| Residual::new(self.width, blocks, vb))?)
    }

    pub(crate) fn by_name(self, opts: &FullyShard, vb: VarBuilder<'static>) -> Result<FsdpModule<Residual<Block>>> {
        Ok(shard(opts, &["blocks.*"], vb, |vb| self.plain(vb))?)
    }

    pub(crate) fn plain(self, vb: VarBuilder) -> Result<Residual<Block>> {
        let blocks = (0..self.layers).map(|i| Block::new(self.width, vb.pp(format!("blocks.{i}"))));
        Residual::new(self.width, blocks.collect::<Result<_>>()?, vb)
    }

    /// Creates a batch.
    pub(crate) fn batch(self, rows: usize, device: &Device) -> Result<Tensor> {
        Tensor::ones((rows, self.width), DType::F32, device)
    }
}

/// The model, whose blocks may be units.
pub(crate) struct Residual<B> {
    pub(crate) blocks: Vec<B>,
    norm: nn::RmsNorm,
}

impl<B> Residual<B> {
    fn new(width: usize, blocks: Vec<B>, vb: VarBuilder) -> Result<Self> {
        Ok(Residual { blocks, norm: nn::rms_norm(width, 1e-5, vb.pp("norm"))? })
    }
}

impl<B: Module> Module for Residual<B> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

/// A residual MLP. Activations of one row are small compared with its parameters.
pub(crate) struct Block {
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
