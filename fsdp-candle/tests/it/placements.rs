//! With every placement of parameters, the gradients are those of plain FSDP.

use candle_core::{DType, Module};
use fsdp_candle::{FullyShard, Recurse, ReshardAfterForward, ShardMesh, ShardPlacement, World, fully_shard, nn};
use fsdp_core::ReduceOp;

use crate::common::{
    Block, WIDTH, assert_close, assert_part, batch, gradients, gradients_of, loss_of, mean_square, ranks, reference,
    refused, sharded, vars, vars_on,
};

fn with_options(world: &World, mesh: &[(&str, usize)], opts: impl Fn(FullyShard) -> FullyShard, tolerance: f32) {
    let want = reference(world);
    let vars = vars_on(world, mesh);
    let model = sharded(&opts(FullyShard::new(&vars)), &vars, WIDTH);
    for _ in 0..2 {
        assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &want, tolerance);
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
        refused(
            fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(6, 4, vb)),
            &["`weight`", "[4, 6]", "4 ranks"],
        );
    });
}

#[test]
fn ignored_parameters_are_not_reduced() {
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
fn units_of_two_modules_called_separately() {
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
                gradients(&vars, &parts.backward(&mean_square(&y)).unwrap())
            } else {
                let whole = vars.clone();
                let model = fully_shard(&opts, vars.builder(DType::F32), |_| Ok(parts.into_parts())).unwrap();
                let unsharded = || whole.params().iter().all(|param| param.is_unsharded());
                let y = model.call(|(norm, head)| {
                    let hidden = norm.forward(&x)?;
                    assert!(unsharded(), "half of the unit has still to run");
                    let y = head.forward(&hidden)?;
                    assert!(!unsharded());
                    Ok::<_, candle_core::Error>(y)
                });
                gradients(&vars, &model.backward(&mean_square(&y.unwrap())).unwrap())
            }
        };
        assert_close(&build(false), &build(true), 0.);
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
                root.backward(&mean_square(&y.unwrap())).unwrap()
            } else {
                let all = fully_shard(&opts, vb, |vb| {
                    Ok((build(vb.pp("outer.inner"))?, build(vb.pp("outer.own"))?, nn::linear(WIDTH, 2, vb.pp("head"))?))
                })
                .unwrap();
                let y = all.call(|(inner, own, head)| head.forward(&own.forward(&inner.forward(&x)?)?));
                all.backward(&mean_square(&y.unwrap())).unwrap()
            };
            gradients(&vars, &grads)
        };
        assert_close(&run(true), &run(false), 1e-6);
    });
}

#[test]
fn parameters_on_another_mesh() {
    ranks(4, |world| {
        let want = reference(&world);
        let pairs = world.mesh(&[("replicate", 2), ("shard", 2)]).unwrap();
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let vars = vars(&world);
            let other = ShardMesh::new(&pairs).unwrap();
            let opts = FullyShard::new(&vars).reshard_after_forward(reshard).shard_placement_fn(move |name, _| {
                name.contains("down").then(|| ShardPlacement { dim: 0, mesh: Some(other.clone()) })
            });
            let model = sharded(&opts, &vars, WIDTH);
            let moved = vars.get("blocks.0.down.weight").unwrap();
            assert_eq!((moved.placements().len(), moved.region().sizes[0]), (2, WIDTH / 2));
            model.set_separate_reduce_scatter_group(true, Recurse::Yes).unwrap();
            let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
            for param in vars.trainable() {
                assert_part(&param, &grads, &want);
            }
            // Norms count the shards of each mesh once.
            let all: f64 = want.iter().flat_map(|(_, v)| v).map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let norm = fsdp_candle::clip_grad_norm(&vars, &mut grads, 1e9).unwrap();
            assert!((norm - all).abs() < 1e-5 * all, "{norm} instead of {all}");
        }
    });
}
