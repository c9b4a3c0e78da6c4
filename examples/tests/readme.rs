//! The README's program is one that compiles and runs.
#![allow(clippy::unwrap_used, missing_docs)]

// What stands between the marks is the README's, to the letter.
// README begins
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, ShardedVarMap, clip_grad_norm, fully_shard, nn};

impl Model {
    fn new(opts: &FullyShard, vb: VarBuilder<'static>) -> Result<Self> {
        // Each block is a unit. Without sharding, this line calls `Block::new` itself.
        let block = |i| fully_shard(opts, vb.pp(format!("blocks.{i}")), Block::new);
        let blocks = (0..BLOCKS).map(block).collect::<fsdp_candle::Result<Vec<FsdpModule<Block>>>>()?;
        let embedding = nn::embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        let head = nn::linear(WIDTH, VOCABULARY, vb.pp("head"))?;
        Ok(Model { embedding, blocks, head })
    }
}

#[rustfmt::skip]
fn train(data: Vec<(Tensor, Tensor)>) -> anyhow::Result<()> {
    let world = fsdp_candle::init()?;                         // reads RANK, WORLD_SIZE, ... as the launcher set them
    let mesh = world.mesh(&[("dp_shard", world.size())])?;
    let vars = ShardedVarMap::new(&mesh, world.device());     // what VarMap is to one process
    let vb = vars.builder(DType::F32);                        // an ordinary candle_nn::VarBuilder
    let opts = FullyShard::new(&vars);
    let model = fully_shard(&opts, vb, |vb| Model::new(&opts, vb))?; // the root unit: the parameters that are left

    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
    for (inputs, targets) in data {
        let loss = nn::cross_entropy(&model.forward(&inputs)?, &targets)?;
        let mut grads = model.backward(&loss)?;               // Candle's GradStore, gradients averaged and sharded
        clip_grad_norm(&vars, &mut grads, 1.0)?;
        optim.step(&grads)?;
    }
    Ok(())
}
// README ends

const WIDTH: usize = 8;
const VOCABULARY: usize = 5;
const BLOCKS: usize = 2;

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

impl Module for Model {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.blocks.iter().try_fold(self.embedding.forward(ids)?, |x, block| block.forward(&x))?;
        self.head.forward(&x)
    }
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    let (_, rest) = text.split_once(from).unwrap();
    let (block, _) = rest.split_once(to).unwrap();
    let is_code = |line: &&str| !line.is_empty() && *line != "#[rustfmt::skip]";
    block.lines().map(str::trim).filter(is_code).collect()
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
    train(vec![(ids.clone(), ids.clone()), (ids.clone(), ids)]).unwrap();
}

/// Bottom-up, as in PyTorch: the blocks are units before there is a model.
fn bottom_up(opts: &FullyShard, vb: VarBuilder<'static>) -> fsdp_candle::Result<FsdpModule<Model>> {
    let blocks = (0..BLOCKS).map(|i| fully_shard(opts, vb.pp(format!("blocks.{i}")), Block::new));
    let blocks = blocks.collect::<fsdp_candle::Result<Vec<_>>>()?;
    fully_shard(opts, vb, |vb| {
        let embedding = nn::embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?;
        Ok(Model { embedding, blocks, head: nn::linear(WIDTH, VOCABULARY, vb.pp("head"))? })
    })
}

/// The units of a model, what it computes, and the gradient of each parameter.
fn outcome(
    build: impl Fn(&FullyShard, VarBuilder<'static>) -> fsdp_candle::Result<FsdpModule<Model>>,
) -> (Vec<Vec<String>>, Vec<Vec<f32>>) {
    let world = fsdp_candle::World::single().unwrap();
    let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 1)]).unwrap(), world.device());
    let model = build(&FullyShard::new(&vars), vars.builder(DType::F32)).unwrap();
    let ids = Tensor::from_vec(vec![0u32, 1, 2, 3, 4, 0], (2, 3), world.device()).unwrap();
    let loss = nn::cross_entropy(&model.forward(&ids).unwrap(), &ids).unwrap();
    let grads = model.backward(&loss).unwrap();
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let mut values: Vec<Vec<f32>> = vec![vec![loss.to_scalar().unwrap()]];
    let mut params = vars.trainable();
    params.sort_by_key(|param| param.name().to_owned());
    values.extend(params.iter().map(|param| flat(grads.get(param.var()).unwrap())));
    let names = |params: &[std::sync::Arc<fsdp_candle::FsdpParam>]| {
        params.iter().map(|param| param.name().to_owned()).collect::<Vec<_>>()
    };
    let blocks = model.inner().blocks.iter().map(|block| names(block.params()));
    (blocks.chain([names(model.params())]).collect(), values)
}

#[test]
fn units_may_be_made_inside_of_a_models_own_new() {
    let (units, values) = outcome(|opts, vb| fully_shard(opts, vb, |vb| Model::new(opts, vb)));
    assert_eq!(units.len(), BLOCKS + 1);
    assert!(units.concat().len() == 2 * BLOCKS + 3 && units[0] == ["blocks.0.weight", "blocks.0.bias"], "{units:?}");
    assert_eq!((units, values), outcome(bottom_up));
}
