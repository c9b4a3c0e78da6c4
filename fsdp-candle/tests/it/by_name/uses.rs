//! Uses of parameters: raw parameters, errors, evaluation, and both kinds of units in one model.

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::activation_checkpoint::checkpoint;
use fsdp_candle::{FullyShard, ReshardAfterForward, fully_shard, nn, no_grad, shard};

use super::EACH_LAYER;
use super::model::{
    Kind, LAYERS, Layer, Mlp, Model, by_name, gradients_of, ids, loss_of, untouched, vars_of, watched, wrapped,
};
use crate::common::{assert_resharded, gradients, mean_square, on_cuda, ranks, refused, sorted};

#[test]
fn unmanaged_parameters_stay_in_the_parent_unit() {
    ranks(2, |world| {
        let kind = Kind { scale: true, ..Kind::default() };
        let vars = vars_of(&world, kind);
        let model = wrapped(&FullyShard::new(&vars), &vars, kind);
        let want = gradients_of(&vars, &model, &ids(world.rank(), 0));
        assert!(model.unmanaged_parameters().is_empty());

        let vars = vars_of(&world, kind);
        let model = by_name(&FullyShard::new(&vars), &vars, kind, EACH_LAYER);
        let raw: Vec<&str> = model.unmanaged_parameters().iter().map(|param| param.name()).collect();
        let scales: Vec<String> = (0..LAYERS).map(|i| format!("model.layers.{i}.scale")).collect();
        assert_eq!(raw, scales);
        let root: Vec<&str> = model.params().iter().map(|param| param.name()).collect();
        assert!(root.contains(&"model.layers.0.scale") && !root.contains(&"model.layers.0.q.weight"), "{root:?}");
        for _ in 0..2 {
            assert_eq!(gradients_of(&vars, &model, &ids(world.rank(), 0)), want);
            assert_resharded(&vars);
        }
    });
}

#[test]
fn candles_layers_are_unmanaged() {
    ranks(2, |world| {
        let vars = vars_of(&world, Kind::default());
        let opts = FullyShard::new(&vars);
        let model =
            shard(&opts, &["layer"], vars.builder(DType::F32), |vb| candle_nn::linear(6, 6, vb.pp("layer"))).unwrap();
        assert_eq!(model.unmanaged_parameters().len(), 2);
        assert_eq!(model.units().len(), 1);
        // A dtype without a kernel runs Candle's operations: F64 has none on the host, and has one on CUDA.
        let opts = FullyShard::new(&vars);
        let model = shard(&opts, &["wide"], vars.builder(DType::F64), |vb| nn::linear(6, 6, vb.pp("wide"))).unwrap();
        assert_eq!(model.unmanaged_parameters().len(), if on_cuda() { 0 } else { 2 });
        let x = Tensor::ones((2, 6), DType::F64, world.device()).unwrap();
        model.backward(&model.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap()).unwrap();
    });
}

#[test]
fn refuses_unmatched_patterns() {
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let build = |names: &[&str]| {
            let opts = FullyShard::new(&vars);
            shard(&opts, names, vars.builder(DType::F32), |vb| untouched(kind, vb))
        };
        let unmatched = ["`model.blocks.*` matches no module's name", "`model.layers.*`"];
        refused(build(&["model.layers.*", "model.blocks.*"]), &unmatched);
        refused(build(&["model.["]), &["is not a valid pattern"]);
        assert!(vars.params().is_empty());
        by_name(&FullyShard::new(&vars), &vars, kind, EACH_LAYER);
    });
}

#[test]
fn refuses_uses_outside_forward() {
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let model = by_name(&FullyShard::new(&vars), &vars, kind, EACH_LAYER);
        let x = Tensor::ones((1, 2, 6), DType::F32, world.device()).unwrap();
        refused(
            model.inner().layers[1].forward(&x),
            &["unit `model.layers.1` is gathered inside a forward of the model alone", "call_mut"],
        );
    });
}

