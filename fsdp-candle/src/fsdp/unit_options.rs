//! The options of a unit, and how one parameter is sharded.

use std::sync::Arc;

use super::policy::{MixedPrecisionPolicy, NamePredicate, OffloadPolicy, ReshardAfterForward};
use super::weight_format::WeightFormat;
use crate::data_parallel::{DataParallel, ShardMesh};
use crate::extension::AllGatherExtension;

/// How one parameter is sharded.
///
/// ```
/// use fsdp_candle::{DataParallelMeshDims, ShardMesh, ShardPlacement};
/// use fsdp_core::process_group::local;
/// # use fsdp_candle::doc_example::*;
///
/// local::try_run(4, |group| {
///     let world = World::of(group);
///     // Experts are sharded over pairs of ranks, all other parameters over all four ranks.
///     let pairs = world.mesh(&[("expert", 2), ("within", 2)])?;
///     let dims = DataParallelMeshDims { shard: &["within"], replicate: &["expert"] };
///     let pairs = ShardMesh::of_dims(&pairs, &dims)?;
///     let vars = ShardedVarMap::of_world(&world)?;
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
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ShardPlacement {
    /// Dimension to shard. A dimension other than 0 must divide evenly.
    pub dim: usize,
    /// Another mesh than the unit's. It must have all ranks of the map's mesh, except for frozen parameters.
    pub mesh: Option<ShardMesh>,
}

impl From<usize> for ShardPlacement {
    fn from(dim: usize) -> Self {
        ShardPlacement { dim, mesh: None }
    }
}

/// Chooses how a parameter is sharded, by its FQN and shape; `None` for dimension 0 on the unit's mesh.
pub type ShardPlacementFn = Arc<dyn Fn(&str, &[usize]) -> Option<ShardPlacement> + Send + Sync>;

/// Chooses the all-gather extension of a parameter, by its FQN.
pub type ExtensionFn = Arc<dyn Fn(&str) -> Option<Arc<dyn AllGatherExtension>> + Send + Sync>;

/// Chooses how a frozen parameter is stored, by its FQN and shape; `None` for the builder's dtype.
pub type StoreFn = Arc<dyn Fn(&str, &[usize]) -> Option<WeightFormat> + Send + Sync>;

/// The options of a unit.
#[derive(Clone, Default)]
pub(super) struct UnitOptions {
    /// The mesh, if it is not the map's.
    pub(super) ranks: Option<Arc<DataParallel>>,
    pub(super) mp_policy: MixedPrecisionPolicy,
    pub(super) reshard_after_forward: ReshardAfterForward,
    pub(super) offload_policy: OffloadPolicy,
    pub(super) shard_placement_fn: Option<ShardPlacementFn>,
    pub(super) ignored_params: Option<NamePredicate>,
    pub(super) extension: Option<ExtensionFn>,
    pub(super) store: Option<StoreFn>,
    pub(super) shard_optimizer_over_replicas: bool,
}
