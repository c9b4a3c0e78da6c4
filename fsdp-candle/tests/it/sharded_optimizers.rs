//! Optimizers on shards against PyTorch's formulas on full tensors, with uneven and empty shards, in every dtype;
//! parameter groups and state dicts.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamWConfig, CandleOptimizer, FsdpModule, FsdpParam, FullyShard, GradScaler, NamePattern,
    Optimizers, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap, StateDictOptions, World, fully_shard,
    get_optimizer_state_dict, group_by_name, load_param_groups, nn, optimizer_tensors, optimizer_values,
    set_optimizer_state_dict,
};
use fsdp_ckpt::{SaveState, save};

use crate::common::{Gradients, assert_close, cut, device, elements, full, ranks, refused, vars, weights};

type Params = Vec<Arc<FsdpParam>>;
type Make<'a> = &'a (dyn Fn(Params) -> Box<dyn ShardedOptimizer> + Sync);

const STEPS: u64 = 4;

/// Two layers. At 4 ranks the shards of 5 rows are uneven, and the shards of 2 rows are empty on two ranks.
pub(crate) struct Layers(nn::Linear, nn::Linear);

impl Module for Layers {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?)
    }
}

pub(crate) fn layers(vars: &ShardedVarMap, dtype: DType) -> FsdpModule<Layers> {
    let build = |vb: candle_nn::VarBuilder<'static>| {
        Ok(Layers(nn::linear(3, 5, vb.pp("up"))?, nn::linear(5, 2, vb.pp("down"))?))
    };
    fully_shard(&FullyShard::new(vars), vars.builder(dtype), build).unwrap()
}

/// The gradient of an element in a step.
fn gradient(element: usize, step: u64) -> f64 {
    ((element * 37 + step as usize * 101) % 64) as f64 / 64. - 0.5
}

/// Replaces the gradients of backward with known ones.
pub(crate) fn backward(
    model: &FsdpModule<Layers>,
    vars: &ShardedVarMap,
    dtype: DType,
    step: u64,
) -> candle_core::backprop::GradStore {
    let x = Tensor::ones((2, 3), dtype, &device()).unwrap();
    let mut grads = model.backward(&model.forward(&x).unwrap().sum_all().unwrap()).unwrap();
    for param in vars.trainable().iter().filter(|param| !param.region().is_empty()) {
        let all: Vec<f64> = (0..param.shape().elem_count()).map(|at| gradient(at, step)).collect();
        let whole = Tensor::from_vec(all, param.shape(), &device()).unwrap().to_dtype(dtype).unwrap();
        grads.insert(param.var(), cut(param, &whole));
    }
    grads
}

/// Weights before and after training by the optimizer.
fn trained(world_size: usize, dtype: DType, make: Make<'_>) -> (Gradients, Gradients) {
    ranks(world_size, |world| {
        let vars = vars(&world);
        let model = layers(&vars, dtype);
        let mut optim = make(vars.trainable());
        let before = weights(&vars);
        for step in 1..=STEPS {
            optim.step(&backward(&model, &vars, dtype, step)).unwrap();
        }
        assert!(optim.states().iter().all(|state| state.step == STEPS));
        (before, weights(&vars))
    })
    .swap_remove(0)
}

/// PyTorch's update of one element, from its value, gradient, state and the step's number.
type Plain = fn(f64, f64, &mut [f64; 2], u64) -> f64;

/// Compares every dtype and world size with the formula, and the world sizes with each other bit for bit.
fn steps_as(make: Make<'_>, plain: Plain, rounded: impl Fn(DType, f64) -> f64) {
    for (dtype, near) in [(DType::F32, 2e-6), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
        let (before, alone) = trained(1, dtype, make);
        assert_ne!(before, alone);
        for ((name, before), (_, after)) in before.iter().zip(&alone) {
            for (at, (&before, &after)) in before.iter().zip(after).enumerate() {
                let (mut value, mut state) = (f64::from(before), [0.; 2]);
                for step in 1..=STEPS {
                    value = plain(value, rounded(dtype, gradient(at, step)), &mut state, step);
                }
                let error = (f64::from(after) - value).abs();
                assert!(error <= near * value.abs().max(1.), "{dtype:?} {name} {at}: {after} instead of {value}");
            }
        }
        for world_size in [2, 3, 4] {
            assert_eq!(trained(world_size, dtype, make), (before.clone(), alone.clone()), "{world_size} ranks");
        }
    }
}

/// Gradients are multiples of 1/64, which every dtype represents.
fn exact(_: DType, value: f64) -> f64 {
    value
}

