//! Which dimensions of a mesh are data parallel.

/// The roles of a mesh's dimensions: PyTorch's `DataParallelMeshDims`, as in
/// `fully_shard(.., mesh=mesh, dp_mesh_dims=..)`.
///
/// Several dimensions in one role are made one, in the order given. With `replicate` alone every rank holds whole
/// parameters (DDP), and with neither nothing is data parallel. Dimensions without a role are others': what
/// [`parallelize`](crate::parallelize) cuts along them, FSDP shards once more.
///
/// ```
/// use fsdp_candle::{DataParallelMeshDims, ShardedVarMap, World};
/// use fsdp_core::process_group::local;
///
/// local::run(8, |group| {
///     let world = World::of(group);
///     let mesh = world.mesh(&[("replicate", 2), ("shard", 2), ("tp", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["shard"], replicate: &["replicate"] };
///     let vars = ShardedVarMap::with_mesh_dims(&mesh, &dims, world.device())?;
///     assert_eq!(vars.mesh().size(), 8);
///     Ok::<_, fsdp_candle::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataParallelMeshDims<'a> {
    /// The dimensions that parameters are sharded over.
    pub shard: &'a [&'a str],
    /// Those that hold the same shards.
    pub replicate: &'a [&'a str],
}
