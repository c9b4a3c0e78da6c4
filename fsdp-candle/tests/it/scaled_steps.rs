//! A step that multiplies gradients has the bits of a step after clipping, and leaves the gradients as they are.

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use candle_nn::ParamsAdamW;
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CandleOptimizer, Ema, FsdpModule, FullyShard,
    GradScaler, Muon, MuonConfig, OffloadPolicy, Optimizers, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap,
    StateOnDisk, World, clip_factor, clip_grad_norm, fully_shard, grad_norm, nn,
};

use crate::common::{WIDTH, alone, batch, elements, mean_square, ranks, refused, shard_of_gradient, vars, vars_on};

/// Less than the norms of all steps.
const MAX_NORM: f64 = 1e-2;
const STEPS: usize = 3;

type Optimizer = Box<dyn ShardedOptimizer>;
type Make = fn(&ShardedVarMap) -> Optimizer;

const ADAMW: AdamWConfig = AdamWConfig { lr: 0.02, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

fn adamw(vars: &ShardedVarMap) -> Optimizer {
    Box::new(AdamW::new(vars.trainable(), ADAMW).unwrap())
}

fn adam(vars: &ShardedVarMap) -> Optimizer {
    let config = AdamConfig { lr: 0.02, weight_decay: 0.1, ..AdamConfig::default() };
    Box::new(Adam::new(vars.trainable(), config).unwrap())
}

fn adamw8bit(vars: &ShardedVarMap) -> Optimizer {
    let config = AdamW8bitConfig { lr: 0.02, min_8bit_size: 8, ..AdamW8bitConfig::default() };
    Box::new(AdamW8bit::new(vars.trainable(), config).unwrap())
}

fn sgd(momentum: f64, nesterov: bool, vars: &ShardedVarMap) -> Optimizer {
    let config = SgdConfig { lr: 0.5, momentum, nesterov, weight_decay: 0.1, ..SgdConfig::default() };
    Box::new(SGD::new(vars.trainable(), config).unwrap())
}

fn muon(nesterov: bool, vars: &ShardedVarMap) -> Optimizer {
    let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
    let muon = Muon::new(matrices, MuonConfig { lr: 0.02, nesterov, ..MuonConfig::default() }).unwrap();
    Box::new(Optimizers::new(vec![Box::new(muon), Box::new(AdamW::new(rest, ADAMW).unwrap())]).unwrap())
}

fn on_disk(vars: &ShardedVarMap) -> Optimizer {
    let disk = StateOnDisk::new(std::env::temp_dir());
    Box::new(AdamW::on_disk(vec![(vars.trainable(), ADAMW)], &disk).unwrap())
}

/// Takes copies of the gradients, by the trait's default.
fn candles(vars: &ShardedVarMap) -> Optimizer {
    let params = ParamsAdamW { lr: 0.02, weight_decay: 0.1, ..ParamsAdamW::default() };
    Box::new(CandleOptimizer::<candle_nn::AdamW>::new(vars.trainable(), params).unwrap())
}

type Layer = FsdpModule<nn::Linear>;

fn layer(vars: &ShardedVarMap, opts: &FullyShard, dtype: DType) -> Layer {
    fully_shard(opts, vars.builder(dtype), |vb| nn::linear(WIDTH, 3, vb)).unwrap()
}

/// The gradients of a step, of a loss that is multiplied by `scale`.
fn backward(world: &World, model: &Layer, dtype: DType, step: usize, scaler: &GradScaler) -> GradStore {
    let x = batch(world.rank() + 10 * step, WIDTH).to_dtype(dtype).unwrap();
    let loss = mean_square(&model.forward(&x).unwrap());
    model.backward(&scaler.scale(&loss).unwrap()).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    elements::<f64>(tensor).into_iter().map(f64::to_bits).collect()
}

fn gradient_bits(vars: &ShardedVarMap, grads: &GradStore) -> Vec<Vec<u64>> {
    vars.trainable().iter().map(|param| bits(shard_of_gradient(param, grads))).collect()
}

/// How a run steps.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Unclipped,
    AfterClipping,
    Scaled,
}

