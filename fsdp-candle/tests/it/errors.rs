//! Wrong use gives an error on every rank that says what to do, and the next step is correct.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{AdamW, AdamWConfig, FullyShard, GradScaler, ReduceScatter, fully_shard, nn, no_grad};
use fsdp_core::{Allocator, Buffer, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::common::{
    Sharded, WIDTH, alone, assert_close, assert_contains, batch, built, changed, elements, gradients, gradients_of,
    loss_of, ranks, reference, refused, shard_of_gradient, sharded, vars,
};

/// A reduce-scatter whose result lacks the last element.
struct Short;

impl ReduceScatter for Short {
    fn reduce_scatter(
        &self,
        ranks: &ProcessGroup,
        parts: Vec<ScatterPart>,
        op: ReduceOp,
        memory: Arc<dyn Allocator>,
    ) -> Work {
        let mut outputs = ranks.reduce_scatter(parts, op, memory).wait();
        if let Ok([first, ..]) = outputs.as_deref_mut() {
            let whole = std::mem::replace(first, Buffer::F32(vec![]));
            *first = changed(whole, |values| values.truncate(values.len() - 1));
        }
        Work::ready(outputs)
    }
}

#[test]
fn custom_collectives_with_wrong_lengths_are_errors() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        let backward = || model.backward(&loss_of(&model, &batch(world.rank(), WIDTH)));
        let unit = &model.inner().blocks[1];

        unit.set_custom_reduce_scatter(Some(Arc::new(Short)));
        refused(backward(), &["FSDP unit `blocks.1`: the reduce-scatter returned buffers of ["]);
        unit.set_custom_reduce_scatter(None);

        for cut in [false, true] {
            unit.set_all_reduce_hook(Some(Arc::new(move |mut shards: Vec<Buffer>| {
                let last = shards.pop().unwrap();
                if cut {
                    shards.push(changed(last, |values| values.truncate(1)));
                }
                Ok(shards)
            })));
            refused(backward(), &["`blocks.1`: the all-reduce hook changed the buffers' number or lengths"]);
        }
        unit.set_all_reduce_hook(None);
        assert_close(&gradients(&vars, &backward().unwrap()), &want, 0.);
    });
}

