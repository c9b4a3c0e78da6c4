//! `parallelize`: which modules of a model are cut for tensor parallelism, said before it is built.

use std::sync::Arc;

use fsdp_core::DeviceMesh;

use super::var_map::{ShardedVarMap, lock};
use crate::error::{Error, Result};
use crate::tensor_parallel::{ParallelPlan, Planned};

/// Cuts the modules that a plan names over the ranks of one dimension of the map's mesh: PyTorch's
/// `parallelize_module`. Call it before the model is built, as [`ShardedVarMap::freeze`]; FSDP shards what is left over
/// the data-parallel dimensions.
///
/// Layers of [`nn`](crate::nn) that get a cut parameter do the collectives in forward and backward. Each asks its
/// builder for the global shape and gets the local part.
///
/// # Errors
/// When parameters are built already, the map has a plan, `mesh` is not one dimension of the map's mesh or is one of its
/// data-parallel ones, or a pattern is none. Later, when a parameter is built: when its dimension does not divide. When
/// a unit is closed: when the layer that holds it does not know of tensor parallelism.
pub fn parallelize(vars: &ShardedVarMap, mesh: &DeviceMesh, plan: &ParallelPlan) -> Result<()> {
    let fail = |message: String| Err(Error::Argument(format!("parallelize: {message}")));
    if let Some(param) = vars.params().first() {
        return fail(format!(
            "parameter `{}` is built already, whole: call it before the model is built",
            param.name()
        ));
    }
    let of = vars.mesh();
    let &[_] = mesh.layout().shape() else {
        return fail(format!("the mesh {} is not one dimension: pass a slice of {}", mesh.layout(), of.layout()));
    };
    let group = mesh.group(0)?;
    let ranks = vars.ranks()?;
    let is_in = |other: &DeviceMesh| {
        (0..other.layout().shape().len()).any(|dim| other.group(dim).is_ok_and(|along| along.is(group)))
    };
    if !is_in(of) {
        return fail(format!(
            "the mesh {} is no dimension of the map's mesh {}: pass a slice of that (`vars.mesh().slice(&[\"tp\"])`)",
            mesh.layout(),
            of.layout()
        ));
    }
    if is_in(ranks.data()) {
        return fail(format!(
            "dimension {} of the map's mesh {} is data parallel: name the dimensions that are, without this one, by \
             ShardedVarMap::on",
            mesh.layout(),
            of.layout()
        ));
    }
    let planned = Planned::new(mesh, plan)?;
    let mut own = lock(&vars.0.plan);
    if own.is_some() {
        return fail("the map has a plan already: make one of both".into());
    }
    *own = Some(Arc::new(planned));
    Ok(())
}
