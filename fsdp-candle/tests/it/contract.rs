//! Contracts other than numbers: errors that name the parameter, units that recover, reports of cut graphs.

use crate::common::{alone, assert_close, batch, gradients, loss_of, ranks, refused, sharded, vars};
use candle_core::{DType, Module, Tensor};
use fsdp_candle::{FullyShard, Recurse, fully_shard, nn};

fn error<T>(result: Result<T, impl std::fmt::Display>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn calls_without_hooks_name_parameter_and_fix() {
    let world = alone();
    let vars = vars(&world);
    let model = sharded(&FullyShard::new(&vars), &vars, 4);
    refused(
        model.inner().blocks[0].inner().forward(&batch(0, 4)),
        &["parameter `blocks.0.norm.weight`", "through its FsdpModule"],
    );
}

#[test]
fn refuses_parameters_of_another_unit() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let _first = fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
    refused(
        fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)),
        &["`a.weight`", "already belongs to FSDP unit `a`"],
    );
    refused(fully_shard(&opts, vb.clone(), |vb| nn::linear(4, 4, vb.pp("a"))), &["unit `(root)`"]);
    refused(vb.pp("b").get((4, 4), "weight"), &["outside fully_shard"]);
    refused(fully_shard(&opts, vb.pp("c"), |vb| vb.get((), "scale")), &["shape [1]"]);
}

#[test]
fn a_failed_build_leaves_no_parameters() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    refused(
        fully_shard(&opts, vb.pp("a"), |vb| {
            nn::linear(4, 4, vb)?;
            Err::<(), _>(candle_core::Error::msg("no"))
        }),
        &["no"],
    );
    assert!(vars.params().is_empty());
    fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
}

#[test]
fn trains_after_a_failed_step() {
    let losses = ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, 4);
        let step = |fail: bool| -> candle_core::Result<(f32, f64)> {
            let y = model.call(|m| {
                let y = m.forward(&batch(world.rank(), 4))?;
                if fail { candle_core::bail!("injected") } else { Ok(y) }
            })?;
            let loss = y.sqr()?.mean_all()?;
            let grads = model.backward(&loss)?;
            Ok((loss.to_scalar()?, fsdp_candle::grad_norm(&vars, &grads).map_err(candle_core::Error::wrap)?))
        };
        let first = step(false).unwrap();
        assert!(error(step(true)).contains("injected"));
        (first, step(false).unwrap())
    });
    for (before, after) in losses {
        assert_eq!(before, after);
    }
}

#[test]
fn ignored_parameters_have_one_shape_and_dtype() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars).ignored_params(|name| name == "scale");
    let ask = |shape: usize, dtype: DType| {
        fully_shard(&opts, vars.builder(DType::F32), |vb| {
            vb.get(4, "scale")?;
            vb.get_with_hints_dtype(shape, "scale", candle_nn::Init::Const(0.), dtype)
        })
    };
    refused(ask(5, DType::F32), &["parameter `scale`", "[4] F32", "[5] F32"]);
    assert!(error(ask(4, DType::F64)).contains("[4] F64"));
    ask(4, DType::F32).unwrap();
}

#[test]
fn settings_of_split_units_do_not_reach_siblings() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let linear = |name: &str| fully_shard(&opts, vb.pp(name), |vb| nn::linear(4, 4, vb)).unwrap();
    let (block, adapter) = (linear("block"), linear("head.adapter"));
    let pair = fully_shard(&opts, vb.clone(), |vb| {
        Ok((nn::rms_norm(4, 1e-5, vb.pp("norm"))?, nn::linear(4, 4, vb.pp("head"))?))
    });
    let (norm, head) = pair.unwrap().into_parts();
    let root = fully_shard(&opts, vb.clone(), |vb| nn::linear(4, 4, vb.pp("embed"))).unwrap();
    let x = batch(0, 4);
    let run = || {
        let y = root.call(|embed| {
            let y = adapter.forward(&block.forward(&embed.forward(&x)?)?)?;
            head.forward(&norm.forward(&y)?)
        });
        let units = [block.params(), adapter.params(), norm.params(), root.params()];
        let kept = units.map(|params| params[0].is_unsharded());
        root.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
        kept
    };
    assert_eq!(run(), [false, false, false, true]);
    norm.set_reshard_after_forward(fsdp_candle::ReshardAfterForward::Never, Recurse::Yes).unwrap();
    assert_eq!(run(), [false, true, true, true]);
    root.set_reshard_after_forward(fsdp_candle::ReshardAfterForward::Always, Recurse::Yes).unwrap();
    assert_eq!(run(), [false; 4]);
    let tree = root.to_string();
    for unit in ["\n  block [", "\n  (root) [", "\n    head.adapter ["] {
        assert!(tree.contains(unit), "{unit:?} in {tree}");
    }
}

