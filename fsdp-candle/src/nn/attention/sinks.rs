//! Attention sinks: a learned score for each head that no key has, as in gpt-oss (arXiv:2508.10925; Xiao et al., 2024,
//! arXiv:2309.17453). It takes part in the softmax, so that a query's weights sum up to less than 1.
//!
//! For query `i` of a head with the sink `z`: `L'_i = ln(e^L_i + e^z)` replaces the logarithm of the sum, and
//! `o'_i = e^(L_i - L'_i) o_i` the output. The other gradients keep their formulas, with these two. That of the sink is
//! `-sum_i e^(z - L'_i) do_i.o'_i`, also with dropout.

use std::sync::Arc;

use candle_core::op::BackpropOp;
use candle_core::{D, Result, Storage, Tensor};

use super::engine::AttentionDims;
use crate::graph::{Reads, graph_op};
use crate::storage::{copied_storage, take};

/// Returns the sinks `[1, n_heads, 1]` in the dtype of the logarithms of the sums.
fn spread(sinks: &Tensor, log_sums: &Tensor) -> Result<Tensor> {
    sinks.detach().to_dtype(log_sums.dtype())?.reshape((1, (), 1))
}

/// Returns the output and the logarithms of the sums with sinks, given those without.
pub(super) fn with_sinks(
    dims: &AttentionDims,
    (out, log_sums): (Storage, Tensor),
    sinks: &Tensor,
) -> Result<(Storage, Tensor)> {
    let sinks = spread(sinks, &log_sums)?.broadcast_as(log_sums.shape())?;
    let highest = log_sums.maximum(&sinks)?;
    let lower = log_sums.minimum(&sinks)?;
    let sums = (&highest + ((lower - &highest)?.exp()? + 1.)?.log()?)?;
    let factors = (&log_sums - &sums)?.exp()?.transpose(1, 2)?.unsqueeze(3)?;
    let out = Tensor::from_storage(out, (dims.batch, dims.queries, dims.n_heads, dims.dim), BackpropOp::none(), false);
    // In half precision, the output is rounded once more.
    let out = out.to_dtype(sums.dtype())?.broadcast_mul(&factors)?.to_dtype(out.dtype())?;
    Ok((take(&out)?, sums))
}

/// Returns the attention's output with sinks as a node that also follows the sinks. An operation of Candle has at most three
/// sources, and attention has three already, so this is another one, whose output is a copy.
pub(super) fn after_sinks(dims: AttentionDims, y: &Tensor, log_sums: Arc<Tensor>, sinks: &Tensor) -> Result<Tensor> {
    // Their values in backward may be those of a parameter that is gathered again.
    let values = sinks.detach().force_contiguous()?;
    graph_op("attention_sinks", &[y, sinks], copied_storage(y)?, y.shape(), Reads::Output, move |_, out, d_out| {
        Ok([Some(d_out.clone()), Some(sink_gradient(&dims, [out, d_out], &log_sums, &values)?)])
    })
}

/// Returns the gradient of the sinks.
fn sink_gradient(
    dims: &AttentionDims,
    [out, d_out]: [&Tensor; 2],
    log_sums: &Tensor,
    sinks: &Tensor,
) -> Result<Tensor> {
    let heads = |x: &Tensor| -> Result<Tensor> {
        x.detach().to_dtype(log_sums.dtype())?.reshape((dims.batch, dims.queries, dims.n_heads, dims.dim))
    };
    let deltas = (heads(out)? * heads(d_out)?)?.sum(D::Minus1)?.transpose(1, 2)?;
    let weights = spread(sinks, log_sums)?.broadcast_sub(log_sums)?.exp()?;
    (weights * deltas)?.sum((0, 2))?.neg()?.to_dtype(sinks.dtype())
}
