//! Fully connected layers, with low-rank adapters where they are asked for.

pub(in crate::nn) mod adapter;
mod add_bias;
pub(in crate::nn) mod affine;
mod conv1d;
mod layer;

pub use conv1d::{Conv1D, gpt2_linear};
pub use layer::{Linear, linear, linear_b, linear_no_bias};
