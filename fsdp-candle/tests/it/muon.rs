//! Muon: one rank orthogonalizes each full matrix, however the ranks shard it.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Shape, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{
    AdjustLr, FsdpModule, FsdpParam, FullyShard, Muon, MuonConfig, Optimizers, SGD, SgdConfig, ShardedOptimizer,
    ShardedVarMap, fully_shard, get_optimizer_state_dict, nn, set_optimizer_state_dict,
};

use crate::common::{Gradients, cut, device, elements, full, ranks, refused, vars_on, whole};

const STEPS: u64 = 3;
/// Rows and columns: fewer rows than ranks, uneven shards, tall and wide matrices.
const SHAPES: [(usize, usize); 5] = [(6, 4), (2, 8), (7, 2), (1, 4), (4, 4)];

struct Layers(Vec<nn::Linear>);

impl Module for Layers {
    /// The sum of all layers' outputs for ones.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let sum = |(layer, (_, columns)): (&nn::Linear, (usize, usize))| {
            layer.forward(&Tensor::ones((1, columns), x.dtype(), x.device())?)?.sum_all()
        };
        self.0.iter().zip(SHAPES).try_fold(x.sum_all()?, |total, layer| total + sum(layer)?)
    }
}

fn layers(opts: &FullyShard, vars: &ShardedVarMap, dtype: DType) -> FsdpModule<Layers> {
    let build = |vb: VarBuilder<'static>| {
        let layer = |(at, (rows, columns)): (usize, (usize, usize))| nn::linear(columns, rows, vb.pp(format!("l{at}")));
        Ok(Layers(SHAPES.into_iter().enumerate().map(layer).collect::<candle_core::Result<_>>()?))
    };
    fully_shard(opts, vars.builder(dtype), build).unwrap()
}

fn gradient(param: &FsdpParam, step: u64) -> Tensor {
    let seed = param.name().len() + param.shape().elem_count() + step as usize * 13;
    full_rank(seed, param.shape())
}

/// Repeatable values from -0.5 to 0.5, without the period that would make a matrix singular.
pub(crate) fn full_rank(seed: usize, shape: &Shape) -> Tensor {
    let value = |at: usize| ((at * 7919 + at * at * 31 + seed * 101) % 64) as f32 / 64. - 0.5;
    let values: Vec<f32> = (0..shape.elem_count()).map(value).collect();
    Tensor::from_vec(values, shape, &device()).unwrap()
}

fn backward(model: &FsdpModule<Layers>, vars: &ShardedVarMap, dtype: DType, step: u64) -> GradStore {
    let x = Tensor::ones(1, dtype, &device()).unwrap();
    let mut grads = model.backward(&model.forward(&x).unwrap()).unwrap();
    for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
        grads.insert(param.var(), cut(param, &gradient(param, step).to_dtype(dtype).unwrap()));
    }
    grads
}

fn of_weights(vars: &ShardedVarMap) -> Gradients {
    let full = |param: &FsdpParam| elements(&param.dtensor().unwrap().full_tensor().unwrap());
    vars.params().iter().map(|param| (param.name().to_string(), full(param))).collect()
}

const CONFIG: MuonConfig = MuonConfig {
    lr: 0.02,
    weight_decay: 0.1,
    momentum: 0.9,
    nesterov: true,
    ns_coefficients: (3.4445, -4.7750, 2.0315),
    ns_steps: 5,
    eps: 1e-7,
    adjust_lr: AdjustLr::Original,
};

