//! A training loop written for plain Candle: `backward_step`, generic trainers, models with errors of another type, and
//! rows of a batch by rank.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CandleOptimizer, FsdpModule, FsdpParam,
    FullyShard, GradScaler, Muon, MuonConfig, Optimizers, Recurse, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap,
    World, fully_shard, nn, shard,
};

use crate::common::{
    Gradients, alone, assert_close, assert_contains, batch, built, input, loss_of, ranks, refused, vars, weights,
};

/// Odd, so that shards are uneven, and some are empty at 3 ranks.
const WIDTH: usize = 5;
const STEPS: usize = 3;

/// A generic trainer for plain Candle, which knows nothing of shards.
fn train<M: ModuleT, O: Optimizer>(model: &M, optim: &mut O, x: &Tensor) -> candle_core::Result<()> {
    for _ in 0..STEPS {
        let loss = model.forward_t(x, true)?.sqr()?.mean_all()?;
        optim.backward_step(&loss)?;
    }
    Ok(())
}

/// Weights after training by the generic trainer, and by gradients of the model's own backward. `params` makes the
/// optimizer of these parameters.
fn both_ways<O: Optimizer>(size: usize, make: impl Fn(&ShardedVarMap) -> O + Sync) -> Vec<[Gradients; 2]> {
    ranks(size, |world| {
        [true, false].map(|by_trainer| {
            let (vars, model) = built(&world, WIDTH);
            let (mut optim, x) = (make(&vars), batch(world.rank(), WIDTH));
            match by_trainer {
                true => train(&model, &mut optim, &x).unwrap(),
                false => (0..STEPS).for_each(|_| optim.step(&model.backward(&loss_of(&model, &x)).unwrap()).unwrap()),
            }
            weights(&vars)
        })
    })
}

fn matrices(vars: &ShardedVarMap) -> Vec<Arc<FsdpParam>> {
    vars.trainable().into_iter().filter(|param| param.shape().rank() == 2).collect()
}

#[test]
fn backward_step_of_a_generic_trainer_has_the_bits_of_both_calls() {
    let all = |vars: &ShardedVarMap| vars.trainable_vars();
    for size in 1..=3 {
        let optimizers = [
            both_ways(size, |vars| <AdamW as Optimizer>::new(all(vars), AdamWConfig::default()).unwrap()),
            both_ways(size, |vars| <Adam as Optimizer>::new(all(vars), AdamConfig::default()).unwrap()),
            both_ways(size, |vars| <SGD as Optimizer>::new(all(vars), SgdConfig::default()).unwrap()),
            both_ways(size, |vars| <AdamW8bit as Optimizer>::new(all(vars), AdamW8bitConfig::default()).unwrap()),
            both_ways(size, |vars| {
                let shards: Vec<Var> = matrices(vars).iter().map(|param| param.var().clone()).collect();
                <Muon as Optimizer>::new(shards, MuonConfig::default()).unwrap()
            }),
            both_ways(size, |vars| {
                <CandleOptimizer<candle_nn::AdamW> as Optimizer>::new(all(vars), ParamsAdamW::default()).unwrap()
            }),
        ];
        for [by_trainer, by_hand] in optimizers.into_iter().flatten() {
            assert_eq!(by_trainer, by_hand);
        }
    }
}

#[test]
fn backward_step_works_without_candles_trait_and_for_several_optimizers() {
    for size in 1..=3 {
        ranks(size, |world| {
            let x = batch(world.rank(), WIDTH);
            let optim = |vars: &ShardedVarMap| {
                let (matrices, rest) = vars.trainable().into_iter().partition(|param| param.shape().rank() == 2);
                let muon = Muon::new(matrices, MuonConfig::default()).unwrap();
                Optimizers::new(vec![Box::new(muon), Box::new(AdamW::new_lr(rest, 0.01).unwrap())]).unwrap()
            };
            let [(vars, model), (other_vars, other)] = [built(&world, WIDTH), built(&world, WIDTH)];
            let (mut one, mut two) = (optim(&vars), optim(&other_vars));
            for _ in 0..STEPS {
                one.backward_step(&loss_of(&model, &x)).unwrap();
                two.step(&other.backward(&loss_of(&other, &x)).unwrap()).unwrap();
            }
            assert_eq!(weights(&vars), weights(&other_vars));
        });
    }
}

