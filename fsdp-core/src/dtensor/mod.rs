//! DTensors: one tensor over the ranks of a mesh, as PyTorch's `torch.distributed.tensor`.
//!
//! From the bottom up: a [`DTensorSpec`] says what every rank holds; [`plan`] finds the [`Step`]s from one spec to
//! another, without communication; a [`Redistribution`] takes them, in [`LocalMemory`]; a [`DTensor`] holds this rank's
//! elements.

mod memory;
mod permute;
mod plan;
mod redistribute;
mod spec;
mod tensor;

pub use memory::{LocalMemory, Rows};
pub use plan::{Action, Step, plan};
pub use redistribute::Redistribution;
pub use spec::DTensorSpec;
pub use tensor::DTensor;
