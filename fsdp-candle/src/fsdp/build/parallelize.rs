//! `parallelize`: which modules of a model are cut for tensor parallelism, said before it is built.

use std::sync::Arc;

use fsdp_core::DeviceMesh;

use super::by_name::listed;
use super::var_map::{ShardedVarMap, lock};
use crate::data_parallel::check_ranks_agree;
use crate::error::{Error, Result};
use crate::tensor_parallel::{ParallelPlan, Planned};

/// Cuts the modules that a plan names over the ranks of one dimension of the map's mesh: PyTorch's
/// `parallelize_module`. Call it before the model is built, as [`ShardedVarMap::freeze`]; FSDP shards what is left over
/// the data-parallel dimensions. Collective over the map's mesh.
///
/// Layers of [`nn`](crate::nn) that get a cut parameter do the collectives in forward and backward. Each asks its
/// builder for the global shape and gets the local part.
///
/// ```
/// use candle_core::{DType, Module, Tensor};
/// use fsdp_candle::{ColwiseParallel, DataParallelMeshDims, FullyShard, ParallelPlan, RowwiseParallel, ShardedVarMap};
/// use fsdp_candle::{World, fully_shard, nn, parallelize};
/// use fsdp_core::process_group::local;
///
/// local::run(4, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("dp", 2), ("tp", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["dp"], replicate: &[] };
///     let vars = ShardedVarMap::on(&mesh, &dims, world.device())?;
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
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When parameters are built already, the map has a plan, `mesh` is not one dimension of the map's mesh or is one of
/// its data-parallel ones, a pattern is none, or ranks have different plans. Later, when a parameter is built: when its
/// dimension does not divide. When a unit is closed: when the layer that holds a parameter does not know of tensor
/// parallelism. In the first forward: when a pattern has matched no module.
pub fn parallelize(vars: &ShardedVarMap, mesh: &DeviceMesh, plan: &ParallelPlan) -> Result<()> {
    let fail = |message: String| Err(Error::Argument(format!("parallelize: {message}")));
    let built = vars.params().first().map(|param| param.name().to_string());
    if let Some(name) = built.or_else(|| vars.wholes().into_iter().map(|(name, _)| name).next()) {
        return fail(format!("`{name}` is built already, whole: call it before the model is built"));
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
            "the mesh {} is no dimension of the map's mesh {}: make the map on the whole mesh (ShardedVarMap::on), and \
             pass a slice of that (`vars.mesh().slice(&[\"tp\"])`)",
            mesh.layout(),
            of.layout()
        ));
    }
    if ranks.parallel_dim(name, group).is_none() {
        return fail(format!(
            "dimension \"{name}\" of the map's mesh {} is data parallel: name the dimensions that are, without this \
             one, by ShardedVarMap::on",
            of.layout()
        ));
    }
    if vars.parallel_ranks().is_some() {
        return fail("the map has a plan already: make one of both".into());
    }
    let planned = Arc::new(Planned::new(mesh, plan)?);
    check_ranks_agree(of, "plans of tensor parallelism", &format!("{name} {plan:?}"))?;
    *lock(&vars.0.plan) = Some(planned.clone());
    let inner = Arc::downgrade(&vars.0);
    vars.schedule().before_first_forward(move || match inner.upgrade() {
        Some(inner) => check_matched(&ShardedVarMap(inner), &planned),
        None => Ok(()),
    });
    Ok(())
}

/// Fails for a pattern that matched no module of the model, which is built.
fn check_matched(vars: &ShardedVarMap, plan: &Planned) -> Result<()> {
    let Some(idle) = plan.idle().next() else { return Ok(()) };
    let params = vars.params();
    let modules = params.iter().filter_map(|param| param.name().rsplit_once('.')).map(|(module, _)| module);
    Err(Error::Argument(format!(
        "parallelize: the pattern `{idle}` of the plan matches no module that has parameters of its own; those that \
         are there: {}",
        listed(modules).unwrap_or("none".into())
    )))
}
