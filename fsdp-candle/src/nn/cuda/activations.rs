//! Activations: the graph keeps only their inputs.

use candle_core::{Result, Tensor};

use super::Cuda;
use crate::graph::{Reads, graph_op};
use crate::kernels::cuda::{self, activate_back, swiglu, swiglu_back, swiglu_halves, swiglu_halves_back};
use crate::storage::{to_storage, to_tensor, with_slice};

impl Cuda {
    /// Applies a function of each element: `silu`, `gelu` (tanh) or `gelu_erf`.
    pub(in crate::nn) fn activate(self, function: &'static str, x: &Tensor) -> Result<Tensor> {
        let y = with_slice(&x.detach().contiguous()?, |_, x| cuda::activate(function, x))?;
        graph_op(function, &[x], to_storage(y)?, x.shape(), Reads::Sources, move |sources, _, dy| {
            let (x, dy) = (sources[0].detach().contiguous()?, dy.detach().contiguous()?);
            let dx = with_slice(&x, |_, x| with_slice(&dy, |_, dy| activate_back(function, x, dy)))?;
            Ok([Some(to_tensor(dx, x.dims(), x.device())?)])
        })
    }

    /// Computes `silu(gate) * up`.
    pub(in crate::nn) fn silu_mul(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let rows = |x: &Tensor| x.detach().contiguous();
        let y = with_slice(&rows(gate)?, |_, gate| with_slice(&rows(up)?, |_, up| swiglu(gate, up)))?;
        graph_op("silu_mul", &[gate, up], to_storage(y)?, gate.shape(), Reads::Sources, move |both, _, dy| {
            let (gate, up, dy) = (rows(both[0])?, rows(both[1])?, rows(dy)?);
            let grads = with_slice(&gate, |_, gate| {
                with_slice(&up, |_, up| with_slice(&dy, |_, dy| swiglu_back(gate, up, dy)))
            })?;
            let [d_gate, d_up] = grads.map(|grad| to_tensor(grad, dy.dims(), dy.device()).map(Some));
            Ok([d_gate?, d_up?])
        })
    }

    /// Computes `silu` of the first half of each row, times the second half. A row has `2 * width` elements.
    pub(in crate::nn) fn silu_mul_halves(self, both: &Tensor, width: usize) -> Result<Tensor> {
        let mut shape = both.dims().to_vec();
        shape.pop();
        shape.push(width);
        let y = with_slice(&both.detach().contiguous()?, |_, both| swiglu_halves(both, width))?;
        graph_op("swiglu", &[both], to_storage(y)?, shape, Reads::Sources, move |sources, _, dy| {
            let (both, dy) = (sources[0].detach().contiguous()?, dy.detach().contiguous()?);
            let grads = with_slice(&both, |_, both| with_slice(&dy, |_, dy| swiglu_halves_back(both, dy, width)))?;
            Ok([Some(to_tensor(grads, both.dims(), both.device())?)])
        })
    }
}
