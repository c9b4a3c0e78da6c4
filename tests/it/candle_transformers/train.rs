//! Trains one model without sharding and on two ranks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use fsdp_candle::initializer::{Initializer, Philox, ShardRequest};
use fsdp_candle::{
    AdamW, AdamWConfig, Error, FullyShard, GradcheckOptions, Recurse, ShardedVarMap, World, gradcheck, nn, shard,
};
use fsdp_core::process_group::{Options, local};

use super::data::{Batch, Forward, Load};
use super::gathered::{bytes, most_while};

pub(crate) const RANKS: usize = 2;
pub(crate) const STEPS: usize = 20;
pub(crate) const RATE: f64 = 5e-3;
/// The smallest gradient norm to divide by, relative to the norm of all gradients.
pub(crate) const LEAST: f64 = 3e-3;

/// Initial values of about the same size in every layer, without zeros, whatever initialization a file requests.
struct Spread;

impl Initializer for Spread {
    fn fill(&self, request: &ShardRequest<'_>, shard: &mut [u8]) -> fsdp_candle::Result<()> {
        let (mean, stdev) = match request.shape {
            [_] if request.name.ends_with("bias") => (0., 0.1),
            [_] => (1., 0.1),
            [_, inputs @ ..] => (0., (inputs.iter().product::<usize>() as f64).powf(-0.5)),
            [] => (1., 0.),
        };
        Philox::new(7).fill(&ShardRequest { init: Init::Randn { mean, stdev }, ..*request }, shard)
    }
}

pub(crate) fn vars_of(world: &World) -> ShardedVarMap {
    let vars = ShardedVarMap::of_world(world).unwrap();
    vars.init_with(Spread).unwrap();
    vars
}

/// The initial weights of every run, at every world size.
pub(crate) fn weights(load: Load) -> BTreeMap<String, Tensor> {
    let vars = vars_of(&World::single().unwrap());
    shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), load).unwrap();
    vars.params().iter().map(|param| (param.name().into(), param.var().as_tensor().copy().unwrap())).collect()
}

/// A `VarMap` of Candle's with these weights.
pub(crate) fn var_map(weights: &BTreeMap<String, Tensor>) -> VarMap {
    let map = VarMap::new();
    let var = |(name, value): (&String, &Tensor)| (name.clone(), Var::from_tensor(value).unwrap());
    map.data().lock().unwrap().extend(weights.iter().map(var));
    map
}

/// The results of a run without sharding: its losses, and the gradients of its first step by name.
pub(crate) struct Plain {
    losses: Vec<f64>,
    gradients: BTreeMap<String, Tensor>,
}

impl Plain {
    /// The largest differences of gradients and losses from another run.
    pub(crate) fn apart(&self, other: &Plain) -> [f64; 2] {
        let squares = self.gradients.iter().map(|(name, gradient)| {
            let difference = (gradient - &other.gradients[name]).unwrap();
            (name.clone(), [square(&difference), square(gradient)])
        });
        let losses = self.losses.iter().zip(&other.losses).map(|(a, b)| (a - b).abs());
        [largest_share(&squares.collect()), losses.fold(0., f64::max)]
    }
}

fn scalar(loss: &Tensor) -> f64 {
    f64::from(loss.to_scalar::<f32>().unwrap())
}

/// Trains in plain Candle on this many parts of the batch in turn, and averages their gradients.
pub(crate) fn plain(weights: &BTreeMap<String, Tensor>, load: Load, parts: usize) -> Plain {
    let map = var_map(weights);
    let mut forward = load(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu)).unwrap();
    assert_eq!(map.data().lock().unwrap().len(), weights.len(), "the same parameters");
    let params = ParamsAdamW { lr: RATE, weight_decay: 0., ..ParamsAdamW::default() };
    let mut optim = candle_nn::AdamW::new(map.all_vars(), params).unwrap();
    let mut run = Plain { losses: vec![], gradients: BTreeMap::new() };
    for step in 0..STEPS {
        let mut of_parts = (0..parts).map(|part| {
            let batch = Batch::of(part, parts).unwrap();
            let (output, targets) = batch.targets(&forward(&batch).unwrap()).unwrap();
            let loss = (candle_nn::loss::cross_entropy(&output, &targets).unwrap() / parts as f64).unwrap();
            (loss.backward().unwrap(), scalar(&loss))
        });
        let (mut grads, mut loss) = of_parts.next().unwrap();
        for (more, its_loss) in of_parts {
            loss += its_loss;
            for var in map.all_vars() {
                // An expert without tokens of a part has no gradient from it.
                let Some(grad) = more.get(&var) else { continue };
                let sum = grads.get(&var).map_or_else(|| Ok(grad.clone()), |sum| sum + grad);
                grads.insert(&var, sum.unwrap());
            }
        }
        if step == 0 {
            for (name, var) in map.data().lock().unwrap().iter() {
                run.gradients.extend(grads.get(var).map(|grad| (name.clone(), grad.clone())));
            }
        }
        optim.step(&grads).unwrap();
        run.losses.push(loss);
    }
    run
}

/// The comparison of a sharded run with one without sharding.
#[derive(Clone, Debug, Default)]
pub(crate) struct Comparison {
    pub(crate) units: usize,
    /// Bytes of all parameters, of parameters outside layers of `nn`, the most that were gathered at once, and the
    /// limit: the root and the two largest units.
    pub(crate) bytes: usize,
    pub(crate) unmanaged: usize,
    pub(crate) gathered: usize,
    pub(crate) bound: usize,
    pub(crate) losses: Vec<f64>,
    /// The largest difference of a step's loss.
    pub(crate) loss_apart: f64,
    /// The largest difference of a gradient in the first step, relative to its norm ([`LEAST`]).
    pub(crate) gradient_apart: f64,
    /// The same differences between two runs of plain Candle, one of which takes the rows of each rank in turn: the
    /// effect of rounding.
    pub(crate) plain_apart: [f64; 2],
    /// The parameters without a gradient.
    pub(crate) without: Vec<String>,
    /// The units whose gradients are wrong.
    pub(crate) wrong: Vec<String>,
}

