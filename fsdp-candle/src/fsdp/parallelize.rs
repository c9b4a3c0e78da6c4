//! `parallelize` names the modules that tensor parallelism divides, before the model is built.

use std::sync::Arc;

use fsdp_core::DeviceMesh;

use super::fully_shard::list_modules;
use super::var_map::ShardedVarMap;
use crate::data_parallel::check_ranks_agree;
use crate::error::{Error, Result};
use crate::tensor_parallel::{BoundPlan, ParallelPlan};

/// Divides the modules that a plan names over the ranks of one dimension of the map's mesh: PyTorch's
/// `parallelize_module`. Call it before the model is built, as [`ShardedVarMap::freeze`]. FSDP shards the local parts
/// over the data-parallel dimensions. Collective over the map's mesh.
///
/// Layers of [`nn`](crate::nn) do the collectives of their divided parameters in forward and backward. Each asks its
/// builder for the global shape and gets the local part.
///
/// ```
/// use candle_core::{DType, Module, Tensor};
/// use fsdp_candle::{ColwiseParallel, DataParallelMeshDims, FullyShard, ParallelPlan, RowwiseParallel, ShardedVarMap};
/// use fsdp_candle::{World, fully_shard, nn, parallelize};
/// use fsdp_core::process_group::local;
///
/// local::try_run(4, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("dp", 2), ("tp", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
///     let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())?;
///     let plan = ParallelPlan::new()
///         .module("up", ColwiseParallel::default())
///         .module("down", RowwiseParallel::default());
///     parallelize(&vars, &mesh.slice(&["tp"])?, &plan)?;
///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///         Ok((nn::linear(4, 8, vb.pp("up"))?, nn::linear(8, 4, vb.pp("down"))?))
///     })?;
///     let up = vars.get("up.weight").unwrap();
///     assert_eq!((up.unsharded_shape().dims(), up.var().dims()), (&[4, 4][..], &[2, 4][..])); // of [8, 4]
///     let x = Tensor::ones((3, 4), DType::F32, world.device())?;
///     let y = model.call(|(up, down)| down.forward(&nn::gelu(&up.forward(&x)?)?))?;
///     model.backward(&y.sqr()?.mean_all()?)?;
///     Ok::<_, fsdp_candle::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if parameters are built already, or the map has a plan. Fails if `mesh` is not one dimension of the map's
/// mesh, or is data-parallel. Fails for an invalid pattern, and if ranks have different plans. Later, building fails
/// for a parameter whose dimension does not divide evenly, and for a layer that does not support tensor parallelism.
/// The first forward fails if a pattern matched no module.
pub fn parallelize(vars: &ShardedVarMap, mesh: &DeviceMesh, plan: &ParallelPlan) -> Result<()> {
    let fail = |message: String| Err(Error::Argument(format!("parallelize: {message}")));
    let built = vars.params().first().map(|param| param.name().to_string());
    if let Some(name) = built.or_else(|| vars.wholes().into_iter().map(|(name, _)| name).next()) {
        return fail(format!("`{name}` is built already: call it before the model is built"));
    }
    let of = vars.mesh();
    let &[_] = mesh.layout().shape() else {
        return fail(format!("the mesh {} is not one dimension: pass a slice of {}", mesh.layout(), of.layout()));
    };
    let group = mesh.group(0)?;
    let ranks = vars.ranks()?;
    let name = mesh.layout().names()[0].as_str();
    if !of.group_by_name(name).is_ok_and(|along| along.is(group)) {
        return fail(format!(
            "the mesh {} is not a dimension of the map's mesh {}: make the map on the whole mesh \
             (ShardedVarMap::with_dp_mesh_dims), and pass a slice of it (`vars.mesh().slice(&[\"tp\"])`)",
            mesh.layout(),
            of.layout()
        ));
    }
    if ranks.parallel_dim(name, group).is_none() {
        return fail(format!(
            "dimension \"{name}\" of the map's mesh {} is data parallel: pass the data-parallel dimensions without it \
             to ShardedVarMap::with_dp_mesh_dims",
            of.layout()
        ));
    }
    if vars.parallel_ranks().is_some() {
        return fail("the map has a plan already: make one plan of both".into());
    }
    let planned = Arc::new(BoundPlan::new(mesh, plan)?);
    check_ranks_agree(of, "plans of tensor parallelism", &format!("{name} {plan:?}"))?;
    vars.set_plan(planned, check_matched);
    Ok(())
}

/// Fails for a pattern that matched no module of the complete model.
fn check_matched(vars: &ShardedVarMap, plan: &BoundPlan) -> Result<()> {
    let Some(idle) = plan.unmatched().next() else { return Ok(()) };
    let params = vars.params();
    let modules = params.iter().filter_map(|param| param.name().rsplit_once('.')).map(|(module, _)| module);
    Err(Error::Argument(format!(
        "parallelize: the pattern `{idle}` of the plan matches no module with parameters of its own; the modules \
         are {}",
        list_modules(modules).unwrap_or("none".into())
    )))
}
