//! Results without elements. Candle reduces and reshapes no empty tensors.

use candle_core::{Result, Shape, Tensor};

use crate::graph::{Reads, graph_op};

/// Returns an empty result of this shape, if `x` has no elements. Otherwise returns `None`. The gradients of the sources
/// are zeros.
pub(in crate::nn) fn if_empty(
    name: &'static str,
    x: &Tensor,
    sources: &[&Tensor],
    shape: impl Into<Shape>,
) -> Result<Option<Tensor>> {
    if x.elem_count() > 0 {
        return Ok(None);
    }
    let shape = shape.into();
    let empty = Tensor::zeros(&shape, x.dtype(), x.device())?;
    let (storage, layout) = empty.storage_and_layout();
    let of_sources: Vec<Shape> = sources.iter().map(|source| source.shape().clone()).collect();
    let backward = move |_: &[&Tensor], _: &Tensor, dy: &Tensor| {
        let zeros = |shape: &Shape| Tensor::zeros(shape, dy.dtype(), dy.device()).map(Some);
        of_sources.iter().map(zeros).collect::<Result<Vec<_>>>()
    };
    graph_op(name, sources, storage.try_clone(layout)?, shape, Reads::Nothing, backward).map(Some)
}
