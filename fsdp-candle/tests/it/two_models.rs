//! Two models in one loss, as in a GAN: two outermost units of one map.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::{FsdpModule, FsdpParam, FullyShard, ShardedVarMap, World, fully_shard, nn, no_grad, shard};

use crate::common::{Gradients, alone, assert_close, input, ranks, refused, shard_of_gradient, vars, whole};

type Layer = FsdpModule<nn::Linear>;

fn model(vars: &ShardedVarMap, name: &str, inputs: usize, outputs: usize) -> Layer {
    let vb = vars.builder(DType::F32).pp(name);
    fully_shard(&FullyShard::new(vars), vb, |vb| nn::linear(inputs, outputs, vb)).unwrap()
}

/// The full gradients of the parameters whose names begin with one of `models`. The others have none.
fn gradients(vars: &ShardedVarMap, grads: &GradStore, models: &[&str]) -> Gradients {
    let (found, others): (Vec<_>, Vec<_>) =
        vars.trainable().into_iter().partition(|param| models.iter().any(|model| param.name().starts_with(model)));
    assert!(others.iter().all(|param| grads.get(param.var()).is_none()));
    found.iter().map(|param| (param.name().to_string(), whole(vars, param, shard_of_gradient(param, grads)))).collect()
}

fn mean(critic: &Layer, x: &Tensor) -> Tensor {
    critic.forward(x).unwrap().tanh().unwrap().mean_all().unwrap()
}

/// The gradients of a critic's step and of a generator's step over the same forward of the generator.
fn gan(world: &World) -> [Gradients; 2] {
    let vars = vars(world);
    let (generator, critic) = (model(&vars, "generator", 3, 5), model(&vars, "critic", 5, 1));
    let fake = generator.forward(&input(1, &[4, 3])).unwrap();
    let loss = (mean(&critic, &fake.detach()) - mean(&critic, &input(2, &[4, 5]))).unwrap();
    let of_critic = critic.backward(&loss).unwrap();
    assert_eq!(critic.parameters_without_gradient(), [""; 0]);
    assert_eq!(critic.unused_parameters(), ["generator.weight", "generator.bias"]);
    let of_both = generator.backward(&mean(&critic, &fake).neg().unwrap()).unwrap();
    assert_eq!(generator.unused_parameters(), [""; 0]);
    [gradients(&vars, &of_critic, &["critic"]), gradients(&vars, &of_both, &["generator", "critic"])]
}

#[test]
fn a_critic_and_its_generator_have_the_gradients_of_one_process() {
    let expected = gan(&alone());
    assert_eq!(expected.each_ref().map(Vec::len), [2, 4]);
    for size in [1, 2, 3] {
        for found in ranks(size, |world| gan(&world)) {
            found.iter().zip(&expected).for_each(|(found, expected)| assert_close(found, expected, 1e-6));
        }
    }
}

#[test]
fn a_model_without_gradient_is_reported_if_the_loss_reaches_a_part_of_it() {
    let vars = vars(&alone());
    let vb = vars.builder(DType::F32).pp("critic");
    let critic = fully_shard(&FullyShard::new(&vars), vb, |vb| {
        Ok([nn::linear(5, 1, vb.pp("used"))?, nn::linear(5, 1, vb.pp("cut"))?])
    });
    let (generator, critic) = (model(&vars, "generator", 3, 5), critic.unwrap());
    let fake = no_grad(|| generator.forward(&input(1, &[4, 3]))).unwrap();
    let y = critic.call(|[used, cut]| used.forward(&fake)? + cut.forward(&fake)?.detach()).unwrap();
    critic.backward(&y.mean_all().unwrap()).unwrap();
    assert_eq!(critic.parameters_without_gradient(), ["critic.cut.bias", "critic.cut.weight"]);
}

#[test]
fn a_loss_over_two_maps_is_an_error_that_names_both() {
    ranks(2, |world| {
        let maps = [vars(&world), vars(&world)];
        let (generator, critic) = (model(&maps[0], "generator", 3, 5), model(&maps[1], "critic", 5, 1));
        let loss = || mean(&critic, &generator.forward(&input(1, &[4, 3])).unwrap());
        let way_out = "which is of another ShardedVarMap";
        refused(critic.backward(&loss()), &["the backward of unit `critic` came to unit `generator`", way_out]);
        refused(generator.backward(&loss()), &["the backward of unit `generator` came to unit `critic`", way_out]);
        // Without the model's backward, the advice is another one.
        refused(loss().backward(), &["call `backward(&loss)` of the FsdpModule"]);
        // The next step is correct.
        let fake = no_grad(|| generator.forward(&input(1, &[4, 3]))).unwrap();
        let grads = critic.backward(&mean(&critic, &fake)).unwrap();
        assert_eq!(gradients(&maps[1], &grads, &["critic"]).len(), 2);
    });
}

#[test]
fn ranks_that_call_models_of_two_maps_in_different_orders_get_an_error() {
    ranks(2, |world| {
        let maps = [vars(&world), vars(&world)];
        let models = maps.each_ref().map(|vars| model(vars, "critic", 3, 5));
        let called = &models[world.rank()];
        refused(called.forward(&input(1, &[4, 3])), &["unit `critic`", "ShardedVarMap 1"]);
    });
}

#[test]
fn a_model_lists_the_parameters_of_its_own_units() {
    let vars = vars(&alone());
    let opts = FullyShard::new(&vars);
    let build = |name: &str| {
        let net =
            |vb: VarBuilder| candle_core::Result::Ok([nn::linear(3, 5, vb.pp("a"))?, nn::linear(5, 1, vb.pp("b"))?]);
        shard(&opts, &[&format!("{name}.a")], vars.builder(DType::F32).pp(name), net).unwrap()
    };
    let [_generator, critic] = ["generator", "critic"].map(build);
    let names = |params: &[Arc<FsdpParam>]| -> Vec<_> { params.iter().map(|param| param.name().to_string()).collect() };
    assert_eq!(names(critic.params()), ["critic.b.weight", "critic.b.bias"]);
    let mut all = names(&critic.trainable());
    all.sort();
    assert_eq!(all, ["critic.a.bias", "critic.a.weight", "critic.b.bias", "critic.b.weight"]);
}

#[test]
fn a_map_reports_the_memory_of_its_buffers() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = model(&vars, "model", 64, 64);
        assert_eq!((vars.buffer_memory().now, vars.buffer_memory().most), (0, 0));
        let y = model.forward(&input(1, &[4, 64])).unwrap();
        // The root stays gathered until backward. The bias has 64 elements.
        let whole = (64 * 64 + 64) * 4;
        assert_eq!(vars.buffer_memory().now, whole);
        model.backward(&y.mean_all().unwrap()).unwrap();
        let after = vars.buffer_memory();
        assert_eq!(after.now, 0);
        assert!((2 * whole..=3 * whole).contains(&after.most), "{after:?}");
    });
}
