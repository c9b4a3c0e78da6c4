//! The constant properties of a parameter.

use std::sync::Arc;

use candle_core::{DType, Shape};
use fsdp_core::layout::Region;

use super::offload::Offload;
use super::replica_sharding::ReplicaSharding;
use super::weight_format::{Blocks, WeightFormat};
use crate::adapter::Adapters;
use crate::data_parallel::{DataParallel, ShardLayout};
use crate::disk::FileTensor;
use crate::extension::AllGatherExtension;
use crate::tensor_parallel::Parallel;

/// Constant properties of a parameter.
pub(crate) struct ParamSpec {
    pub(crate) name: String,
    /// Global shape.
    pub(crate) shape: Shape,
    /// Box of the global shape that this rank holds.
    pub(crate) region: Region,
    /// Dimension that FSDP shards.
    pub(crate) shard_dim: usize,
    pub(crate) layout: ShardLayout,
    /// Set where the replicas divide the shard among them.
    pub(crate) replica_sharding: Option<ReplicaSharding>,
    pub(crate) ranks: Arc<DataParallel>,
    pub(crate) parallel: Option<Arc<Parallel>>,
    /// Dtype that the builder asked for.
    pub(crate) dtype: DType,
    pub(crate) compute_dtype: DType,
    pub(crate) reduce_dtype: DType,
    /// Storage of a frozen parameter that is not stored in its dtype.
    pub(crate) stored: Option<WeightFormat>,
    /// Set if it is stored in blocks.
    pub(crate) blocks: Option<Blocks>,
    pub(crate) trainable: bool,
    pub(crate) extension: Option<Arc<dyn AllGatherExtension>>,
    /// Selection of the layers with adapters when the parameter was built.
    pub(crate) adapters: Option<Arc<Adapters>>,
    /// Set for a shard on the host whose layers compute on another device.
    pub(crate) offload: Option<Offload>,
    /// The shard, if it is on disk. The variable then has no memory.
    pub(crate) on_disk: Option<FileTensor>,
}
