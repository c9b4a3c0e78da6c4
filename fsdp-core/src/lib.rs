//! Ranks and shards for fully sharded training, without a tensor library: device meshes, DTensor placements and their
//! layout math, and the process groups that move bytes.
//!
//! From the bottom up: [`DType`] and [`Buffer`] describe memory. [`MeshLayout`] gives ranks coordinates. [`layout`]
//! computes the elements of a tensor that a rank holds. A [`ProcessGroup`] moves buffers between ranks. A
//! [`DeviceMesh`] is a mesh layout with a process group for each dimension. [`dtensor`] plans and executes
//! redistributions of a tensor over a mesh. [`RankEnv`] reads this process's rank from the launcher's environment.
//! Ranks on several hosts exchange a few bytes in a [`store`], before any group exists.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod block_format;
pub mod buffer;
#[cfg(feature = "tcp")]
pub mod channel;
pub mod device;
mod device_id;
mod device_mesh;
pub mod dtensor;
pub mod dtype;
pub mod env;
pub mod error;
mod error_file;
pub mod file_limit;
mod hash;
pub mod heartbeat;
mod host_names;
pub mod layout;
mod mesh_layout;
pub mod placement;
pub mod process_group;
mod reduce_op;
mod shared_file;
pub mod store;
mod text;

pub use block_format::{BLOCK, BLOCK_SCALE, BlockFormat};
pub use buffer::{Allocator, Buffer, Element, Heap, Readable, Writable};
pub use device::{Stream, View};
pub use device_id::DeviceId;
pub use device_mesh::DeviceMesh;
pub use dtensor::DTensorSpec;
pub use dtype::{DType, Scalar};
pub use env::RankEnv;
pub use error::{Error, Result};
pub use error_file::record_error;
pub use host_names::HostNames;
pub use mesh_layout::MeshLayout;
pub use placement::Placement;
pub use process_group::{ExchangePart, GatherPart, ProcessGroup, ScatterPart, Work};
pub use reduce_op::ReduceOp;

/// Runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