#[test]
fn recovers_from_failed_and_unused_forwards() {
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let model = by_name(&FullyShard::new(&vars), &vars, kind, EACH_LAYER);
        let batch = ids(world.rank(), 0);
        let grads = || gradients_of(&vars, &model, &batch);
        let want = grads();
        let x = Tensor::ones((1, 2, 6), DType::F32, world.device()).unwrap();
        let failed = model.call(|m| {
            m.layers[0].forward(&x)?;
            m.layers[1].forward(&x)?;
            candle_core::bail!("on purpose") as Result<Tensor>
        });
        refused(failed, &["on purpose"]);
        assert_resharded(&vars);
        assert_eq!(grads(), want);
        // Dropped with `reshard`, and dropped by the next forward.
        loss_of(&model, &batch);
        model.reset_iter_state();
        assert_resharded(&vars);
        loss_of(&model, &batch);
        assert_eq!(grads(), want);
        // Layers in a different order than before.
        let turned = model.call(|m| [3, 1, 0, 2].iter().try_fold(x.clone(), |x, &i| m.layers[i].forward(&x))).unwrap();
        model.backward(&turned.sqr().unwrap().sum_all().unwrap()).unwrap();
        assert_resharded(&vars);
        // A layer that is used twice.
        let twice = model.call(|m| [0, 1, 0].iter().try_fold(x.clone(), |x, &i| m.layers[i].forward(&x))).unwrap();
        model.backward(&twice.sqr().unwrap().sum_all().unwrap()).unwrap();
        assert_resharded(&vars);
        assert_eq!(grads(), want);
    });
}

#[test]
fn frees_units_after_use_without_a_graph() {
    for policy in [ReshardAfterForward::Default, ReshardAfterForward::Never] {
        ranks(2, |world| {
            let kind = Kind { scale: true, ..Kind::default() };
            let vars = vars_of(&world, kind);
            let opts = FullyShard::new(&vars).reshard_after_forward(policy);
            let model = by_name(&opts, &vars, kind, EACH_LAYER);
            let batch = ids(world.rank(), 0);
            let grads = gradients_of(&vars, &model, &batch);
            let (without, _, most) = watched(&vars, || no_grad(|| model.forward(&batch)).unwrap());
            assert!(!without.track_op());
            assert_resharded(&vars);
            let elements = |params: &[std::sync::Arc<fsdp_candle::FsdpParam>]| -> usize {
                params.iter().map(|param| param.shape().elem_count()).sum()
            };
            let units = model.units();
            let largest = units[..LAYERS].iter().map(|unit| elements(unit.params())).max().unwrap();
            assert!(most <= elements(model.params()) + 2 * largest, "{most} elements were gathered");
            // Between a forward and its backward.
            let with = loss_of(&model, &batch);
            let other = no_grad(|| loss_of(&model, &ids(world.rank(), 1)));
            assert!(other.to_scalar::<f32>().unwrap() > 0.);
            assert_eq!(sorted(gradients(&vars, &model.backward(&with).unwrap())), grads);
            // An inner unit called without a graph, within a forward with one.
            assert!(model.parameters_without_gradient().is_empty());
        });
    }
}

#[test]
fn wrapped_units_under_no_grad() {
    ranks(2, |world| {
        let kind = Kind { lora: true, ..Kind::default() };
        let vars = vars_of(&world, kind);
        let model = wrapped(&FullyShard::new(&vars), &vars, kind);
        let batch = ids(world.rank(), 0);
        let want = loss_of(&model, &batch);
        let grads = sorted(gradients(&vars, &model.backward(&want).unwrap()));
        let without = no_grad(|| loss_of(&model, &batch));
        assert_eq!(without.to_scalar::<f32>().unwrap(), want.to_scalar::<f32>().unwrap());
        assert!(!without.track_op());
        assert_resharded(&vars);
        assert_eq!(gradients_of(&vars, &model, &batch), grads);
    });
}

