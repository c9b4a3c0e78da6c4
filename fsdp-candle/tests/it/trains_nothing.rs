//! Programs that would train nothing, or wrongly: errors and warnings say so.

use std::process::Command;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use fsdp_candle::{
    Adam, AdamConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, CandleOptimizer, Ema, Error, FsdpModule,
    FsdpParam, FullyShard, GradScaler, Muon, MuonConfig, Optimizers, Recurse, SGD, SgdConfig, ShardedVarMap,
    StateOnDisk, World, clip_grad_norm, fully_shard, grad_norm, nn, shard,
};

use crate::common::{all_refused, alone, assert_contains, device, input, ranks, refused, vars};

type Layer = FsdpModule<nn::Linear>;

fn layer(vars: &ShardedVarMap, name: &str) -> Layer {
    let vb = vars.builder(DType::F32).pp(name);
    fully_shard(&FullyShard::new(vars), vb, |vb| nn::linear(4, 2, vb)).unwrap()
}

fn loss(model: &impl Module) -> Tensor {
    model.forward(&input(1, &[3, 4])).unwrap().sqr().unwrap().mean_all().unwrap()
}

fn sgd(params: &[Arc<FsdpParam>]) -> SGD {
    SGD::new(params.to_vec(), SgdConfig::default()).unwrap()
}

/// Runs `f` on ranks. Returns the warnings of each rank.
fn warnings(size: usize, f: impl Fn(&World) + Sync) -> Vec<Vec<String>> {
    ranks(size, |world| {
        let said: Arc<Mutex<Vec<String>>> = Arc::default();
        let all = said.clone();
        let on_event = move |event: &tracing::Metadata<'_>, text: String| {
            if *event.level() == tracing::Level::WARN {
                all.lock().unwrap().push(text);
            }
        };
        fsdp_test_support::observed(on_event, || f(&world));
        std::mem::take(&mut *said.lock().unwrap())
    })
}

/// Asserts that rank 0 alone warned, once, with all of `parts`.
fn warned_once(said: &[Vec<String>], parts: &[&str]) {
    assert!(said[0].len() == 1 && said[1..].iter().all(Vec::is_empty), "{said:?}");
    assert_contains(&said[0][0], parts);
}

fn silent(said: &[Vec<String>]) {
    assert!(said.iter().all(Vec::is_empty), "{said:?}");
}

#[test]
fn optimizers_without_parameters_are_errors() {
    let world = alone();
    let vars = vars(&world);
    let trainable = || vars.trainable(); // before the model
    let disk = StateOnDisk::new(std::env::temp_dir());
    let made: [Result<(), Error>; 11] = [
        AdamW::new(trainable(), AdamWConfig::default()).map(drop),
        Adam::new(trainable(), AdamConfig::default()).map(drop),
        SGD::new(trainable(), SgdConfig::default()).map(drop),
        AdamW8bit::new(trainable(), AdamW8bitConfig::default()).map(drop),
        Muon::new(trainable(), MuonConfig::default()).map(drop),
        AdamW::with_groups(vec![(vec![], AdamWConfig::default()), (vec![], AdamWConfig::default())]).map(drop),
        AdamW::with_groups(vec![]).map(drop),
        AdamW::on_disk(vec![(trainable(), AdamWConfig::default())], &disk).map(drop),
        CandleOptimizer::<candle_nn::SGD>::new(trainable(), 0.1).map(drop),
        Ema::new(vars.params(), 0.5).map(drop),
        <AdamW as Optimizer>::new(vars.trainable_vars(), AdamWConfig::default()).map(drop).map_err(Error::from),
    ];
    for outcome in made {
        refused(outcome, &["it has no parameters, so it would train nothing", "after the model, of the same map"]);
    }
    refused(Optimizers::new(vec![]).map(drop), &["expected at least one optimizer, found none"]);
    let other = crate::common::vars(&world);
    let model = layer(&other, "a");
    let mut grads = model.backward(&loss(&model)).unwrap();
    refused(GradScaler::default().unscale(&vars, &mut grads), &["the map has no trainable parameters"]);
    refused(grad_norm(&vars, &grads), &["there are no trainable parameters"]);
    refused(clip_grad_norm(&vars, &mut grads, 1.), &["Pass the map that the model was built from"]);
    // All parameters are frozen on purpose, and trained later.
    other.set_requires_grad(false, |_| true).unwrap();
    refused(AdamW::new(other.trainable(), AdamWConfig::default()), &["If all parameters are frozen"]);
    AdamW::new(other.params(), AdamWConfig::default()).unwrap();
}

#[test]
fn a_rank_with_empty_shards_has_an_optimizer() {
    silent(&warnings(3, |world| {
        let vars = vars(world);
        let model = layer(&vars, "a"); // two rows on three ranks
        let mut optim = sgd(&vars.trainable());
        (0..2).for_each(|_| optim.step(&model.backward(&loss(&model)).unwrap()).unwrap());
    }));
}

