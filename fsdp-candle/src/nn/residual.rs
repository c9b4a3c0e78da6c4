//! The sum of a residual connection.

use candle_core::{Result, Tensor};

use super::cpu::simd::kernel;
use super::cpu::{map_rows, read, storage};
use super::weight::has_cpu_kernels;
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
    let total = if has_cpu_kernels(x) {
        let mut total = vec![0f32; x.elem_count()];
        {
            read!(x, x);
            read!(y, y);
            map_rows(&mut total, 1, 1, |first, total| sums(total, &x[first..], &y[first..]));
        }
        storage(total, x.dtype())?
    } else {
        take(&sum(x, y)?)?
    };
    graph_op("add", &[x, y], total, x.shape(), Reads::Nothing, |_, _, gradient| {
        Ok([Some(gradient.clone()), Some(gradient.clone())])
    })
}

kernel! {
    fn sums(sums: &mut [f32], x: &[f32], y: &[f32]) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum = x + y;
        }
    }
}
