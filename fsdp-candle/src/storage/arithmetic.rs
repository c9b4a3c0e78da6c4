//! Sums, scales, casts and copies of buffers, by the kernels of the device that they are on.

use candle_core::{Device, Result};
use fsdp_core::{Allocator, Buffer, DType};

use crate::error::Error;
use crate::kernels;

/// `sum += more`, of one dtype and length.
pub(crate) fn add(sum: &mut Buffer, more: &Buffer) -> Result<()> {
    kernels::of_buffer(sum)?.add(sum.into(), more.into())
}

/// `buffer *= factor`.
pub(crate) fn scale(buffer: &mut Buffer, factor: f64) -> Result<()> {
    kernels::of_buffer(buffer)?.scale(buffer.into(), factor)
}

/// The same values in another dtype; the old buffer goes back to `memory`.
pub(crate) fn cast(from: Buffer, dtype: DType, memory: &dyn Allocator) -> Result<Buffer> {
    if from.dtype() == dtype {
        return Ok(from);
    }
    let mut to = memory.take(dtype, from.len()).map_err(Error::from)?;
    kernels::of_buffer(&from)?.cast((&from).into(), (&mut to).into())?;
    memory.give(from);
    Ok(to)
}

/// Copies all elements of a buffer to another of its dtype and length.
pub(crate) fn copy(from: &Buffer, to: &mut Buffer) -> Result<()> {
    kernels::of_buffer(from)?.copy(from.into(), to.into())
}

/// A few numbers as a buffer of F32 on a device, to travel with what is there.
pub(crate) fn from_numbers(numbers: &[f32], device: &Device) -> Result<Buffer> {
    let kernels = kernels::of_device(device)?;
    let mut buffer = kernels.zeros(DType::F32, numbers.len()).map_err(Error::from)?;
    kernels.write((&mut buffer).into(), &mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(numbers)))?;
    Ok(buffer)
}

/// The numbers of a buffer of F32.
pub(crate) fn to_numbers(buffer: &Buffer) -> Result<Vec<f32>> {
    let mut numbers = vec![];
    let mut take = |bytes: &[u8]| numbers = bytemuck::pod_collect_to_vec(bytes);
    kernels::of_buffer(buffer)?.read(buffer.into(), &mut take)?;
    Ok(numbers)
}
