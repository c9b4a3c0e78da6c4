//! The order of collectives, and custom collectives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{FullyShard, MixedPrecisionPolicy, Recurse, ReshardAfterForward, fully_shard, nn};
use fsdp_core::{Buffer, Work};

use crate::common::{
    Own, Parts, WIDTH, assert_close, assert_contains, batch, built, changed, gradients, gradients_of, journal, loss_of,
    mean_square, ranks, reference, refused, sharded, times, vars, vars_on,
};

#[test]
fn prefetch_lists_keep_gradients() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        model.set_implicit_prefetch(false);
        for ahead in 0..3 {
            let blocks = &model.inner().blocks;
            for (i, block) in blocks.iter().enumerate() {
                let next: Vec<_> = blocks.iter().skip(i + 1).take(ahead).map(|block| block.unit()).collect();
                let before: Vec<_> = blocks[..i].iter().rev().take(ahead).map(|block| block.unit()).collect();
                block.set_modules_to_forward_prefetch(&next).unwrap();
                block.set_modules_to_backward_prefetch(&before).unwrap();
            }
            assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &want, 0.);
        }
    });
}

#[test]
fn manual_unshard() {
    ranks(2, |world| {
        let (_vars, model) = built(&world, WIDTH);
        let block = &model.inner().blocks[0];
        let x = batch(0, WIDTH);
        assert!(block.inner().forward(&x).is_err());
        block.unshard_async().unwrap().wait().unwrap();
        assert!(block.params().iter().all(|param| param.is_unsharded()));
        let past_the_hooks = block.inner().forward(&x).unwrap();
        block.reshard().unwrap();
        assert!(block.params().iter().all(|param| !param.is_unsharded()));
        assert_eq!(past_the_hooks.to_vec2::<f32>().unwrap(), block.forward(&x).unwrap().to_vec2::<f32>().unwrap());
    });
}

/// Counts the calls and passes them on, or fails on request.
#[derive(Default)]
struct Watch {
    gathers: AtomicUsize,
    scatters: AtomicUsize,
    fail: AtomicUsize,
}

impl Watch {
    fn failure(&self) -> Option<Work> {
        let injected = || fsdp_core::Error::Argument { rank: 0, message: "injected".into() };
        (self.fail.load(Ordering::Relaxed) > 0).then(|| Work::ready(Err(injected())))
    }

    fn collective(self: &Arc<Self>) -> Arc<Own<impl Fn(Parts<'_>) -> Option<Work> + use<>>> {
        let watch = self.clone();
        Own::new(move |parts: Parts<'_>| {
            let count = if matches!(parts, Parts::Gather { .. }) { &watch.gathers } else { &watch.scatters };
            count.fetch_add(1, Ordering::Relaxed);
            watch.failure()
        })
    }
}

#[test]
fn custom_collectives_fail_and_recover() {
    ranks(2, |world| {
        let want = reference(&world);
        for (reshard, gathers) in [(ReshardAfterForward::Always, 2), (ReshardAfterForward::Never, 1)] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, WIDTH);
            let watch = Arc::new(Watch::default());
            for block in &model.inner().blocks {
                block.set_custom_all_gather(Some(watch.collective()));
                block.set_custom_reduce_scatter(Some(watch.collective()));
            }
            let blocks = model.inner().blocks.len();
            let x = batch(world.rank(), WIDTH);
            for step in 1..=3 {
                assert_close(&gradients_of(&vars, &model, &x), &want, 0.);
                assert_eq!(watch.gathers.load(Ordering::Relaxed), step * blocks * gathers);
                assert_eq!(watch.scatters.load(Ordering::Relaxed), step * blocks);
            }
            // A collective that fails in forward, and one that fails in backward.
            watch.fail.store(1, Ordering::Relaxed);
            refused(model.forward(&x), &["all-gather"]);
            watch.fail.store(0, Ordering::Relaxed);
            let loss = loss_of(&model, &x);
            watch.fail.store(1, Ordering::Relaxed);
            assert!(model.backward(&loss).is_err());
            watch.fail.store(0, Ordering::Relaxed);
            model.reset_iter_state();
            assert_close(&gradients_of(&vars, &model, &x), &want, 0.);
        }
    });
}

