//! Freezing and unfreezing parameters of built models, compared with plain Candle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor, Var};
use candle_nn::Optimizer;
use fsdp_candle::{
    AdamW, AdamWConfig, Error, FullyShard, GradcheckOptions, Recurse, ShardedVarMap, StateDictOptions,
    activation_checkpoint::checkpoint, clip_grad_norm, fully_shard, get_model_state_dict, get_optimizer_state_dict,
    gradcheck, nn, shard,
};

use crate::common::{
    Gradients, Own, Parts, Plain, WIDTH, alone, assert_close, assert_resharded, batch, built, elements, gradients,
    loss_of, mean, mean_square, plain, ranks, refused, sharded, vars, vars_on, weights, whole,
};

/// The trainable parameters of each step: all, parts of blocks, only the head, one bias of a unit, all.
const PHASES: [fn(&str) -> bool; 5] = [
    |_| true,
    |name| name.ends_with("weight") && !name.contains("up"),
    |name| name.starts_with("head"),
    |name| !name.starts_with("blocks.1") || name.ends_with("up.bias"),
    |_| true,
];
/// A larger learning rate makes this model diverge, and rounding errors with it.
const LR: f64 = 5e-5;

/// The losses of rank 0, the norms and the final parameters of plain Candle, trained on the mean of `ranks` batches.
fn train_plain(initial: &Gradients, ranks: usize) -> (Vec<f32>, Vec<f32>, Gradients) {
    let plain = Plain::new(initial, |vb| plain(vb, WIDTH));
    let mut optim = candle_nn::SGD::new(plain.vars_of(|_| true), LR).unwrap();
    let (mut losses, mut norms) = (vec![], vec![]);
    for trained in PHASES {
        for _ in 0..2 {
            let all: Vec<Tensor> = (0..ranks).map(|rank| loss_of(&plain.model, &batch(rank, WIDTH))).collect();
            let mut grads = mean(&all).backward().unwrap();
            plain.vars_of(|name| !trained(name)).iter().for_each(|var| drop(grads.remove(var)));
            let kept = plain.vars_of(trained);
            let squares = kept.iter().flat_map(|var| elements(grads.get(var).unwrap())).map(|g: f32| g * g);
            norms.push(squares.sum::<f32>().sqrt());
            optim.step(&grads).unwrap();
            losses.push(all[0].to_scalar().unwrap());
        }
    }
    (losses, norms, plain.values())
}

fn has_exactly(vars: &ShardedVarMap, grads: &GradStore, trained: impl Fn(&str) -> bool) {
    for param in vars.params() {
        let wanted = trained(param.name()) && !param.region().is_empty();
        assert_eq!(grads.get(param.var()).is_some(), wanted, "{}", param.name());
    }
}

#[test]
fn freezing_matches_plain_candle() {
    let initial = weights(&built(&alone(), WIDTH).0);
    for size in [1, 2, 3, 4] {
        let (want_losses, want_norms, want) = train_plain(&initial, size);
        ranks(size, |world| {
            let (vars, model) = built(&world, WIDTH);
            let sent = Arc::new(AtomicUsize::new(0));
            let counts = sent.clone();
            let count = Own::new(move |parts: Parts<'_>| {
                if let Parts::Scatter(parts) = parts {
                    counts.fetch_add(parts.len(), Ordering::Relaxed);
                }
                None
            });
            model.set_custom_reduce_scatter(Some(count.clone()));
            model.inner().blocks.iter().for_each(|block| block.set_custom_reduce_scatter(Some(count.clone())));
            let all = vars.params().iter().map(|param| param.var().clone()).collect();
            let mut optim = candle_nn::SGD::new(all, LR).unwrap();
            let mut step = 0;
            for trained in PHASES {
                assert!(vars.set_requires_grad(false, |name| !trained(name)).is_ok() || step == 0 || step == 8);
                vars.set_requires_grad(true, trained).unwrap();
                let trainable = vars.trainable().len();
                for _ in 0..2 {
                    let loss = loss_of(&model, &batch(world.rank(), WIDTH));
                    sent.store(0, Ordering::Relaxed);
                    let mut grads = model.backward(&loss).unwrap();
                    // A frozen parameter is not reduced.
                    assert_eq!(sent.load(Ordering::Relaxed), trainable);
                    assert!(model.parameters_without_gradient().is_empty() && model.graph_cuts().is_empty());
                    has_exactly(&vars, &grads, trained);
                    let norm = clip_grad_norm(&vars, &mut grads, 1e9).unwrap() as f32;
                    let want = want_norms[step];
                    assert!((norm - want).abs() < 1e-4 * want.max(0.1), "{size} {step}: a norm of {norm}, not {want}");
                    if world.rank() == 0 {
                        let loss: f32 = loss.to_scalar().unwrap();
                        let want = want_losses[step];
                        assert!((loss - want).abs() < 2e-5 * want.max(1.), "{size} {step}: {loss}, not {want}");
                    }
                    optim.step(&grads).unwrap();
                    step += 1;
                }
            }
            for ((name, got), (_, want)) in weights(&vars).iter().zip(&want) {
                let near = |(got, want): (&f32, &f32)| (got - want).abs() < 2e-4;
                assert!(got.iter().zip(want).all(near), "{size} {name}: {got:?} and {want:?}");
            }
        });
    }
}

