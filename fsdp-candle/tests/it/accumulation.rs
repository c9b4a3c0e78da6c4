//! Several forwards and backwards, with and without communication, add up to the correct gradients.

use candle_core::{DType, Module};
use fsdp_candle::{FullyShard, Recurse, ReshardAfterForward, fully_shard, nn};

use crate::common::{
    WIDTH, assert_close, batch, built, gradients, gradients_of, loss_of, mean_square, ranks, reference, sharded, times,
    vars, vars_on,
};

#[test]
fn accumulation_without_communication() {
    let one_replica = vec![("replicate", 1), ("shard", 2)];
    for (size, mesh) in [(2, vec![("shard", 2)]), (2, one_replica), (4, vec![("replicate", 2), ("shard", 2)])] {
        ranks(size, |world| {
            let run = |sync: bool, all_reduce: bool| {
                let vars = vars_on(&world, &mesh);
                let model = sharded(&FullyShard::new(&vars), &vars, WIDTH);
                model.set_requires_gradient_sync(sync, Recurse::Yes);
                model.set_requires_all_reduce(all_reduce, Recurse::Yes);
                let first = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
                model.set_requires_gradient_sync(true, Recurse::Yes);
                model.set_requires_all_reduce(true, Recurse::Yes);
                let delivered = vars.trainable().iter().filter(|param| first.get(param.var()).is_some()).count();
                let waits = !sync || !all_reduce;
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
fn manual_finalization() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        model.set_manual_backward_finalization(true);
        let mut grads = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert!(vars.trainable().iter().all(|param| grads.get(param.var()).is_none()));
        model.finalize_backward(&mut grads).unwrap();
        assert_close(&gradients(&vars, &grads), &want, 0.);

        // The last of two backwards reduces the sum.
        model.set_manual_backward_finalization(false);
        model.set_is_last_backward(false);
        let first = model.backward(&loss_of(&model, &batch(world.rank(), WIDTH))).unwrap();
        assert!(vars.trainable().iter().all(|param| first.get(param.var()).is_none()));
        model.set_is_last_backward(true);
        assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &times(&want, 2.), 1e-6);
    });
}

#[test]
fn candles_backward_leaves_no_gradients() {
    ranks(2, |world| {
        let want = reference(&world);
        let (vars, model) = built(&world, WIDTH);
        assert!(loss_of(&model, &batch(world.rank(), WIDTH)).backward().is_err());
        assert_close(&gradients_of(&vars, &model, &batch(world.rank(), WIDTH)), &want, 0.);
    });
}

#[test]
fn two_losses_and_two_roots() {
    ranks(2, |world| {
        for reshard in [ReshardAfterForward::Default, ReshardAfterForward::Always, ReshardAfterForward::Never] {
            // Two forwards, then a backward of each.
            let one = vars(&world);
            let model = sharded(&FullyShard::new(&one).reshard_after_forward(reshard), &one, WIDTH);
            let (a, b) = (batch(world.rank(), WIDTH), batch(world.rank() + 7, WIDTH));
            let apart: Vec<_> = [&a, &b].map(|x| gradients_of(&one, &model, x)).into();
            let (first, second) = (loss_of(&model, &a), loss_of(&model, &b));
            assert_close(&gradients(&one, &model.backward(&first).unwrap()), &apart[0], 0.);
            assert_close(&gradients(&one, &model.backward(&second).unwrap()), &apart[1], 0.);

            // An encoder and a decoder called one after the other, with and without a root unit.
            let run = |rooted: bool| {
                let map = vars(&world);
                let opts = FullyShard::new(&map).reshard_after_forward(reshard);
                let vb = map.builder(DType::F32);
                let unit = |name: &str| fully_shard(&opts, vb.pp(name), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
                let (encoder, decoder) = (unit("encoder"), unit("decoder"));
                if rooted {
                    let root = fully_shard(&opts, vb.clone(), |_| Ok((encoder, decoder))).unwrap();
                    let y = root.call(|(encoder, decoder)| decoder.forward(&encoder.forward(&a)?)).unwrap();
                    gradients(&map, &root.backward(&mean_square(&y)).unwrap())
                } else {
                    let y = decoder.forward(&encoder.forward(&a).unwrap()).unwrap();
                    gradients(&map, &decoder.backward(&mean_square(&y)).unwrap())
                }
            };
            assert_close(&run(false), &run(true), 0.);
        }
    });
}

#[test]
fn delayed_all_reduces_are_kept() {
    ranks(4, |world| {
        let run = |wait: bool| {
            let map = vars_on(&world, &[("replicate", 2), ("shard", 2)]);
            let opts = FullyShard::new(&map);
            let vb = map.builder(DType::F32);
            let unit = |name: &str| fully_shard(&opts, vb.pp(name), |vb| nn::linear(WIDTH, WIDTH, vb)).unwrap();
            let (a, b) = (unit("a"), unit("b"));
            let root = fully_shard(&opts, vb.clone(), |_| Ok((a, b))).unwrap();
            let x = batch(world.rank(), WIDTH);
            // The first micro-batch uses both units, the last one only `a`.
            root.set_requires_all_reduce(!wait, Recurse::Yes);
            let first = root.backward(&mean_square(&root.call(|(a, b)| b.forward(&a.forward(&x)?)).unwrap())).unwrap();
            root.set_requires_all_reduce(true, Recurse::Yes);
            let mut last = root.backward(&mean_square(&root.call(|(a, _)| a.forward(&x)).unwrap())).unwrap();
            if !wait {
                last.extend(first).unwrap();
            }
            gradients(&map, &last)
        };
        assert_close(&run(true), &run(false), 1e-5);
    });
}
