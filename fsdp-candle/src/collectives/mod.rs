//! Collectives of tensors as operations of Candle's graph: what the layers of [`nn`](crate::nn) do under tensor
//! parallelism, for modules that do something else.
//!
//! A tensor of a group of ranks has a layout, a [`Placement`](crate::Placement): every rank holds the same
//! (`Replicate`), a part of one dimension (`Shard(dim)`), or a term of a sum (`Partial(Sum)`). So has its gradient.
//!
//! | | from | to | the gradient's way back |
//! |---|---|---|---|
//! | [`copy`] | `Replicate` | `Replicate`, for what differs on the ranks | all-reduce |
//! | [`all_reduce`] | `Partial` | `Replicate` | as it is |
//! | [`all_gather`] | `Shard` | `Replicate` | reduce-scatter, or this rank's part |
//! | [`reduce_scatter`] | `Partial` | `Shard` | all-gather |
//! | [`split`] | `Replicate` | `Shard` | all-gather |
//! | [`all_to_all`] | `Shard` | `Shard` of another dimension | all-to-all |
//!
//! [`prepare_module_input`] and [`prepare_module_output`] choose among them by two layouts.
//!
//! Every rank of the group calls the same functions in the same order, and runs the same backward. A dimension that is
//! cut must divide by the number of ranks, which each function checks before anything moves. Ranks whose shapes or
//! dtypes differ all get [`fsdp_core::Error::Mismatch`]. Half floats are added up in f32 and rounded once, but by NCCL
//! in their own dtype. On a device the group must move that device's memory, as those of a [`World`](crate::World) on
//! it do.

mod functions;
mod moves;
mod prepare;
mod shared_input;

pub use functions::{Consumers, all_gather, all_reduce, all_to_all, copy, reduce_scatter, split};
pub use prepare::{prepare_module_input, prepare_module_output};

pub(crate) use functions::{all_reduce_owned, reduce_scatter_owned};
pub(crate) use moves::{check, largest, reduced_values};
pub(crate) use shared_input::{Entry, SharedInput, scope};
