//! Normalization: over the last dimension, over groups of channels, over a batch.

pub mod batch_norm;
mod channels;
pub mod group_norm;
pub mod layer_norm;
pub(in crate::nn) mod rows;
