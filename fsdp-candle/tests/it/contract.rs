//! What users rely on beside the numbers: errors that name the parameter, units that recover, graphs that report what
//! they lost.

use crate::common::{Block, alone, assert_close, batch, device, gradients, loss_of, ranks, sharded, vars};
use candle_core::{DType, Module, Tensor};
use fsdp_candle::{FullyShard, Recurse, fully_shard, nn};

fn error<T>(result: Result<T, impl std::fmt::Display>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_call_past_the_hooks_names_the_parameter_and_the_way_out() {
    let world = alone();
    let vars = vars(&world);
    let model = sharded(&FullyShard::new(&vars), &vars, 4);
    let text = error(model.inner().blocks[0].inner().forward(&batch(0, 4)));
    assert!(text.contains("parameter `blocks.0.norm.weight`") && text.contains("through its FsdpModule"), "{text}");
}

#[test]
fn a_candle_layer_past_the_hooks_is_explained_by_the_unit_around_it() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let inner = fully_shard(&opts, vb.pp("inner"), |vb| candle_nn::linear(4, 4, vb)).unwrap();
    let outer = fully_shard(&opts, vb, |vb| nn::linear(4, 4, vb.pp("outer"))).unwrap();
    let text = error(outer.call(|_| inner.inner().forward(&batch(0, 4))));
    assert!(text.contains("`inner`") && text.contains("unshard"), "{text}");
}

#[test]
fn a_parameter_of_another_unit_is_refused() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let _first = fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
    let text = error(fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)));
    assert!(text.contains("`a.weight`") && text.contains("already belongs to FSDP unit `a`"), "{text}");
    let text = error(fully_shard(&opts, vb.clone(), |vb| nn::linear(4, 4, vb.pp("a"))));
    assert!(text.contains("unit `(root)`"), "{text}");
    let text = error(vb.pp("b").get((4, 4), "weight"));
    assert!(text.contains("outside fully_shard"), "{text}");
    let text = error(fully_shard(&opts, vb.pp("c"), |vb| vb.get((), "scale")));
    assert!(text.contains("shape [1]"), "{text}");
}

#[test]
fn a_unit_that_failed_to_build_leaves_nothing() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let vb = vars.builder(DType::F32);
    let text = error(fully_shard(&opts, vb.pp("a"), |vb| {
        nn::linear(4, 4, vb)?;
        Err::<(), _>(candle_core::Error::msg("no"))
    }));
    assert!(text.contains("no"), "{text}");
    assert!(vars.params().is_empty());
    fully_shard(&opts, vb.pp("a"), |vb| nn::linear(4, 4, vb)).unwrap();
}

#[test]
fn the_losss_own_backward_is_refused() {
    let world = alone();
    let vars = vars(&world);
    let model = sharded(&FullyShard::new(&vars), &vars, 4);
    let loss = model.forward(&batch(0, 4)).unwrap().mean_all().unwrap();
    let text = error(loss.backward());
    assert!(text.contains("backward(&loss)"), "{text}");
}

#[test]
fn a_cut_graph_is_reported_by_name() {
    struct Cut(candle_nn::RmsNorm, nn::Linear);
    impl Module for Cut {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            self.1.forward(&self.0.forward(x)?) // candle_nn's RmsNorm has no backward
        }
    }
    let world = alone();
    let vars = vars(&world);
    let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
        Ok(Cut(candle_nn::rms_norm(4, 1e-5, vb.pp("norm"))?, nn::linear(4, 2, vb.pp("head"))?))
    })
    .unwrap();
    let loss = model.forward(&batch(0, 4)).unwrap().mean_all().unwrap();
    let grads = model.backward(&loss).unwrap();
    assert_eq!(model.parameters_without_gradient(), ["norm.weight"]);
    assert!(grads.get(vars.get("head.weight").unwrap().var()).is_some());
}

