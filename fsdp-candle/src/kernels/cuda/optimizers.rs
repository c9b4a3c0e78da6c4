//! Steps of optimizers.

use candle_core::{Result, bail};
use cudarc::driver::LaunchConfig;
use fsdp_core::DType;

use super::super::eight_bits::STATE_BLOCK;
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

pub(super) fn adam_8bit(
    cuda: &Cuda,
    update: &AdamUpdate,
    param: SliceMut<'_>,
    grad: Slice<'_>,
    [codes1, scales1, codes2, scales2]: [SliceMut<'_>; 4],
) -> Result<()> {
    let (len, dtype) = (param.len(), param.dtype());
    if dtype == DType::F64 {
        bail!("moments in 8 bits are for parameters of F32, BF16 and F16; got {dtype}")
    }
    let kernel = format!("adam_8bit_{}", of_float(dtype)?);
    same_dtype(dtype, grad.dtype())?;
    same_length(len, grad.len())?;
    let blocks = len.div_ceil(STATE_BLOCK);
    for (codes, scales) in [(&codes1, &scales1), (&codes2, &scales2)] {
        same_dtype(DType::U8, codes.dtype())?;
        same_length(len, codes.len())?;
        same_dtype(DType::F32, scales.dtype())?;
        same_length(blocks, scales.len())?;
    }
    let (param, grad) = (cuda.view_mut(param)?, cuda.view(grad)?);
    let moments = [codes1, scales1, codes2, scales2].map(|part| cuda.view_mut(part));
    let [codes1, scales1, codes2, scales2] = moments;
    let mut args =
        vec![param.into(), grad.into(), codes1?.into(), scales1?.into(), codes2?.into(), scales2?.into(), len.into()];
    if len == 0 {
        return Ok(());
    }
    args.extend(numbers(update).into_iter().skip(1).map(Arg::from));
    let Ok(grid) = u32::try_from(blocks) else { bail!("{blocks} blocks are more than one launch takes") };
    let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (STATE_BLOCK as u32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel's arguments; there is a code for each element, and a scale for each block of threads.
    unsafe { cuda.launch(&kernel, config, &args) }
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
