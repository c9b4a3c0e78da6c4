//! The diff in the README compiles and runs on both sides: plain Candle before, sharded after.
#![allow(clippy::unwrap_used, missing_docs)]

mod model {
    use candle_core::{Module, Result, Tensor};
    use candle_nn::VarBuilder;
    use fsdp_candle::nn as candle_nn;

    const WIDTH: usize = 8;
    const VOCABULARY: usize = 5;

    /// A model's own file: it has no other line about sharding than the one above.
    pub(crate) struct Model {
        embedding: candle_nn::Embedding,
        blocks: Vec<candle_nn::Linear>,
        head: candle_nn::Linear,
    }

    impl Model {
        pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
            let blocks = (0..2).map(|i| candle_nn::linear(WIDTH, WIDTH, vb.pp(format!("blocks.{i}"))));
            Ok(Model {
                blocks: blocks.collect::<Result<_>>()?,
                embedding: candle_nn::embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?,
                head: candle_nn::linear(WIDTH, VOCABULARY, vb.pp("head"))?,
            })
        }
    }

    impl Module for Model {
        fn forward(&self, ids: &Tensor) -> Result<Tensor> {
            let x = self.blocks.iter().try_fold(self.embedding.forward(ids)?, |x, block| block.forward(&x)?.tanh())?;
            self.head.forward(&x)?.flatten_to(1)
        }
    }
}

use candle_core::{DType, Device, Module, Tensor};
use model::Model;

type Data = Vec<(Tensor, Tensor)>;

mod plain {
    use candle_nn::loss::cross_entropy;
    use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};

    use super::*;

    #[rustfmt::skip]
    pub(crate) fn train(data: Data, device: Device) -> anyhow::Result<Vec<f32>> {
        let mut losses = vec![];
        // before
let vars = VarMap::new();
let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
let model = Model::new(vb)?;
let mut optim = AdamW::new(vars.all_vars(), ParamsAdamW::default())?;
for (inputs, targets) in data {
    let loss = cross_entropy(&model.forward(&inputs)?, &targets)?;
    optim.backward_step(&loss)?;
    // end
    losses.push(loss.to_scalar()?);
}
        Ok(losses)
    }
}

mod sharded {
    use fsdp_candle::nn::loss::cross_entropy;
    use fsdp_candle::{AdamW, AdamWConfig, FullyShard, ShardedVarMap, shard};

    use super::*;

    #[rustfmt::skip]
    pub(crate) fn train(data: Data) -> anyhow::Result<(Vec<f32>, usize)> {
        let mut losses = vec![];
        // after
let world = fsdp_candle::init()?;
let vars = ShardedVarMap::of_world(&world)?;
let opts = FullyShard::new(&vars);
let model = shard(&opts, &["blocks.*"], vars.builder(DType::F32), Model::new)?;
let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default())?;
for (inputs, targets) in data {
    let loss = cross_entropy(&model.forward(&inputs)?, &targets)?;
    optim.backward_step(&loss)?;
    // end
    losses.push(loss.to_scalar()?);
}
        Ok((losses, model.units().len()))
    }
}

/// The lines of this file between a mark and the next end mark.
fn lines_after(mark: &str) -> Vec<&'static str> {
    let (_, rest) = include_str!("readme.rs").split_once(&format!("// {mark}\n")).unwrap();
    let (block, _) = rest.split_once("    // end\n").unwrap();
    block.lines().chain(["}"]).collect()
}

#[test]
fn diff_in_the_readme_is_the_code_of_this_test() {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("\n```diff\n").unwrap();
    let (diff, _) = rest.split_once("\n```\n").unwrap();
    let side = |sign: char| -> Vec<&str> {
        diff.lines().filter(|line| line.starts_with([' ', sign])).map(|line| &line[1..]).collect()
    };
    assert_eq!(side('-'), lines_after("before"));
    assert_eq!(side('+'), lines_after("after"));
    assert!(!readme.contains("```rust"), "another Rust block is in the README: test it here");
}

#[test]
fn both_sides_of_the_diff_learn() {
    let ids = Tensor::from_vec(vec![0u32, 1, 2, 3, 4, 0], (2, 3), &Device::Cpu).unwrap();
    let data: Data = vec![(ids.clone(), ids.flatten_all().unwrap()); 20];
    let (sharded, units) = sharded::train(data.clone()).unwrap();
    assert_eq!(units, 3, "two blocks and the root");
    for losses in [plain::train(data, Device::Cpu).unwrap(), sharded] {
        assert!(losses[0].is_finite() && losses[19] < losses[0], "{losses:?}");
    }
}
