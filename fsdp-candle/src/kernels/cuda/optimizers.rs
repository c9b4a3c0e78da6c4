//! Steps of optimizers.

use candle_core::Result;

use super::super::slice::{Slice, SliceMut};
use super::super::update::{AdamUpdate, SgdUpdate};
use super::device::{Cuda, same_dtype, same_length};
use super::launch::{Arg, for_each_of, of_float};

pub(super) fn adam(
    cuda: &Cuda,
    update: &AdamUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    [means, squares]: [SliceMut<'_>; 2],
) -> Result<()> {
    let (len, dtype) = (param.len(), param.dtype());
    let kernel = format!("adam_{}", of_float(dtype)?);
    for (other, its_len) in [(grad.dtype(), grad.len()), (means.dtype(), means.len()), (squares.dtype(), squares.len())]
    {
        same_length(len, its_len)?;
        same_dtype(dtype, other)?;
    }
    let (param, grad) = (cuda.view_mut(param)?, cuda.view(grad)?);
    let (means, squares) = (cuda.view_mut(means)?, cuda.view_mut(squares)?);
    if len == 0 {
        return Ok(());
    }
    let mut args = vec![param.into(), grad.into(), means.into(), squares.into(), len.into()];
    args.extend(numbers(update).map(Arg::from));
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.launch(&kernel, for_each_of(len), &args) }
}

/// Adam's numbers in the order of the kernels' arguments.
pub(super) fn numbers(update: &AdamUpdate) -> [f64; 9] {
    let AdamUpdate { l2, decay, beta1, beta2, step_size, root_bias_correction2, eps } = *update;
    [l2, decay, beta1, 1. - beta1, beta2, 1. - beta2, step_size, root_bias_correction2, eps]
}

pub(super) fn sgd(
    cuda: &Cuda,
    update: &SgdUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    buffer: Option<SliceMut<'_>>,
) -> Result<()> {
    let (len, dtype) = (param.len(), param.dtype());
    let float = of_float(dtype)?;
    let buffers = buffer.as_ref().map(|buffer| (buffer.dtype(), buffer.len()));
    for (other, its_len) in [Some((grad.dtype(), grad.len())), buffers].into_iter().flatten() {
        same_length(len, its_len)?;
        same_dtype(dtype, other)?;
    }
    let (param, grad) = (cuda.view_mut(param)?, cuda.view(grad)?);
    let buffer = buffer.map(|buffer| cuda.view_mut(buffer)).transpose()?;
    if len == 0 {
        return Ok(());
    }
    let SgdUpdate { l2, kept, taken, nesterov, lr } = *update;
    let Some(buffer) = buffer else {
        let args = [param.into(), grad.into(), len.into(), l2.into(), lr.into()];
        // SAFETY: the kernel's arguments, of one dtype and length.
        return unsafe { cuda.launch(&format!("sgd_{float}"), for_each_of(len), &args) };
    };
    let mut args = vec![param.into(), grad.into(), buffer.into(), len.into(), u32::from(nesterov.is_some()).into()];
    args.extend([l2, kept, taken, nesterov.unwrap_or(0.), lr].map(Arg::from));
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.launch(&format!("momentum_{float}"), for_each_of(len), &args) }
}
