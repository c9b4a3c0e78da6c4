//! What fully sharded training needs to know about ranks and shards, without a tensor library: device meshes, DTensor
//! placements and their layout math, and the process groups that move the bytes.
//!
//! From the bottom up: [`DType`] and [`Buffer`] are the memory that travels; [`MeshLayout`] gives ranks their
//! coordinates; [`layout`] says which elements of a tensor a rank holds; a [`ProcessGroup`] moves buffers between
//! ranks; a [`DeviceMesh`] is a layout with a process group for each of its dimensions; a [`DTensor`] is a buffer on
//! each rank of a mesh that together are one tensor. [`RankEnv`] reads who this process is from what its launcher set.
//! In a [`store`] ranks of several hosts exchange a few bytes before any group stands, over a [`channel`].

pub mod buffer;
pub mod channel;
pub mod device;
mod device_id;
mod device_mesh;
pub mod dtensor;
pub mod dtype;
pub mod env;
pub mod error;
mod error_file;
mod hash;
pub mod heartbeat;
mod host_names;
pub mod layout;
mod mesh_layout;
pub mod placement;
pub mod process_group;
mod reduce_op;
pub mod store;
mod text;

pub use buffer::{Allocator, Buffer, Element, Heap, Readable, Writable};
pub use device::{Stream, View};
pub use device_id::DeviceId;
pub use device_mesh::DeviceMesh;
pub use dtensor::{DTensor, DTensorSpec};
pub use dtype::{DType, Scalar};
pub use env::RankEnv;
pub use error::{Error, Result};
pub use error_file::record_error;
pub use host_names::HostNames;
pub use mesh_layout::MeshLayout;
pub use placement::Placement;
pub use process_group::{ExchangePart, GatherPart, ProcessGroup, ScatterPart, Work};
pub use reduce_op::ReduceOp;
