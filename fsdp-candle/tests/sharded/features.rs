//! Every way to shard, accumulate and reduce gives the gradients of the plainest one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{
    AdamW, AdamWConfig, AllGather, AllGatherExtension, ClipOptions, FullyShard, GradScaler, Int8Blocks,
    MixedPrecisionPolicy, NormType, ReduceScatter, ReshardAfterForward, ShardMesh, ShardPlacement, ShardedVarMap,
    World, clip_grad_norm_with, fully_shard, nn,
};
use fsdp_core::{Allocator, Buffer, GatherPart, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::common::{Block, assert_close, batch, gradients, loss_of, ranks, sharded, vars, whole};

const WIDTH: usize = 6;

type Gradients = Vec<(String, Vec<f32>)>;

/// One backward with default options: what every other way is held against.
fn reference(world: &World) -> Gradients {
    let vars = vars(world);
    let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
    let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
    gradients(&vars, &grads)
}

fn with_options(world: &World, mesh: &[(&str, usize)], opts: impl Fn(FullyShard) -> FullyShard, tolerance: f32) {
    let want = reference(world);
    let vars = ShardedVarMap::new(&world.mesh(mesh).unwrap(), world.device());
    let model = sharded(&opts(FullyShard::new(&vars)), &vars, WIDTH);
    for _ in 0..2 {
        let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert_close(&gradients(&vars, &grads), &want, tolerance);
    }
}

#[test]
fn hsdp() {
    ranks(4, |world| {
        with_options(&world, &[("replicate", 2), ("shard", 2)], |opts| opts, 1e-5);
        with_options(&world, &[("replicate", 4), ("shard", 1)], |opts| opts, 1e-5);
        with_options(&world, &[("replicate", 1), ("shard", 4)], |opts| opts, 1e-5);
    });
}

#[test]
fn resharding_to_fewer_ranks() {
    ranks(4, |world| {
        with_options(&world, &[("shard", 4)], |opts| opts.reshard_after_forward(ReshardAfterForward::To(2)), 1e-6);
        let vars = vars(&world);
        for bad in [1, 3, 4] {
            let opts = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::To(bad));
            let error =
                fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 4, vb)).err().unwrap().to_string();
            assert!(
                error.contains(&format!("reshard_after_forward = {bad}")) && error.contains("4 shard ranks"),
                "{error}"
            );
        }
    });
}

#[test]
fn sharding_another_dimension() {
    for size in [2, 3] {
        ranks(size, |world| {
            let second = |_: &str, shape: &[usize]| (shape.len() == 2).then(|| 1.into());
            with_options(&world, &[("shard", size)], move |opts| opts.shard_placement_fn(second), 1e-6);
        });
    }
    ranks(4, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).shard_placement_fn(|_, shape| (shape.len() == 2).then(|| 1.into()));
        let error = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(6, 4, vb)).err().unwrap().to_string();
        assert!(error.contains("`weight`") && error.contains("[4, 6]") && error.contains("4 ranks"), "{error}");
    });
}

#[test]
fn accumulation_without_communication() {
    for (size, mesh) in [(2, vec![("shard", 2)]), (4, vec![("replicate", 2), ("shard", 2)])] {
        ranks(size, |world| {
            let run = |sync: bool, all_reduce: bool| {
                let vars = ShardedVarMap::new(&world.mesh(&mesh).unwrap(), world.device());
                let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
                model.set_requires_gradient_sync(sync, true);
                model.set_requires_all_reduce(all_reduce, true);
                let first = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
                model.set_requires_gradient_sync(true, true);
                model.set_requires_all_reduce(true, true);
                let delivered = vars.trainable().iter().filter(|param| first.get(param.var()).is_some()).count();
                let waits = !sync || (!all_reduce && mesh.len() == 2);
                assert_eq!(delivered, if waits { 0 } else { vars.trainable().len() });
                let mut second = model.backward(&loss_of(&model, &batch(world.rank() + 7, WIDTH))).unwrap();
                assert!(model.parameters_without_gradient().is_empty());
                if !waits {
                    second.extend(first).unwrap();
                }
                gradients(&vars, &second)
            };
            let want = run(true, true);
            assert_close(&run(false, true), &want, 1e-5);
            assert_close(&run(true, false), &want, 1e-5);
        });
    }
}

