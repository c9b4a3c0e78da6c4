//! Normalization: the graph keeps only the input, whose statistics backward computes again.

use candle_core::{Result, Tensor};

use super::super::weight::Weight;
use super::{Cuda, with_optional_slice, write_grad};
use crate::graph::{Reads, graph_op};
use crate::kernels::Normalization;
use crate::kernels::cuda::{self, normalize_back};
use crate::storage::{to_storage, to_tensor, with_slice};

impl Cuda {
    /// Normalizes rows, multiplies them by the weight and adds the bias.
    pub(in crate::nn) fn normalize(
        self,
        function: &'static str,
        x: &Tensor,
        weight: Weight,
        bias: Option<Weight>,
        norm: Normalization,
    ) -> Result<Tensor> {
        let own_weight = weight.value()?.detach().contiguous()?;
        let own_bias = match &bias {
            Some(bias) => Some(bias.value()?.detach().contiguous()?),
            None => None,
        };
        let y = with_slice(&x.detach().contiguous()?, |_, x| {
            with_slice(&own_weight, |_, weight| {
                with_optional_slice(own_bias.as_ref(), |bias| cuda::normalize(x, weight, bias, norm))
            })
        })?;
        let arguments = weight.arguments(x, bias.as_ref());
        graph_op(function, &arguments, to_storage(y)?, x.shape(), Reads::Sources, move |sources, _, dy| {
            backward(sources[0], dy, &weight, bias.as_ref(), norm)
        })
    }
}

fn backward(
    argument: &Tensor,
    dy: &Tensor,
    weight: &Weight,
    bias: Option<&Weight>,
    norm: Normalization,
) -> Result<[Option<Tensor>; 3]> {
    let (x, dy) = (argument.detach().contiguous()?, dy.detach().contiguous()?);
    let bias = bias.filter(|bias| bias.wants_grad());
    let own_weight = weight.value()?.detach().contiguous()?;
    let (grads, sums) = with_slice(&x, |_, x| {
        with_slice(&dy, |_, dy| {
            let grads = with_slice(&own_weight, |_, weight| normalize_back(x, dy, weight, norm))?;
            let wanted = weight.wants_grad() || bias.is_some();
            let sums = wanted.then(|| grads.weight_sums(x, dy)).transpose()?;
            Ok((grads, sums))
        })
    })?;
    let add = |weight: &Weight, of_bias| match &sums {
        Some(sums) => write_grad(weight, |grad, accumulate| sums.add_to(grad, accumulate, of_bias)),
        None => Ok(None),
    };
    let dw = if weight.wants_grad() { add(weight, false)? } else { None };
    let db = bias.map(|bias| add(bias, true)).transpose()?.flatten();
    let dx = if argument.track_op() { Some(to_tensor(grads.dx, x.dims(), x.device())?) } else { None };
    Ok([dx, dw, db])
}
