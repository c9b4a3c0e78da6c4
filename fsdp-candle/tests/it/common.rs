//! Shared by the tests: a small model in ordinary Candle code, and ranks as threads.

mod counted;
mod device;
mod parts;
mod plain;

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    FsdpModule, FsdpParam, FullyShard, ReduceOp, ShardedVarMap, StateDict, StateDictOptions, World, fully_shard, nn,
};
use fsdp_core::ProcessGroup;
use fsdp_core::process_group::{Options, local};

pub(crate) use counted::counted;
pub(crate) use device::{address, changed, device, elements, memory, on_cuda, one_of, rounding};
pub(crate) use parts::{Draws, Identity, Own, Parts, journal};
pub(crate) use plain::{Plain, mean};

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

pub(crate) type Sharded = FsdpModule<Model<FsdpModule<Block>>>;

pub(crate) fn sharded(opts: &FullyShard, vars: &ShardedVarMap, width: usize) -> Sharded {
    let vb = vars.builder(DType::F32);
    let blocks = (0..LAYERS)
        .map(|i| fully_shard(opts, vb.pp(format!("blocks.{i}")), |vb| Block::new(width, vb)).unwrap())
        .collect();
    fully_shard(opts, vb, |vb| Ok(Model { blocks, head: nn::linear(width, 2, vb.pp("head"))? })).unwrap()
}

/// The sharded model with default options, and its map.
pub(crate) fn built(world: &World, width: usize) -> (ShardedVarMap, Sharded) {
    let vars = vars(world);
    let model = sharded(&FullyShard::new(&vars), &vars, width);
    (vars, model)
}

pub(crate) fn plain(vb: VarBuilder, width: usize) -> candle_core::Result<Model<Block>> {
    let blocks = (0..LAYERS).map(|i| Block::new(width, vb.pp(format!("blocks.{i}"))));
    Ok(Model { blocks: blocks.collect::<candle_core::Result<_>>()?, head: nn::linear(width, 2, vb.pp("head"))? })
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

/// Repeatable values from -0.5 to 0.5, different ones for each seed.
pub(crate) fn input(seed: usize, shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 101) % 61) as f32 / 61. - 0.5).collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// A batch that depends on the rank.
pub(crate) fn batch(rank: usize, width: usize) -> Tensor {
    input(rank, &[4, width])
}

/// Repeatable values between -1 and 1 that the dtype holds exactly.
pub(crate) fn exact(seed: usize, shape: &[usize], dtype: DType) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 101) % 63) as f32 / 32. - 1.).collect();
    Tensor::from_vec(values, shape, &device()).unwrap().to_dtype(dtype).unwrap()
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

/// Asserts that each rank's error contains all of `parts`.
pub(crate) fn all_refused(errors: Vec<String>, parts: &[&str]) {
    errors.iter().for_each(|error| assert_contains(error, parts));
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
pub(crate) fn gradients(vars: &ShardedVarMap, grads: &GradStore) -> Gradients {
    vars.trainable()
        .iter()
        .map(|param| (param.name().to_string(), whole(vars, param, shard_of_gradient(param, grads))))
        .collect()
}

/// The mean of the squares of a model's output.
pub(crate) fn mean_square(y: &Tensor) -> Tensor {
    y.to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()
}

/// The mean of the squares of the model's output for a batch.
pub(crate) fn loss_of(model: &impl Module, x: &Tensor) -> Tensor {
    mean_square(&model.forward(x).unwrap())
}

/// The full gradients of [`loss_of`].
pub(crate) fn gradients_of<M: Module>(vars: &ShardedVarMap, model: &FsdpModule<M>, x: &Tensor) -> Gradients {
    gradients(vars, &model.backward(&loss_of(model, x)).unwrap())
}

/// Sorts values by name: units by name are built in a different order than wrapped units.
pub(crate) fn sorted(mut values: Gradients) -> Gradients {
    values.sort_by(|a, b| a.0.cmp(&b.0));
    values
}

/// The elements of a state dict's tensors, by name.
pub(crate) fn dict_elements(dict: &StateDict) -> Gradients {
    dict.tensors.iter().map(|(name, state)| (name.clone(), elements(&state.tensor))).collect()
}

/// Asserts that this rank's part of a parameter's gradient, which has whole rows, is that of the full gradient.
pub(crate) fn assert_part(param: &FsdpParam, grads: &GradStore, want: &Gradients) {
    let (_, want) = want.iter().find(|(name, _)| name == param.name()).unwrap();
    let row: usize = param.shape().dims()[1..].iter().product();
    let got = elements::<f32>(shard_of_gradient(param, grads));
    let want = &want[param.region().offsets[0] * row..][..got.len()];
    let largest = want.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
    assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5 * largest), "{}", param.name());
}

/// Asserts that no parameter is gathered.
pub(crate) fn assert_resharded(vars: &ShardedVarMap) {
    vars.params().iter().for_each(|param| assert!(!param.is_unsharded(), "{}", param.name()));
}

pub(crate) fn assert_close(got: &Gradients, want: &Gradients, tolerance: f32) {
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
    let (vars, model) = built(world, WIDTH);
    gradients_of(&vars, &model, &batch(world.rank(), WIDTH))
}