/// The norms, and the bits of this rank's shards, moments and averages.
fn train(
    world: &World,
    vars: &ShardedVarMap,
    model: &Layer,
    make: Make,
    how: Step,
    scale: Option<f64>,
) -> Vec<Vec<u64>> {
    let dtype = vars.params()[0].dtype();
    let mut optim = make(vars);
    let mut ema = Ema::new(vars.params(), 0.5).unwrap();
    let mut scaler = scale.map_or_else(GradScaler::disabled, GradScaler::new);
    let mut all = vec![];
    for step in 0..STEPS {
        let mut grads = backward(world, model, dtype, step, &scaler);
        assert!(!scaler.unscale(vars, &mut grads).unwrap());
        let before = gradient_bits(vars, &grads);
        let norm = match how {
            Step::AfterClipping => clip_grad_norm(vars, &mut grads, MAX_NORM).unwrap(),
            Step::Unclipped | Step::Scaled => grad_norm(vars, &grads).unwrap(),
        };
        assert!(norm > 2. * MAX_NORM, "{norm}");
        let factor = if how == Step::Scaled { clip_factor(MAX_NORM, norm) } else { 1. };
        assert!(scaler.step_scaled(&mut *optim, &grads, factor).unwrap());
        scaler.update().unwrap();
        ema.update().unwrap();
        assert!(how == Step::AfterClipping || gradient_bits(vars, &grads) == before, "the gradients changed");
        all.push(vec![norm.to_bits()]);
    }
    all.extend(vars.params().iter().map(|param| bits(param.var())));
    for state in optim.states() {
        assert_eq!(state.step, STEPS as u64, "{}", state.param.name());
        all.extend(state.names().map(|name| bits(&state.tensor(name).unwrap())));
    }
    all.extend(ema.means().iter().map(|(_, mean)| bits(mean)));
    all
}

fn compare(
    mesh: &[(&str, usize)],
    options: fn(FullyShard) -> FullyShard,
    dtype: DType,
    make: Make,
    scale: Option<f64>,
) {
    ranks(mesh.iter().map(|(_, size)| size).product(), |world| {
        let run = |how| {
            let vars = vars_on(&world, mesh);
            let model = layer(&vars, &options(FullyShard::new(&vars)), dtype);
            train(&world, &vars, &model, make, how, scale)
        };
        let (clipped, scaled) = (run(Step::AfterClipping), run(Step::Scaled));
        assert!(clipped == scaled, "{mesh:?}, {dtype:?}, rank {}", world.rank());
        let norms = |run: &[Vec<u64>]| run[..STEPS].to_vec();
        assert_ne!(norms(&run(Step::Unclipped)), norms(&scaled), "clipping changes nothing");
    });
}

#[test]
fn every_optimizer_has_the_bits_of_clipping_and_a_step() {
    let makes: [Make; 8] = [
        adamw,
        adam,
        adamw8bit,
        |vars| sgd(0., false, vars),
        |vars| sgd(0.9, false, vars),
        |vars| sgd(0.9, true, vars),
        |vars| muon(false, vars),
        |vars| muon(true, vars),
    ];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for make in makes {
            compare(&[("dp_shard", 2)], |opts| opts, dtype, make, None);
        }
        // In F16, Candle's AdamW divides by an epsilon of zero.
        if dtype != DType::F16 {
            compare(&[("dp_shard", 2)], |opts| opts, dtype, candles, None);
        }
    }
}

/// Also with empty shards: the bias has three elements.
#[test]
fn every_place_of_shards_and_state_has_the_bits_of_clipping_and_a_step() {
    let same: fn(FullyShard) -> FullyShard = |opts| opts;
    for size in [1, 4] {
        compare(&[("dp_shard", size)], same, DType::F32, adamw, None);
    }
    let hsdp = &[("dp_replicate", 2), ("dp_shard", 2)];
    compare(hsdp, same, DType::F32, adamw, None);
    compare(hsdp, |opts| opts.shard_optimizer_over_replicas(true), DType::F32, |vars| muon(true, vars), None);
    let in_host: fn(FullyShard) -> FullyShard = |opts| opts.offload_policy(OffloadPolicy::Cpu { pin_memory: true });
    for dtype in [DType::F32, DType::BF16] {
        compare(&[("dp_shard", 2)], in_host, dtype, adamw, None);
        compare(&[("dp_shard", 4)], in_host, dtype, on_disk, None);
    }
    // Under a loss scale.
    for dtype in [DType::F32, DType::F16] {
        compare(&[("dp_shard", 2)], same, dtype, adamw, Some(8.));
    }
}

#[test]
fn factors_that_are_not_finite_are_refused() {
    let world = alone();
    let makes: [Make; 4] = [adamw, |vars| muon(true, vars), candles, |vars| sgd(0., false, vars)];
    for make in makes {
        let vars = vars(&world);
        let model = layer(&vars, &FullyShard::new(&vars), DType::F32);
        let mut optim = make(&vars);
        let grads = backward(&world, &model, DType::F32, 0, &GradScaler::disabled());
        let before: Vec<_> = vars.params().iter().map(|param| bits(param.var())).collect();
        for factor in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            refused(optim.step_scaled(&grads, factor), &["step_scaled", &factor.to_string(), "clip_factor"]);
        }
        assert!(vars.params().iter().map(|param| bits(param.var())).eq(before));
        assert!(optim.states().iter().all(|state| state.step == 0));
    }
}

#[test]
fn factors_of_clipping_are_those_of_pytorch() {
    assert_eq!(clip_factor(1., 4.), 1. / (4. + 1e-6));
    for (max, norm) in [(1., 0.5), (f64::INFINITY, 4.), (1., f64::NAN), (f64::NAN, 1.)] {
        assert_eq!(clip_factor(max, norm), 1., "{max} {norm}");
    }
    assert_eq!(clip_factor(1., f64::INFINITY), 0.);
}
