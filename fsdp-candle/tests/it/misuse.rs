//! What users do wrong is an error that says what to do, on every rank, and the next step is right.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use fsdp_candle::{AdamW, AdamWConfig, FsdpModule, FullyShard, GradScaler, ReduceScatter, fully_shard, nn, no_grad};
use fsdp_core::{Allocator, Buffer, ProcessGroup, ReduceOp, ScatterPart, Work};

use crate::common::{
    Block, Model, WIDTH, alone, assert_close, batch, changed, gradients, loss_of, ranks, reference, shard_of_gradient,
    sharded, vars,
};

/// Loses the last element of what it reduces.
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
fn collectives_of_a_users_own_that_change_lengths_are_named_and_forgiven() {
    ranks(2, |world| {
        let want = reference(&world);
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let backward = || model.backward(&loss_of(&model, &batch(world.rank(), WIDTH)));
        let unit = &model.inner().blocks[1];

        unit.set_custom_reduce_scatter(Some(Arc::new(Short)));
        let error = backward().unwrap_err().to_string();
        assert!(error.contains("FSDP unit `blocks.1`: the reduce-scatter returned buffers of ["), "{error}");
        unit.set_custom_reduce_scatter(None);

        for cut in [false, true] {
            unit.set_all_reduce_hook(Some(Arc::new(move |mut shards: Vec<Buffer>| {
                let last = shards.pop().unwrap();
                if cut {
                    shards.push(changed(last, |values| values.truncate(1)));
                }
                Ok(shards)
            })));
            let error = backward().unwrap_err().to_string();
            assert!(
                error.contains("`blocks.1`: the all-reduce hook changed the buffers' number or lengths"),
                "{error}"
            );
        }
        unit.set_all_reduce_hook(None);
        assert_close(&gradients(&vars, &backward().unwrap()), &want, 0.);
    });
}

#[test]
fn a_model_that_is_gone_and_a_backward_of_candles_own_are_named() {
    let world = alone();
    let x = batch(0, WIDTH);
    let all = vars(&world);
    let model = sharded(&FullyShard::new(&all), &all, WIDTH);
    let loss = loss_of(&model, &x);
    drop(model);
    let error = loss.backward().unwrap_err().to_string();
    assert!(error.contains("call `backward(&loss)` of the FsdpModule"), "{error}");
    drop(all);
    let error = loss.backward().unwrap_err().to_string();
    assert!(error.contains("keep the FsdpModule alive until after backward"), "{error}");

    // One that is dropped after its forward is no loss: the map has its parameters.
    let all = vars(&world);
    let opts = FullyShard::new(&all);
    let vb = all.builder(DType::F32);
    let inner = fully_shard(&opts, vb.pp("inner"), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
    let model = fully_shard(&opts, vb, |vb| nn::linear(WIDTH, 1, vb.pp("head"))).unwrap();
    let loss = model.call(|head| head.forward(&inner.forward(&x)?)?.sum_all()).unwrap();
    drop(inner);
    assert_eq!(shard_of_gradient(&all.params()[0], &model.backward(&loss).unwrap()).dims(), [WIDTH, WIDTH]);
}

/// However the graph was lost, on every rank; what follows is as if nothing had been.
#[test]
fn a_loss_without_a_graph_is_refused() {
    type Loss = fn(&FsdpModule<Model<FsdpModule<Block>>>, &Tensor) -> Tensor;
    let losses: [Loss; 4] = [
        |model, x| no_grad(|| loss_of(model, x)),
        |model, x| loss_of(model, x).detach(),
        |model, x| (loss_of(model, x) * 0.).unwrap(),
        |_, x| x.sqr().unwrap().mean_all().unwrap(),
    ];
    for size in [1, 2] {
        ranks(size, |world| {
            let want = reference(&world);
            let vars = vars(&world);
            let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
            let x = batch(world.rank(), WIDTH);
            for loss in losses {
                let error = model.backward(&loss(&model, &x)).unwrap_err().to_string();
                assert!(error.contains("the loss has no graph") && error.contains("outside of no_grad"), "{error}");
                assert_close(&gradients(&vars, &model.backward(&loss_of(&model, &x)).unwrap()), &want, 0.);
            }
            // Nothing is trained, and nothing is missed.
            vars.set_requires_grad(false, |_| true).unwrap();
            assert!(model.backward(&losses[0](&model, &x)).is_ok());
        });
    }
}

/// The others learn that it has left, and do not wait for it.
#[test]
fn a_loss_without_a_graph_on_one_rank_ends_the_others() {
    let outcomes = ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let loss = loss_of(&model, &batch(world.rank(), WIDTH));
        let loss = if world.rank() == 0 { loss.detach() } else { loss };
        model.backward(&loss).unwrap_err().to_string()
    });
    assert!(outcomes[0].contains("the loss has no graph"), "{}", outcomes[0]);
    assert!(outcomes[1].contains("FSDP unit"), "{}", outcomes[1]);
}

#[test]
fn a_backward_inside_a_forward_is_refused() {
    let world = alone();
    let vars = vars(&world);
    let opts = FullyShard::new(&vars);
    let inner = fully_shard(&opts, vars.builder(DType::F32).pp("inner"), |vb| nn::linear(4, 4, vb)).unwrap();
    let model =
        fully_shard(&opts, vars.builder(DType::F32), |vb| Ok((inner, nn::linear(4, 4, vb.pp("head"))?))).unwrap();
    let x = batch(0, 4);
    let error = model
        .call(|(inner, head)| {
            let hidden = inner.forward(&x)?;
            inner.backward(&hidden.sum_all()?)?;
            head.forward(&hidden)
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("forward"), "{error}");
    model.reset_iter_state();
    let loss = model.call(|(inner, head)| head.forward(&inner.forward(&x)?)?.sum_all()).unwrap();
    assert!(model.backward(&loss).is_ok());
}

#[test]
fn gradients_that_are_not_shards_and_scaling_out_of_turn_say_what_to_call() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        let mut scaler = GradScaler::new(2.);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        let error = scaler.step(&mut optim, &grads).unwrap_err().to_string();
        assert!(error.contains("call unscale first"), "{error}");
        scaler.unscale(&vars, &mut grads).unwrap();
        let error = scaler.unscale(&vars, &mut grads).unwrap_err().to_string();
        assert!(error.contains("call step and update before"), "{error}");
        assert!(scaler.step(&mut optim, &grads).unwrap());
        // The scale is another one from the update on, and gradients are unscaled once a step.
        let error = scaler.unscale(&vars, &mut grads).unwrap_err().to_string();
        assert!(error.contains("call step and update"), "{error}");
        scaler.update().unwrap();
        assert!(scaler.update().is_err());

        let param = vars.trainable()[0].clone();
        let before = param.var().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        grads.insert(param.var(), Tensor::zeros(param.shape(), DType::F32, world.device()).unwrap());
        let error = optim.step(&grads).unwrap_err().to_string();
        assert!(error.contains(param.name()) && error.contains("use gradients of FsdpModule::backward"), "{error}");
        assert_eq!(param.var().flatten_all().unwrap().to_vec1::<f32>().unwrap(), before);
    });
}
