//! A small model, the meshes it trains on, and its training in one process.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    ActivationLayout, AdamW, AdamWConfig, ColwiseParallel, DataParallelMeshDims, FsdpModule, FullyShard, ParallelPlan,
    RowwiseParallel, SequenceParallel, ShardedVarMap, VocabParallel, World, clip_grad_norm, fully_shard,
    get_model_state_dict, nn, parallelize, shard,
};

use crate::common::{Gradients, device, dict_elements, full, unsharded};

/// Dimensions sharded by tensor parallelism are divisible by 4; the parts are not divisible by 3.
pub(super) const VOCABULARY: usize = 28;
pub(super) const WIDTH: usize = 8;
pub(super) const HIDDEN: usize = 20;
pub(super) const OUTPUTS: usize = 12;
const LAYERS: usize = 2;
const SEQUENCE: usize = 4;

/// A mesh and the roles of its dimensions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mesh {
    pub(super) dims: &'static [(&'static str, usize)],
    pub(super) shard: &'static [&'static str],
    pub(super) replicate: &'static [&'static str],
}

impl Mesh {
    pub(super) const fn new(
        dims: &'static [(&'static str, usize)],
        shard: &'static [&'static str],
        replicate: &'static [&'static str],
    ) -> Self {
        Mesh { dims, shard, replicate }
    }

    pub(super) fn size(&self) -> usize {
        self.dims.iter().map(|(_, size)| size).product()
    }

    /// A map on the mesh, with a plan if there is a tensor parallel dimension.
    pub(super) fn vars(&self, world: &World, sequence: bool) -> ShardedVarMap {
        let mesh = world.mesh(self.dims).unwrap();
        let dims = DataParallelMeshDims { shard: self.shard, replicate: self.replicate };
        let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device()).unwrap();
        if let Ok(tp) = mesh.slice(&["tp"]) {
            parallelize(&vars, &tp, &plan(sequence)).unwrap();
        }
        vars
    }

    /// The index of this rank's batches, and the number of data parallel ranks.
    pub(super) fn batch_of(&self, vars: &ShardedVarMap) -> (usize, usize) {
        let data = |(name, _): &&(&str, usize)| self.shard.contains(name) || self.replicate.contains(name);
        self.dims
            .iter()
            .filter(data)
            .fold((0, 1), |(at, all), (name, size)| (at * size + vars.mesh().get_local_rank(name).unwrap(), all * size))
    }
}

/// One rank, FSDP only, tensor parallelism only, and both in every order and role.
pub(super) const MESHES: &[Mesh] = &[
    Mesh::new(&[("dp", 1), ("tp", 1)], &["dp"], &[]),
    Mesh::new(&[("dp", 2), ("tp", 1)], &["dp"], &[]),
    Mesh::new(&[("dp", 1), ("tp", 2)], &["dp"], &[]),
    Mesh::new(&[("dp", 3)], &["dp"], &[]),
    Mesh::new(&[("dp", 2), ("tp", 2)], &["dp"], &[]),
    Mesh::new(&[("tp", 2), ("dp", 2)], &["dp"], &[]),
    Mesh::new(&[("tp", 4)], &[], &[]),
    Mesh::new(&[("replicate", 2), ("tp", 2)], &[], &["replicate"]),
    Mesh::new(&[("replicate", 2), ("shard", 1), ("tp", 2)], &["shard"], &["replicate"]),
    Mesh::new(&[("dp", 3), ("tp", 2)], &["dp"], &[]),
    Mesh::new(&[("replicate", 2), ("shard", 2), ("tp", 2)], &["shard"], &["replicate"]),
    Mesh::new(&[("outer", 2), ("tp", 2), ("inner", 2)], &["outer", "inner"], &[]),
    Mesh::new(&[("outer", 2), ("inner", 2), ("tp", 2)], &[], &["outer", "inner"]),
];

pub(super) fn plan(sequence: bool) -> ParallelPlan {
    let part = if sequence { ActivationLayout::Shard(1) } else { ActivationLayout::Replicate };
    let columns = ColwiseParallel { input_layout: part, ..ColwiseParallel::default() };
    let plan = ParallelPlan::new()
        .module("embed", VocabParallel { output_layout: part, ..VocabParallel::default() })
        .module("blocks.*.up", columns)
        .module("blocks.*.down", RowwiseParallel { output_layout: part, ..RowwiseParallel::default() })
        .module("head", ColwiseParallel { output_layout: ActivationLayout::Replicate, ..columns });
    match sequence {
        true => plan.module("norm", SequenceParallel::default()).module("blocks.*.norm", SequenceParallel::default()),
        false => plan,
    }
}

pub(super) struct Block {
    norm: nn::RmsNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Block {
            norm: nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            up: nn::linear(WIDTH, HIDDEN, vb.pp("up"))?,
            down: nn::linear(HIDDEN, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(&self.norm.forward(x)?)?)?)?
    }
}