/// The loop of a GAN in plain Candle: each optimizer steps on its own loss.
#[test]
fn backward_step_of_two_models_steps_each_optimizers_own() {
    let layer = |vars: &ShardedVarMap, name: &str, from, to| {
        fully_shard(&FullyShard::new(vars), vars.builder(DType::F32).pp(name), |vb| nn::linear(from, to, vb)).unwrap()
    };
    let train = |world: &World, by_step: bool| {
        let vars = vars(world);
        let (generator, critic) = (layer(&vars, "generator", 3, 5), layer(&vars, "critic", 5, 1));
        let optim = |model: &FsdpModule<nn::Linear>| AdamW::new_lr(model.params().to_vec(), 0.1).unwrap();
        let (mut of_generator, mut of_critic) = (optim(&generator), optim(&critic));
        for step in 0..STEPS {
            let score = |x: &Tensor| critic.forward(x).unwrap().tanh().unwrap().mean_all().unwrap();
            let fake = generator.forward(&input(step, &[4, 3])).unwrap();
            let loss = (score(&fake.detach()) - score(&input(7, &[4, 5]))).unwrap();
            match by_step {
                true => of_critic.backward_step(&loss).unwrap(),
                false => of_critic.step(&critic.backward(&loss).unwrap()).unwrap(),
            }
            let loss = score(&fake).neg().unwrap();
            match by_step {
                true => of_generator.backward_step(&loss).unwrap(),
                false => of_generator.step(&generator.backward(&loss).unwrap()).unwrap(),
            }
        }
        weights(&vars)
    };
    for size in 1..=3 {
        ranks(size, |world| assert_eq!(train(&world, true), train(&world, false)));
    }
}

#[test]
fn backward_step_refuses_what_it_could_not_step() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let mut optim = AdamW::new_lr(vars.trainable(), 0.1).unwrap();
        let before = weights(&vars);
        let x = batch(world.rank(), WIDTH);
        let loss = || loss_of(&model, &x);

        // No forward of the model.
        refused(optim.backward_step(&Tensor::new(1f32, &Device::Cpu).unwrap()), &["the loss has no graph"]);
        let other = Var::ones(3, DType::F32, x.device()).unwrap();
        refused(
            optim.backward_step(&other.sum_all().unwrap()),
            &["(root)", "reaches no parameter", "`forward` or `call`"],
        );

        // Gradients accumulate.
        let accumulates = ["accumulate", "`let grads = model.backward(&loss)?`", "`optim.step(&grads)`"];
        model.set_is_last_backward(false);
        refused(optim.backward_step(&loss()), &accumulates);
        model.set_is_last_backward(true);
        model.set_requires_gradient_sync(false, Recurse::Yes);
        refused(optim.backward_step(&loss()), &accumulates);
        model.set_requires_gradient_sync(true, Recurse::Yes);
        model.set_post_accumulate_grad_hook(Some(Arc::new(|_: GradStore| Ok(()))));
        refused(optim.backward_step(&loss()), &["a hook takes them", "`model.backward(&loss)`"]);
        model.set_post_accumulate_grad_hook(None);

        // A scaled loss.
        let scaled = GradScaler::default().scale(&loss()).unwrap();
        refused(optim.backward_step(&scaled), &["GradScaler", "`scaler.step(&mut optim, &grads)?`"]);

        // A loss that another optimizer has stepped on.
        let parts: (Vec<_>, Vec<_>) = vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"));
        let [mut biases, mut rest] = [parts.0, parts.1].map(|params| AdamW::new_lr(params, 0.).unwrap());
        let shared = loss();
        biases.backward_step(&shared).unwrap();
        refused(rest.backward_step(&shared), &["has been through backward", "several optimizers", "`step(&grads)`"]);

        // Two maps.
        let others = crate::common::vars(&world);
        let _other =
            fully_shard(&FullyShard::new(&others), others.builder(DType::F32).pp("other"), |vb| nn::linear(2, 2, vb));
        let params = [vars.trainable(), others.trainable()].concat();
        refused(
            SGD::new(params, SgdConfig::default()).unwrap().backward_step(&loss()),
            &["`other.weight`, of another ShardedVarMap", "`optim.step(&model.backward(&loss)?)`"],
        );

        // The loss of a plain optimizer names the way out.
        let mut plain = candle_nn::SGD::new(vars.trainable_vars(), 0.1).unwrap();
        refused(plain.backward_step(&loss()), &["backward(&loss)", "CandleOptimizer"]);
        assert_eq!(weights(&vars), before);
    });
}

#[test]
fn candles_hyper_parameters_are_ours() {
    let ours: AdamWConfig = ParamsAdamW { lr: 0.1, beta1: 0.2, beta2: 0.3, eps: 0.4, weight_decay: 0.5 }.into();
    assert_eq!(ours, AdamWConfig { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5 });
    assert_eq!(AdamWConfig::from(ParamsAdamW::default()), AdamWConfig::default());
    let (vars, _model) = built(&alone(), WIDTH);
    assert_eq!(AdamW::new_lr(vars.trainable(), 0.3).unwrap().groups()[0].lr, 0.3);
}

/// A model whose functions return `anyhow::Result`.
struct Heads(nn::Linear);

