//! The README's program is one that compiles and runs.
#![allow(clippy::unwrap_used, missing_docs)]

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, ShardedVarMap, clip_grad_norm, fully_shard, nn};

const WIDTH: usize = 8;
const VOCABULARY: usize = 5;

struct Block(nn::Linear);

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Block(nn::linear(WIDTH, WIDTH, vb)?))
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + nn::gelu(&self.0.forward(x)?)?
    }
}

struct Model {
    embedding: nn::Embedding,
    blocks: Vec<FsdpModule<Block>>,
    head: nn::Linear,
}

impl Model {
    fn new(vb: VarBuilder, blocks: Vec<FsdpModule<Block>>) -> Result<Self> {
        let embedding = nn::embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        Ok(Model { embedding, blocks, head: nn::linear(WIDTH, VOCABULARY, vb.pp("head"))? })
    }
}

impl Module for Model {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.blocks.iter().try_fold(self.embedding.forward(ids)?, |x, block| block.forward(&x))?;
        self.head.forward(&x)
    }
}

/// What stands between the marks is the README's, to the letter.
#[rustfmt::skip]
fn readme(layers: usize, data: Vec<(Tensor, Tensor)>) -> anyhow::Result<()> {
    // README begins
    let world = fsdp_candle::init()?;                              // RANK, WORLD_SIZE, ... as torchrun and fsdp-launch set them
    let mesh = world.mesh(&[("dp_shard", world.size())])?;
    let vars = ShardedVarMap::new(&mesh, world.device());          // what VarMap is to one process
    let vb = vars.builder(DType::F32);                             // an ordinary candle_nn::VarBuilder
    let opts = FullyShard::new(&vars);

    // Bottom-up: each block, then the root, which takes the parameters that are left.
    let blocks = (0..layers)
        .map(|i| fully_shard(&opts, vb.pp(format!("layers.{i}")), |vb| Block::new(vb)))
        .collect::<fsdp_candle::Result<Vec<_>>>()?;
    let model = fully_shard(&opts, vb, |vb| Model::new(vb, blocks))?;

    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    for (inputs, targets) in data {
        let loss = nn::cross_entropy(&model.forward(&inputs)?, &targets)?;
        let mut grads = model.backward(&loss)?;                    // Candle's GradStore, gradients averaged and sharded
        clip_grad_norm(&vars, &mut grads, 1.0)?;
        optim.step(&grads)?;
    }
    // README ends
    Ok(())
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    let (_, rest) = text.split_once(from).unwrap();
    let (block, _) = rest.split_once(to).unwrap();
    block.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn the_program_in_the_readme_is_this_one() {
    let readme = include_str!("../../README.md");
    assert_eq!(
        between(readme, "\n```rust\n", "\n```\n"),
        between(include_str!("readme.rs"), "// README begins\n", "// README ends\n")
    );
    assert_eq!(readme.matches("```rust").count(), 1, "another Rust block is in the README: test it here");
}

#[test]
fn the_program_in_the_readme_runs() {
    let device = candle_core::Device::Cpu;
    let ids = Tensor::from_vec(vec![0u32, 1, 2, 3, 4, 0], (2, 3), &device).unwrap();
    readme(2, vec![(ids.clone(), ids.clone()), (ids.clone(), ids)]).unwrap();
}
