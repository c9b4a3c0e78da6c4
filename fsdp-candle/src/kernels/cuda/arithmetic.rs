//! Sums, scales, mixtures and casts.

use candle_core::Result;
use cudarc::driver::CudaStream;
use fsdp_core::DType;
use fsdp_core::device::cuda::CudaView;

use super::super::slice::{Slice, SliceMut};
use super::device::{Cuda, same_dtype, same_length};
use super::launch::{for_each_of, of_float};

pub(super) fn add(cuda: &Cuda, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
    let (len, kernel) = (sum.len(), format!("add_{}", of_float(sum.dtype())?));
    same_dtype(sum.dtype(), more.dtype())?;
    same_length(len, more.len())?;
    let (sum, more) = (cuda.view_mut(sum)?, cuda.view(more)?);
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the kernel's arguments, of one dtype and length.
    unsafe { cuda.launch(&kernel, for_each_of(len), &[sum.into(), more.into(), len.into()]) }
}

pub(super) fn scale(cuda: &Cuda, values: SliceMut<'_>, factor: f64) -> Result<()> {
    let (len, kernel) = (values.len(), format!("scale_{}", of_float(values.dtype())?));
    let values = cuda.view_mut(values)?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the kernel's arguments.
    unsafe { cuda.launch(&kernel, for_each_of(len), &[values.into(), len.into(), factor.into()]) }
}

pub(super) fn cast(cuda: &Cuda, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
    let (from_dtype, to_dtype) = (from.dtype(), to.dtype());
    let (from, to) = (cuda.view(from)?, cuda.view_mut(to)?);
    cast_on(cuda, &cuda.stream, (from_dtype, from), (to_dtype, to))
}

/// Casts in the order of a stream.
pub(super) fn cast_on(
    cuda: &Cuda,
    stream: &CudaStream,
    (from_dtype, from): (DType, CudaView<'_>),
    (to_dtype, to): (DType, CudaView<'_>),
) -> Result<()> {
    let kernel = format!("cast_{}_{}", of_float(from_dtype)?, of_float(to_dtype)?);
    let len = to.bytes() / to_dtype.size();
    same_length(from.bytes() / from_dtype.size(), len)?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the kernel's arguments, of the dtypes in its name and of one length.
    unsafe { cuda.launch_on(stream, &kernel, for_each_of(len), &[from.into(), to.into(), len.into()]) }
}

pub(super) fn mix(cuda: &Cuda, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
    let (len, kernel) = (values.len(), format!("mix_{}_{}", of_float(values.dtype())?, of_float(more.dtype())?));
    same_length(len, more.len())?;
    let (values, more) = (cuda.view_mut(values)?, cuda.view(more)?);
    if len == 0 {
        return Ok(());
    }
    let args = [values.into(), more.into(), len.into(), kept.into(), taken.into()];
    // SAFETY: the kernel's arguments, of the dtypes in its name and of one length.
    unsafe { cuda.launch(&kernel, for_each_of(len), &args) }
}
