//! Threads that compute with one model.

use std::sync::Barrier;
use std::thread;

use candle_core::{DType, Module, Result, Tensor};
use fsdp_candle::{FsdpModule, FullyShard, ShardedVarMap, nn, shard};
use rayon::prelude::*;

use crate::common::{
    Block, Model, WIDTH, alone, assert_close, assert_contains, assert_resharded, batch, built, elements, gradients,
    gradients_of, mean_square, plain, ranks, refused, vars,
};
use crate::reentrancy::within_deadline;

/// Parts of the error of a call beside a running one.
const BESIDE: [&str; 3] = [
    "FSDP unit `(root)`: its forward was called while another thread, or another job of a rayon pool",
    "runs the forward of unit `(root)`",
    "with `iter` instead of rayon's `par_iter`",
];

/// The blocks as units by name.
fn by_name(vars: &ShardedVarMap, width: usize) -> FsdpModule<Model<Block>> {
    let opts = FullyShard::new(vars);
    shard(&opts, &["blocks.*"], vars.builder(DType::F32), |vb| plain(vb, width)).unwrap()
}

/// A call beside a running one is refused on every rank, and the running one goes on.
#[test]
fn a_second_thread_must_not_call_a_running_model() {
    within_deadline(|| {
        ranks(2, |world| {
            let vars = vars(&world);
            let (model, x) = (by_name(&vars, WIDTH), batch(world.rank(), WIDTH));
            let want = gradients_of(&vars, &model, &x);
            let y = model.call(|inner| {
                let beside = thread::scope(|scope| scope.spawn(|| model.forward(&x)).join().unwrap());
                refused(beside, &BESIDE);
                inner.forward(&x)
            });
            let grads = model.backward(&mean_square(&y.unwrap())).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 0.);
            assert_resharded(&vars);
        });
    });
}

/// A worker that waits inside a layer runs another job of its pool, here the same forward.
#[test]
fn a_job_below_a_running_forward_is_refused() {
    within_deadline(|| {
        let world = alone();
        let vars = vars(&world);
        let (model, x) = (by_name(&vars, WIDTH), batch(0, WIDTH));
        let want = gradients_of(&vars, &model, &x);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let y = pool.install(|| {
            model.call(|inner| {
                refused(model.forward(&x), &BESIDE);
                inner.forward(&x)
            })
        });
        let grads = model.backward(&mean_square(&y.unwrap())).unwrap();
        assert_close(&gradients(&vars, &grads), &want, 0.);
    });
}

/// Forwards of a parallel iterator end, each with its values or with the error.
#[test]
fn parallel_forwards_never_hang() {
    within_deadline(|| {
        let world = alone();
        let vars = vars(&world);
        let (model, x) = (by_name(&vars, 64), batch(0, 64));
        let want: Vec<f32> = elements(&model.forward(&x).unwrap());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        for _ in 0..50 {
            model.reset_iter_state();
            let all: Vec<Result<Tensor>> = pool.install(|| (0..8).into_par_iter().map(|_| model.forward(&x)).collect());
            assert!(all.iter().any(|y| y.is_ok()));
            for y in all {
                match y {
                    Ok(y) => assert_eq!(elements::<f32>(&y), want),
                    Err(error) => assert_contains(&error.to_string(), &BESIDE),
                }
            }
        }
    });
}

#[test]
fn another_thread_may_call_an_inner_unit() {
    within_deadline(|| {
        ranks(2, |world| {
            let ((vars, model), x) = (built(&world, WIDTH), batch(world.rank(), WIDTH));
            let want = gradients_of(&vars, &model, &x);
            let y = model.call(|inner| {
                let block = |x: Tensor, block: &FsdpModule<Block>| {
                    thread::scope(|scope| scope.spawn(|| block.forward(&x)).join().unwrap())
                };
                inner.head.forward(&inner.blocks.iter().try_fold(x.clone(), block)?)
            });
            let grads = model.backward(&mean_square(&y.unwrap())).unwrap();
            assert_close(&gradients(&vars, &grads), &want, 0.);
        });
    });
}

#[test]
fn a_held_model_computes_in_several_threads() {
    within_deadline(|| {
        ranks(2, |world| {
            let vars = vars(&world);
            let (model, x) = (by_name(&vars, WIDTH), batch(0, WIDTH));
            let held = model.unshard_all().unwrap();
            let want: Vec<f32> = elements(&model.forward(&x).unwrap());
            thread::scope(|scope| {
                for _ in 0..2 + world.rank() {
                    scope.spawn(|| (0..5).for_each(|_| assert_eq!(elements::<f32>(&model.forward(&x).unwrap()), want)));
                }
            });
            drop(held);
            assert_resharded(&vars);
        });
    });
}

/// Heads in one unit by name, each of which computes in a thread of its own.
struct Heads(Vec<nn::Linear>);

impl Heads {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let together = Barrier::new(self.0.len());
        let outputs: Vec<Result<Tensor>> = thread::scope(|scope| {
            let of_head = |head| {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    nn::Linear::forward(head, x)
                })
            };
            let threads: Vec<_> = self.0.iter().map(of_head).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        Tensor::cat(&outputs.into_iter().collect::<Result<Vec<_>>>()?, 1)
    }
}

/// The thread that comes first gathers the unit, and the others wait.
#[test]
fn layers_of_one_unit_compute_in_several_threads() {
    within_deadline(|| {
        for size in [1, 2] {
            ranks(size, |world| {
                let (vars, x) = (vars(&world), batch(world.rank(), WIDTH));
                let opts = FullyShard::new(&vars);
                let model = shard(&opts, &["heads"], vars.builder(DType::F32), |vb| {
                    let head = |i| nn::linear(WIDTH, 3, vb.pp(format!("heads.{i}")));
                    Ok::<_, candle_core::Error>(Heads((0..4).map(head).collect::<Result<_>>()?))
                })
                .unwrap();
                let one_by_one = model.call(|model| {
                    Tensor::cat(&model.0.iter().map(|head| head.forward(&x)).collect::<Result<Vec<_>>>()?, 1)
                });
                let want = gradients(&vars, &model.backward(&mean_square(&one_by_one.unwrap())).unwrap());
                for _ in 0..30 {
                    let y = model.call(|model| model.forward(&x)).unwrap();
                    let grads = model.backward(&mean_square(&y)).unwrap();
                    assert_close(&gradients(&vars, &grads), &want, 0.);
                    assert_resharded(&vars);
                }
            });
        }
    });
}
