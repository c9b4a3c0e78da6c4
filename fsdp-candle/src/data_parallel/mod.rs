//! The ranks that a parameter is sharded and replicated over.

mod alike;
mod dims;
mod ranks;
mod shard_layout;

pub(crate) use alike::check_alike;
pub use dims::DataParallelMeshDims;
pub(crate) use ranks::DataParallel;
pub use ranks::ShardMesh;
pub(crate) use shard_layout::ShardLayout;
