//! The sum of a residual connection.

use candle_core::{Result, Tensor};

use super::cpu::simd::kernel;
use super::cpu::{map_rows, read, storage};
use super::weight::has_cpu_kernels;
use crate::graph::graph_op;

/// Returns `x + y`, for two tensors of one shape and dtype.
///
/// On the CPU in f32, f16 and bf16, the gradient reaches other operations of this module without the copies and sums of
/// Candle's `+`. Otherwise, this is Candle's `+`.
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
    if !(has_cpu_kernels(x) && y.device().is_cpu() && x.dims() == y.dims() && x.dtype() == y.dtype()) {
        return x + y;
    }
    let mut sum = vec![0f32; x.elem_count()];
    {
        read!(x, x);
        read!(y, y);
        map_rows(&mut sum, 1, 1, |first, sum| sums(sum, &x[first..], &y[first..]));
    }
    graph_op("add", &[x, y], storage(sum, x.dtype())?, x.shape(), |_, _, gradient| {
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