#[test]
fn finalization_apart_from_backward() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        model.set_manual_backward_finalization(true);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert!(vars.trainable().iter().all(|param| grads.get(param.var()).is_none()));
        model.finalize_backward(&mut grads).unwrap();
        assert_close(&gradients(&vars, &grads), &want, 0.);

        // Of two backwards the last hands out the sum.
        model.set_manual_backward_finalization(false);
        model.set_is_last_backward(false);
        let first = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert!(vars.trainable().iter().all(|param| first.get(param.var()).is_none()));
        model.set_is_last_backward(true);
        let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let twice: Gradients =
            want.iter().map(|(name, v)| (name.clone(), v.iter().map(|v| 2. * v).collect())).collect();
        assert_close(&gradients(&vars, &grads), &twice, 1e-6);
    });
}

#[test]
fn several_forwards_before_one_backward() {
    ranks(2, |world| {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, WIDTH);
            let (a, b) = (batch(world.rank(), WIDTH), batch(world.rank() + 7, WIDTH));
            let mut apart = model.backward(&loss_of(&model, &a)).unwrap();
            apart.extend(model.backward(&loss_of(&model, &b)).unwrap()).unwrap();
            let want = gradients(&vars, &apart);
            let (first, second) = (loss_of(&model, &a), loss_of(&model, &b));
            let together = model.backward(&(first + second).unwrap()).unwrap();
            assert_close(&gradients(&vars, &together), &want, 1e-5);
        }
    });
}

#[test]
fn a_validation_forward_before_the_step_leaves_nothing_stale() {
    ranks(2, |world| {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, WIDTH);
            let x = batch(world.rank(), WIDTH);
            let before = loss_of(&model, &x).to_scalar::<f32>().unwrap();
            for param in vars.params() {
                param.var().set(&(param.var().as_tensor() * 0.5).unwrap()).unwrap();
            }
            let after = loss_of(&model, &x).to_scalar::<f32>().unwrap();
            model.reset_iter_state();
            let fresh = loss_of(&model, &x).to_scalar::<f32>().unwrap();
            assert_eq!(after, fresh);
            assert_ne!(before, after);
        }
    });
}

#[test]
fn a_refused_backward_leaves_no_gradients() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        assert!(loss_of(&model, &batch(world.rank(), WIDTH)).backward().is_err());
        let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert_close(&gradients(&vars, &grads), &want, 0.);
    });
}

#[test]
fn prefetch_lists_and_none_at_all() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        model.set_implicit_prefetch(false);
        for ahead in 0..3 {
            let blocks = &model.inner().blocks;
            for (i, block) in blocks.iter().enumerate() {
                let next: Vec<_> = blocks.iter().skip(i + 1).take(ahead).map(|block| block.unit()).collect();
                let before: Vec<_> = blocks[..i].iter().rev().take(ahead).map(|block| block.unit()).collect();
                block.set_modules_to_forward_prefetch(&next);
                block.set_modules_to_backward_prefetch(&before);
            }
            let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 0.);
        }
    });
}

#[test]
fn unsharding_by_hand() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
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

/// Counts, and passes on; or fails when told to.
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
}

impl AllGather for Watch {
    fn all_gather(&self, ranks: &Arc<dyn ProcessGroup>, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        self.gathers.fetch_add(1, Ordering::Relaxed);
        self.failure().unwrap_or_else(|| ranks.all_gather(parts, memory))
    }
}

impl ReduceScatter for Watch {
    fn reduce_scatter(
        &self,
        ranks: &Arc<dyn ProcessGroup>,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        self.scatters.fetch_add(1, Ordering::Relaxed);
        self.failure().unwrap_or_else(|| ranks.reduce_scatter(parts, op, memory))
    }
}

