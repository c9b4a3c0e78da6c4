//! The layers' own operations on CUDA devices: methods of [`Cuda`]. `no_cuda` has them for a build without CUDA.
//!
//! Forward of fully connected layers and embeddings is Candle's, and backward accumulates the weights' gradients in the
//! parameters' buffers. With Candle's own operations, the full weight would be in the graph, and its gradient would take
//! three times the weight. Products of 8-bit floats are cuBLASLt's in both.
//!
//! The other files run kernels of this library. The graph keeps only their inputs, and a backward that needs more
//! computes it again. Layers that are not here (convolutions, batch and group norms, PReLU) put the full weight into
//! Candle's graph.

mod activations;
mod dropout;
mod experts;
mod linear;
mod losses;
mod norms;
mod rotary;

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::Buffer;

use super::weight::{GradDestination, Weight, on_cuda};
use crate::graph::{Reads, graph_op};
use crate::kernels::Slice;
use crate::kernels::cuda::add_rows;
use crate::storage::{take, to_buffer, to_tensor, with_slice};

/// The layers' operations on a CUDA device.
#[derive(Clone, Copy)]
pub(super) struct Cuda(());

impl Cuda {
    /// Returns the operations on a tensor's device, or `None` if it is not a CUDA device, or they do not support the
    /// dtype.
    pub(super) fn of(tensor: &Tensor) -> Option<Self> {
        on_cuda(tensor).then_some(Cuda(()))
    }

    /// Returns `found`, the table's rows for these ids, as a node of the graph. Backward adds the gradient's rows to the
    /// parameter's buffer.
    pub(in crate::nn) fn lookup(self, found: Tensor, weight: Weight, ids: &Tensor) -> Result<Tensor> {
        let (node, ids) = (weight.node().clone(), to_u32(ids)?);
        cuda_node("Embedding", &[node], found, move |_, gradient| {
            if !weight.wants_grad() {
                return Ok([None]);
            }
            let width = gradient.dims().last().copied().unwrap_or(1);
            let gradient = gradient.detach().contiguous()?;
            let grad = write_grad(&weight, |buffer, accumulate| {
                with_slice(&ids, |_, ids| {
                    with_slice(&gradient, |_, rows| add_rows(ids, rows, buffer, accumulate, width))
                })
            })?;
            Ok([grad])
        })
    }
}

/// [`Weight::write_grad`] to a buffer on the weight's device.
fn write_grad(weight: &Weight, write: impl FnOnce(&mut Buffer, bool) -> Result<()>) -> Result<Option<Tensor>> {
    match weight.grad_destination()? {
        GradDestination::Plain(value) => {
            let grad = value.zeros_like()?;
            let Some(mut buffer) = to_buffer(take(&grad)?)? else {
                bail!("a gradient of {:?} has no buffer", grad.dtype())
            };
            write(&mut buffer, false)?;
            Ok(Some(to_tensor(buffer, grad.dims(), grad.device())?))
        }
        GradDestination::Param { param, anchor } => {
            param.gradient.write_in(write)?;
            Ok(Some(anchor.detach()))
        }
        GradDestination::Nothing => Ok(None),
    }
}

/// Returns `result` as a node that follows its sources in the graph. Nothing else may hold `result`. `backward(x,
/// gradient)` returns the gradients of the sources. `x` is the first source. The others are read through their
/// [`Weight`]s.
fn cuda_node<const N: usize>(
    function: &'static str,
    sources: &[Tensor],
    result: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static,
) -> Result<Tensor> {
    let is_whole = result.is_contiguous() && result.layout().start_offset() == 0;
    let result = if is_whole { result } else { result.force_contiguous()? };
    // Candle gives the shape [2, 0, 3] a stride of 0, with which nothing can be taken.
    let values = take(&result.flatten_all()?)?;
    graph_op(function, sources, values, result.shape(), Reads::Sources, move |sources, _, gradient| {
        backward(sources[0], gradient)
    })
}

/// [`with_slice`] for a tensor that may be left out.
fn with_optional_slice<R>(tensor: Option<&Tensor>, f: impl FnOnce(Option<Slice<'_>>) -> Result<R>) -> Result<R> {
    match tensor {
        Some(tensor) => with_slice(tensor, |_, slice| f(Some(slice))),
        None => f(None),
    }
}

/// Returns the tensor as rows of its last dimension.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let width = tensor.dims().last().copied().unwrap_or(1);
    let rows = tensor.elem_count().checked_div(width).unwrap_or(0);
    tensor.detach().contiguous()?.reshape((rows, width))
}

/// Converts ids to U32, whose largest number stands for no row.
fn to_u32(ids: &Tensor) -> Result<Tensor> {
    let ids = ids.detach().flatten_all()?.contiguous()?;
    let words = ids.to_dtype(DType::U32)?;
    match ids.dtype() {
        DType::U8 => ids.eq(u8::MAX)?.where_cond(&words.ones_like()?.affine(f64::from(u32::MAX), 0.)?, &words),
        _ => Ok(words),
    }
}
