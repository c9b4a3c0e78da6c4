//! The sum of a residual connection.

use candle_core::{Result, Tensor};

use crate::graph::{Reads, graph_op};
use crate::storage::{sum, take};

/// Returns `x + y`, for two tensors of one shape and dtype.
///
/// On CPUs and CUDA devices, the gradient reaches other operations of this module without the copies and sums of Candle's
/// `+`. Where shapes, dtypes or devices differ, this is Candle's `+`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn;
///
/// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// assert_eq!(nn::add(&x, &x)?.to_vec1::<f32>()?, [2., 4.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let is_one_kind = x.device().same_device(y.device()) && x.dims() == y.dims() && x.dtype() == y.dtype();
    if x.device().is_metal() || !is_one_kind {
        return x + y;
    }
    let total = take(&sum(x, y)?)?;
    graph_op("add", &[x, y], total, x.shape(), Reads::Nothing, |_, _, gradient| {
        Ok([Some(gradient.clone()), Some(gradient.clone())])
    })
}
