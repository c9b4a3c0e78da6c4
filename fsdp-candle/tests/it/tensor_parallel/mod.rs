//! Layers under a tensor parallel plan, compared with the same layers without one.

mod checkpoints;
mod inputs;
mod layers;
mod losses;

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp_candle::{
    DataParallelMeshDims, FsdpModule, FullyShard, ParallelPlan, Placement, ShardedVarMap, World, fully_shard,
    parallelize,
};

use crate::common::{cut, device, elements, exact as values, ranks, shard_of_gradient, unsharded};

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// Repeatable ids below `bound`.
fn ids(seed: u32, shape: &[usize], bound: u32) -> Tensor {
    let count = shape.iter().product::<usize>() as u32;
    Tensor::from_vec((0..count).map(|i| (i * 17 + seed) % bound).collect(), shape, &device()).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    elements(tensor)
}

/// Close for the dtype, relative to the largest value.
fn assert_near(what: &str, found: &Tensor, wanted: &Tensor) {
    let tolerance = match wanted.dtype() {
        DType::BF16 => 2.5e-2,
        DType::F16 => 4e-3,
        // The AVX2 matrix product was seen to differ by 2e-6.
        _ => 1e-5,
    };
    assert_within(what, found, wanted, tolerance);
}

fn assert_within(what: &str, found: &Tensor, wanted: &Tensor, tolerance: f64) {
    assert_eq!((found.dims(), found.dtype()), (wanted.dims(), wanted.dtype()), "{what}");
    let (found, wanted) = (numbers(found), numbers(wanted));
    let scale = wanted.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
    for (found, wanted) in found.iter().zip(&wanted) {
        assert!((found - wanted).abs() <= tolerance * scale, "{what}: {found} instead of {wanted}");
    }
}

/// A map over all ranks, with the plan for tensor parallelism.
fn parallel_vars(world: &World, plan: &ParallelPlan) -> ShardedVarMap {
    let mesh = world.mesh(&[("dp", 1), ("tp", world.size())]).unwrap();
    let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
    let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device()).unwrap();
    parallelize(&vars, &mesh.slice(&["tp"]).unwrap(), plan).unwrap();
    vars
}

fn build<M>(vars: &ShardedVarMap, dtype: DType, new: impl FnOnce(VarBuilder<'static>) -> Result<M>) -> FsdpModule<M> {
    fully_shard(&FullyShard::new(vars), vars.builder(dtype), new).unwrap()
}

/// This rank's part of a full tensor.
fn part(x: &Tensor, layout: Placement, world: &World) -> Tensor {
    match layout {
        Placement::Shard(dim) => {
            let part = x.dims()[dim] / world.size();
            x.narrow(dim, world.rank() * part, part).unwrap().contiguous().unwrap()
        }
        _ => x.clone(),
    }
}

/// Compares each rank's part of the parameter gradients with the full ones.
fn assert_same_gradients(
    what: &str,
    (vars, grads): (&ShardedVarMap, &candle_core::backprop::GradStore),
    (whole, whole_grads): (&ShardedVarMap, &candle_core::backprop::GradStore),
) {
    assert_eq!(vars.trainable().len(), whole.trainable().len());
    for (param, of_whole) in vars.trainable().iter().zip(whole.trainable()) {
        assert_eq!((param.name(), param.shape()), (of_whole.name(), of_whole.shape()));
        assert_eq!(numbers(param.var()), numbers(&cut(param, of_whole.var())), "{what}: {}", param.name());
        let wanted = cut(param, whole_grads.get(of_whole.var()).unwrap());
        assert_near(&format!("{what}: gradient of {}", param.name()), shard_of_gradient(param, grads), &wanted);
    }
}

/// The settings of a comparison.
struct Case {
    plan: ParallelPlan,
    input: Placement,
    output: Placement,
}

/// Compares a module under a plan with the same module without one: output, and gradients of input and parameters.
fn check<M: Module>(
    what: &str,
    case: &Case,
    shape: &[usize],
    prepare: impl Fn(&ShardedVarMap) + Sync,
    new: impl Fn(VarBuilder<'static>) -> Result<M> + Sync,
) {
    for size in 1..=4 {
        ranks(size, |world| {
            for dtype in DTYPES {
                let what = format!("{what} on rank {} of {size}, {dtype:?}", world.rank());
                let x = values(1, shape, dtype);
                let weigh = |y: &Tensor, weights: &Tensor| {
                    (y * weights).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap()
                };

                let whole_vars = unsharded(&world);
                prepare(&whole_vars);
                let whole = build(&whole_vars, dtype, &new);
                let whole_x = Var::from_tensor(&x).unwrap();
                let whole_y = whole.forward(&whole_x).unwrap();
                let weights = values(2, whole_y.dims(), dtype);
                let whole_grads = whole.backward(&weigh(&whole_y, &weights)).unwrap();

                let vars = parallel_vars(&world, &case.plan);
                prepare(&vars);
                let model = build(&vars, dtype, &new);
                let own_x = Var::from_tensor(&part(&x, case.input, &world)).unwrap();
                let y = model.forward(&own_x).unwrap();
                assert_near(&what, &y, &part(&whole_y, case.output, &world));
                let grads = model.backward(&weigh(&y, &part(&weights, case.output, &world))).unwrap();
                let wanted = part(whole_grads.get(&whole_x).unwrap(), case.input, &world);
                assert_near(&format!("{what}: gradient of the input"), grads.get(&own_x).unwrap(), &wanted);
                assert_same_gradients(&what, (&vars, &grads), (&whole_vars, &whole_grads));
                assert!(model.parameters_without_gradient().is_empty() && model.graph_cuts().is_empty(), "{what}");
            }
        });
    }
}