#[test]
fn gradients_of_another_map_are_errors_on_every_rank() {
    let errors = ranks(3, |world| {
        let maps = [vars(&world), vars(&world)];
        let (model, other) = (layer(&maps[0], "model"), layer(&maps[1], "other"));
        let grads = model.backward(&loss(&model)).unwrap();
        let matrices = other.params().iter().filter(|param| param.shape().rank() == 2).cloned().collect();
        let mut muon = Muon::new(matrices, MuonConfig::default()).unwrap();
        refused(fsdp_candle::ShardedOptimizer::step(&mut muon, &grads), &["another ShardedVarMap"]);
        let mut optim = sgd(&maps[1].trainable());
        optim.step(&grads).unwrap_err().to_string()
    });
    let parts =
        ["the optimizer has `other.bias`, `other.weight`", "are of `model.bias`, `model.weight`", "of the map that"];
    all_refused(errors, &parts);
}

#[test]
fn an_optimizer_of_the_wrong_model_warns() {
    let said = warnings(2, |world| {
        let vars = vars(world);
        let (trained, other) = (layer(&vars, "trained"), layer(&vars, "other"));
        let mut optim = sgd(other.params());
        (0..3).for_each(|_| optim.step(&trained.backward(&loss(&trained)).unwrap()).unwrap());
    });
    warned_once(
        &said,
        &["it has `other.bias`, `other.weight`", "are of `trained.bias`, `trained.weight`, which no optimizer"],
    );
}

#[test]
fn a_step_without_any_gradients_warns() {
    let said = warnings(2, |world| {
        let vars = vars(world);
        let model = layer(&vars, "a");
        model.set_requires_gradient_sync(false, Recurse::Yes);
        let mut optim = sgd(&vars.trainable());
        (0..3).for_each(|_| optim.step(&model.backward(&loss(&model)).unwrap()).unwrap());
    });
    warned_once(&said, &["got no gradients at all", "`a.bias`, `a.weight`", "set_requires_gradient_sync"]);
}

#[test]
fn steps_that_rightly_have_no_gradient_are_silent() {
    silent(&warnings(2, |world| {
        // A critic and its generator, with one loop over both optimizers.
        let vars = vars(world);
        let (critic, generator) = (layer(&vars, "critic"), layer(&vars, "generator"));
        let mut optims = [sgd(critic.params()), sgd(generator.params())];
        for model in [&critic, &critic, &critic, &generator] {
            let grads = model.backward(&loss(model)).unwrap();
            optims.iter_mut().for_each(|optim| optim.step(&grads).unwrap());
        }
        // Frozen for now.
        vars.set_requires_grad(false, |name| name.starts_with("critic")).unwrap();
        optims[0].step(&generator.backward(&loss(&generator)).unwrap()).unwrap();
        vars.set_requires_grad(true, |_| true).unwrap();
        // A hook has taken the gradients.
        let steps = Mutex::new(sgd(&vars.trainable()));
        let step = move |grads: candle_core::backprop::GradStore| Ok(steps.lock().unwrap().step(&grads)?);
        critic.set_post_accumulate_grad_hook(Some(Arc::new(step)));
        optims[0].step(&critic.backward(&loss(&critic)).unwrap()).unwrap();
    }));
}

#[test]
fn an_optimizer_that_never_has_a_gradient_warns() {
    let said = warnings(1, |world| {
        let vars = vars(world);
        let (trained, left_out) = (layer(&vars, "trained"), layer(&vars, "left_out"));
        let mut optims = [sgd(trained.params()), sgd(left_out.params())];
        for _ in 0..101 {
            let grads = trained.backward(&loss(&trained)).unwrap();
            optims.iter_mut().for_each(|optim| optim.step(&grads).unwrap());
        }
    });
    warned_once(&said, &["no gradient of its parameters in 100 steps", "`left_out.bias`, `left_out.weight`"]);
}

/// A layer whose parameters are in a map of its own.
fn own_layer(outputs: usize) -> candle_core::Result<candle_nn::Linear> {
    candle_nn::linear(4, outputs, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device()))
}