/// Muon for matrices, SGD for the rest.
fn make(vars: &ShardedVarMap, config: MuonConfig) -> Optimizers {
    let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
    let muon = Muon::new(matrices, config).unwrap();
    let sgd = SGD::new(rest, SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap();
    Optimizers::new(vec![Box::new(muon), Box::new(sgd)]).unwrap()
}

/// Weights before and after training, with matrices sharded along `dim`.
fn trained(mesh: &[(&str, usize)], dim: usize, dtype: DType, config: MuonConfig) -> (Gradients, Gradients) {
    trained_over_replicas(mesh, dim, dtype, config, false)
}

/// [`trained`] by HSDP whose replicas may shard the state.
fn trained_over_replicas(
    mesh: &[(&str, usize)],
    dim: usize,
    dtype: DType,
    config: MuonConfig,
    divided: bool,
) -> (Gradients, Gradients) {
    let size = mesh.iter().map(|(_, size)| size).product();
    let all = ranks(size, |world| {
        let vars = vars_on(&world, mesh);
        let opts = FullyShard::new(&vars)
            .shard_optimizer_over_replicas(divided)
            .shard_placement_fn(move |_, shape| (shape.len() == 2 && shape[1] % size == 0).then(|| dim.into()));
        let model = layers(&opts, &vars, dtype);
        let before = of_weights(&vars);
        let mut optim = make(&vars, config);
        (1..=STEPS).for_each(|step| optim.step(&backward(&model, &vars, dtype, step)).unwrap());
        assert!(optim.states().iter().all(|state| state.step == STEPS));
        (before, of_weights(&vars))
    });
    assert!(all.iter().all(|outcome| *outcome == all[0]), "replicas part: {mesh:?}");
    all.into_iter().next().unwrap()
}

/// A matrix in f64.
#[derive(Clone)]
struct Matrix(Vec<Vec<f64>>);

impl Matrix {
    fn of(values: &[f64], rows: usize) -> Self {
        Matrix(values.chunks(values.len() / rows).map(<[f64]>::to_vec).collect())
    }

    fn t(&self) -> Self {
        Matrix((0..self.0[0].len()).map(|at| self.0.iter().map(|row| row[at]).collect()).collect())
    }

    fn times(&self, other: &Self) -> Self {
        let other = other.t();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        Matrix(self.0.iter().map(|row| other.0.iter().map(|column| dot(row, column)).collect()).collect())
    }

    fn plus(&self, a: f64, other: &Self, b: f64) -> Self {
        let row = |(x, y): (&Vec<f64>, &Vec<f64>)| x.iter().zip(y).map(|(x, y)| a * x + b * y).collect();
        Matrix(self.0.iter().zip(&other.0).map(row).collect())
    }

    /// Newton-Schulz in exact arithmetic.
    fn orthogonal(&self, (a, b, c): (f64, f64, f64)) -> Self {
        let norm = self.0.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = self.plus(1. / norm, self, 0.);
        for _ in 0..5 {
            let gram = x.times(&x.t());
            x = gram.plus(b, &gram.times(&gram), c).times(&x).plus(1., &x, a);
        }
        x
    }
}

#[test]
fn steps_along_the_orthogonalized_momentum() {
    for (adjust_lr, nesterov) in
        [(AdjustLr::Original, true), (AdjustLr::MatchRmsAdamW, true), (AdjustLr::SpectralUnclamped, false)]
    {
        let config = MuonConfig { adjust_lr, nesterov, ..CONFIG };
        let (before, after) = trained(&[("shard", 1)], 0, DType::F32, config);
        let wholes = ranks(1, |world| {
            let vars = vars_on(&world, &[("shard", 1)]);
            let _model = layers(&FullyShard::new(&vars), &vars, DType::F32);
            let gradients = |param: &Arc<FsdpParam>| {
                let of = |step| elements::<f32>(&gradient(param, step));
                (param.shape().dims().to_vec(), (1..=STEPS).map(of).collect::<Vec<_>>())
            };
            vars.params().iter().map(gradients).collect::<Vec<_>>()
        });
        for (((name, before), (_, after)), (shape, gradients)) in before.iter().zip(&after).zip(&wholes[0]) {
            let [rows, columns] = shape[..] else { continue };
            let f64s = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let mut p = Matrix::of(&f64s(before), rows);
            let mut buffer = p.plus(0., &p, 0.);
            let (a, b) = (rows as f64, columns as f64);
            let lr = 0.02
                * match adjust_lr {
                    AdjustLr::Original => (a / b).max(1.).sqrt(),
                    AdjustLr::MatchRmsAdamW => 0.2 * a.max(b).sqrt(),
                    AdjustLr::SpectralUnclamped => (a / b).sqrt(),
                };
            for g in gradients {
                let g = Matrix::of(&f64s(g), rows);
                buffer = buffer.plus(0.9, &g, 0.1);
                let along = if nesterov { g.plus(0.1, &buffer, 0.9) } else { buffer.clone() };
                p = p.plus(1. - 0.02 * 0.1, &along.orthogonal(config.ns_coefficients), -lr);
            }
            // Three steps in bf16 (8 bits), whose rounding errors small singular values amplify.
            let apart = after.iter().zip(p.0.iter().flatten()).map(|(got, want)| (f64::from(*got) - want).abs());
            let apart: Vec<f64> = apart.map(|apart| apart / (3. * lr)).collect();
            let mean = apart.iter().sum::<f64>() / apart.len() as f64;
            assert!(mean < 0.04 && apart.iter().all(|apart| *apart < 0.15), "{name}: {mean} {apart:?}");
        }
    }
}

#[test]
fn every_mesh_gives_the_same_bits() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let alone = trained(&[("shard", 1)], 0, dtype, CONFIG);
        for size in [2, 3, 4] {
            assert_eq!(trained(&[("shard", size)], 0, dtype, CONFIG), alone, "{size} ranks, {dtype:?}");
        }
    }
    let alone = trained(&[("shard", 1)], 0, DType::F32, CONFIG);
    // Regions that are not full rows.
    assert_eq!(trained(&[("shard", 2)], 1, DType::F32, CONFIG), alone);
    // Replicas divide the work.
    for (replicate, shard) in [(2, 1), (2, 2), (4, 1), (3, 2)] {
        let mesh = [("replicate", replicate), ("shard", shard)];
        assert_eq!(trained(&mesh, 0, DType::F32, CONFIG), alone, "{mesh:?}");
    }
}

