//! Units that stay unsharded: held by `unshard_all`, unsharded by hand, or kept from one forward to the next.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Optimizer;
use fsdp_candle::{
    AdamW, AdamWConfig, CandleOptimizer, Ema, FsdpModule, FullyShard, SGD, SgdConfig, ShardedOptimizer, ShardedVarMap,
    fully_shard, nn, no_grad, shard,
};

use crate::common::{
    Block, Model, WIDTH, all_refused, assert_close, assert_resharded, batch, built, gradients_of, journal, loss_of,
    plain, ranks, refused, vars, weights,
};

/// The blocks as units by name.
fn by_name(vars: &ShardedVarMap) -> FsdpModule<Model<Block>> {
    let opts = FullyShard::new(vars);
    shard(&opts, &["blocks.*"], vars.builder(DType::F32), |vb| plain(vb, WIDTH)).unwrap()
}

fn values(y: &Tensor) -> Vec<Vec<f32>> {
    y.to_vec2().unwrap()
}

fn sgd(vars: &ShardedVarMap) -> SGD {
    SGD::new(vars.trainable(), SgdConfig { lr: 0.5, ..SgdConfig::default() }).unwrap()
}

/// Trains two steps. Before each, the model is held, and `forwards` returns the number of a rank's forwards.
fn train<M: Module>(vars: &ShardedVarMap, model: &FsdpModule<M>, forwards: Option<fn(usize) -> usize>) {
    let rank = vars.mesh().rank();
    let x = batch(rank, WIDTH);
    let mut optim = sgd(vars);
    for _ in 0..2 {
        let want = values(&no_grad(|| model.forward(&x)).unwrap());
        if let Some(forwards) = forwards {
            let held = model.unshard_all().unwrap();
            assert!(vars.params().iter().all(|param| param.is_unsharded()));
            for _ in 0..forwards(rank) {
                let y = model.forward(&x).unwrap();
                assert!(!y.track_op());
                assert_eq!(values(&y), want);
            }
            drop(held);
            assert_resharded(vars);
        }
        optim.step(&model.backward(&loss_of(model, &x)).unwrap()).unwrap();
    }
}

#[test]
fn ranks_run_different_numbers_of_forwards() {
    /// Number of forwards of a rank.
    type Count = fn(usize) -> usize;
    let counts: [Option<Count>; 4] =
        [None, Some(|rank| 3 + rank), Some(|rank| usize::from(rank == 0) * 2), Some(|rank| usize::from(rank == 1))];
    for size in [1, 2, 3] {
        ranks(size, |world| {
            let runs = counts.map(|forwards| {
                let (nested, model) = built(&world, WIDTH);
                train(&nested, &model, forwards);
                let named = vars(&world);
                train(&named, &by_name(&named), forwards);
                (weights(&nested), crate::common::sorted(weights(&named)))
            });
            for (nested, named) in &runs[1..] {
                assert_close(nested, &runs[0].0, 0.);
                assert_close(named, &runs[0].1, 0.);
            }
        });
    }
}

#[test]
fn units_by_name_are_unsharded_by_hand() {
    ranks(2, |world| {
        let vars = vars(&world);
        let model = by_name(&vars);
        let x = batch(world.rank(), WIDTH);
        let want = values(&model.forward(&x).unwrap());
        model.reset_iter_state();
        let mut optim = AdamW::new(vars.trainable(), AdamWConfig::default()).unwrap();
        for step in 0..3 {
            model.unshard().unwrap();
            assert!(model.units().iter().all(|unit| unit.params().iter().all(|param| param.is_unsharded())));
            for _ in 0..3 + world.rank() {
                // With and without the hooks.
                let y = no_grad(|| model.forward(&x)).unwrap();
                assert_eq!(values(&y), values(&no_grad(|| model.inner().forward(&x)).unwrap()));
                assert!(step > 0 || values(&y) == want);
            }
            model.reshard().unwrap();
            assert_resharded(&vars);
            optim.step(&model.backward(&loss_of(&model, &x)).unwrap()).unwrap();
        }
    });
}

