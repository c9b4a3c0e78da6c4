//! Dropout: the kernel draws the random numbers.

use candle_core::{Result, Tensor};

use crate::kernels::drop_elements;
use crate::random::Mask;
use crate::storage::{to_tensor, with_slice};

/// Returns the tensor with the dropped elements set to 0, in its own memory and outside the graph.
pub(in crate::nn) fn dropped(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let draw = mask.on_device();
    let y = with_slice(&x.contiguous()?, |_, x| drop_elements(x, &draw))?;
    to_tensor(y, x.dims(), x.device())
}