#[test]
fn candles_error_for_a_sharded_weight() {
    let world = alone();
    let vars = vars(&world);
    let vb = vars.builder(DType::F32);
    let unit = fully_shard(&FullyShard::new(&vars), vb, |vb| candle_nn::linear(4, 4, vb)).unwrap();
    let text = error(unit.inner().forward(&batch(0, 4)));
    // Cited by the crate's documentation.
    assert!(text.contains("dtype mismatch in matmul, lhs: F32, rhs: F4"), "{text}");
}

#[test]
fn repeats_backward_and_refuses_a_reset_graph() {
    use fsdp_candle::ReshardAfterForward::{Always, Default, Never};
    for policy in [Default, Always, Never] {
        ranks(2, |world| {
            let vars = vars(&world);
            vars.freeze(|name| name.contains("blocks.1.up"));
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(policy), &vars, 4);
            let loss = || loss_of(&model, &batch(world.rank(), 4));
            let first = loss();
            let want = gradients(&vars, &model.backward(&first).unwrap());
            assert_close(&gradients(&vars, &model.backward(&first).unwrap()), &want, 0.);
            if policy == Default {
                let forgotten = loss();
                model.reset_iter_state();
                for loss in [&forgotten, &first] {
                    let text = error(model.backward(loss));
                    assert!(text.contains("has been through backward") && text.contains("run forward again"), "{text}");
                    assert!(!text.contains("outside the forward"), "{text}");
                }
            }
            assert_close(&gradients(&vars, &model.backward(&loss()).unwrap()), &want, 0.);
        });
    }
}

#[test]
fn captured_tensors_keep_frozen_parameters() {
    ranks(2, |world| {
        let run = |captured: bool| {
            let vars = vars(&world);
            vars.freeze(|name| name.contains("frozen"));
            let vb = vars.builder(DType::F32);
            let opts = FullyShard::new(&vars).reshard_after_forward(fsdp_candle::ReshardAfterForward::Always);
            let before = fully_shard(&opts, vb.pp("before"), |vb| nn::linear(4, 4, vb)).unwrap();
            // Candle's own layers, whose frozen weights no hook observes.
            let unit = fully_shard(&opts, vb.pp("unit"), |vb| {
                Ok((candle_nn::linear(4, 4, vb.pp("frozen"))?, nn::linear(4, 4, vb.pp("trained"))?))
            });
            let unit = unit.unwrap();
            let root = fully_shard(&opts, vb, |_| Ok(())).unwrap();
            let x = batch(world.rank(), 4);
            let seen = std::sync::Mutex::new(vec![]);
            let y = root.call(|()| {
                let h = before.forward(&x)?;
                let both = |(frozen, trained): &(candle_nn::Linear, nn::Linear), a: &Tensor, b: &Tensor| {
                    let y = (frozen.forward(&frozen.forward(a)?)? + trained.forward(&frozen.forward(b)?.sqr()?)?)?;
                    y + frozen.forward(&a.sqr()?)?
                };
                // In both orders. The other tensor is computed before the unit.
                let first = match captured {
                    true => unit.call_with(h.sin()?, |m, a| both(m, &a, &h))?,
                    false => unit.call(|m| both(m, &h.sin()?, &h))?,
                };
                seen.lock().unwrap().push(unit.params()[0].is_unsharded());
                let other = h.cos()?;
                match captured {
                    true => unit.call_with(first, |m, a| both(m, &other, &a)),
                    false => unit.call(|m| both(m, &other, &first)),
                }
            });
            let grads = root.backward(&y.unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
            assert_eq!(*seen.lock().unwrap(), [false]);
            assert!(vars.params().iter().all(|param| !param.is_unsharded()));
            gradients(&vars, &grads)
        };
        assert_close(&run(true), &run(false), 1e-6);
    });
}