#[test]
fn collectives_are_counted_and_survive_a_failure() {
    ranks(2, |world| {
        let want = reference(&world);
        for (reshard, gathers) in [(ReshardAfterForward::Always, 2), (ReshardAfterForward::Never, 1)] {
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(reshard), &vars, WIDTH);
            let watch = Arc::new(Watch::default());
            for block in &model.inner().blocks {
                block.set_custom_all_gather(Some(watch.clone()));
                block.set_custom_reduce_scatter(Some(watch.clone()));
            }
            let blocks = model.inner().blocks.len();
            let x = batch(world.rank(), WIDTH);
            for step in 1..=3 {
                let grads = model.backward(&loss_of(&model, &x)).unwrap();
                assert_close(&gradients(&vars, &grads), &want, 0.);
                assert_eq!(watch.gathers.load(Ordering::Relaxed), step * blocks * gathers);
                assert_eq!(watch.scatters.load(Ordering::Relaxed), step * blocks);
            }
            // A collective that fails in forward, and one that fails in backward.
            watch.fail.store(1, Ordering::Relaxed);
            assert!(model.forward(&x).unwrap_err().to_string().contains("all-gather"));
            watch.fail.store(0, Ordering::Relaxed);
            let loss = loss_of(&model, &x);
            watch.fail.store(1, Ordering::Relaxed);
            assert!(model.backward(&loss).is_err());
            watch.fail.store(0, Ordering::Relaxed);
            model.reset_iter_state();
            let grads = model.backward(&loss_of(&model, &x)).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 0.);
        }
    });
}

#[test]
fn hooks_and_factors_change_the_reduction() {
    ranks(2, |world| {
        let want = reference(&world);
        let halves: Gradients =
            want.iter().map(|(name, v)| (name.clone(), v.iter().map(|v| v / 2.).collect())).collect();
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let backward = || gradients(&vars, &model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap());
        model.set_force_sum_reduction_for_comms(true, true);
        assert_close(&backward(), &want, 1e-6);
        model.set_gradient_divide_factor(Some(4.), true);
        assert_close(&backward(), &halves, 1e-6);
        model.set_gradient_divide_factor(None, true);
        model.set_force_sum_reduction_for_comms(false, true);
        let halve = |shards: Vec<Buffer>| {
            Ok(shards
                .into_iter()
                .map(|shard| match shard {
                    Buffer::F32(v) => Buffer::F32(v.into_iter().map(|v| v / 2.).collect()),
                    other => other,
                })
                .collect())
        };
        for unit in &model.inner().blocks {
            unit.set_all_reduce_hook(Some(Arc::new(halve)));
        }
        model.set_all_reduce_hook(Some(Arc::new(halve)));
        assert_close(&backward(), &halves, 0.);
    });
}

#[test]
fn ignored_parameters_are_whole_and_not_reduced() {
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars).ignored_params(|name| name.contains("norm"));
        let model = sharded(&opts, &vars, WIDTH);
        let ignored = vars.ignored();
        assert_eq!(ignored.len(), 3);
        assert!(vars.params().iter().all(|param| !param.name().contains("norm")));
        let grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let own: Vec<f32> = grads.get(&ignored[0].1).unwrap().to_vec1().unwrap();
        let mean = world.all_reduce(&own.iter().map(|&v| f64::from(v)).collect::<Vec<_>>(), ReduceOp::Avg).unwrap();
        assert!(own.iter().zip(&mean).any(|(own, mean)| (f64::from(*own) - mean).abs() > 1e-6), "it was reduced");
        let want = reference(&world);
        let (_, want) = want.iter().find(|(name, _)| *name == ignored[0].0).unwrap();
        assert!(want.iter().zip(&mean).all(|(want, mean)| (f64::from(*want) - mean).abs() < 1e-5));
    });
}

