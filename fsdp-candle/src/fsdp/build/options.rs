//! How the parameters of a unit are made.

use std::sync::Arc;

use crate::data_parallel::{DataParallel, ShardMesh};
use crate::extension::AllGatherExtension;
use crate::fsdp::policy::{MixedPrecisionPolicy, NamePredicate, OffloadPolicy, ReshardAfterForward};

/// How a parameter is sharded.
///
/// ```
/// use fsdp_candle::{DataParallelMeshDims, ShardMesh, ShardPlacement};
/// use fsdp_core::process_group::local;
/// # use candle_core::{DType, Module, Tensor};
/// # use fsdp_candle::{fully_shard, nn, FullyShard, ShardedVarMap, World};
///
/// local::run(4, |group| {
///     let world = World::of(group);
///     // Experts are sharded over pairs of ranks, all else over all four.
///     let pairs = world.mesh(&[("expert", 2), ("within", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["within"], replicate: &["expert"] };
///     let pairs = ShardMesh::of_dims(&pairs, &dims)?;
///     let vars = ShardedVarMap::new(&world.mesh(&[("dp_shard", 4)])?, world.device());
///     let opts = FullyShard::new(&vars).shard_placement_fn(move |fqn, shape| match fqn {
///         _ if fqn.starts_with("expert") => Some(ShardPlacement { dim: 0, mesh: Some(pairs.clone()) }),
///         _ if shape.len() == 2 => Some(ShardPlacement::from(1)), // by columns
///         _ => None,
///     });
///     let model = fully_shard(&opts, vars.builder(DType::F32), |vb| {
///         Ok((nn::linear(8, 8, vb.pp("gate"))?, nn::linear_no_bias(8, 8, vb.pp("expert"))?))
///     })?;
///     let shards: Vec<_> = model.params().iter().map(|param| param.var().dims().to_vec()).collect();
///     assert_eq!(shards, [vec![8, 2], vec![2], vec![4, 8]]);
///     Ok::<_, fsdp_candle::Error>(())
/// })
/// .into_iter()
/// .collect::<Result<Vec<_>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ShardPlacement {
    /// The tensor dimension that is cut. One other than 0 must divide evenly.
    pub dim: usize,
    /// Another mesh than the unit's. It has all ranks of the map's mesh, but for frozen parameters.
    pub mesh: Option<ShardMesh>,
}

impl From<usize> for ShardPlacement {
    fn from(dim: usize) -> Self {
        ShardPlacement { dim, mesh: None }
    }
}

/// Chooses how a parameter is sharded by its FQN and shape; `None`: along dimension 0 on the unit's mesh.
pub type ShardPlacementFn = Arc<dyn Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync>;

/// Chooses the all-gather extension by FQN.
pub type ExtensionFn = Arc<dyn Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync>;

/// The options of a unit.
#[derive(Clone, Default)]
pub(super) struct UnitOptions {
    /// The mesh, if not the map's.
    pub(super) ranks: Option<Arc<DataParallel>>,
    pub(super) mp_policy: MixedPrecisionPolicy,
    pub(super) reshard_after_forward: ReshardAfterForward,
    pub(super) offload_policy: OffloadPolicy,
    pub(super) shard_placement_fn: Option<ShardPlacementFn>,
    pub(super) ignored_params: Option<NamePredicate>,
    pub(super) extension: Option<ExtensionFn>,
    pub(super) shard_optimizer_over_replicas: bool,
}