/// The sharding of a model.
#[derive(Clone, Copy)]
pub(crate) struct Sharding<'a> {
    /// The modules that are units.
    pub(crate) units: &'a [&'a str],
    /// Whether ranks use different parameters.
    pub(crate) experts: bool,
}

/// Trains on two ranks.
pub(crate) fn sharded(plain: &Plain, sharding: Sharding<'_>, load: Load) -> Comparison {
    let options = Options::default().with_timeout(Duration::from_secs(60));
    let all = local::run_with(RANKS, options, |group| rank(&World::of(group), plain, sharding, load));
    // By name: the squares of the difference and of the gradient, summed over ranks.
    let mut squares: BTreeMap<String, [f64; 2]> = BTreeMap::new();
    for (name, [difference, gradient]) in all.iter().flat_map(|(_, squares)| squares) {
        let sum = squares.entry(name.clone()).or_default();
        *sum = [sum[0] + difference, sum[1] + gradient];
    }
    let mut comparison = all.into_iter().next().unwrap().0;
    comparison.gradient_apart = largest_share(&squares);
    comparison
}

/// The largest difference of a gradient relative to its norm, from the squares of both by name.
fn largest_share(squares: &BTreeMap<String, [f64; 2]>) -> f64 {
    // The gradient of a key's bias is zero but for rounding.
    let least = LEAST * squares.values().map(|[_, gradient]| gradient).sum::<f64>().sqrt();
    let shares = squares.values().map(|[difference, gradient]| difference.sqrt() / gradient.sqrt().max(least));
    shares.fold(0., f64::max)
}

pub(crate) fn square(tensor: &Tensor) -> f64 {
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    tensor.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
}

type Squares = Vec<(String, [f64; 2])>;

fn rank(world: &World, plain: &Plain, sharding: Sharding<'_>, load: Load) -> (Comparison, Squares) {
    let vars = vars_of(world);
    let opts = FullyShard::new(&vars);
    // `gradcheck` passes the model as `&`.
    let model = shard(&opts, sharding.units, vars.builder(DType::F32), |vb| load(vb).map(RefCell::new)).unwrap();
    model.set_reduce_scatter_unused_params(sharding.experts, Recurse::Yes);
    let batch = Batch::of(world.rank(), world.size()).unwrap();
    let loss = |model: &fsdp_candle::FsdpModule<RefCell<Forward>>| {
        let (output, targets) = batch.targets(&model.call(|m| (m.borrow_mut())(&batch))?)?;
        nn::cross_entropy(&output, &targets)
    };
    let mut sizes: Vec<usize> = model.units().iter().map(|unit| bytes(unit.params())).collect();
    let root = sizes.pop().unwrap();
    assert_eq!(root, bytes(model.params()), "the root comes last");
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let mut found = Comparison {
        units: sizes.len() + 1,
        bytes: bytes(&vars.params()),
        unmanaged: bytes(model.unmanaged_parameters()),
        bound: root + sizes.iter().take(2).sum::<usize>(),
        ..Comparison::default()
    };
    found.wrong = match gradcheck(&model, &GradcheckOptions::default(), loss) {
        Ok(_) => vec![],
        Err(Error::Gradcheck(mismatch)) => mismatch.wrong().map(|unit| unit.unit.clone()).collect(),
        Err(error) => panic!("{error}"),
    };
    let config = AdamWConfig { lr: RATE, weight_decay: 0., ..AdamWConfig::default() };
    let mut optim = AdamW::new(vars.trainable(), config).unwrap();
    let mut squares = Squares::new();
    for step in 0..STEPS {
        let ((grads, loss), most) = most_while(&vars, || {
            let loss = loss(&model).unwrap();
            (model.backward(&loss).unwrap(), loss)
        });
        assert!(vars.params().iter().all(|param| !param.is_unsharded()), "all is freed after a step");
        if step == 0 {
            found.without = model.parameters_without_gradient();
            squares = apart(&vars, &grads, plain);
        }
        optim.step(&grads).unwrap();
        let mean = world.all_reduce(&[scalar(&loss)], fsdp_candle::ReduceOp::Avg).unwrap()[0];
        found.loss_apart = found.loss_apart.max((mean - plain.losses[step]).abs());
        found.losses.push(mean);
        found.gathered = found.gathered.max(most);
    }
    (found, squares)
}

/// The squared difference between this rank's part of the gradients and the gradients without sharding.
fn apart(vars: &ShardedVarMap, grads: &candle_core::backprop::GradStore, plain: &Plain) -> Squares {
    let mut squares = vec![];
    for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
        let (name, region) = (param.name(), param.region());
        match (grads.get(param.var()), plain.gradients.get(name)) {
            (Some(got), Some(want)) => {
                let dims = region.offsets.iter().zip(&region.sizes).enumerate();
                let want = dims.fold(want.clone(), |want, (dim, (&at, &len))| want.narrow(dim, at, len).unwrap());
                squares.push((name.into(), [square(&(got - &want).unwrap()), square(&want)]));
            }
            (got, want) => {
                let is_zero = |grad: Option<&Tensor>| grad.is_none_or(|grad| square(grad) == 0.);
                assert!(is_zero(got) && is_zero(want), "{name}: only one of the runs has a gradient");
            }
        }
    }
    squares
}