#[test]
fn models_that_take_nothing_from_their_builder_are_errors() {
    ranks(2, |world| {
        let vars = vars(&world);
        let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
        let way_out = ["took no parameter from its builder", "instead of a VarMap or Vars"];
        refused(shard(&opts, &[], vb.clone(), |_| own_layer(2)), &[&["unit `(root)`"][..], &way_out].concat());
        let raw = |_| Var::from_tensor(&input(0, &[4, 2]));
        refused(shard(&opts, &[], vb.clone(), raw), &way_out);
        // A unit of `fully_shard` may be a part of a model, so its backward tells.
        let model = fully_shard(&opts, vb.pp("model"), |_| own_layer(2)).unwrap();
        refused(model.backward(&loss(&model)), &[&["unit `model`"][..], &way_out].concat());
        let outer =
            fully_shard(&opts, vb.pp("outer"), |_| Ok(fully_shard(&opts, vb.pp("outer.inner"), |_| own_layer(2))?));
        let outer = outer.unwrap();
        refused(outer.backward(&loss(&outer)), &["unit `outer`"]);
        // A model whose parameters are all ignored took them from the builder.
        let ignoring = FullyShard::new(&vars).ignored_params(|_| true);
        let whole = shard(&ignoring, &[], vb.pp("whole"), |vb| nn::linear(4, 2, vb)).unwrap();
        whole.backward(&loss(&whole)).unwrap();
    });
}

#[test]
fn an_activation_may_be_a_unit() {
    struct Gelu;
    impl Module for Gelu {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            nn::gelu(x)
        }
    }
    silent(&warnings(2, |world| {
        let vars = vars(world);
        let (opts, vb) = (FullyShard::new(&vars), vars.builder(DType::F32));
        let gelu = fully_shard(&opts, vb.clone(), |_| Ok(Gelu)).unwrap();
        let also = fully_shard(&opts, vb.pp("gelu"), |_| Ok(Gelu)).unwrap();
        let model = fully_shard(&opts, vb, |vb| Ok((nn::linear(4, 2, vb)?, gelu, also))).unwrap();
        let mut optim = sgd(&vars.trainable());
        for _ in 0..2 {
            let y = model.call(|(layer, gelu, also)| also.forward(&gelu.forward(&layer.forward(&input(1, &[3, 4]))?)?));
            optim.step(&model.backward(&y.unwrap().sum_all().unwrap()).unwrap()).unwrap();
        }
    }));
}

/// Trains a layer times a scale for some steps.
fn scaled(world: &World, scale: impl Fn(usize) -> Tensor) {
    let vars = vars(world);
    let model = layer(&vars, "a");
    for step in 0..3 {
        let y = model.forward(&input(1, &[3, 4])).unwrap().broadcast_mul(&scale(step)).unwrap();
        model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
    }
}

#[test]
fn a_variable_beside_sharded_parameters_warns() {
    let with_own = |world: &World| {
        let scale = Var::new(&[1f32], &device()).unwrap();
        scaled(world, |_| scale.as_tensor().clone());
    };
    let parts =
        ["a variable of shape [1], F32", "between the 3 ranks", "`vb.get(shape, name)`", "average its gradient"];
    warned_once(&warnings(3, with_own), &parts);
    silent(&warnings(1, with_own));
    // An input whose gradient is wanted.
    silent(&warnings(2, |world| scaled(world, |_| Var::new(&[1f32], &device()).unwrap().as_tensor().clone())));
    // An ignored parameter is whole on purpose.
    silent(&warnings(2, |world| {
        let vars = vars(world);
        let opts = FullyShard::new(&vars).ignored_params(|name| name == "bias");
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| candle_nn::linear(4, 2, vb)).unwrap();
        (0..3).for_each(|_| drop(model.backward(&loss(&model)).unwrap()));
    }));
}

fn unmanaged(world: &World) {
    let vars = vars(world);
    let opts = FullyShard::new(&vars);
    let model = shard(&opts, &["layers.*"], vars.builder(DType::F32), |vb| {
        Ok::<_, candle_core::Error>((candle_nn::linear(4, 4, vb.pp("layers.0"))?, nn::linear(4, 2, vb.pp("head"))?))
    });
    assert_eq!(model.unwrap().unmanaged_parameters().len(), 2);
}

const UNMANAGED: [&str; 3] =
    ["holds 2 parameters", "`layers.0.weight`, `layers.0.bias`", "use fsdp_candle::nn as candle_nn"];

#[test]
fn unmanaged_parameters_warn_once() {
    warned_once(&warnings(2, unmanaged), &UNMANAGED);
}

#[test]
fn warnings_reach_stderr_without_a_subscriber() {
    const CHILD: &str = "FSDP_TEST_WARNS";
    if std::env::var_os(CHILD).is_some() {
        ranks(2, |world| {
            unmanaged(&world);
            let scale = Var::new(&[1f32], &device()).unwrap();
            scaled(&world, |_| scale.as_tensor().clone());
        });
        return;
    }
    let name = std::thread::current().name().unwrap().to_string();
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{stderr}");
    assert_eq!(stderr.matches("warning: ").count(), 2, "{stderr}");
    assert_contains(&stderr, &UNMANAGED);
    assert_contains(&stderr, &["warning: the loss leads to a variable of shape [1], F32"]);
}
