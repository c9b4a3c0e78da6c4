//! A small mixture of experts, and its training with experts on different ranks or on all.

use std::sync::Arc;

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::ops::softmax;
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{
    ColwiseParallel, DataParallelMeshDims, ExpertParallel, FsdpModule, FullyShard, ParallelPlan, ReduceOp,
    RowwiseParallel, ShardedVarMap, World, fully_shard, nn, parallelize,
};

use crate::common::{elements, input};

pub(super) const WIDTH: usize = 6;
const INNER: usize = 10;

/// The tokens' choice of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Skew {
    /// By the router.
    Router,
    /// One expert has a token of each choice, and the others share the rest.
    OneExpert(usize),
    /// Only the first experts are chosen.
    First(usize),
}

/// A mixture that is added to its input.
pub(super) struct Block {
    mixture: Arc<Mixture>,
    recomputes: bool,
}

struct Mixture {
    norm: nn::RmsNorm,
    router: nn::Linear,
    experts: Vec<nn::SwiGlu>,
    per_token: usize,
    skew: Skew,
}

impl Block {
    pub(super) fn new(model: Shape, vb: VarBuilder) -> Result<Self> {
        let expert = |number: usize| {
            let vb = vb.pp(format!("experts.{number}"));
            let linear = |inputs, outputs, name| match model.bias {
                true => nn::linear(inputs, outputs, vb.pp(name)),
                false => nn::linear_no_bias(inputs, outputs, vb.pp(name)),
            };
            let (gate, up) = (linear(WIDTH, INNER, "gate")?, linear(WIDTH, INNER, "up")?);
            Ok(nn::SwiGlu::new(gate, up, linear(INNER, WIDTH, "down")?))
        };
        let mixture = Mixture {
            norm: nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            router: nn::linear_no_bias(WIDTH, model.experts, vb.pp("router"))?,
            experts: (0..model.experts).map(expert).collect::<Result<_>>()?,
            per_token: model.per_token,
            skew: model.skew,
        };
        Ok(Block { mixture: Arc::new(mixture), recomputes: model.recomputes })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.recomputes {
            false => self.mixture.forward(x),
            true => {
                let mixture = self.mixture.clone();
                checkpoint(move |x| mixture.forward(&x), x.clone())
            }
        }
    }
}

impl Mixture {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(x)?;
        let logits = self.router.forward(&normed)?.to_dtype(DType::F32)?;
        let bias: Vec<f32> = (0..self.experts.len())
            .map(|expert| match self.skew {
                Skew::OneExpert(one) if expert == one => 50.,
                Skew::First(count) if expert >= count => -50.,
                _ => 0.,
            })
            .collect();
        let scores = softmax(&logits.broadcast_add(&Tensor::new(bias, x.device())?)?, D::Minus1)?;
        let chosen = nn::choose_experts(&scores, self.per_token)?;
        let weights = scores.gather(&chosen, 1)?;
        x + nn::mixture_of_experts(&normed, &self.experts, &chosen, &weights)?
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) experts: usize,
    pub(super) per_token: usize,
    pub(super) skew: Skew,
    pub(super) bias: bool,
    pub(super) recomputes: bool,
}

/// Four experts, two for each token.
pub(super) const FOUR: Shape = Shape { experts: 4, per_token: 2, skew: Skew::Router, bias: false, recomputes: false };

pub(super) struct Model {
    blocks: Vec<FsdpModule<Block>>,
    head: nn::Linear,
}

impl Module for Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

pub(super) type Mesh<'a> = &'a [(&'a str, usize)];

/// A map on a mesh, whose dimension `dp_replicate` replicates and `tp` splits experts' layers. With `is_parallel`, experts
/// live on the ranks of `ep`.
pub(super) fn vars(world: &World, mesh: Mesh<'_>, is_parallel: bool) -> ShardedVarMap {
    let mesh_of_ranks = world.mesh(mesh).unwrap();
    let names =
        |wanted: fn(&str) -> bool| mesh.iter().map(|(name, _)| *name).filter(|name| wanted(name)).collect::<Vec<_>>();
    let (shard, replicate) = (names(|name| ["dp_shard", "ep"].contains(&name)), names(|name| name == "dp_replicate"));
    let dims = DataParallelMeshDims { shard: &shard, replicate: &replicate };
    let vars = ShardedVarMap::with_dp_mesh_dims(&mesh_of_ranks, &dims, world.device()).unwrap();
    if is_parallel {
        let plan = ParallelPlan::new().module("blocks.*.experts", ExpertParallel);
        parallelize(&vars, &mesh_of_ranks.slice(&["ep"]).unwrap(), &plan).unwrap();
    }
    if mesh.iter().any(|(name, _)| *name == "tp") {
        let plan = ParallelPlan::new()
            .module("blocks.*.experts.*.gate", ColwiseParallel::default())
            .module("blocks.*.experts.*.up", ColwiseParallel::default())
            .module("blocks.*.experts.*.down", RowwiseParallel::default());
        parallelize(&vars, &mesh_of_ranks.slice(&["tp"]).unwrap(), &plan).unwrap();
    }
    vars
}

pub(super) fn build(opts: &FullyShard, vars: &ShardedVarMap, dtype: DType, shape: Shape) -> FsdpModule<Model> {
    let vb = vars.builder(dtype);
    let block = |i| fully_shard(opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(shape, vb)).unwrap();
    let blocks = (0..2).map(block).collect();
    fully_shard(opts, vb.clone(), |vb| Ok(Model { blocks, head: nn::linear(WIDTH, 3, vb.pp("head"))? })).unwrap()
}

/// The tokens of a step for the ranks of this number, which have the same batch. Others have another number of tokens.
pub(super) fn tokens(batch: usize, step: usize, dtype: DType) -> Tensor {
    let count = 3 + (batch + step) % 4;
    (input(7 * step + batch, &[count, WIDTH]) * 3.).unwrap().to_dtype(dtype).unwrap()
}

/// The mean over all ranks.
pub(super) fn mean(world: &World, loss: &Tensor) -> f64 {
    let loss = elements::<f64>(&loss.flatten_all().unwrap())[0];
    world.all_reduce(&[loss], ReduceOp::Avg).unwrap()[0]
}

/// Every full parameter, by name.
pub(super) fn weights(vars: &ShardedVarMap) -> Vec<(String, Vec<f64>)> {
    let full = |param: &fsdp_candle::FsdpParam| param.dtensor().unwrap().full_tensor().unwrap();
    vars.params().iter().map(|param| (param.name().to_owned(), elements(&full(param)))).collect()
}

/// Asserts that two lists of named values are equal within a share of each one's largest value.
pub(super) fn assert_near(what: &str, found: &[(String, Vec<f64>)], wanted: &[(String, Vec<f64>)], tolerance: f64) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for ((name, found), (other, wanted)) in found.iter().zip(wanted) {
        assert_eq!((name, found.len()), (other, wanted.len()), "{what}");
        let scale = wanted.iter().fold(1e-3f64, |most, value| most.max(value.abs()));
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() <= tolerance * scale, "{what}: {name}: {found} instead of {wanted}");
        }
    }
}