#[test]
fn freezing_reaches_named_units_and_checkpoints() {
    ranks(2, |world| {
        let gradients = |frozen: bool, again: bool| {
            let vars = vars(&world);
            let opts = FullyShard::new(&vars);
            let model = shard(&opts, &["*"], vars.builder(DType::F32), |vb| {
                Ok::<_, candle_core::Error>(Arc::new((
                    nn::linear(WIDTH, 8, vb.pp("a"))?,
                    nn::linear(8, 3, vb.pp("b"))?,
                )))
            })
            .unwrap();
            let x = batch(world.rank(), WIDTH);
            let run = || {
                let y = model.call(|layers| {
                    let layers = layers.clone();
                    let forward = move |x: Tensor| layers.1.forward(&nn::gelu(&layers.0.forward(&x)?)?);
                    if again { checkpoint(forward, x.clone()) } else { forward(x.clone()) }
                });
                model.backward(&mean_square(&y.unwrap())).unwrap()
            };
            if frozen {
                vars.set_requires_grad(false, |name| name.starts_with("a.") || name == "b.bias").unwrap();
                has_exactly(&vars, &run(), |name| name == "b.weight");
                assert_resharded(&vars);
                vars.set_requires_grad(true, |_| true).unwrap();
            }
            let grads = run();
            vars.params().iter().map(|param| whole(&vars, param, grads.get(param.var()).unwrap())).collect::<Vec<_>>()
        };
        let want = gradients(false, false);
        assert!([(true, false), (true, true)].into_iter().all(|(frozen, again)| gradients(frozen, again) == want));
    });
}

#[test]
fn refuses_different_choices_on_ranks() {
    for dims in [vec![("dp_shard", 4)], vec![("dp_replicate", 2), ("dp_shard", 2)]] {
        ranks(4, |world| {
            let vars = vars_on(&world, &dims);
            let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
            let own = if world.rank() == 3 { "blocks.1.up.bias" } else { "blocks.1.down.bias" };
            // The first in the order of building.
            let first = "parameter `blocks.1.up.bias`: ranks disagree on whether it is trained";
            let would = if world.rank() == 3 { "rank 3 would freeze it" } else { "would train it" };
            refused(vars.set_requires_grad(false, |name| name == own), &[first, would, "nothing was changed"]);
            assert_eq!(vars.trainable().len(), vars.params().len());
            model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        });
    }
}

#[test]
fn refuses_impossible_choices() {
    let world = alone();
    let (vars, model) = built(&world, WIDTH);
    let error = vars.set_requires_grad(false, |name| name == "haed.weight").unwrap_err();
    assert!(matches!(&error, Error::Argument(why) if why.contains("none of the 17 parameters")), "{error}");
    let inside = model.call(|model| {
        refused(vars.set_requires_grad(false, |_| true), &["inside a forward or backward"]);
        model.head.forward(&batch(0, WIDTH))
    });
    inside.unwrap();

    // Parameters frozen before they are built. A layer of `nn` checks this, one of Candle's has no graph to them.
    let vars = ShardedVarMap::of_world(&world).unwrap();
    vars.freeze(|name| name.contains("blocks.1")).unwrap();
    let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
    refused(
        vars.set_requires_grad(true, |name| name == "blocks.1.up.weight"),
        &["parameter `blocks.1.up.weight`: it was frozen (`freeze`) when it was built"],
    );
    let trained = |name: &str| !name.contains("blocks.1.up");
    vars.set_requires_grad(true, trained).unwrap();
    let grads = model.backward(&loss_of(&model, &batch(0, WIDTH))).unwrap();
    has_exactly(&vars, &grads, trained);
    let born = self::vars(&world);
    let other = sharded(&FullyShard::new(&born), &born, WIDTH);
    let want = other.backward(&loss_of(&other, &batch(0, WIDTH))).unwrap();
    for (param, other) in vars.trainable().iter().zip(born.params().iter().filter(|param| trained(param.name()))) {
        let [got, want] =
            [(&grads, param), (&want, other)].map(|(grads, p)| elements::<f32>(grads.get(p.var()).unwrap()));
        assert_eq!(got, want, "{}", param.name());
    }
}