#[test]
fn a_step_that_failed_can_be_followed_by_one_that_works() {
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
fn frozen_parameters_get_no_gradient_and_tied_ones_get_one() {
    let all = ranks(2, |world| {
        let vars = vars(&world);
        vars.freeze(|name| name.contains("norm"));
        let vb = vars.builder(DType::F32);
        let opts = FullyShard::new(&vars);
        let blocks = vec![fully_shard(&opts, vb.pp("blocks.0"), |vb| Block::new(4, vb)).unwrap()];
        let model = fully_shard(&opts, vb, |vb| {
            let tied = vb.get((4, 4), "tied")?;
            Ok((blocks, nn::Linear::new(tied.clone(), None), candle_nn::Linear::new(vb.get((4, 4), "tied")?, None)))
        })
        .unwrap();
        let x = batch(world.rank(), 4);
        let y = model.call(|(blocks, first, last)| last.forward(&blocks[0].forward(&first.forward(&x)?)?)).unwrap();
        let grads = model.backward(&y.sqr().unwrap().mean_all().unwrap()).unwrap();
        assert_eq!(vars.params().len(), vars.trainable().len() + 1);
        assert!(grads.get(vars.get("blocks.0.norm.weight").unwrap().var()).is_none());
        assert!(model.parameters_without_gradient().is_empty());

        // The tied weight's gradient is the sum over both uses: the same in plain Candle.
        let plain = |name: &str| -> Tensor {
            let param = vars.get(name).unwrap();
            let group = vars.mesh().group(0).unwrap();
            let whole = group
                .all_gather(
                    vec![fsdp_core::GatherPart {
                        input: std::sync::Arc::new(fsdp_core::Buffer::F32(
                            param.var().flatten_all().unwrap().to_vec1().unwrap(),
                        )),
                        counts: (0..2)
                            .map(|r| {
                                fsdp_core::layout::chunk_range(param.shape().dims()[0], 2, r).len()
                                    * param.shape().elem_count()
                                    / param.shape().dims()[0]
                            })
                            .collect(),
                    }],
                    fsdp_core::Heap::shared(),
                )
                .wait()
                .unwrap();
            let [fsdp_core::Buffer::F32(v)] = &whole[..] else { panic!() };
            Tensor::from_slice(v, param.shape(), &device()).unwrap()
        };
        let names = [
            "tied",
            "blocks.0.norm.weight",
            "blocks.0.up.weight",
            "blocks.0.up.bias",
            "blocks.0.down.weight",
            "blocks.0.down.bias",
        ];
        let map = candle_nn::VarMap::new();
        let values: Vec<(&str, Tensor)> = names.iter().map(|name| (*name, plain(name))).collect();
        let pvb = candle_nn::VarBuilder::from_varmap(&map, DType::F32, &device());
        let block = Block::new(4, pvb.pp("blocks.0")).unwrap();
        let tied = pvb.get((4, 4), "tied").unwrap();
        for (name, value) in &values {
            map.data().lock().unwrap()[*name].set(value).unwrap();
        }
        let forward = |rank: usize| {
            let x = batch(rank, 4);
            let y = nn::Linear::new(tied.clone(), None).forward(&x).unwrap();
            let y = block.forward(&y).unwrap();
            candle_nn::Linear::new(tied.clone(), None).forward(&y).unwrap().sqr().unwrap().mean_all().unwrap()
        };
        let loss = ((forward(0) + forward(1)).unwrap() / 2.).unwrap();
        let want = loss.backward().unwrap().get(&map.data().lock().unwrap()["tied"]).unwrap().clone();
        let got = grads.get(vars.get("tied").unwrap().var()).unwrap().clone();
        let rows = vars.get("tied").unwrap().region().clone();
        let want = want.narrow(0, rows.offsets[0], rows.sizes[0]).unwrap();
        (got - want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap()
    });
    assert!(all.iter().all(|&difference| difference < 1e-5), "{all:?}");
}

#[test]
fn an_ignored_parameter_has_one_shape_and_dtype() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars).ignored_params(|name| name == "scale");
    let ask = |shape: usize, dtype: DType| {
        fully_shard(&opts, vars.builder(DType::F32), |vb| {
            vb.get(4, "scale")?;
            vb.get_with_hints_dtype(shape, "scale", candle_nn::Init::Const(0.), dtype)
        })
    };
    let text = error(ask(5, DType::F32));
    assert!(text.contains("parameter `scale`") && text.contains("[4] F32") && text.contains("[5] F32"), "{text}");
    assert!(error(ask(4, DType::F64)).contains("[4] F64"));
    ask(4, DType::F32).unwrap();
}

#[test]
fn settings_of_a_unit_taken_apart_do_not_reach_what_is_beside_it() {
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
fn what_candle_says_of_a_sharded_weight_outside_of_any_unit() {
    let world = alone();
    let vars = vars(&world);
    let vb = vars.builder(DType::F32);
    let unit = fully_shard(&FullyShard::new(&vars), vb, |vb| candle_nn::linear(4, 4, vb)).unwrap();
    let text = error(unit.inner().forward(&batch(0, 4)));
    // The crate's documentation cites it.
    assert!(text.contains("dtype mismatch in matmul, lhs: F32, rhs: F4"), "{text}");
}

#[test]
fn a_second_backward_gathers_again_and_one_of_a_forgotten_graph_says_so() {
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
fn frozen_parameters_stay_while_a_captured_tensor_needs_them() {
    ranks(2, |world| {
        let run = |captured: bool| {
            let vars = vars(&world);
            vars.freeze(|name| name.contains("frozen"));
            let vb = vars.builder(DType::F32);
            let opts = FullyShard::new(&vars).reshard_after_forward(fsdp_candle::ReshardAfterForward::Always);
            let before = fully_shard(&opts, vb.pp("before"), |vb| nn::linear(4, 4, vb)).unwrap();
            // Candle's own layers: their frozen weights are in no hook's sight.
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
                // In both orders; the other tensor comes from before the unit.
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
