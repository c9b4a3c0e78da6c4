//! The softmax of each row of the last dimension.
//!
//! With `y` the probabilities: `dx = y (dy - sum(y dy))`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};

use super::cpu::parallel::map_rows;
use super::cpu::simd::{dot, kernel, max, probability, sum};
use super::cpu::values::{floats, read, served, storage, tensor};
use super::limits::countable_input;

/// `e^x` over its sum along the last dimension.
pub(super) fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    let Some(&width) = x.dims().last() else { bail!("softmax: the input must have a dimension") };
    match served(x) && width > 0 {
        true => x.apply_op1(SoftmaxLastDim { width }),
        false => composite(countable_input("softmax", x)?, D::Minus1),
    }
}

/// The same from Candle's operations, along any dimension.
pub(super) fn composite<D: candle_core::shape::Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "softmax")?;
    let dtype = x.dtype();
    let x = if matches!(dtype, DType::F16 | DType::BF16) { x.to_dtype(DType::F32)? } else { x.clone() };
    // The result does not depend on what is subtracted.
    let powers = x.broadcast_sub(&x.max_keepdim(dim)?.detach())?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(dim)?)?.to_dtype(dtype)
}

struct SoftmaxLastDim {
    width: usize,
}

impl CustomOp1 for SoftmaxLastDim {
    fn name(&self) -> &'static str {
        "softmax_last_dim"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dtype = x.dtype();
        let mut y = floats(x, layout)?.into_owned();
        map_rows(&mut y, self.width, self.width, |_, y| softmax(y, self.width));
        Ok((storage(y, dtype)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        read!(probabilities, y);
        read!(grad, dy);
        let mut dx = grad.to_vec();
        map_rows(&mut dx, self.width, self.width, |first, dx| {
            softmax_back(dx, &probabilities[first * self.width..], self.width);
        });
        Ok(Some(tensor(dx, x.shape(), x.dtype())?))
    }
}

kernel! {
    /// Replaces each row by its softmax.
    fn softmax(rows: &mut [f32], width: usize) {
        for row in rows.chunks_exact_mut(width) {
            let highest = max(row);
            row.iter_mut().for_each(|x| *x = probability(*x - highest));
            let inverse = 1.0 / sum(row);
            row.iter_mut().for_each(|x| *x *= inverse);
        }
    }

    /// Replaces each row of the probabilities' gradients by that of the scores' gradients.
    fn softmax_back(grads: &mut [f32], probabilities: &[f32], width: usize) {
        for (grad, y) in grads.chunks_exact_mut(width).zip(probabilities.chunks_exact(width)) {
            let delta = dot(y, grad, 0.0);
            grad.iter_mut().zip(y).for_each(|(grad, y)| *grad = y * (*grad - delta));
        }
    }
}