#[test]
fn freezing_drops_accumulated_gradients() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model =
            fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| nn::linear(WIDTH, 2, vb)).unwrap();
        let loss = || loss_of(&model, &batch(world.rank(), WIDTH));
        let want = model.backward(&loss()).unwrap();
        model.set_requires_gradient_sync(false, Recurse::Yes);
        model.backward(&loss()).unwrap();
        vars.set_requires_grad(false, |name| name == "weight").unwrap();
        vars.set_requires_grad(true, |name| name == "weight").unwrap();
        model.set_requires_gradient_sync(true, Recurse::Yes);
        let grads = model.backward(&loss()).unwrap();
        let [weight, bias] = [0, 1].map(|i| vars.params()[i].var().clone());
        let of = |grads: &GradStore, var: &Var| grads.get(var).map(elements::<f32>);
        assert_eq!(of(&grads, &weight), of(&want, &weight));
        let twice = of(&want, &bias).map(|bias| bias.iter().map(|b| 2. * b).collect::<Vec<_>>());
        assert_eq!(of(&grads, &bias), twice);

        // Frozen between a forward and its backward: the graph reaches it, but it gets no gradient.
        let begun = loss();
        vars.set_requires_grad(false, |name| name == "weight").unwrap();
        let grads = model.backward(&begun).unwrap();
        assert!(grads.get(&weight).is_none() && of(&grads, &bias) == of(&want, &bias));
        // Unfrozen between them: the graph does not reach it.
        let begun = loss();
        vars.set_requires_grad(true, |name| name == "weight").unwrap();
        let grads = model.backward(&begun).unwrap();
        assert!(grads.get(&weight).is_none() && of(&grads, &bias) == of(&want, &bias));
        assert_eq!(of(&model.backward(&loss()).unwrap(), &weight), of(&want, &weight));
    });
}

#[test]
fn state_dicts_and_gradcheck_follow_frozen_parameters() {
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
            let cut = candle_nn::layer_norm(WIDTH, 1e-5, vb.pp("cut"))?; // has no backward
            Ok((nn::linear(WIDTH, WIDTH, vb.pp("body"))?, cut, nn::linear(WIDTH, WIDTH, vb.pp("head"))?))
        })
        .unwrap();
        let optim = AdamW::new(vars.params(), AdamWConfig::default()).unwrap();
        vars.set_requires_grad(false, |name| !name.starts_with("head.")).unwrap();
        let options = StateDictOptions { ignore_frozen_params: true, ..Default::default() };
        let names = |dict: fsdp_candle::StateDict| dict.tensors.keys().cloned().collect::<Vec<_>>();
        let saved = names(get_model_state_dict(&vars, &options).unwrap());
        assert_eq!(saved, ["head.bias", "head.weight"]);
        let moments = names(get_optimizer_state_dict(&vars, &optim, &options).unwrap());
        assert!(moments.iter().any(|name| name == "state.body.weight.exp_avg"), "{moments:?}"); // as PyTorch has it

        let forward = |model: &fsdp_candle::FsdpModule<(nn::Linear, candle_nn::LayerNorm, nn::Linear)>| {
            let x = batch(world.rank(), WIDTH);
            let y = model.call(|(body, cut, head)| {
                let x = body.forward(&x)?;
                head.forward(&cut.forward(&x)?)? + x
            })?;
            y.sqr()?.mean_all()
        };
        // The head comes after the cut, so with the rest frozen the step works.
        gradcheck(&model, &GradcheckOptions::default(), forward).unwrap();
        assert!(model.graph_cuts().is_empty());
        vars.set_requires_grad(true, |_| true).unwrap();
        let Err(Error::Gradcheck(_)) = gradcheck(&model, &GradcheckOptions::default(), forward) else {
            panic!("the gradient of the body is lost in the cut")
        };
        assert_eq!(model.graph_cuts().len(), 1);
        let saved = names(get_model_state_dict(&vars, &options).unwrap());
        assert_eq!(saved.len(), 6);
    });
}

#[test]
fn captured_tensors_keep_frozen_parameters() {
    ranks(2, |world| {
        let run = |captured: bool| {
            let vars = vars(&world);
            vars.freeze(|name| name.contains("frozen")).unwrap();
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
            let grads = root.backward(&mean_square(&y.unwrap())).unwrap();
            assert_eq!(*seen.lock().unwrap(), [false]);
            assert_resharded(&vars);
            gradients(&vars, &grads)
        };
        assert_close(&run(true), &run(false), 1e-6);
    });
}
