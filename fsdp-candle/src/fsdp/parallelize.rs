//! `parallelize` names the modules that tensor parallelism divides, and the experts that live on different ranks, before
//! the model is built.

use std::sync::Arc;

use fsdp_core::DeviceMesh;

use super::fully_shard::list_modules;
use super::var_map::ShardedVarMap;
use crate::data_parallel::check_ranks_agree;
use crate::error::{Error, Result};
use crate::expert_parallel::ExpertPlan;
use crate::pattern::NamePattern;
use crate::tensor_parallel::{BoundPlan, ParallelPlan, ParallelStyle};

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
/// # Expert parallelism
/// A plan of [`ExpertParallel`](crate::ExpertParallel) modules is for a dimension that shards the other parameters:
/// ranks along it have different batches, send each other the tokens of their experts, and have different experts, which
/// FSDP shards over the remaining dimensions. A gradient is the mean over all batches, as that of the other parameters.
/// Norms, optimizers and checkpoints do not differ. A map may have such a plan, and one of tensor parallelism.
///
/// ```
/// use candle_core::{D, DType, Device, Module, Tensor};
/// use fsdp_candle::{DataParallelMeshDims, ExpertParallel, FullyShard, ParallelPlan, ShardedVarMap, World};
/// use fsdp_candle::{fully_shard, nn, parallelize};
/// use fsdp_core::process_group::local;
///
/// local::try_run(2, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("dp_shard", 1), ("ep", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["dp_shard", "ep"], replicate: &[] };
///     let vars = ShardedVarMap::with_dp_mesh_dims(&mesh, &dims, world.device())?;
///     parallelize(&vars, &mesh.slice(&["ep"])?, &ParallelPlan::new().module("experts", ExpertParallel))?;
///     let model = fully_shard(&FullyShard::new(&vars), vars.builder(DType::F32), |vb| {
///         let expert = |i| {
///             let vb = vb.pp(format!("experts.{i}"));
///             let [gate, up] = ["gate", "up"].map(|name| nn::linear_no_bias(4, 8, vb.pp(name)));
///             candle_core::Result::Ok(nn::SwiGlu::new(gate?, up?, nn::linear_no_bias(8, 4, vb.pp("down"))?))
///         };
///         let experts = (0..4).map(expert).collect::<candle_core::Result<Vec<_>>>()?;
///         Ok((nn::linear_no_bias(4, 4, vb.pp("router"))?, experts))
///     })?;
///     // Rank 1 has the experts 1 and 3.
///     let rows = vars.get("experts.1.gate.weight").unwrap().var().dims()[0];
///     assert_eq!(rows, [0, 8][world.rank()]);
///     let x = Tensor::rand(0f32, 1., (6, 4), &Device::Cpu)?;
///     let y = model.call(|(router, experts)| {
///         let scores = candle_nn::ops::softmax(&router.forward(&x)?, D::Minus1)?;
///         let chosen = nn::choose_experts(&scores, 2)?;
///         nn::mixture_of_experts(&x, experts, &chosen, &scores.gather(&chosen, 1)?)
///     })?;
///     model.backward(&y.sqr()?.mean_all()?)?;
///     Ok::<_, fsdp_candle::Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if parameters are built already, or the map has such a plan. Fails if `mesh` is not one dimension of the map's
/// mesh, is data-parallel, or does not shard for a plan of experts. Fails for an invalid pattern, for a plan of both
/// kinds, and if ranks have different plans. Later, building fails for a parameter whose dimension does not divide
/// evenly, and for a layer that does not support tensor parallelism. The first forward fails if a pattern matched no
/// module, and for a parameter below a list of experts that no [`SwiGlu`](crate::nn::SwiGlu) holds.
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
    let is_of_experts = |(_, style): &(String, ParallelStyle)| matches!(style, ParallelStyle::Expert(_));
    if plan.modules().iter().any(is_of_experts) {
        if let Some((other, style)) = plan.modules().iter().find(|module| !is_of_experts(module)) {
            return fail(format!(
                "the plan has ExpertParallel modules and makes `{other}` {}: make a plan of each kind, for its dimension of \
                 the mesh",
                style.name()
            ));
        }
        if vars.has_expert_plan() {
            return fail("the map has a plan of experts already: make one plan of both".into());
        }
        check_ranks_agree(of, "plans of expert parallelism", &format!("{name} {plan:?}"))?;
        let ranks = Arc::new(ranks.of_experts(of, name)?);
        vars.set_expert_plan(Arc::new(ExpertPlan::new(ranks, plan)?), check_experts);
        return Ok(());
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
    vars.set_plan(planned, check_modules);
    Ok(())
}

/// Fails for a pattern that matched no list of experts of the complete model, and for an expert's parameter that no
/// expert holds.
fn check_experts(vars: &ShardedVarMap, plan: &ExpertPlan) -> Result<()> {
    let params = vars.params();
    if let Some(param) = params.iter().find(|param| param.lacks_expert()) {
        return Err(param.error(
            "the plan makes its list of experts ExpertParallel, but no SwiGlu of fsdp_candle::nn holds it: build each \
             expert as a SwiGlu of three linear layers, or remove the list from the plan",
        ));
    }
    check_matched(vars, "list of experts", plan.unmatched().next())
}

/// Fails for a pattern that matched no module of the complete model.
fn check_modules(vars: &ShardedVarMap, plan: &BoundPlan) -> Result<()> {
    check_matched(vars, "module with parameters of its own", plan.unmatched().next())
}

/// Fails if a pattern of a plan matched nothing of this kind in the complete model.
fn check_matched(vars: &ShardedVarMap, kind: &str, idle: Option<&NamePattern>) -> Result<()> {
    let Some(idle) = idle else { return Ok(()) };
    let params = vars.params();
    let modules = params.iter().filter_map(|param| param.name().rsplit_once('.')).map(|(module, _)| module);
    Err(Error::Argument(format!(
        "parallelize: the pattern `{idle}` of the plan matches no {kind}; the modules are {}",
        list_modules(modules).unwrap_or("none".into())
    )))
}
