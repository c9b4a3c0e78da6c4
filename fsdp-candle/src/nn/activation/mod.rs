//! Activations: `candle_nn::activation`, and the fused functions behind it.

pub(in crate::nn) mod composed;
pub(in crate::nn) mod fused;
mod layer;
mod prelu;

pub use layer::Activation;
pub use prelu::{PReLU, prelu};
