//! Units by name: a model without FSDP code does the same as one with wrapped layers.

mod experts;
mod model;
mod plain;
mod uses;

use candle_core::{DType, Module};
use fsdp_candle::{
    AdamW, AdamWConfig, FsdpModule, FullyShard, MixedPrecisionPolicy, Recurse, ReshardAfterForward, ShardedVarMap,
    World,
};

use crate::common::{Gradients, assert_resharded, gradients, ranks, rounding, sorted, weights};
use model::{Kind, LAYERS, by_name, ids, loss_of, vars_of, watched, wrapped};

const STEPS: usize = 3;
const EACH_LAYER: &[&str] = &["model.layers.*"];

/// The results of a run: losses and weights as bits, collectives, and the largest number of gathered elements.
type Run = (Vec<u32>, Gradients, Vec<String>, usize);

fn train<M: Module>(world: &World, vars: &ShardedVarMap, model: &FsdpModule<M>) -> Run {
    let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
    let (losses, collectives, most) = watched(vars, || {
        let step = |step| {
            let loss = loss_of(model, &ids(world.rank(), step));
            let grads = model.backward(&loss).unwrap();
            optim.step(&grads).unwrap();
            loss.to_scalar::<f32>().unwrap().to_bits()
        };
        (0..STEPS).map(step).collect()
    });
    assert!(model.parameters_without_gradient().is_empty(), "{:?}", model.parameters_without_gradient());
    (losses, sorted(weights(vars)), collectives, most)
}

fn opts(vars: &ShardedVarMap, dtype: DType, policy: ReshardAfterForward) -> FullyShard {
    let mp_policy = MixedPrecisionPolicy {
        param_dtype: Some(dtype),
        reduce_dtype: Some(DType::F32),
        ..MixedPrecisionPolicy::default()
    };
    FullyShard::new(vars).mp_policy(mp_policy).reshard_after_forward(policy)
}

/// Trains the model with wrapped layers and with units by name.
fn both(world: &World, kind: Kind, dtype: DType, policy: ReshardAfterForward) -> [Run; 2] {
    let vars = vars_of(world, kind);
    let model = wrapped(&opts(&vars, dtype, policy), &vars, kind);
    let wrapped = train(world, &vars, &model);
    let vars = vars_of(world, kind);
    let model = by_name(&opts(&vars, dtype, policy), &vars, kind, EACH_LAYER);
    let names: Vec<String> = model.units().iter().map(|unit| unit.name().to_string()).collect();
    assert_eq!(names.len(), LAYERS + 1, "{names:?}");
    [wrapped, train(world, &vars, &model)]
}

fn assert_same([wrapped, by_name]: &[Run; 2], what: &str) {
    assert_eq!(wrapped.0, by_name.0, "losses, {what}");
    assert_eq!(wrapped.1, by_name.1, "weights, {what}");
    assert_eq!(wrapped.2, by_name.2, "collectives, {what}");
    assert_eq!(wrapped.3, by_name.3, "gathered elements, {what}");
}

#[test]
fn named_units_match_wrapped_units() {
    use ReshardAfterForward::{Always, Default, Never, To};
    for size in [1, 2, 3, 4] {
        for dtype in [DType::F32, DType::BF16] {
            for policy in [Default, Always, Never, To(2)] {
                if policy == To(2) && size < 4 {
                    continue;
                }
                ranks(size, |world| {
                    let runs = both(&world, Kind::default(), dtype, policy);
                    assert_same(&runs, &format!("{size} ranks, {dtype:?}, {policy:?}"));
                    assert!(runs[0].3 > 0);
                });
            }
        }
    }
}

#[test]
fn tied_checkpointed_and_adapted_models_match_wrapped_ones() {
    for (tied, again, lora) in
        [(true, false, false), (false, true, false), (true, true, false), (false, false, true), (false, true, true)]
    {
        ranks(2, |world| {
            let kind = Kind { tied, again, lora, ..Kind::default() };
            assert_same(&both(&world, kind, DType::F32, ReshardAfterForward::Default), &format!("{kind:?}"));
        });
    }
}

#[test]
fn nested_and_partial_patterns() {
    for names in
        [&["model.layers.*", "model.layers.*.mlp"][..], &["model.layers.[13]"], &["**.mlp"], &["model", "head"]]
    {
        ranks(3, |world| {
            let kind = Kind::default();
            let vars = vars_of(&world, kind);
            let model = wrapped(&FullyShard::new(&vars), &vars, kind);
            let want = train(&world, &vars, &model);
            let vars = vars_of(&world, kind);
            let model = by_name(&FullyShard::new(&vars), &vars, kind, names);
            let got = train(&world, &vars, &model);
            for (got, want) in got.0.iter().zip(&want.0) {
                let (got, want) = (f32::from_bits(*got), f32::from_bits(*want));
                let allowed = 10. * rounding(DType::F32) * want;
                assert!((got - want).abs() <= allowed, "{names:?}: {got} instead of {want}");
            }
            assert_resharded(&vars);
        });
    }
}

#[test]
fn named_units_accumulate_gradients() {
    ranks(2, |world| {
        let grads_of = |named: bool| {
            let kind = Kind::default();
            let vars = vars_of(&world, kind);
            let opts = FullyShard::new(&vars);
            fn steps<M: Module>(world: &World, vars: &ShardedVarMap, model: &FsdpModule<M>) -> Vec<Gradients> {
                let mut out = vec![];
                for last in [false, true] {
                    model.set_requires_gradient_sync(last, Recurse::Yes);
                    let grads = model.backward(&loss_of(model, &ids(world.rank(), usize::from(last)))).unwrap();
                    if last {
                        out.push(sorted(gradients(vars, &grads)));
                    }
                }
                for last in [false, true] {
                    model.set_is_last_backward(last);
                    let losses = [0, 1].map(|step| loss_of(model, &ids(world.rank(), step)));
                    for grads in losses.map(|loss| model.backward(&loss).unwrap()) {
                        assert!(last || vars.trainable().iter().all(|param| grads.get(param.var()).is_none()));
                        if last {
                            out.push(sorted(gradients(vars, &grads)));
                        }
                    }
                }
                out
            }
            match named {
                true => steps(&world, &vars, &by_name(&opts, &vars, kind, EACH_LAYER)),
                false => steps(&world, &vars, &wrapped(&opts, &vars, kind)),
            }
        };
        assert_eq!(grads_of(true), grads_of(false));
    });
}
