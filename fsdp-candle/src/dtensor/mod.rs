//! DTensors over Candle tensors: one tensor over the ranks of a mesh, as PyTorch's `torch.distributed.tensor`, on any
//! device that has kernels.
//!
//! From the bottom up: `memory` (a device's, for the redistributions of [`fsdp_core::dtensor`]), `tensor` (a
//! [`DTensor`]), `redistribute` and `distribute` (what communicates), `create`; `rules` (which placements a result has)
//! and the operations that keep to them: `elementwise`, `reduce`, `norm`, `matmul`.

mod create;
mod distribute;
mod elementwise;
mod matmul;
mod memory;
mod norm;
mod redistribute;
mod reduce;
mod rules;
mod tensor;

pub use distribute::{distribute_tensor, distribute_tensor_from};
pub use elementwise::Operand;
pub use norm::PartialNorm;
pub use redistribute::Redistribution;
pub use tensor::DTensor;