#[test]
fn a_unit_of_two_modules_called_apart() {
    ranks(2, |world| {
        let build = |together: bool| {
            let vars = vars(&world);
            let opts = FullyShard::new(&vars).reshard_after_forward(ReshardAfterForward::Always);
            let vb = vars.builder(DType::F32);
            let x = batch(world.rank(), WIDTH);
            let parts = fully_shard(&opts, vb, |vb| {
                Ok((nn::rms_norm(WIDTH, 1e-5, vb.pp("norm"))?, nn::linear(WIDTH, 3, vb.pp("head"))?))
            })
            .unwrap();
            if together {
                let y = parts.call(|(norm, head)| head.forward(&norm.forward(&x)?)).unwrap();
                gradients(&vars, &parts.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap())
            } else {
                let (norm, head) = parts.into_parts();
                let hidden = norm.forward(&x).unwrap();
                assert!(head.params().iter().all(|param| param.is_unsharded()), "half of the unit has still to run");
                let y = head.forward(&hidden).unwrap();
                assert!(head.params().iter().all(|param| !param.is_unsharded()));
                gradients(&vars, &head.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap())
            }
        };
        assert_close(&build(false), &build(true), 0.);
    });
}

#[test]
fn unused_parameters_join_with_zeros_where_asked() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
            Ok((nn::linear(WIDTH, WIDTH, vb.pp("a"))?, nn::linear(WIDTH, WIDTH, vb.pp("b"))?))
        })
        .unwrap();
        model.set_reduce_scatter_unused_params(true, true);
        // Each rank uses a layer of its own.
        let x = batch(world.rank(), WIDTH);
        let y = model.call(|(a, b)| if world.rank() == 0 { a.forward(&x) } else { b.forward(&x) }).unwrap();
        let grads = model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
        for (name, grad) in gradients(&vars, &grads) {
            assert!(grad.iter().any(|v| *v != 0.), "{name}");
        }
    });
}

#[test]
fn one_unused_parameter_does_not_hold_the_others_back() {
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
                block.set_custom_reduce_scatter(Some(watch.clone()));
                block
            })
            .collect();
        let model = fully_shard(&opts, vb, |_| Ok(blocks)).unwrap();
        let y = model.call(|blocks| blocks.iter().try_fold(batch(world.rank(), WIDTH), |x, b| b.forward(&x))).unwrap();
        let grads = model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
        assert_eq!(watch.scatters.load(Ordering::Relaxed), 3);
        assert_eq!(model.parameters_without_gradient().len(), 6);
        for param in vars.trainable() {
            assert_eq!(grads.get(param.var()).is_some(), param.name().contains(".used."), "{}", param.name());
        }
    });
}