#[test]
fn named_and_wrapped_units_nest() {
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let model = wrapped(&FullyShard::new(&vars), &vars, kind);
        let batch = ids(world.rank(), 0);
        let want = gradients_of(&vars, &model, &batch);

        // Wrapped MLPs in layers by name.
        let vars = vars_of(&world, kind);
        let opts = FullyShard::new(&vars);
        let called = opts.clone();
        let vb = vars.builder(DType::F32);
        let mlps: Vec<_> = (0..LAYERS)
            .map(|i| fully_shard(&called, vb.pp(format!("model.layers.{i}.mlp")), |vb| Mlp::new(kind, vb)).unwrap())
            .collect();
        let model = shard(&opts, EACH_LAYER, vb, |vb| {
            let layers = mlps.into_iter().enumerate();
            let layers = layers.map(|(i, mlp)| Layer::new(kind, |_| Ok(mlp), vb.pp(format!("model.layers.{i}"))));
            Model::new(kind, layers.collect::<Result<Vec<_>>>()?, vb.clone())
        })
        .unwrap();
        assert_eq!(model.units().len(), 2 * LAYERS + 1);
        for _ in 0..3 {
            assert_eq!(gradients_of(&vars, &model, &batch), want);
            assert_resharded(&vars);
        }

        // Wrapped layers with MLPs by name in them.
        let vars = vars_of(&world, kind);
        let opts = FullyShard::new(&vars);
        let vb = vars.builder(DType::F32);
        let layers: Vec<_> = (0..LAYERS)
            .map(|i| {
                let vb = vb.pp(format!("model.layers.{i}"));
                shard(&opts, &[&format!("model.layers.{i}.mlp")], vb, |vb| {
                    Layer::new(kind, |vb| Mlp::new(kind, vb), vb)
                })
                .unwrap()
            })
            .collect();
        let model = fully_shard(&opts, vb, |vb| Model::new(kind, layers, vb)).unwrap();
        for _ in 0..3 {
            assert_eq!(gradients_of(&vars, &model, &batch), want);
            assert_resharded(&vars);
        }
    });
}

#[test]
fn one_checkpoint_around_several_units() {
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let build = |vb| untouched(kind, vb).map(std::sync::Arc::new);
        let opts = FullyShard::new(&vars);
        let model = shard(&opts, EACH_LAYER, vars.builder(DType::F32), build).unwrap();
        let batch = ids(world.rank(), 0);
        let grads = |again: bool| {
            let logits = model.call(|m| {
                let m = m.clone();
                match again {
                    true => checkpoint(move |ids: Tensor| m.forward(&ids), batch.clone()),
                    false => m.forward(&batch),
                }
            });
            let loss = nn::cross_entropy(&logits.unwrap(), &batch).unwrap();
            let grads = gradients(&vars, &model.backward(&loss).unwrap());
            assert_resharded(&vars);
            grads
        };
        assert_eq!(grads(true), grads(false));
    });
}

#[test]
fn call_mut_changes_the_model() {
    struct Counts(super::model::Untouched, usize);
    ranks(2, |world| {
        let kind = Kind::default();
        let vars = vars_of(&world, kind);
        let opts = FullyShard::new(&vars);
        let mut model = shard(&opts, EACH_LAYER, vars.builder(DType::F32), |vb| {
            Ok::<_, candle_core::Error>(Counts(untouched(kind, vb)?, 0))
        })
        .unwrap();
        for calls in 1..3 {
            let logits = model.call_mut(|m| {
                m.1 += 1;
                m.0.forward(&ids(world.rank(), 0))
            });
            assert_eq!(model.inner().1, calls);
            model.backward(&mean_square(&logits.unwrap())).unwrap();
        }
        model.inner_mut().1 = 0;
        no_grad(|| model.call_mut(|m| m.0.forward(&ids(world.rank(), 0)))).unwrap();
        assert_resharded(&vars);
    });
}
