//! A map without a mesh.

use fsdp_core::DeviceMesh;

use super::var_map::ShardedVarMap;
use crate::error::Result;
use crate::world::World;

/// What the one dimension of a mesh is called that nobody made.
const DIM: &str = "dp_shard";

impl ShardedVarMap {
    /// An empty map that shards over all ranks of a job, on this rank's device: what PyTorch's `fully_shard` does
    /// without a `mesh`. Its mesh has one dimension, `dp_shard`. No communication.
    ///
    /// ```
    /// use fsdp_candle::{ShardedVarMap, World};
    ///
    /// let world = World::single()?;
    /// let vars = ShardedVarMap::of_world(&world)?;
    /// assert_eq!(vars.mesh().size_of("dp_shard")?, world.size());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// None that is known: those of [`DeviceMesh::from_group`].
    pub fn of_world(world: &World) -> Result<Self> {
        Ok(ShardedVarMap::new(&DeviceMesh::from_group(DIM, world.group())?, world.device()))
    }
}