#[test]
fn hooks_and_factors_change_the_reduction() {
    ranks(2, |world| {
        let want = reference(&world);
        let halves = times(&want, 0.5);
        let (vars, model) = built(&world, WIDTH);
        let backward = || gradients_of(&vars, &model, &batch(world.rank(), WIDTH));
        model.set_force_sum_reduction_for_comms(true, Recurse::Yes);
        assert_close(&backward(), &want, 1e-6);
        model.set_gradient_divide_factor(Some(4.), Recurse::Yes);
        assert_close(&backward(), &halves, 1e-6);
        model.set_gradient_divide_factor(None, Recurse::Yes);
        model.set_force_sum_reduction_for_comms(false, Recurse::Yes);
        let halve = |shards: Vec<Buffer>| {
            let half = |shard: Buffer| changed(shard, |values| values.iter_mut().for_each(|v| *v /= 2.));
            Ok(shards.into_iter().map(half).collect())
        };
        for unit in &model.inner().blocks {
            unit.set_all_reduce_hook(Some(Arc::new(halve)));
        }
        model.set_all_reduce_hook(Some(Arc::new(halve)));
        assert_close(&backward(), &halves, 0.);
    });
}

#[test]
fn f16_averages_do_not_overflow() {
    const GRADIENT: f64 = 30000.;
    for mesh in [vec![("shard", 4)], vec![("replicate", 2), ("shard", 2)]] {
        ranks(4, |world| {
            let vars = vars_on(&world, &mesh);
            let policy = MixedPrecisionPolicy { reduce_dtype: Some(DType::F16), ..Default::default() };
            // Gradients are reduced in F16, whatever the parameter's dtype.
            for (name, dtype) in [("half", DType::F16), ("single", DType::F32)] {
                let opts = FullyShard::new(&vars).mp_policy(policy.clone());
                let unit = fully_shard(&opts, vars.builder(dtype), |vb| vb.get((8, 3), name)).unwrap();
                let reduced = |factor: Option<f64>, force: bool| {
                    unit.set_gradient_divide_factor(factor, Recurse::Yes);
                    unit.set_force_sum_reduction_for_comms(force, Recurse::Yes);
                    let loss = unit.call(|weight| (weight * GRADIENT)?.sum_all()).unwrap();
                    let grads = unit.backward(&loss).unwrap();
                    let grad = grads.get(unit.params()[0].var()).unwrap().to_dtype(DType::F64).unwrap();
                    grad.flatten_all().unwrap().to_vec1::<f64>().unwrap()
                };
                for (factor, force, want) in [
                    (None, false, 30000.),
                    (None, true, 30000.),
                    (Some(4.), false, 30000.),
                    (Some(8.), false, 15000.),
                    (Some(6.), true, 20000.),
                    (Some(3.), false, 40000.),
                ] {
                    let got = reduced(factor, force);
                    assert!(got.iter().all(|v| *v == want), "{name} {mesh:?} {factor:?} {force}: {got:?}");
                }
            }
        });
    }
}