#[test]
fn a_root_is_gathered_once_for_the_forwards_of_a_step() {
    ranks(2, |world| {
        let vars = vars(&world);
        let opts = FullyShard::new(&vars);
        let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(WIDTH, 2, vb)).unwrap();
        let calls = Arc::new(Mutex::new(vec![]));
        model.set_custom_all_gather(Some(journal("gather".to_string(), &calls)));
        let x = batch(0, WIDTH);
        let mut optim = sgd(&vars);
        let once = gradients_of(&vars, &model, &x);
        for step in 1..=2 {
            calls.lock().unwrap().clear();
            // Another number on each rank.
            let count = 3 + world.rank();
            let losses: Vec<Tensor> = (0..count).map(|_| loss_of(&model, &x)).collect();
            let sum = losses.iter().skip(1).try_fold(losses[0].clone(), |sum, loss| sum + loss).unwrap();
            let grads = model.backward(&sum).unwrap();
            assert_eq!(calls.lock().unwrap().len(), 1, "step {step}");
            if step == 1 {
                // Rank 0 has three times, and rank 1 four times the gradient: 3.5 times on average.
                let got = crate::common::gradients(&vars, &grads);
                assert_close(&got, &crate::common::times(&once, 3.5), 1e-5);
            }
            assert_resharded(&vars);
            optim.step(&grads).unwrap();
        }
    });
}

#[test]
fn a_forward_sees_what_was_written_after_an_earlier_forward() {
    type Linear = FsdpModule<nn::Linear>;
    type Write = fn(&ShardedVarMap, &mut dyn FnMut() -> Result<Linear>);
    // Each makes a model, and writes after a forward that no backward follows.
    let writes: [(&str, Write); 6] = [
        ("SGD", |vars, kept| {
            let model = kept().unwrap();
            let mut optim = sgd(vars);
            let grads = model.backward(&loss_of(&model, &batch(0, WIDTH))).unwrap();
            kept().unwrap();
            optim.step(&grads).unwrap();
        }),
        ("CandleOptimizer", |vars, kept| {
            let model = kept().unwrap();
            let mut optim = CandleOptimizer::<candle_nn::SGD>::new(vars.trainable(), 0.5).unwrap();
            let grads = model.backward(&loss_of(&model, &batch(0, WIDTH))).unwrap();
            kept().unwrap();
            ShardedOptimizer::step(&mut optim, &grads).unwrap();
        }),
        ("candle_nn::SGD", |vars, kept| {
            let model = kept().unwrap();
            let mut optim = candle_nn::SGD::new(vars.trainable_vars(), 0.5).unwrap();
            let grads = model.backward(&loss_of(&model, &batch(0, WIDTH))).unwrap();
            kept().unwrap();
            optim.step(&grads).unwrap();
        }),
        ("var", |vars, kept| {
            kept().unwrap();
            for param in vars.params() {
                param.var().set(&(param.var().as_tensor() * 2.).unwrap()).unwrap();
            }
        }),
        ("set_local", |vars, kept| {
            kept().unwrap();
            for param in vars.params() {
                param.set_local(&(param.dtensor().unwrap().to_local() * 2.).unwrap()).unwrap();
            }
        }),
        ("Ema", |vars, kept| {
            let mut ema = Ema::new(vars.params(), 0.5).unwrap();
            let model = kept().unwrap();
            ema.update().unwrap();
            let grads = model.backward(&loss_of(&model, &batch(0, WIDTH))).unwrap();
            sgd(vars).step(&grads).unwrap();
            ema.update().unwrap();
            kept().unwrap();
            ema.copy_to(vars).unwrap();
        }),
    ];
    for (what, write) in writes {
        ranks(2, |world| {
            let vars = vars(&world);
            let opts = FullyShard::new(&vars);
            let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(WIDTH, 2, vb)).unwrap();
            let x = batch(world.rank(), WIDTH);
            let mut before = vec![];
            write(&vars, &mut || {
                before = values(&model.forward(&x)?);
                assert!(model.params().iter().all(|param| param.is_unsharded()));
                Ok(model.clone())
            });
            let seen = values(&model.forward(&x).unwrap());
            model.reset_iter_state();
            assert_eq!(seen, values(&model.forward(&x).unwrap()), "{what}");
            assert_ne!(seen, before, "{what}");
        });
    }
}

