//! From a plain tensor to a DTensor.

use candle_core::Tensor;
use fsdp_core::{DTensorSpec, DeviceMesh, Placement, dtensor};

use super::tensor::DTensor;
use crate::error::Result;
use crate::storage::{copied, to_core_dtype, to_tensor};

/// Lays a tensor out over a mesh, as PyTorch's `distribute_tensor`. Every rank passes a full tensor of the same shape
/// and dtype; the data is that of the mesh's rank 0. Collective over the mesh.
///
/// # Errors
/// Those of [`DTensorSpec::new`] and of [`fsdp_core::dtensor::plan`] from replicate to `placements`, before anything is
/// sent; those of a collective.
pub fn distribute_tensor(tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
    distribute_tensor_from(tensor, mesh, placements, Some(0))
}

/// [`distribute_tensor`] with the data of another rank of the mesh, PyTorch's `src_data_rank`. With `None` each rank
/// takes its part of its own data, and nothing is sent.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fsdp_candle::{distribute_tensor_from, Placement::Shard, World};
/// # use fsdp_core::process_group::local;
/// # local::run(2, |group| {
/// # let world = World::of(group);
/// # let mesh = world.mesh(&[("dp", 2)])?;
/// let mine = Tensor::new(&[[world.rank() as u32; 2]; 2], world.device())?;
/// let sent = distribute_tensor_from(&mine, &mesh, &[Shard(0)], Some(1))?;
/// assert_eq!(sent.to_local().to_vec2::<u32>()?, [[1, 1]]);
/// let own = distribute_tensor_from(&mine, &mesh, &[Shard(0)], None)?;
/// assert_eq!(own.to_local().to_vec2::<u32>()?, [[world.rank() as u32; 2]]);
/// # Ok::<_, fsdp_candle::Error>(())
/// # }).into_iter().collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), fsdp_candle::Error>(())
/// ```
///
/// # Errors
/// As [`distribute_tensor`], and when the mesh has no such rank.
pub fn distribute_tensor_from(
    tensor: &Tensor,
    mesh: &DeviceMesh,
    placements: &[Placement],
    src_data_rank: Option<usize>,
) -> Result<DTensor> {
    let replicate = vec![Placement::Replicate; placements.len()];
    let spec = DTensorSpec::new(mesh.layout().clone(), &replicate, tensor.dims(), to_core_dtype(tensor.dtype())?)?;
    dtensor::plan(&spec, &spec.with_placements(placements)?)?;
    let local = match src_data_rank {
        Some(root) => to_tensor(mesh.broadcast(copied(tensor)?, root)?, tensor.dims(), tensor.device())?,
        None => tensor.clone(),
    };
    DTensor::at(local, spec, mesh).redistribute(placements)
}