#[test]
fn eight_bit_gathers_of_frozen_weights_stay_near() {
    ranks(2, |world| {
        let output = |quantised: bool| {
            let vars = vars(&world);
            vars.freeze(|name| name.ends_with("weight") && !name.contains("norm"));
            let int8: Arc<dyn AllGatherExtension> = Arc::new(Int8Blocks::new(64));
            let opts = FullyShard::new(&vars).all_gather_extension(move |name| {
                (quantised && name.ends_with("weight") && !name.contains("norm")).then(|| int8.clone())
            });
            let model = sharded(&opts, &vars, WIDTH);
            let y = model.forward(&batch(world.rank(), WIDTH)).unwrap();
            let grads = model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
            assert!(gradients(&vars, &grads).iter().all(|(_, grad)| grad.iter().all(|v| v.is_finite())));
            y.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let (exact, near) = (output(false), output(true));
        let size = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
        let difference = size(&mut exact.iter().zip(&near).map(|(a, b)| a - b)) / size(&mut exact.iter().copied());
        assert!(difference > 0. && difference < 0.05, "{difference}");
    });
}

#[test]
fn frozen_parameters_are_freed_as_backward_passes() {
    ranks(2, |world| {
        let vars = vars(&world);
        vars.freeze(|name| !name.contains("blocks.0"));
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let x = batch(world.rank(), WIDTH);
        let later = model.inner().blocks[2].params().to_vec();
        let watch: Arc<std::sync::Mutex<Vec<bool>>> = Arc::default();
        let seen = watch.clone();
        struct Look(Vec<Arc<fsdp_candle::FsdpParam>>, Arc<std::sync::Mutex<Vec<bool>>>);
        impl ReduceScatter for Look {
            fn reduce_scatter(
                &self,
                ranks: &Arc<dyn ProcessGroup>,
                parts: Vec<ScatterPart>,
                op: ReduceOp,
                memory: Arc<dyn Allocator>,
            ) -> Work {
                self.1.lock().unwrap().extend(self.0.iter().map(|param| param.is_unsharded()));
                ranks.reduce_scatter(parts, op, memory)
            }
        }
        model.inner().blocks[0].set_custom_reduce_scatter(Some(Arc::new(Look(later, seen))));
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
fn norms_of_every_order() {
    ranks(3, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let all: Vec<f64> =
            gradients(&vars, &grads).iter().flat_map(|(_, v)| v.iter().map(|&v| f64::from(v).abs())).collect();
        for (norm_type, want) in [
            (NormType::Two, all.iter().map(|v| v * v).sum::<f64>().sqrt()),
            (NormType::P(1.), all.iter().sum()),
            (NormType::P(3.), all.iter().map(|v| v.powi(3)).sum::<f64>().cbrt()),
            (NormType::Infinity, all.iter().copied().fold(0., f64::max)),
        ] {
            let options = ClipOptions { max_norm: 1e9, norm_type, error_if_nonfinite: true };
            let got = clip_grad_norm_with(&vars, &mut grads, &options).unwrap();
            assert!((got - want).abs() < 1e-5 * want, "{norm_type:?}: {got} instead of {want}");
        }
        let bad = ClipOptions { max_norm: 1., norm_type: NormType::P(-1.), error_if_nonfinite: false };
        assert!(clip_grad_norm_with(&vars, &mut grads, &bad).unwrap_err().to_string().contains("order -1"));
        let first = vars.trainable()[0].clone();
        if first.region().elements() > 0 {
            grads.insert(first.var(), (grads.get(first.var()).unwrap() / 0.).unwrap());
        }
        let strict = ClipOptions { max_norm: 1., norm_type: NormType::Infinity, error_if_nonfinite: true };
        assert!(clip_grad_norm_with(&vars, &mut grads, &strict).unwrap_err().to_string().contains("norm is"));
    });
}

#[test]
fn nested_units() {
    ranks(2, |world| {
        let run = |nested: bool| {
            let vars = vars(&world);
            let opts = FullyShard::new(&vars);
            let vb = vars.builder(DType::F32);
            let x = batch(world.rank(), WIDTH);
            let build = |vb: candle_nn::VarBuilder<'static>| Block::new(WIDTH, vb);
            let grads = if nested {
                let inner = fully_shard(&opts, vb.pp("outer.inner"), build).unwrap();
                let outer =
                    fully_shard(&opts, vb.pp("outer"), |vb| Ok((inner, Block::new(WIDTH, vb.pp("own"))?))).unwrap();
                let root = fully_shard(&opts, vb, |vb| Ok((outer, nn::linear(WIDTH, 2, vb.pp("head"))?))).unwrap();
                let y = root.call(|(outer, head)| {
                    let hidden = outer.call_with(x.clone(), |(inner, own), x| own.forward(&inner.forward(&x)?))?;
                    head.forward(&hidden)
                });
                root.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap()).unwrap()
            } else {
                let all = fully_shard(&opts, vb, |vb| {
                    Ok((build(vb.pp("outer.inner"))?, build(vb.pp("outer.own"))?, nn::linear(WIDTH, 2, vb.pp("head"))?))
                })
                .unwrap();
                let y = all.call(|(inner, own, head)| head.forward(&own.forward(&inner.forward(&x)?)?));
                all.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap()).unwrap()
            };
            gradients(&vars, &grads)
        };
        assert_close(&run(true), &run(false), 1e-6);
    });
}

#[test]
fn one_ranks_overflow_skips_everybodys_step() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(1024.).growth_interval(2);
        let want = reference(&world);
        let before: Vec<_> = vars.params().iter().map(|param| whole(&vars, param, param.var())).collect();
        for (step, (overflow, scale)) in
            [(false, 1024.), (true, 512.), (false, 512.), (false, 1024.)].into_iter().enumerate()
        {
            let loss = loss_of(&model, &batch(world.rank(), WIDTH));
            let mut grads = model.backward(&scaler.scale(&loss).unwrap()).unwrap();
            let first = vars.trainable()[0].clone();
            if overflow && world.rank() == 1 {
                grads.insert(first.var(), (grads.get(first.var()).unwrap() * f64::INFINITY).unwrap());
            }
            assert_eq!(scaler.unscale(&vars, &mut grads).unwrap(), overflow);
            if step == 0 {
                assert_close(&gradients(&vars, &grads), &want, 1e-6);
            }
            assert_eq!(scaler.step(&mut optim, &grads).unwrap(), !overflow);
            assert_eq!(scaler.current_scale(), scale);
        }
        assert_eq!(optim.states()[0].step, 3);
        let after: Vec<_> = vars.params().iter().map(|param| whole(&vars, param, param.var())).collect();
        assert!(before != after && after.iter().flatten().all(|v| v.is_finite()));
    });
}