#[test]
fn a_step_while_a_model_is_held_is_an_error() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let x = batch(world.rank(), WIDTH);
        let grads = model.backward(&loss_of(&model, &x)).unwrap();
        let loss = loss_of(&model, &x);
        let held = model.unshard_all().unwrap();
        let way_out = "drop the handle before a forward or backward that trains";
        refused(model.backward(&loss), &["unit `(root)`", way_out]);
        // An optimizer's step frees the values.
        sgd(&vars).step(&grads).unwrap();
        refused(model.forward(&x), &["`unshard_all` held it", "call `unshard_all` again on every rank"]);
        drop(held);
        let block = model.inner().blocks[0].unshard_all().unwrap();
        refused(model.forward(&x), &["unit `blocks.0`", way_out]);
        drop(block);
        refused(
            model.call(|_| model.unshard_all().map(|_| x.clone())),
            &["unit `(root)`: unshard_all was called inside a forward"],
        );
        model.backward(&loss_of(&model, &x)).unwrap();
        assert_resharded(&vars);
    });
}

#[test]
fn a_teacher_is_held_while_a_student_trains() {
    ranks(2, |world| {
        let vars = vars(&world);
        let build = |name: &str| {
            let vb = vars.builder(DType::F32).pp(name);
            fully_shard(&FullyShard::new(&vars), vb, |vb| nn::linear(WIDTH, 2, vb)).unwrap()
        };
        let (teacher, student) = (build("teacher"), build("student"));
        let x = batch(world.rank(), WIDTH);
        let want = values(&no_grad(|| teacher.forward(&x)).unwrap());
        let mut optim = SGD::new(student.params().to_vec(), SgdConfig::default()).unwrap();
        let held = teacher.unshard_all().unwrap();
        for _ in 0..3 {
            let target = teacher.forward(&x).unwrap();
            assert_eq!(values(&target), want);
            let loss = (student.forward(&x).unwrap() - target).unwrap().sqr().unwrap().mean_all().unwrap();
            optim.step(&student.backward(&loss).unwrap()).unwrap();
        }
        drop(held);
        assert_resharded(&vars);
    });
}

#[test]
fn two_handles_hold_until_the_last_is_dropped() {
    ranks(2, |world| {
        let (vars, model) = built(&world, WIDTH);
        let (outer, inner) = (model.unshard_all().unwrap(), model.inner().blocks[1].unshard_all().unwrap());
        drop(outer);
        let unsharded = |name: &str| {
            vars.params().iter().filter(|param| param.is_unsharded()).all(|param| param.name().starts_with(name))
        };
        assert!(unsharded("blocks.1.") && model.inner().blocks[1].params().iter().all(|param| param.is_unsharded()));
        drop(inner);
        assert_resharded(&vars);
    });
}

#[test]
fn forwards_on_one_rank_alone_name_the_way_out() {
    let errors = ranks(2, |world| {
        let vars = vars(&world);
        let model = by_name(&vars);
        let x = batch(0, WIDTH);
        let outcome = match world.rank() {
            0 => no_grad(|| model.forward(&x)).map(drop),
            _ => model.unshard_all().map(drop),
        };
        outcome.unwrap_err().to_string()
    });
    all_refused(
        errors,
        &[
            "hold the model on all: `let held = model.unshard_all()?`. To train different units, `set_reduce_scatter_unused_params(true",
        ],
    );
}
