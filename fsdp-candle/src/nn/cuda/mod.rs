//! What the layers of `nn` compute on CUDA devices by operations of their own, so that the gradients of weights collect
//! where the parameters keep them. Forward is Candle's.

pub(in crate::nn) mod linear;
pub(in crate::nn) mod node;
pub(in crate::nn) mod recomputed;
pub(in crate::nn) mod table;

pub(in crate::nn) use super::weight::on_cuda;
