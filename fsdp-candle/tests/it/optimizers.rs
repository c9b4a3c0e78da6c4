//! Any `candle_nn::Optimizer` trains a sharded model as it trains a plain one, with uneven and empty shards.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fsdp_candle::{
    AdamW, AdamWConfig, FsdpParam, ShardedVarMap, StateDictOptions, World, get_optimizer_state_dict,
    set_optimizer_state_dict,
};

use crate::common::{
    Gradients, Plain, Sharded, assert_close, batch, built, loss_of, mean, plain, ranks, refused, weights,
};

/// Odd, so that shards are uneven. At 4 ranks some shards of the head's two rows are empty.
const WIDTH: usize = 5;
const STEPS: usize = 4;

/// Some steps with a rank's batch.
fn steps(world: &World, model: &Sharded, mut step: impl FnMut(&GradStore)) {
    let x = batch(world.rank(), WIDTH);
    (0..STEPS).for_each(|_| step(&model.backward(&loss_of(model, &x)).unwrap()));
}

/// The biases, and all other parameters.
fn parts(vars: &ShardedVarMap) -> (Vec<Arc<FsdpParam>>, Vec<Arc<FsdpParam>>) {
    vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"))
}

/// Weights before and after training a sharded model with the optimizer that `make` builds of its shards.
fn train<O: Optimizer>(world_size: usize, make: impl Fn(&ShardedVarMap) -> O + Sync) -> (Gradients, Gradients) {
    ranks(world_size, |world| {
        let (vars, model) = built(&world, WIDTH);
        let before = weights(&vars);
        let mut optim = make(&vars);
        steps(&world, &model, |grads| optim.step(grads).unwrap());
        (before, weights(&vars))
    })
    .swap_remove(0)
}

/// The same of plain Candle, on the mean of the ranks' losses.
fn train_plain<O: Optimizer<Config: Clone>>(before: &Gradients, replicas: usize, config: &O::Config) -> Gradients {
    let plain = Plain::new(before, |vb| plain(vb, WIDTH));
    let mut optim = make::<O>(plain.vars_of(|_| true), config);
    for _ in 0..STEPS {
        let losses: Vec<Tensor> = (0..replicas).map(|rank| loss_of(&plain.model, &batch(rank, WIDTH))).collect();
        optim.backward_step(&mean(&losses)).unwrap();
    }
    plain.values()
}

/// Makes an optimizer by the trait, as a generic training loop does.
fn make<O: Optimizer<Config: Clone>>(vars: Vec<Var>, config: &O::Config) -> O {
    let mut optim = O::new(vars, config.clone()).unwrap();
    let lr = optim.learning_rate();
    optim.set_learning_rate(lr);
    optim
}

#[test]
fn optimizers_by_candles_trait_match_plain_candle() {
    let params = ParamsAdamW { lr: 0.02, weight_decay: 0.1, ..Default::default() };
    let config = AdamWConfig { lr: 0.02, weight_decay: 0.1, ..Default::default() };
    for size in 1..=4 {
        let (before, after) = train(size, |vars| make::<candle_nn::SGD>(vars.trainable_vars(), &0.1));
        assert_ne!(before, after);
        assert_close(&after, &train_plain::<candle_nn::SGD>(&before, size, &0.1), 1e-4);

        let plain = train_plain::<candle_nn::AdamW>(&before, size, &params);
        let (_, candles) = train(size, |vars| make::<candle_nn::AdamW>(vars.trainable_vars(), &params));
        assert_close(&candles, &plain, 1e-3);
        let (_, ours) = train(size, |vars| make::<AdamW>(vars.trainable_vars(), &config));
        assert_close(&ours, &plain, 1e-3);
    }
}

#[test]
fn refuses_variables_that_are_not_shards() {
    let stranger = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    refused(<AdamW as Optimizer>::new(vec![stranger], AdamWConfig::default()), &["trainable_vars", "[3]"]);
}

#[test]
fn groups_match_separate_optimizers() {
    let config = AdamWConfig { lr: 0.02, weight_decay: 0.3, ..Default::default() };
    let other = AdamWConfig { weight_decay: 0., betas: (0.5, 0.9), eps: 1e-3, ..config };
    for world_size in 1..=3 {
        let together = ranks(world_size, |world| {
            let (vars, model) = built(&world, WIDTH);
            let (biases, rest) = parts(&vars);
            let mut optim = AdamW::with_groups(vec![(rest, config), (biases, other)]).unwrap();
            steps(&world, &model, |grads| optim.step(grads).unwrap());
            let options = StateDictOptions::default();
            let dict = get_optimizer_state_dict(&vars, &optim, &options).unwrap();
            let groups = &dict.values["param_groups"];
            assert_eq!((&groups[0]["weight_decay"], &groups[1]["weight_decay"]), (&0.3.into(), &0.0.into()));
            let named = |group: usize| groups[group]["params"].as_array().unwrap().len();
            assert_eq!(named(0) + named(1), vars.trainable().len());
            let biases = groups[1]["params"].as_array().unwrap();
            assert!(biases.iter().all(|name| name.as_str().unwrap().ends_with("bias")));

            // A new optimizer with the same groups loads it, with the hyper-parameters.
            let (biases, rest) = parts(&vars);
            let mut again = AdamW::with_groups(vec![(rest, other), (biases, config)]).unwrap();
            set_optimizer_state_dict(&vars, &mut again, &dict, &options).unwrap();
            assert_eq!(again.groups(), [config, other]);
            assert!(again.states().iter().all(|state| state.step == STEPS as u64));
            again.reset().unwrap();
            assert!(again.states().iter().all(|state| state.step == 0));

            let twice = AdamW::with_groups(vec![(vars.trainable(), config), (parts(&vars).0, other)]);
            refused(twice, &["in the groups of"]);
            weights(&vars)
        });
        let apart = ranks(world_size, |world| {
            let (vars, model) = built(&world, WIDTH);
            let (biases, rest) = parts(&vars);
            let mut optims = [AdamW::new(rest, config).unwrap(), AdamW::new(biases, other).unwrap()];
            steps(&world, &model, |grads| optims.iter_mut().for_each(|optim| optim.step(grads).unwrap()));
            weights(&vars)
        });
        assert_eq!(together, apart);
    }
}
