//! Dropout: the kernel draws the random numbers.

use candle_core::{Result, Tensor};

use super::Cuda;
use crate::kernels::cuda::drop_elements;
use crate::random::Mask;
use crate::storage::{to_tensor, with_slice};

impl Cuda {
    /// Returns the tensor with the dropped elements set to 0, in its own memory and outside the graph.
    pub(in crate::nn) fn dropped(self, x: &Tensor, mask: &Mask) -> Result<Tensor> {
        let y = with_slice(&x.contiguous()?, |_, x| drop_elements(x, &mask.0))?;
        to_tensor(y, x.dims(), x.device())
    }
}