#[test]
fn an_unused_parameter_does_not_delay_others() {
    struct Half(nn::Linear, #[allow(dead_code)] nn::Linear);
    impl Module for Half {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            self.0.forward(x)
        }
    }
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let vb = vars.builder(DType::F32);
        let watch = Arc::new(Watch::default());
        let blocks: Vec<_> = (0..3)
            .map(|i| {
                let build = |vb: candle_nn::VarBuilder<'static>| {
                    Ok(Half(nn::linear(WIDTH, WIDTH, vb.pp("used"))?, nn::linear(WIDTH, WIDTH, vb.pp("unused"))?))
                };
                let block = fully_shard(&opts, vb.pp(format!("blocks.{i}")), build).unwrap();
                block.set_custom_reduce_scatter(Some(watch.collective()));
                block
            })
            .collect();
        let model = fully_shard(&opts, vb, |_| Ok(blocks)).unwrap();
        let y = model.call(|blocks| blocks.iter().try_fold(batch(world.rank(), WIDTH), |x, b| b.forward(&x))).unwrap();
        let grads = model.backward(&mean_square(&y)).unwrap();
        assert_eq!(watch.scatters.load(Ordering::Relaxed), 3);
        assert_eq!(model.parameters_without_gradient().len(), 6);
        for param in vars.trainable() {
            assert_eq!(grads.get(param.var()).is_some(), param.name().contains(".used."), "{}", param.name());
        }
    });
}

#[test]
fn backward_frees_frozen_parameters() {
    ranks(2, |world| {
        let vars = vars(&world);
        vars.freeze(|name| !name.contains("blocks.0")).unwrap();
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let x = batch(world.rank(), WIDTH);
        let later = model.inner().blocks[2].params().to_vec();
        let watch: Arc<std::sync::Mutex<Vec<bool>>> = Arc::default();
        let seen = watch.clone();
        let look = move |_: Parts<'_>| {
            seen.lock().unwrap().extend(later.iter().map(|param| param.is_unsharded()));
            None
        };
        model.inner().blocks[0].set_custom_reduce_scatter(Some(Own::new(look)));
        let grads = model.backward(&loss_of(&model, &x)).unwrap();
        assert_eq!(gradients(&vars, &grads).len(), model.inner().blocks[0].params().len());
        let seen = watch.lock().unwrap();
        assert!(
            !seen.is_empty() && seen.iter().all(|unsharded| !unsharded),
            "frozen parameters stayed gathered: {seen:?}"
        );
    });
}

#[test]
fn printed_models_show_units_and_placements() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() };
        let model = sharded(&FullyShard::new(&vars).mp_policy(policy), &vars, WIDTH);
        let lines = [
            "(root) [Default, sharded]: this rank holds ",
            "\n  blocks.1 [Default, sharded]",
            "\n    . blocks.2.up.weight [18, 6] F32 (S(0)) 216 B of 432 B, computes in BF16",
        ];
        assert_contains(&model.to_string(), &lines);
        assert!(vars.to_string().starts_with(&format!("mesh (dp_shard: 2) rank {}", world.rank())));
        assert_eq!(model.inner().blocks[0].to_string().lines().count(), 6);
    });
}

#[test]
fn collectives_overlap_compute_and_free_parameters() {
    ranks(2, |world| {
        let (_vars, model) = built(&world, WIDTH);
        let entries: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
        for block in &model.inner().blocks {
            let name = block.name().trim_start_matches("blocks.");
            block.set_custom_all_gather(Some(journal(format!("gather {name}"), &entries)));
            block.set_custom_reduce_scatter(Some(journal(format!("reduce {name}"), &entries)));
        }
        let unsharded = || -> Vec<bool> {
            let blocks = model.inner().blocks.iter();
            blocks.map(|b| b.params()[0].is_unsharded()).chain([model.params()[0].is_unsharded()]).collect()
        };
        let x = batch(world.rank(), WIDTH);
        for step in 0..2 {
            entries.lock().unwrap().clear();
            assert_eq!(unsharded(), [false; 4]);
            let loss = loss_of(&model, &x);
            // After forward only the root is unsharded.
            assert_eq!(unsharded(), [false, false, false, true]);
            let _grads = model.backward(&loss).unwrap();
            // The next block's all-gather is issued before this block computes, and the reduction of this block's
            // gradients after that.
            let forward = ["gather 0", "gather 1", "gather 2"];
            let backward = ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"];
            assert_eq!(*entries.lock().unwrap(), [&forward[..], &backward[..]].concat(), "step {step}");
        }
        assert_eq!(unsharded(), [false; 4]);
    });
}
