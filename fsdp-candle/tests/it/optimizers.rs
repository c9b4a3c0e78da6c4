//! Any `candle_nn::Optimizer` trains a sharded model as it trains a plain one, with uneven and empty shards.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use fsdp_candle::{
    AdamW, AdamWConfig, FullyShard, ShardedVarMap, StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
};

use crate::common::{Gradients, alone, assert_close, batch, loss_of, plain, ranks, refused, sharded, vars, weights};

/// Odd, so that shards are uneven. At 4 ranks some shards of the head's two rows are empty.
const WIDTH: usize = 5;
const STEPS: usize = 4;

/// Weights before and after training a sharded model with the optimizer that `make` builds of its shards.
fn train<O: Optimizer>(world_size: usize, make: impl Fn(&ShardedVarMap) -> O + Sync) -> (Gradients, Gradients) {
    ranks(world_size, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let before = weights(&vars);
        let mut optim = make(&vars);
        for _ in 0..STEPS {
            let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            optim.step(&grads).unwrap();
        }
        (before, weights(&vars))
    })
    .swap_remove(0)
}

/// The same of plain Candle, on the mean of the ranks' losses.
fn train_plain<O: Optimizer>(before: &Gradients, replicas: usize, make: impl Fn(Vec<Var>) -> O) -> Gradients {
    let map = VarMap::new();
    let model = plain(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), WIDTH);
    let data = map.data().lock().unwrap();
    for (name, values) in before {
        data[name].set(&Tensor::from_slice(values, data[name].shape(), &Device::Cpu).unwrap()).unwrap();
    }
    let mut optim = make(before.iter().map(|(name, _)| data[name].clone()).collect());
    for _ in 0..STEPS {
        let losses: Vec<Tensor> = (0..replicas).map(|rank| loss_of(&model, &batch(rank, WIDTH))).collect();
        let mean = (Tensor::stack(&losses, 0).unwrap().sum_all().unwrap() / replicas as f64).unwrap();
        optim.backward_step(&mean).unwrap();
    }
    let values = |name: &String| data[name].flatten_all().unwrap().to_vec1().unwrap();
    before.iter().map(|(name, _)| (name.clone(), values(name))).collect()
}

#[test]
fn candles_optimizers_match_plain_candle() {
    let params = ParamsAdamW { lr: 0.02, weight_decay: 0.1, ..Default::default() };
    for world_size in 1..=4 {
        let (before, after) = train(world_size, |vars| candle_nn::SGD::new(vars.trainable_vars(), 0.1).unwrap());
        assert_ne!(before, after);
        assert_close(&after, &train_plain(&before, world_size, |vars| candle_nn::SGD::new(vars, 0.1).unwrap()), 1e-4);

        let (before, after) =
            train(world_size, |vars| candle_nn::AdamW::new(vars.trainable_vars(), params.clone()).unwrap());
        let plain = train_plain(&before, world_size, |vars| candle_nn::AdamW::new(vars, params.clone()).unwrap());
        assert_close(&after, &plain, 1e-3);
    }
}

#[test]
fn adamw_implements_candles_optimizer() {
    let config = AdamWConfig { lr: 0.02, weight_decay: 0.1, ..Default::default() };
    for world_size in 1..=4 {
        // By the trait, as in a generic training loop.
        fn make<O: Optimizer>(vars: Vec<Var>, config: O::Config) -> O {
            let mut optim = O::new(vars, config).unwrap();
            let lr = optim.learning_rate();
            optim.set_learning_rate(lr);
            optim
        }
        let (before, after) = train(world_size, |vars| make::<AdamW>(vars.trainable_vars(), config));
        let params = ParamsAdamW { lr: 0.02, weight_decay: 0.1, ..Default::default() };
        let plain = train_plain(&before, world_size, |vars| candle_nn::AdamW::new(vars, params.clone()).unwrap());
        assert_close(&after, &plain, 1e-3);
    }
}

#[test]
fn refuses_candles_backward_step() {
    let world = alone();
    let vars = vars(&world);
    let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
    let config = AdamWConfig::default();
    let mut optim = <AdamW as Optimizer>::new(vars.trainable_vars(), config).unwrap();
    refused(optim.backward_step(&loss_of(&model, &batch(0, WIDTH))), &["model.backward(&loss)"]);
    refused(
        candle_nn::SGD::new(vars.trainable_vars(), 0.1).unwrap().backward_step(&loss_of(&model, &batch(0, WIDTH))),
        &["backward(&loss)", "step(&grads)"],
    );
    let stranger = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    refused(<AdamW as Optimizer>::new(vec![stranger], config), &["trainable_vars", "[3]"]);
}

#[test]
fn groups_match_separate_optimizers() {
    let config = AdamWConfig { lr: 0.02, weight_decay: 0.3, ..Default::default() };
    let other = AdamWConfig { weight_decay: 0., betas: (0.5, 0.9), eps: 1e-3, ..config };
    for world_size in 1..=3 {
        let together = ranks(world_size, |world| {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
            let parts = || vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"));
            let (biases, rest): (Vec<_>, Vec<_>) = parts();
            let mut optim = AdamW::with_groups(vec![(rest, config), (biases, other)]).unwrap();
            for _ in 0..STEPS {
                let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
                optim.step(&grads).unwrap();
            }
            let options = StateDictOptions::default();
            let dict = get_optimizer_state_dict(&vars, &optim, &options).unwrap();
            let groups = &dict.values["param_groups"];
            assert_eq!((&groups[0]["weight_decay"], &groups[1]["weight_decay"]), (&0.3.into(), &0.0.into()));
            let named = |group: usize| groups[group]["params"].as_array().unwrap().len();
            assert_eq!(named(0) + named(1), vars.trainable().len());
            assert!(
                groups[1]["params"].as_array().unwrap().iter().all(|name| name.as_str().unwrap().ends_with("bias"))
            );

            // A new optimizer with the same groups loads it, with the hyper-parameters.
            let (biases, rest): (Vec<_>, Vec<_>) = parts();
            let mut again = AdamW::with_groups(vec![(rest, other), (biases, config)]).unwrap();
            set_optimizer_state_dict(&vars, &mut again, &dict, &options).unwrap();
            assert_eq!(again.groups(), [config, other]);
            assert!(again.states().iter().all(|state| state.step == STEPS as u64));
            again.reset().unwrap();
            assert!(again.states().iter().all(|state| state.step == 0));

            let twice = AdamW::with_groups(vec![(vars.trainable(), config), (parts().0, other)]).unwrap_err();
            assert!(twice.to_string().contains("in the groups of"), "{twice}");
            weights(&vars)
        });
        let apart = ranks(world_size, |world| {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
            let (biases, rest): (Vec<_>, Vec<_>) =
                vars.trainable().into_iter().partition(|param| param.name().ends_with("bias"));
            let mut optims = [AdamW::new(rest, config).unwrap(), AdamW::new(biases, other).unwrap()];
            for _ in 0..STEPS {
                let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
                optims.iter_mut().for_each(|optim| optim.step(&grads).unwrap());
            }
            weights(&vars)
        });
        assert_eq!(together, apart);
    }
}