#[test]
fn sgd_matches_pytorchs_formula() {
    steps_as(
        &|params| Box::new(SGD::new(params, SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap()),
        |p, g, _, _| p - 0.1 * g,
        exact,
    );
    let config = SgdConfig { lr: 0.1, momentum: 0.9, dampening: 0.25, weight_decay: 0.2, nesterov: false };
    steps_as(
        &move |params| Box::new(SGD::new(params, config).unwrap()),
        |p, g, [buffer, _], step| {
            let g = g + 0.2 * p;
            *buffer = if step == 1 { g } else { 0.9 * *buffer + 0.75 * g };
            p - 0.1 * *buffer
        },
        exact,
    );
    let config = SgdConfig { lr: 0.1, momentum: 0.9, nesterov: true, ..SgdConfig::default() };
    steps_as(
        &move |params| Box::new(SGD::new(params, config).unwrap()),
        |p, g, [buffer, _], _| {
            *buffer = 0.9 * *buffer + g;
            p - 0.1 * (g + 0.9 * *buffer)
        },
        exact,
    );
}

/// Adam's update for a gradient to which weight decay has been applied.
fn adam(g: f64, [mean, square]: &mut [f64; 2], step: u64) -> f64 {
    *mean = 0.9 * *mean + 0.1 * g;
    *square = 0.95 * *square + 0.05 * g * g;
    let corrected = *square / (1. - 0.95f64.powf(step as f64));
    0.02 * *mean / (1. - 0.9f64.powf(step as f64)) / (corrected.sqrt() + 1e-6)
}

#[test]
fn adam_matches_pytorchs_formula() {
    let config = AdamConfig { lr: 0.02, betas: (0.9, 0.95), eps: 1e-6, weight_decay: 0.3 };
    steps_as(
        &move |params| Box::new(Adam::new(params, config).unwrap()),
        |p, g, state, step| p - adam(g + 0.3 * p, state, step),
        exact,
    );
}

#[test]
fn adamw_matches_pytorchs_formula() {
    let config = AdamWConfig { lr: 0.02, betas: (0.9, 0.95), eps: 1e-6, weight_decay: 0.3 };
    steps_as(
        &move |params| Box::new(AdamW::new(params, config).unwrap()),
        |p, g, state, step| (1. - 0.02 * 0.3) * p - adam(g, state, step),
        exact,
    );
}

/// SGD for biases, AdamW for the rest, with one group without weight decay.
fn mixed(params: Params) -> Box<dyn ShardedOptimizer> {
    let patterns = |text: &str| vec![NamePattern::new(text).unwrap()];
    let (biases, down) = (patterns("bias"), patterns("down.weight"));
    let groups = group_by_name(params, [&biases[..], &down[..]]).unwrap();
    let [rest, biases, down] = groups.try_into().unwrap();
    let config = AdamWConfig { lr: 0.02, ..AdamWConfig::default() };
    let adamw = AdamW::with_groups(vec![(rest, config), (down, AdamWConfig { weight_decay: 0., ..config })]).unwrap();
    let sgd = SGD::new(biases, SgdConfig { momentum: 0.5, dampening: 0.5, ..SgdConfig::default() }).unwrap();
    Box::new(Optimizers::new(vec![Box::new(adamw), Box::new(sgd)]).unwrap())
}

#[test]
fn combined_optimizers_resume_at_any_world_size() {
    let (_, unbroken) = trained(1, DType::F32, &mixed);
    // Weights and state after half of the steps, on two ranks.
    let half = ranks(2, |world| {
        let vars = vars(&world);
        let model = layers(&vars, DType::F32);
        let mut optim = mixed(vars.trainable());
        (1..=STEPS / 2).for_each(|step| optim.step(&backward(&model, &vars, DType::F32, step)).unwrap());
        (weights(&vars), get_optimizer_state_dict(&vars, &*optim, &full()).unwrap())
    });
    let (middle, saved) = &half[0];
    let groups = saved.values["param_groups"].as_array().unwrap();
    assert_eq!(groups.len(), 3);
    assert_eq!((&groups[1]["params"][0], &groups[1]["weight_decay"]), (&"down.weight".into(), &0.0.into()));
    assert_eq!((&groups[2]["momentum"], groups[2]["params"].as_array().unwrap().len()), (&0.5.into(), 2));
    assert!(saved.tensors.contains_key("state.up.bias.momentum_buffer"));
    assert!(!saved.tensors.contains_key("state.up.weight.momentum_buffer"));
    for world_size in [1, 3, 4] {
        let resumed = ranks(world_size, |world| {
            let vars = vars(&world);
            let model = layers(&vars, DType::F32);
            for (param, (_, values)) in vars.params().iter().zip(middle) {
                let whole = Tensor::from_slice(values, param.shape(), &device()).unwrap();
                if !param.region().is_empty() {
                    param.var().set(&cut(param, &whole)).unwrap();
                }
            }
            let mut optim = mixed(vars.trainable());
            optim.set_learning_rate(7.);
            set_optimizer_state_dict(&vars, &mut *optim, saved, &full()).unwrap();
            assert_eq!(optim.param_groups()[0].hyper["lr"], 0.02);
            (STEPS / 2 + 1..=STEPS).for_each(|step| optim.step(&backward(&model, &vars, DType::F32, step)).unwrap());
            weights(&vars)
        });
        assert_eq!(resumed[0], unbroken, "{world_size} ranks");
    }
}

fn one(world: &World) -> (ShardedVarMap, FsdpModule<Layers>) {
    let vars = vars(world);
    let model = layers(&vars, DType::F32);
    (vars, model)
}

#[test]
fn matches_state_dict_groups_by_parameters() {
    ranks(2, |world| {
        let (vars, _model) = one(&world);
        let options = StateDictOptions::default();
        let mut optim = mixed(vars.trainable());
        let mut dict = get_optimizer_state_dict(&vars, &*optim, &options).unwrap();
        let groups = dict.values["param_groups"].as_array_mut().unwrap();
        groups[0]["lr"] = 0.5.into();
        groups.swap(0, 1);
        set_optimizer_state_dict(&vars, &mut *optim, &dict, &options).unwrap();
        let lr = |optim: &dyn ShardedOptimizer| {
            optim.param_groups().iter().map(|group| group.hyper["lr"].as_f64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(lr(&*optim), [0.5, 0.02, 1e-3]);
        optim.set_group_learning_rate(2, 3.);
        optim.set_group_learning_rate(3, 4.);
        assert_eq!(lr(&*optim), [0.5, 0.02, 3.]);

        // A state dict with one wrong entry changes nothing.
        for (group, name, value, why) in [
            (0, "lr", serde_json::json!(-1.), "`lr` is -1, expected at least 0"),
            (2, "nesterov", true.into(), "no `dampening`, found 0.5"),
            (2, "maximize", true.into(), "`maximize` on"),
            (2, "differentiable", true.into(), "`differentiable` on"),
            (1, "amsgrad", true.into(), "`amsgrad` on"),
            (1, "maximize", true.into(), "`maximize` on"),
            (1, "differentiable", true.into(), "`differentiable` on"),
            (1, "betas", serde_json::json!([0.9]), "expected 2 numbers"),
            (1, "decoupled_weight_decay", false.into(), "are those of Adam, expected AdamW"),
            (1, "eps", "small".into(), "expected a number"),
        ] {
            let mut dict = get_optimizer_state_dict(&vars, &*optim, &options).unwrap();
            dict.values["param_groups"][0]["lr"] = 9.0.into();
            dict.values["param_groups"][group][name] = value;
            refused(set_optimizer_state_dict(&vars, &mut *optim, &dict, &options), &[why]);
            assert_eq!(lr(&*optim), [0.5, 0.02, 3.]);
        }
        let mut dict = get_optimizer_state_dict(&vars, &*optim, &options).unwrap();
        dict.tensors.remove("state.up.weight.exp_avg");
        dict.values["param_groups"][0]["lr"] = 9.0.into();
        set_optimizer_state_dict(&vars, &mut *optim, &dict, &options).unwrap_err();
        assert_eq!(lr(&*optim), [0.5, 0.02, 3.]);
    });
}

/// Our state dict lists parameter groups, PyTorch's full state dict has each parameter's options.
#[test]
fn reads_hyper_parameters_of_both_checkpoint_formats() {
    let dir = tempfile::tempdir().unwrap();
    ranks(2, |world| {
        let (vars, _model) = one(&world);
        let mut optim = mixed(vars.trainable());
        optim.set_group_learning_rate(2, 0.25);
        let wanted: Vec<_> = optim.param_groups().into_iter().map(|group| group.hyper).collect();
        let ours = optimizer_values(&*optim);
        let mut theirs = serde_json::Map::new();
        for group in optim.param_groups() {
            for param in group.params {
                let key = |name: &str| format!("optim.param_groups.{}.{name}", param.name());
                theirs.extend(group.hyper.iter().map(|(name, value)| (key(name), value.clone())));
            }
        }
        let saved = |name: &str, values: &serde_json::Map<String, serde_json::Value>| {
            let (mesh, tensors) = (vars.mesh().layout().clone(), optimizer_tensors(&*optim).unwrap());
            let path = dir.path().join(name);
            save(&path, world.group(), &SaveState { mesh, tensors, values: values.clone() }).unwrap();
            fsdp_ckpt::open(&path).unwrap()
        };
        for (name, values) in [("ours", &ours), ("theirs", &theirs)] {
            let source = saved(name, values);
            let mut again = mixed(vars.trainable());
            again.set_learning_rate(7.);
            load_param_groups(&mut *again, &*source).unwrap();
            let found: Vec<_> = again.param_groups().into_iter().map(|group| group.hyper).collect();
            assert_eq!(found, wanted, "{name}");
            // Different groups than in the state dict.
            let mut other = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
            refused(load_param_groups(&mut other, &*source), &["of the same group"]);
        }
        theirs.retain(|key, _| !key.contains("up.bias"));
        refused(load_param_groups(&mut *mixed(vars.trainable()), &*saved("lacks", &theirs)), &["`up.bias`"]);
    });
}

/// PyTorch's SGD does not count steps. It has a momentum buffer, so dampening applies.
#[test]
fn a_state_dict_without_steps_has_begun() {
    ranks(1, |world| {
        let (vars, model) = one(&world);
        let config = SgdConfig { lr: 1., momentum: 0.5, dampening: 0.75, ..SgdConfig::default() };
        let mut optim = SGD::new(vars.trainable(), config).unwrap();
        optim.step(&backward(&model, &vars, DType::F32, 1)).unwrap();
        let options = StateDictOptions::default();
        let mut dict = get_optimizer_state_dict(&vars, &optim, &options).unwrap();
        dict.tensors.retain(|name, _| !name.ends_with(".step"));
        let mut again = SGD::new(vars.trainable(), config).unwrap();
        set_optimizer_state_dict(&vars, &mut again, &dict, &options).unwrap();
        assert!(again.states().iter().all(|state| state.step == 1));
        again.step(&backward(&model, &vars, DType::F32, 2)).unwrap();
        let buffer = elements::<f32>(&again.states()[1].tensor("momentum_buffer").unwrap());
        let want = |at| 0.5 * gradient(at, 1) + 0.25 * gradient(at, 2);
        assert!(buffer.iter().enumerate().all(|(at, got)| f64::from(*got) == want(at)), "{buffer:?}");
    });
}

#[test]
fn refuses_bad_configurations() {
    ranks(1, |world| {
        let (vars, model) = one(&world);
        let sgd = |config| SGD::new(vars.trainable(), config).map(drop);
        refused(sgd(SgdConfig { lr: -1., ..SgdConfig::default() }), &["SGD: `lr` is -1"]);
        refused(sgd(SgdConfig { nesterov: true, ..SgdConfig::default() }), &["needs `momentum` above 0, found 0"]);
        let adam = AdamConfig { betas: (0.9, 1.), ..AdamConfig::default() };
        refused(Adam::new(vars.trainable(), adam).map(drop), &["Adam: `betas` is 1, expected in 0..1"]);
        let both = || Box::new(SGD::new(vars.trainable(), SgdConfig::default()).unwrap());
        refused(Optimizers::new(vec![both(), both()]).map(drop), &["two optimizers update it"]);
        let pattern = [NamePattern::new("norm").unwrap()];
        refused(group_by_name(vars.trainable(), [&pattern[..]]).map(drop), &["`norm` matches no trainable parameter"]);

        // The state of Candle's optimizer is not accessible.
        let params = candle_nn::ParamsAdamW::default();
        let mut candles = CandleOptimizer::<candle_nn::AdamW>::new(vars.trainable(), params).unwrap();
        refused(optimizer_tensors(&candles).map(drop), &["hides its state"]);
        let options = StateDictOptions::default();
        refused(get_optimizer_state_dict(&vars, &candles, &options).map(drop), &["hides its state"]);
        refused(candles.reset(), &["make a new one"]);
        let mut scaler = GradScaler::disabled();
        assert!(scaler.step(&mut candles, &backward(&model, &vars, DType::F32, 1)).unwrap());
    });
}

/// Candle's optimizers fail on empty tensors, which the shards of some ranks are.
#[test]
fn candles_optimizers_step_like_this_crates() {
    let candles = |params: Params| -> Box<dyn ShardedOptimizer> {
        Box::new(CandleOptimizer::<candle_nn::SGD>::without_state(params, 0.1).unwrap())
    };
    let ours = |params: Params| -> Box<dyn ShardedOptimizer> {
        Box::new(SGD::new(params, SgdConfig { lr: 0.1, ..SgdConfig::default() }).unwrap())
    };
    for world_size in 1..=4 {
        let ((_, candles), (_, ours)) = (trained(world_size, DType::F32, &candles), trained(1, DType::F32, &ours));
        assert_close(&candles, &ours, 1e-6);
    }
}
