//! The layout of DTensors, as in PyTorch's `torch.distributed.tensor`: specs, plans and their execution.
//!
//! A [`DTensorSpec`] describes the part that each rank holds. [`plan`] computes the [`Step`]s from one spec to another
//! without communication. A [`Redistribution`] executes them over any [`LocalMemory`]. The `DTensor` type itself is in
//! `fsdp_candle`, over Candle tensors.

mod plan;
mod redistribute;
mod spec;

pub use plan::{Action, Step, plan};
pub use redistribute::{LocalMemory, Redistribution, Rows};
pub use spec::DTensorSpec;
