//! Rotary position embedding: tables and positions stay on the device.

use candle_core::{Result, Tensor};

use super::{Cuda, with_optional_slice};
use crate::graph::{Reads, graph_op};
use crate::kernels::{Rotation, cuda};
use crate::storage::{to_storage, to_tensor, with_slice};

impl Cuda {
    /// Rotates groups of heads. `tables` are the contiguous cosines and sines, and `positions` each group's row of them.
    pub(in crate::nn) fn rotate(
        self,
        function: &'static str,
        x: &Tensor,
        tables: [Tensor; 2],
        positions: Option<Tensor>,
        rotation: Rotation,
    ) -> Result<Tensor> {
        let rotated = move |x: &Tensor, is_backward| {
            let [cos, sin] = &tables;
            with_slice(&x.detach().contiguous()?, |_, x| {
                with_slice(cos, |_, cos| {
                    with_slice(sin, |_, sin| {
                        with_optional_slice(positions.as_ref(), |positions| {
                            cuda::rotate(x, [cos, sin], positions, rotation, is_backward)
                        })
                    })
                })
            })
        };
        let y = to_storage(rotated(x, false)?)?;
        graph_op(function, &[x], y, x.shape(), Reads::Nothing, move |_, _, dy| {
            Ok([Some(to_tensor(rotated(dy, true)?, dy.dims(), dy.device())?)])
        })
    }
}
