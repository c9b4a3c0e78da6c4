//! DTensors over Candle tensors, as PyTorch's `torch.distributed.tensor`, on any device that has kernels.
//!
//! `tensor` holds the type, its constructors and its communication. `placement_rules` computes the placements of an
//! operation's result; `ops` are the operations. An operation never communicates: where PyTorch redistributes
//! implicitly, it returns an error that names the redistribution.

mod ops;
mod placement_rules;
mod tensor;

pub use ops::{Operand, PartialNorm};
pub use tensor::{DTensor, Redistribution, distribute_tensor, distribute_tensor_from};