#[test]
fn candles_backward_and_dropped_models_are_errors() {
    let world = alone();
    let x = batch(0, WIDTH);
    let all = vars(&world);
    let model = sharded(&FullyShard::new(&all), &all, WIDTH);
    let loss = loss_of(&model, &x);
    drop(model);
    refused(loss.backward(), &["call `backward(&loss)` of the FsdpModule"]);
    drop(all);
    refused(loss.backward(), &["keep the FsdpModule alive until after backward"]);

    // A unit dropped after its forward is not an error: the map has its parameters.
    let all = vars(&world);
    let opts = FullyShard::new(&all);
    let vb = all.builder(DType::F32);
    let inner = fully_shard(&opts, vb.pp("inner"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
    let model = fully_shard(&opts, vb, |vb| nn::linear(WIDTH, 1, vb.pp("head"))).unwrap();
    let loss = model.call(|head| head.forward(&inner.forward(&x)?)?.sum_all()).unwrap();
    drop(inner);
    assert_eq!(shard_of_gradient(&all.params()[0], &model.backward(&loss).unwrap()).dims(), [WIDTH, WIDTH]);
}

/// Every way to lose the graph, on every rank. The next step is not affected.
#[test]
fn refuses_a_loss_without_a_graph() {
    type Loss = fn(&Sharded, &Tensor) -> Tensor;
    let losses: [Loss; 4] = [
        |model, x| no_grad(|| loss_of(model, x)),
        |model, x| loss_of(model, x).detach(),
        |model, x| (loss_of(model, x) * 0.).unwrap(),
        |_, x| x.sqr().unwrap().mean_all().unwrap(),
    ];
    for size in [1, 2] {
        ranks(size, |world| {
            let want = reference(&world);
            let (vars, model) = built(&world, WIDTH);
            let x = batch(world.rank(), WIDTH);
            for loss in losses {
                refused(model.backward(&loss(&model, &x)), &["the loss has no graph", "outside of no_grad"]);
                assert_close(&gradients_of(&vars, &model, &x), &want, 0.);
            }
            // Nothing is trained, so nothing is missing.
            vars.set_requires_grad(false, |_| true).unwrap();
            assert!(model.backward(&losses[0](&model, &x)).is_ok());
        });
    }
}

/// The other ranks get an error about the rank that left, and do not wait for it.
#[test]
fn a_loss_without_a_graph_on_one_rank_ends_the_others() {
    let outcomes = ranks(2, |world| {
        let (_vars, model) = built(&world, WIDTH);
        let loss = loss_of(&model, &batch(world.rank(), WIDTH));
        let loss = if world.rank() == 0 { loss.detach() } else { loss };
        model.backward(&loss).unwrap_err().to_string()
    });
    assert!(outcomes[0].contains("the loss has no graph"), "{}", outcomes[0]);
    assert!(outcomes[1].contains("FSDP unit"), "{}", outcomes[1]);
}

#[test]
fn refuses_backward_inside_forward() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let inner = fully_shard(&opts, vars.builder(DType::F32).pp("inner"), |vb| nn::linear(4, 4, vb)).unwrap();
    let model =
        fully_shard(&opts, vars.builder(DType::F32), |vb| Ok((inner, nn::linear(4, 4, vb.pp("head"))?))).unwrap();
    let x = batch(0, 4);
    refused(
        model.call(|(inner, head)| {
            let hidden = inner.forward(&x)?;
            inner.backward(&hidden.sum_all()?)?;
            head.forward(&hidden)
        }),
        &["forward"],
    );
    model.reset_iter_state();
    let loss = model.call(|(inner, head)| head.forward(&inner.forward(&x)?)?.sum_all()).unwrap();
    assert!(model.backward(&loss).is_ok());
}

#[test]
fn refuses_whole_gradients_and_misused_scalers() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(2.);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        refused(scaler.step(&mut optim, &grads), &["call unscale first"]);
        scaler.unscale(&vars, &mut grads).unwrap();
        refused(scaler.unscale(&vars, &mut grads), &["call step and update before"]);
        assert!(scaler.step(&mut optim, &grads).unwrap());
        // Gradients are unscaled once a step, and the scale changes at the update.
        refused(scaler.unscale(&vars, &mut grads), &["call step and update"]);
        scaler.update().unwrap();
        assert!(scaler.update().is_err());

        let param = vars.trainable()[0].clone();
        let before = elements::<f32>(param.var());
        grads.insert(param.var(), Tensor::zeros(param.shape(), DType::F32, world.device()).unwrap());
        refused(optim.step(&grads), &[param.name(), "use gradients of FsdpModule::backward"]);
        assert_eq!(elements::<f32>(param.var()), before);
    });
}

#[test]
fn trains_after_a_failed_step() {
    let losses = ranks(2, |world| {
        let (vars, model) = built(&world, 4);
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
        refused(step(true), &["injected"]);
        (first, step(false).unwrap())
    });
    for (before, after) in losses {
        assert_eq!(before, after);
    }
}

#[test]
fn repeats_backward_and_refuses_a_reset_graph() {
    use fsdp_candle::ReshardAfterForward::{Always, Default, Never};
    for policy in [Default, Always, Never] {
        ranks(2, |world| {
            let vars = vars(&world);
            vars.freeze(|name| name.contains("blocks.1.up")).unwrap();
            let model = sharded(&FullyShard::new(&vars).reshard_after_forward(policy), &vars, 4);
            let loss = || loss_of(&model, &batch(world.rank(), 4));
            let first = loss();
            let want = gradients(&vars, &model.backward_retain_graph(&first).unwrap());
            assert_close(&gradients(&vars, &model.backward(&first).unwrap()), &want, 0.);
            let text = model.backward(&first).unwrap_err().to_string();
            assert_contains(&text, &["has been through backward", "run forward again", "backward_retain_graph"]);
            if policy == Default {
                let forgotten = loss();
                model.reset_iter_state();
                for loss in [&forgotten, &first] {
                    let text = model.backward(loss).unwrap_err().to_string();
                    assert_contains(&text, &["has been through backward", "run forward again"]);
                    assert!(!text.contains("outside the forward"), "{text}");
                }
            }
            assert_close(&gradients(&vars, &model.backward(&loss()).unwrap()), &want, 0.);
        });
    }
}