impl Heads {
    fn new(heads: usize, vb: VarBuilder) -> anyhow::Result<Self> {
        anyhow::ensure!(4 % heads == 0, "4 features are not divisible by {heads} heads");
        Ok(Heads(nn::linear(4, heads, vb)?))
    }

    fn forward(&mut self, x: &Tensor, scale: f64) -> anyhow::Result<Tensor> {
        use anyhow::Context;
        let scale = Some(scale).filter(|scale| *scale > 0.).context("the scale is not positive").context("head")?;
        Ok((self.0.forward(x)? * scale)?)
    }
}

#[derive(Debug)]
struct OwnError(usize);

impl std::fmt::Display for OwnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a batch of {} rows", self.0)
    }
}

impl std::error::Error for OwnError {}

#[test]
fn models_may_return_other_errors() {
    let world = alone();
    let vars = vars(&world);
    let build = |heads| shard(&FullyShard::new(&vars), &[], vars.builder(DType::F32), |vb| Heads::new(heads, vb));
    refused(build(3), &["unit `(root)` failed to build", "not divisible by 3 heads"]);
    let mut model = build(2).unwrap();
    let x = input(1, &[3, 4]);
    // Causes are in the text.
    refused(model.call_mut(|m| m.forward(&x, -1.)), &["head: the scale is not positive"]);
    refused(model.call(|_| Err::<(), _>(OwnError(3))), &["a batch of 3 rows"]);
    refused(model.call(|_| Err::<(), _>("as text")), &["as text"]);
    let y = model.call_mut(|m| m.forward(&x, 2.)).unwrap();
    model.backward(&y.sum_all().unwrap()).unwrap();
    // Candle's errors stay what they are, and errors of sharded parameters are explained.
    let error = model.call(|m| m.0.forward(&x.t()?)).unwrap_err();
    assert!(!matches!(error, candle_core::Error::Wrapped(_)), "{error}");
    let inner = |m: &Heads| -> anyhow::Result<Tensor> { Ok(x.matmul(&m.0.weight().t()?)?) };
    let error = inner(model.inner()).unwrap_err();
    assert_contains(&error.to_string(), &["F4"]);
    let outer = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32).pp("outer"), |_| Ok(())).unwrap();
    refused(outer.call(|()| inner(model.inner())), &["FSDP unit `outer`", "a sharded parameter was used"]);
}

#[test]
fn forward_t_runs_modules_with_and_without_training() {
    let world = alone();
    let vars = vars(&world);
    let model =
        fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::batch_norm(5, 1e-5, vb)).unwrap();
    let x = input(1, &[4, 5]);
    let before = model.forward_t(&x, false).unwrap().to_vec2::<f32>().unwrap();
    let y = model.forward_t(&x, true).unwrap();
    model.backward(&y.sqr().unwrap().sum_all().unwrap()).unwrap();
    let after = nn::func_t(|x, train| model.forward_t(x, train)).forward_t(&x, false).unwrap();
    assert_ne!(before, after.to_vec2::<f32>().unwrap()); // the statistics have changed
}

#[test]
fn uneven_rows_have_the_gradient_of_the_whole_batch() {
    let rows = 7;
    let gradient = |world: &World| {
        let (vars, model) = built(world, WIDTH);
        let own = world.rows(rows);
        let x = input(3, &[rows, WIDTH]).narrow(0, own.start, own.len()).unwrap();
        let loss = (loss_of(&model, &x) * world.row_weight(rows)).unwrap();
        let grads = model.backward(&loss).unwrap();
        (world.mean(&loss).unwrap(), crate::common::gradients(&vars, &grads))
    };
    let (loss, want) = gradient(&alone());
    for size in 2..=4 {
        for (found, got) in ranks(size, |world| gradient(&world)) {
            assert!((found - loss).abs() < 1e-6, "{found} instead of {loss}");
            assert_close(&got, &want, 1e-5);
        }
    }
}

#[test]
fn batches_by_rank_are_as_many_on_every_rank_and_have_every_row() {
    for (size, total, batch) in [(1, 10, 4), (2, 10, 4), (3, 10, 4), (3, 11, 4), (4, 3, 8), (3, 0, 3)] {
        let parts = ranks(size, |world| world.batches(total, batch).unwrap().collect::<Vec<_>>());
        assert!(parts.iter().all(|batches| batches.len() == parts[0].len()));
        let left_out = if total % batch < size { total % batch } else { 0 };
        let mut rows: Vec<usize> = parts.iter().flatten().cloned().flatten().collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..total - left_out).collect::<Vec<_>>());
        assert!(parts.iter().flatten().all(|rows| !rows.is_empty()));
    }
    ranks(3, |world| {
        refused(world.batches(10, 2).map(Iterator::count), &["each of 3 ranks", "2 rows"]);
        refused(world.mean(&input(1, &[2])), &["found shape [2]", "mean_all"]);
    });
}