pub(super) struct Net<B> {
    embed: nn::Embedding,
    blocks: Vec<B>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

impl<B: Module> Module for Net<B> {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.blocks.iter().try_fold(self.embed.forward(ids)?, |x, block| block.forward(&x))?;
        self.head.forward(&self.norm.forward(&x)?)
    }
}

impl<B> Net<B> {
    fn new(blocks: Vec<B>, vb: VarBuilder) -> Result<Self> {
        Ok(Net {
            embed: nn::embedding(VOCABULARY, WIDTH, vb.pp("embed"))?,
            blocks,
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: nn::linear(WIDTH, OUTPUTS, vb.pp("head"))?,
        })
    }
}

pub(super) type Model = FsdpModule<Net<FsdpModule<Block>>>;

pub(super) fn build(opts: &FullyShard, vars: &ShardedVarMap) -> fsdp_candle::Result<Model> {
    let vb = vars.builder(DType::F32);
    let blocks = (0..LAYERS)
        .map(|i| fully_shard(opts, vb.pp(format!("blocks.{i}")), Block::new))
        .collect::<fsdp_candle::Result<Vec<_>>>()?;
    fully_shard(opts, vb, |vb| Net::new(blocks, vb))
}

/// The same with units by name.
pub(super) fn build_by_name(opts: &FullyShard, vars: &ShardedVarMap) -> fsdp_candle::Result<FsdpModule<Net<Block>>> {
    shard(opts, &["blocks.*"], vars.builder(DType::F32), |vb| {
        let blocks = (0..LAYERS).map(|i| Block::new(vb.pp(format!("blocks.{i}")))).collect::<Result<Vec<_>>>()?;
        Net::new(blocks, vb)
    })
}

/// Ids and targets of a batch.
fn batch(number: usize) -> (Tensor, Tensor) {
    let of = |below: usize, seed: usize| {
        let ids: Vec<u32> = (0..2 * SEQUENCE).map(|i| ((i * 31 + number * 17 + seed * 7) % below) as u32).collect();
        Tensor::from_vec(ids, (2, SEQUENCE), &device()).unwrap()
    };
    (of(VOCABULARY, 1), of(OUTPUTS, 5).flatten_all().unwrap())
}

/// The mean of the losses on some batches.
pub(super) fn loss(model: &impl Module, batches: impl IntoIterator<Item = usize>) -> Tensor {
    let (ids, targets): (Vec<_>, Vec<_>) = batches.into_iter().map(batch).unzip();
    let logits = model.forward(&Tensor::cat(&ids, 0).unwrap()).unwrap();
    let logits = logits.reshape(((), OUTPUTS)).unwrap().to_dtype(DType::F32).unwrap();
    nn::cross_entropy(&logits, &Tensor::cat(&targets, 0).unwrap()).unwrap()
}

pub(super) fn optimizer(vars: &ShardedVarMap) -> AdamW {
    AdamW::new(vars.trainable(), AdamWConfig { lr: 0.01, ..AdamWConfig::default() }).unwrap()
}

/// Every parameter's elements, by name.
pub(super) fn values(vars: &ShardedVarMap) -> Gradients {
    dict_elements(&get_model_state_dict(vars, &full()).unwrap())
}

/// The losses and norms of some steps, and the parameters after them.
pub(super) struct Run {
    pub(super) losses: Vec<f64>,
    pub(super) norms: Vec<f64>,
    pub(super) values: Gradients,
}

pub(super) const STEPS: usize = 4;
const MAX_NORM: f64 = 0.5;

/// Trains. This rank uses `count` of the `of` batches of each step, from `first` on.
pub(super) fn train<B: Module>(
    model: &FsdpModule<Net<B>>,
    vars: &ShardedVarMap,
    (first, count, of): (usize, usize, usize),
) -> Run {
    let mut optim = optimizer(vars);
    let mut run = Run { losses: vec![], norms: vec![], values: vec![] };
    for step in 0..STEPS {
        let loss = loss(model, (0..count).map(|at| step * of + first + at));
        run.losses.push(f64::from(loss.to_scalar::<f32>().unwrap()));
        let mut grads = model.backward(&loss).unwrap();
        run.norms.push(clip_grad_norm(vars, &mut grads, MAX_NORM).unwrap());
        optim.step(&grads).unwrap();
    }
    run.values = values(vars);
    run
}

/// One process without a plan, on the given number of batches a step.
pub(super) fn reference(world: &World, batches: usize, prepare: impl Fn(&ShardedVarMap)) -> Run {
    let vars = unsharded(world);
    prepare(&vars);
    let model = build(&FullyShard::new(&vars), &vars).unwrap();
    train(&model, &vars, (0, batches, batches))
}
