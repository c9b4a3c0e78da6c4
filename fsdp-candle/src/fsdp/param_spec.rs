//! The constant properties of a parameter.

use std::sync::Arc;

use candle_core::{DType, Shape};
use fsdp_core::layout::Region;

use super::encoding::Encoding;
use crate::adapter::Adapters;
use crate::data_parallel::{DataParallel, ReplicaLayout, ShardLayout};
use crate::float8::Float8Layers;
use crate::storage::Pool;
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
    /// Division of the shard among replicas, if they divide it.
    pub(crate) over_replicas: Option<ReplicaLayout>,
    pub(crate) ranks: Arc<DataParallel>,
    pub(crate) parallel: Option<Arc<Parallel>>,
    /// The rank that has the parameter's expert, among the ranks that own different experts.
    pub(crate) owner: Option<usize>,
    /// Dtype that the builder asked for.
    pub(crate) dtype: DType,
    pub(crate) compute_dtype: DType,
    pub(crate) reduce_dtype: DType,
    pub(crate) encoding: Encoding,
    pub(crate) trainable: bool,
    /// Selection of the layers with adapters when the parameter was built.
    pub(crate) adapters: Option<Arc<Adapters>>,
    /// Selection of the layers that compute in 8 bits when the parameter was built.
    pub(crate) float8: Option<Arc<Float8Layers>>,
}

impl ParamSpec {
    /// Gives the buffers that collectives pad to equal shares room for the padding.
    pub(super) fn make_room(&self, pool: &Pool) {
        let over_replicas = self.over_replicas.as_ref().map(|replicas| &replicas.layout);
        for layout in [Some(&self.layout), over_replicas].into_iter().flatten() {
            let Some((len, room)) = layout.padded() else { continue };
            pool.make_room(len, room);
            if let Some(blocks) = self.encoding.blocks() {
                pool.make_room(blocks.format.bytes(len), blocks.format.bytes(room));
            }
        }
    }
}
