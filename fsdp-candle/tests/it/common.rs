//! Shared by the tests: a small model in ordinary Candle code, and ranks as threads.

mod counted;
mod device;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    AllGather, FsdpModule, FsdpParam, FullyShard, ReduceOp, ReduceScatter, ShardedVarMap, StateDictOptions, World,
    fully_shard, nn,
};
use fsdp_core::process_group::{Options, local};
use fsdp_core::{Allocator, GatherPart, ProcessGroup, ScatterPart, Work};

pub(crate) use counted::counted;
pub(crate) use device::{address, changed, device, elements, memory, on_cuda, one_of, rounding};

/// A residual MLP of Candle's linear layers and this crate's norm.
pub(crate) struct Block {
    norm: nn::RmsNorm,
    up: candle_nn::Linear,
    down: nn::Linear,
}

impl Block {
    pub(crate) fn new(width: usize, vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Block {
            norm: nn::rms_norm(width, 1e-5, vb.pp("norm"))?,
            up: candle_nn::linear(width, 3 * width, vb.pp("up"))?,
            down: nn::linear(3 * width, width, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.down.forward(&nn::gelu(&self.up.forward(&self.norm.forward(x)?)?)?)?
    }
}

/// Blocks, each of them called by `call`, and a head.
pub(crate) struct Model<B> {
    pub(crate) blocks: Vec<B>,
    pub(crate) head: nn::Linear,
}

impl<B: Module> Module for Model<B> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
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
    vars_on(world, &[("dp_shard", world.size())])
}

pub(crate) fn vars_on(world: &World, mesh: &[(&str, usize)]) -> ShardedVarMap {
    ShardedVarMap::new(&world.mesh(mesh).unwrap(), world.device())
}

/// Options of full state dicts.
pub(crate) fn full() -> StateDictOptions {
    StateDictOptions { full_state_dict: true, ..StateDictOptions::default() }
}

/// Runs a closure on each rank of a world of threads: on the host, or on CUDA devices if `FSDP_TEST_DEVICE=cuda`.
pub(crate) fn ranks<T: Send>(size: usize, f: impl Fn(World) -> T + Sync) -> Vec<T> {
    let _turn = device::turn();
    let options = Options::default().with_timeout(Duration::from_secs(60));
    local::run_with(size, options, |group| f(device::world(group)))
}

/// A world of one rank, on its device.
pub(crate) fn alone() -> World {
    device::world(ProcessGroup::single_rank(Duration::from_secs(60)).unwrap())
}

/// A map on the rank's device in which every rank has all parameters. Collective.
pub(crate) fn unsharded(world: &World) -> ShardedVarMap {
    let mesh = world.mesh(&[("ranks", world.size()), ("each", 1)]).unwrap();
    ShardedVarMap::new(&mesh.slice(&["each"]).unwrap(), world.device())
}

/// A batch that depends on the rank.
pub(crate) fn batch(rank: usize, width: usize) -> Tensor {
    let values: Vec<f32> = (0..4 * width).map(|i| ((i * 37 + rank * 101) % 61) as f32 / 61. - 0.5).collect();
    Tensor::from_vec(values, (4, width), &device()).unwrap()
}

/// A full tensor of this rank's values, with zeros elsewhere.
pub(crate) fn scattered(param: &FsdpParam, values: impl IntoIterator<Item = f32>) -> Vec<f32> {
    let (shape, region) = (param.shape().dims(), param.region());
    let mut full = vec![0f32; shape.iter().product()];
    for (local, value) in values.into_iter().enumerate() {
        let (mut rest, mut at, mut stride) = (local, 0, 1);
        for dim in (0..shape.len()).rev() {
            at += stride * (region.offsets[dim] + rest % region.sizes[dim]);
            rest /= region.sizes[dim];
            stride *= shape[dim];
        }
        full[at] = value;
    }
    full
}

/// Gathers a tensor without the library's all-gather, as the sum of the ranks' values and zeros.
pub(crate) fn whole(vars: &ShardedVarMap, param: &FsdpParam, shard: &Tensor) -> Vec<f32> {
    let ranks = vars.mesh().group(vars.mesh().layout().shape().len() - 1).unwrap();
    ranks.all_reduce_values(scattered(param, elements::<f32>(shard)), ReduceOp::Sum).unwrap()
}

/// Every full parameter, by name.
pub(crate) fn weights(vars: &ShardedVarMap) -> Gradients {
    vars.params().iter().map(|param| (param.name().to_string(), whole(vars, param, param.var()))).collect()
}

/// This rank's part of a full tensor.
pub(crate) fn cut(param: &FsdpParam, whole: &Tensor) -> Tensor {
    let region = param.region();
    let part = |part: Tensor, dim: usize| part.narrow(dim, region.offsets[dim], region.sizes[dim]).unwrap();
    (0..region.sizes.len()).fold(whole.clone(), part).force_contiguous().unwrap()
}

/// Multiplies all gradients.
pub(crate) fn times(gradients: &Gradients, factor: f32) -> Gradients {
    let times = |values: &Vec<f32>| values.iter().map(|value| factor * value).collect();
    gradients.iter().map(|(name, values)| (name.clone(), times(values))).collect()
}

/// Asserts that a result is an error whose message contains all of `parts`.
pub(crate) fn refused<T, E: std::fmt::Display>(result: Result<T, E>, parts: &[&str]) {
    let Err(error) = result else { panic!("expected an error with {parts:?}") };
    assert_contains(&error.to_string(), parts);
}

/// Asserts that a text contains all of `parts`.
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text}"));
}