/// Replicas that shard the state hold different rows, so a matrix is gathered along both mesh dimensions.
#[test]
fn replicas_that_divide_shards_give_the_same_bits() {
    let alone = trained(&[("shard", 1)], 0, DType::F32, CONFIG);
    // Full rows and other regions, uneven and empty shards.
    for (replicate, shard, dim) in [(2, 2, 0), (3, 2, 0), (2, 3, 0), (4, 1, 0), (4, 2, 0), (2, 2, 1), (1, 3, 0)] {
        let mesh = [("replicate", replicate), ("shard", shard)];
        assert_eq!(trained_over_replicas(&mesh, dim, DType::F32, CONFIG, true), alone, "{mesh:?} {dim}");
    }
    let alone = trained(&[("shard", 1)], 0, DType::BF16, CONFIG);
    let mesh = [("replicate", 2), ("shard", 2)];
    assert_eq!(trained_over_replicas(&mesh, 0, DType::BF16, CONFIG, true), alone);
}

#[test]
fn resumes_at_another_world_size() {
    let (_, unbroken) = trained(&[("shard", 1)], 0, DType::F32, CONFIG);
    let half = ranks(2, |world| {
        let vars = vars_on(&world, &[("shard", 2)]);
        let model = layers(&FullyShard::new(&vars), &vars, DType::F32);
        let mut optim = make(&vars, CONFIG);
        optim.step(&backward(&model, &vars, DType::F32, 1)).unwrap();
        (of_weights(&vars), get_optimizer_state_dict(&vars, &optim, &full()).unwrap())
    });
    let (middle, saved) = &half[0];
    assert_eq!(saved.values["param_groups"][0]["adjust_lr_fn"], "original");
    for size in [1, 3] {
        let resumed = ranks(size, |world| {
            let vars = vars_on(&world, &[("shard", size)]);
            let model = layers(&FullyShard::new(&vars), &vars, DType::F32);
            for (param, (_, values)) in vars.params().iter().zip(middle) {
                if !param.region().is_empty() {
                    let whole = Tensor::from_slice(values, param.shape(), &device()).unwrap();
                    param.var().set(&cut(param, &whole)).unwrap();
                }
            }
            // Different hyper-parameters, which the state dict replaces.
            let mut optim = make(&vars, MuonConfig { lr: 5., adjust_lr: AdjustLr::SpectralUnclamped, ..CONFIG });
            set_optimizer_state_dict(&vars, &mut optim, saved, &full()).unwrap();
            (2..=STEPS).for_each(|step| optim.step(&backward(&model, &vars, DType::F32, step)).unwrap());
            of_weights(&vars)
        });
        assert_eq!(resumed[0], unbroken, "{size} ranks");
    }
}

#[test]
fn refuses_vectors_and_gradients_on_some_ranks() {
    ranks(2, |world| {
        let vars = vars_on(&world, &[("shard", 2)]);
        let model = layers(&FullyShard::new(&vars), &vars, DType::F32);
        refused(Muon::new(vars.trainable(), CONFIG), &["l0.bias", "expected a matrix"]);
        let steps = MuonConfig { ns_steps: 100, ..CONFIG };
        refused(Muon::new(vec![], steps), &["`ns_steps` is 100, expected below 100"]);

        let mut optim = make(&vars, CONFIG);
        let mut grads = backward(&model, &vars, DType::F32, 1);
        // A matrix without a gradient on any rank does not change.
        let param = vars.get("l2.weight").unwrap();
        let before = whole(&vars, &param, param.var());
        grads.remove(param.var());
        optim.step(&grads).unwrap();
        assert_eq!(whole(&vars, &param, param.var()), before);
        // A matrix with a gradient on some ranks only is an error on all of them.
        let mut grads = backward(&model, &vars, DType::F32, 2);
        if world.rank() == 0 {
            grads.remove(param.var());
        }
        refused(optim.step(&grads), &["Muon's matrices", "l2.weight"]);
    });
}
