//! The softmax. With `y` the probabilities: `dx = y (dy - sum(y dy))`.

use candle_core::shape::Dim;
use candle_core::{D, DType, Result, Tensor, bail};

use super::cpu::simd::{dot, kernel, max, probability, sum};
use super::cpu::{map_rows, read, storage, tensor_like, to_vec};
use super::empty::if_empty;
use super::limits::check_input_size;
use super::weight::has_cpu_kernels;
use crate::context_parallel::current;
use crate::graph::{Reads, graph_op};

/// Returns the softmax along a dimension, `e^x` over its sum, for any shape and float dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_candle::nn::ops::softmax;
///
/// let y = softmax(&Tensor::new(&[[0f32, 0.], [0., 3f32.ln()]], &Device::Cpu)?, 1)?;
/// let error = (y - Tensor::new(&[[0.5f32, 0.5], [0.25, 0.75]], &Device::Cpu)?)?.abs()?.max_all()?;
/// assert!(error.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    refuse_scores(xs)?;
    if dim + 1 == xs.rank() { softmax_last_dim(xs) } else { softmax_composite(xs, dim) }
}

/// [`softmax`] along the last dimension. Candle's has no backward.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    let Some(&width) = x.dims().last() else { bail!("softmax: the input must have a dimension") };
    refuse_scores(x)?;
    if !has_cpu_kernels(x) || width == 0 {
        return softmax_composite(check_input_size("softmax", x)?, D::Minus1);
    }
    let mut y = to_vec(x)?;
    map_rows(&mut y, width, width, |_, y| softmax_rows(y, width));
    graph_op("softmax_last_dim", &[x], storage(y, x.dtype())?, x.shape(), Reads::Output, move |_, y, dy| {
        read!(probabilities, y);
        let mut dx = to_vec(dy)?;
        map_rows(&mut dx, width, width, |first, dx| softmax_rows_back(dx, &probabilities[first * width..], width));
        Ok([Some(tensor_like(dx, dy)?)])
    })
}

/// Fails for scores `[batch, heads, queries, keys]` in a context-parallel forward, whose ranks have a part of the keys.
fn refuse_scores(x: &Tensor) -> Result<()> {
    if x.rank() == 4 && current().is_some() {
        bail!(
            "softmax: {:?} look like the scores of attention, of which a context-parallel rank has a part: compute \
             attention by `nn::attention` or its variants",
            x.dims()
        )
    }
    Ok(())
}

/// The softmax as a chain of Candle's operations, along any dimension.
pub(super) fn softmax_composite<D: Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "softmax")?;
    if let Some(empty) = if_empty("softmax", x, &[x], x.shape())? {
        return Ok(empty);
    }
    let dtype = x.dtype();
    let x = if matches!(dtype, DType::F16 | DType::BF16) { x.to_dtype(DType::F32)? } else { x.clone() };
    // The result does not depend on the subtracted value.
    let powers = x.broadcast_sub(&x.max_keepdim(dim)?.detach())?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(dim)?)?.to_dtype(dtype)
}

kernel! {
    /// Replaces each row by its softmax.
    fn softmax_rows(rows: &mut [f32], width: usize) {
        for row in rows.chunks_exact_mut(width) {
            let highest = max(row);
            row.iter_mut().for_each(|x| *x = probability(*x - highest));
            let inverse = 1.0 / sum(row);
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    }

    /// Replaces each row of the probabilities' gradients by the scores' gradients.
    fn softmax_rows_back(grads: &mut [f32], probabilities: &[f32], width: usize) {
        for (grad, y) in grads.chunks_exact_mut(width).zip(probabilities.chunks_exact(width)) {
            let delta = dot(y, grad, 0.0);
            grad.iter_mut().zip(y).for_each(|(grad, y)| *grad = y * (*grad - delta));
        }
    }
}
