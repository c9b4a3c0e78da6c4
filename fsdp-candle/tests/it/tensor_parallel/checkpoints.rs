//! Collectives do not overwrite the outputs of tensor parallel layers that a checkpoint keeps.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Var};
use candle_nn::VarBuilder;
use fsdp_candle::activation_checkpoint::selective_checkpoint;
use fsdp_candle::nn;
use fsdp_candle::{ColwiseParallel, ParallelPlan, Placement, RowwiseParallel, World};

use super::layers::{Block, REPLICATE, WIDTH, drawn, shard};
use super::{build, numbers, parallel_vars, part, values};
use crate::common::{one_of, ranks, shard_of_gradient};

/// The output and all gradients; with a checkpoint if `keep` is given, which chooses the operations to keep.
fn run<M: Module + Send + Sync + 'static>(
    world: &World,
    (plan, input): (&ParallelPlan, Placement),
    (shape, dtype): (&[usize], DType),
    new: impl FnOnce(VarBuilder<'static>) -> Result<M>,
    keep: Option<fn(usize) -> bool>,
) -> Vec<Vec<f64>> {
    let vars = parallel_vars(world, plan);
    drawn(&vars);
    let model = build(&vars, dtype, |vb| Ok(Arc::new(new(vb)?)));
    let x = Var::from_tensor(&part(&values(1, shape, dtype), input, world)).unwrap();
    let y = model.call(|module| match keep {
        None => module.forward(&x),
        Some(keep) => {
            let module = module.clone();
            selective_checkpoint(move |call| keep(call.number), move |x| module.forward(&x), x.as_tensor().clone())
        }
    });
    let y = y.unwrap();
    let weighed = (&y * values(2, y.dims(), dtype)).unwrap().to_dtype(DType::F64).unwrap();
    let grads = model.backward(&weighed.sum_all().unwrap()).unwrap();
    let mut found = vec![numbers(&y), numbers(grads.get(&x).unwrap())];
    found.extend(vars.trainable().iter().map(|param| numbers(shard_of_gradient(param, &grads))));
    found
}

/// The same bits with and without a checkpoint, for one sequence and for two; of two, the scattered part is not
/// contiguous.
fn check<M: Module + Send + Sync + 'static>(
    what: &str,
    case: (&ParallelPlan, Placement),
    width: usize,
    new: impl Fn(VarBuilder<'static>) -> Result<M> + Sync,
) {
    const KEEP: [fn(usize) -> bool; 3] = [|_| true, |number| number % 2 == 1, |_| false];
    for size in (1..=4).step_by(one_of(3)) {
        ranks(size, |world| {
            for dtype in super::DTYPES.into_iter().step_by(one_of(2)) {
                for batch in [1, 2] {
                    let shape = [batch, 12, width];
                    let want = run(&world, case, (&shape, dtype), &new, None);
                    for (i, keep) in KEEP.into_iter().enumerate() {
                        let found = run(&world, case, (&shape, dtype), &new, Some(keep));
                        assert!(found == want, "{what} of {shape:?}, {dtype:?}, {size} ranks, keep {i}");
                    }
                }
            }
        });
    }
}

#[test]
fn kept_outputs_of_parallel_layers() {
    for (input_layout, input) in [REPLICATE, shard(1), shard(-1)] {
        for (output_layout, _) in [REPLICATE, shard(1), shard(-1)] {
            let what = format!("{input_layout:?} -> {output_layout:?}");
            let plan = ParallelPlan::new().module("layer", ColwiseParallel { input_layout, output_layout });
            check(&format!("outputs {what}"), (&plan, input), 24, |vb| nn::linear(24, 12, vb.pp("layer")));
            let plan = ParallelPlan::new().module("layer", RowwiseParallel { input_layout, output_layout });
            check(&format!("inputs {what}"), (&plan, input), 24, |vb| nn::linear(24, 12, vb.pp("layer")));
            check(&format!("inputs, no bias, {what}"), (&plan, input), 24, |vb| {
                nn::linear_no_bias(24, 12, vb.pp("layer"))
            });
        }
    }
}

#[test]
fn kept_products_of_parallel_blocks() {
    for (of_sequence, layout) in [(false, Placement::Replicate), (true, Placement::Shard(1))] {
        check(&format!("block {layout}"), (&Block::plan(of_sequence), layout), WIDTH, Block::new);
    }
}
