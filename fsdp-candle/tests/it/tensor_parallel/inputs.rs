//! Layers with the same input share its gather, and drop it in time.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::nn::{self, Linear};
use fsdp_candle::{ActivationLayout, ColwiseParallel, ParallelPlan, RowwiseParallel, no_grad};

use super::{build, parallel_vars, values};
use crate::common::{Identity, counted, refused};

const WIDTH: usize = 8;

/// Three layers of one input.
struct Qkv([Linear; 3]);

impl Qkv {
    fn new(vb: VarBuilder<'static>) -> Result<Self> {
        let layer = |name: &str| nn::linear(WIDTH, WIDTH, vb.pp(name));
        Ok(Qkv([layer("q")?, layer("k")?, layer("v")?]))
    }
}

impl Module for Qkv {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [q, k, v] = &self.0;
        (q.forward(x)? + k.forward(x)?)? * v.forward(x)?
    }
}

fn plan(input_layout: ActivationLayout) -> ParallelPlan {
    ParallelPlan::new().module("[qkv]", ColwiseParallel { input_layout, ..Default::default() })
}

fn input() -> Var {
    Var::from_tensor(&values(1, &[2, 4, WIDTH], DType::F32)).unwrap()
}

#[test]
fn layers_share_the_collectives_of_one_input() {
    let bytes = 4 * 2 * 4 * WIDTH;
    counted(2, |world, counts| {
        for (layout, forward, backward) in [
            (ActivationLayout::Replicate, vec![], vec![("all_reduce", bytes)]),
            (ActivationLayout::Shard(1), vec![("all_gather", bytes)], vec![("reduce_scatter", 2 * bytes)]),
        ] {
            let vars = parallel_vars(&world, &plan(layout));
            let model = build(&vars, DType::F32, Qkv::new);
            let x = input();
            for _ in 0..2 {
                counts.take();
                let y = model.forward(&x).unwrap();
                assert_eq!(counts.take(), forward);
                model.backward(&y.sum_all().unwrap()).unwrap();
                assert_eq!(counts.take(), backward);
            }
            // Without a graph as well.
            let y = no_grad(|| model.forward(&x)).unwrap();
            assert!(!y.track_op());
            assert_eq!(counts.take(), forward);
            // Inputs without a gradient need no reduction.
            let y = model.forward(&x.detach()).unwrap();
            counts.take();
            model.backward(&y.sum_all().unwrap()).unwrap();
            assert_eq!(counts.take(), []);
        }
    });
}

#[test]
fn split_inputs_are_gathered_once() {
    counted(2, |world, counts| {
        let style = RowwiseParallel { input_layout: ActivationLayout::Replicate, ..Default::default() };
        let vars = parallel_vars(&world, &ParallelPlan::new().module("[qkv]", style));
        let model = build(&vars, DType::F32, Qkv::new);
        counts.take();
        let y = model.forward(&input()).unwrap();
        assert_eq!(counts.names(), ["all_reduce"; 3]);
        model.backward(&y.sum_all().unwrap()).unwrap();
        assert_eq!(counts.names(), ["all_gather"]);
    });
}

#[test]
fn shared_inputs_do_not_keep_the_graph() {
    counted(2, |world, _| {
        for layout in [ActivationLayout::Replicate, ActivationLayout::Shard(1)] {
            let vars = parallel_vars(&world, &plan(layout));
            let model = build(&vars, DType::F32, Qkv::new);
            let held = Arc::new(());
            let x = input();
            // The graph holds the backward, and so the value in it.
            let start = || {
                let of_graph = held.clone();
                let backward = move |grad: &Tensor| {
                    let _held = &of_graph;
                    Ok(grad.clone())
                };
                x.apply_op1(Identity(backward)).unwrap()
            };

            let y = model.forward(&start()).unwrap();
            assert_eq!(Arc::strong_count(&held), 2, "the output has the graph");
            drop(y);
            assert_eq!(Arc::strong_count(&held), 1);

            // While the forward runs, only the last layer's input is kept.
            let y = model.call(|model| {
                let first = model.forward(&start())?;
                drop(first);
                assert_eq!(Arc::strong_count(&held), 2, "the last input");
                model.forward(&x)
            });
            assert_eq!(Arc::strong_count(&held), 1);
            model.backward(&y.unwrap().sum_all().unwrap()).unwrap();

            // After a failed forward nothing is kept.
            let failed = model.call(|model| {
                model.forward(&start())?;
                model.forward(&x.narrow(2, 0, 1)?)
            });
            refused(failed, &["the weight takes 8"]);
            assert_eq!(Arc::strong_count(&held), 1);
        }
    });
}
