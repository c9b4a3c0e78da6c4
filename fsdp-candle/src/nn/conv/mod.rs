//! Convolutions: `candle_nn::conv`, with gradients that are right.

pub(in crate::nn) mod op;
mod straight;
mod transposed;
pub(in crate::nn) mod unfold;

pub use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};
pub use straight::{Conv1d, Conv2d, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias};
pub use transposed::{
    ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias,
};