#[test]
fn a_printed_model_shows_its_units_and_placements() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() };
        let model = sharded(&FullyShard::new(&vars).mp_policy(policy), &vars, WIDTH);
        let text = model.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("(root) [Default, sharded]: this rank holds "), "{text}");
        assert!(lines.iter().any(|line| line.starts_with("  blocks.1 [Default, sharded]")), "{text}");
        assert!(
            text.contains("    . blocks.2.up.weight [18, 6] F32 (S(0)) 216 B of 432 B, computes in BF16"),
            "{text}"
        );
        assert!(vars.to_string().starts_with(&format!("mesh (dp_shard: 2) rank {}", world.rank())));
        assert_eq!(model.inner().blocks[0].to_string().lines().count(), 6);
    });
}

#[test]
fn a_parameter_may_keep_its_own_dtype() {
    ranks(2, |world| {
        let vars = vars(&world);
        let policy = MixedPrecisionPolicy {
            param_dtype: Some(DType::BF16),
            keep_dtype_fn: Some(Arc::new(|name| name.contains("norm"))),
            ..Default::default()
        };
        let opts = FullyShard::new(&vars).mp_policy(policy);
        let norm = fully_shard(&opts, vars.builder(DType::F32).pp("norm"), |vb| nn::rms_norm(4, 1e-5, vb)).unwrap();
        let head = fully_shard(&opts, vars.builder(DType::F32).pp("head"), |vb| nn::linear(4, 4, vb)).unwrap();
        assert_eq!(norm.params()[0].compute_dtype(), DType::F32);
        assert_eq!(head.params()[0].compute_dtype(), DType::BF16);
        // Inputs are cast to the unit's dtype, outputs come in it.
        assert_eq!(head.forward(&batch(0, 4)).unwrap().dtype(), DType::BF16);
    });
}

#[test]
fn a_parameter_on_another_mesh() {
    ranks(4, |world| {
        let want = reference(&world);
        let pairs = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let other = ShardMesh::of_dims(&pairs, Some("replicate"), "shard").unwrap();
            let opts = FullyShard::new(&vars).reshard_after_forward(reshard).shard_placement_fn(move |name, _| {
                name.contains("down").then(|| ShardPlacement { dim: 0, mesh: Some(other.clone()) })
            });
            let model = sharded(&opts, &vars, WIDTH);
            let moved = vars.get("blocks.0.down.weight").unwrap();
            assert_eq!((moved.placements().len(), moved.region().sizes[0]), (2, WIDTH / 2));
            model.set_separate_reduce_scatter_group(true, true).unwrap();
            let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            for param in vars.trainable() {
                let (_, want) = want.iter().find(|(name, _)| name == param.name()).unwrap();
                let rows = param.region();
                let row: usize = param.shape().dims()[1..].iter().product();
                let got: Vec<f32> = grads.get(param.var()).unwrap().flatten_all().unwrap().to_vec1().unwrap();
                let want = &want[rows.offsets[0] * row..][..got.len()];
                let largest = want.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
                assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5 * largest), "{}", param.name());
            }
            // Norms count each mesh's shards once.
            let all: f64 = want.iter().flat_map(|(_, v)| v).map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let norm = fsdp_candle::clip_grad_norm(&vars, &mut grads, 1e9).unwrap();
            assert!((norm - all).abs() < 1e-5 * all, "{norm} instead of {all}");
        }
    });
}