/// This rank's part of a parameter's gradient, unless the shard is empty.
pub(crate) fn shard_of_gradient<'a>(param: &'a FsdpParam, grads: &'a GradStore) -> &'a Tensor {
    match grads.get(param.var()) {
        Some(grad) => grad,
        None if param.region().is_empty() => param.var(),
        None => panic!("no gradient of {}", param.name()),
    }
}

/// Every full gradient, by name.
pub(crate) fn gradients(vars: &ShardedVarMap, grads: &GradStore) -> Vec<(String, Vec<f32>)> {
    vars.trainable()
        .iter()
        .map(|param| (param.name().to_string(), whole(vars, param, shard_of_gradient(param, grads))))
        .collect()
}

/// The mean of the squares of the model's output for a batch.
pub(crate) fn loss_of(model: &impl Module, x: &Tensor) -> Tensor {
    model.forward(x).unwrap().to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()
}

pub(crate) fn assert_close(got: &[(String, Vec<f32>)], want: &[(String, Vec<f32>)], tolerance: f32) {
    assert_eq!(got.len(), want.len());
    for ((name, got), (want_name, want)) in got.iter().zip(want) {
        assert_eq!((name, got.len()), (want_name, want.len()));
        let scale = want.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= tolerance * scale, "{name}: {got} instead of {want}");
        }
    }
}

pub(crate) const WIDTH: usize = 6;

pub(crate) type Gradients = Vec<(String, Vec<f32>)>;

/// One backward with default options, with which all others are compared.
pub(crate) fn reference(world: &World) -> Gradients {
    let vars = vars(world);
    let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
    let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
    gradients(&vars, &grads)
}

/// The parts of a custom collective.
pub(crate) enum Parts<'a> {
    Gather(&'a [GatherPart]),
    Scatter(&'a [ScatterPart]),
}

/// A custom collective that first calls a closure, which may read the parts and replace the unit's own collective.
pub(crate) struct Own<F>(pub(crate) F);

impl<F: Fn(Parts<'_>) -> Option<Work> + Send + Sync> AllGather for Own<F> {
    fn all_gather(&self, ranks: &ProcessGroup, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        self.0(Parts::Gather(&parts)).unwrap_or_else(|| ranks.all_gather(parts, memory))
    }
}

impl<F: Fn(Parts<'_>) -> Option<Work> + Send + Sync> ReduceScatter for Own<F> {
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        self.0(Parts::Scatter(&parts)).unwrap_or_else(|| ranks.reduce_scatter(parts, op, memory))
    }
}

/// A custom collective that records `entry` when it is issued.
pub(crate) fn journal(
    entry: String,
    entries: &Arc<Mutex<Vec<String>>>,
) -> Arc<Own<impl Fn(Parts<'_>) -> Option<Work> + use<>>> {
    let entries = entries.clone();
    Arc::new(Own(move |_: Parts<'_>| {
        entries.lock().unwrap().push(entry.clone());
        None
    }))
}