/// The identity, whose backward fails when told to.
struct Fragile(Arc<AtomicUsize>);

impl candle_core::CustomOp1 for Fragile {
    fn name(&self) -> &'static str {
        "fragile"
    }
    fn cpu_fwd(
        &self,
        storage: &candle_core::CpuStorage,
        layout: &candle_core::Layout,
    ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if self.0.load(Ordering::Relaxed) > 0 {
            candle_core::bail!("injected into backward")
        } else {
            Ok(Some(grad.clone()))
        }
    }
}

#[test]
fn an_error_in_the_middle_of_backward_leaves_the_next_step_right() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let fail = Arc::new(AtomicUsize::new(0));
        let backward = || {
            let y = model.call(|m| {
                let x = m.blocks[0].forward(&batch(world.rank(), WIDTH))?.apply_op1(Fragile(fail.clone()))?;
                m.head.forward(&m.blocks[1..].iter().try_fold(x, |x, block| block.forward(&x))?)
            });
            model.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap())
        };
        for _ in 0..2 {
            fail.store(1, Ordering::Relaxed);
            assert!(backward().unwrap_err().to_string().contains("injected into backward"));
            assert!(vars.params().iter().all(|param| !param.is_unsharded()));
            fail.store(0, Ordering::Relaxed);
            assert_close(&gradients(&vars, &backward().unwrap()), &want, 0.);
        }
    });
}

/// Writes down the units in the order in which they communicate.
struct Journal(&'static str, String, Arc<std::sync::Mutex<Vec<String>>>);

impl AllGather for Journal {
    fn all_gather(&self, ranks: &Arc<dyn ProcessGroup>, parts: Vec<GatherPart>, memory: Arc<dyn Allocator>) -> Work {
        self.2.lock().unwrap().push(format!("{} {}", self.0, self.1));
        ranks.all_gather(parts, memory)
    }
}

impl ReduceScatter for Journal {
    fn reduce_scatter(
        &self,
        ranks: &Arc<dyn ProcessGroup>,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        self.2.lock().unwrap().push(format!("{} {}", self.0, self.1));
        ranks.reduce_scatter(parts, op, memory)
    }
}

#[test]
fn collectives_come_in_the_order_that_overlaps_them_and_parameters_go_when_they_should() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let journal: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
        for block in &model.inner().blocks {
            let name = block.name().trim_start_matches("blocks.").to_string();
            block.set_custom_all_gather(Some(Arc::new(Journal("gather", name.clone(), journal.clone()))));
            block.set_custom_reduce_scatter(Some(Arc::new(Journal("reduce", name, journal.clone()))));
        }
        let unsharded = || -> Vec<bool> {
            let blocks = model.inner().blocks.iter();
            blocks.map(|b| b.params()[0].is_unsharded()).chain([model.params()[0].is_unsharded()]).collect()
        };
        let x = batch(world.rank(), WIDTH);
        for step in 0..2 {
            journal.lock().unwrap().clear();
            assert_eq!(unsharded(), [false; 4]);
            let loss = loss_of(&model, &x);
            // After forward the root alone is whole.
            assert_eq!(unsharded(), [false, false, false, true]);
            let _grads = model.backward(&loss).unwrap();
            // The next block's gather is issued before this one computes, and its own gradients' reduction after that.
            let forward = ["gather 0", "gather 1", "gather 2"];
            let backward = ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"];
            assert_eq!(*journal.lock().unwrap(), [&forward[..], &backward[..]].concat(), "step {step}");
        }
        assert_eq!(unsharded(), [false; 4]);
    });
}
