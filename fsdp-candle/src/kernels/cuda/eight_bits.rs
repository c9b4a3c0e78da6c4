//! 8-bit codes with a scale for each block.

use candle_core::Result;
use cudarc::driver::LaunchConfig;
use fsdp_core::DType;

use super::super::eight_bits::EightBits;
use super::super::slice::{Slice, SliceMut};
use super::device::{Cuda, same_dtype, same_length};
use super::launch::{Arg, THREADS, for_each_of, of_float};
use super::memory::clear;

/// Elements that are worth a block of threads.
const EACH: usize = 4096;

pub(super) fn quantise(
    cuda: &Cuda,
    bits: EightBits,
    block: usize,
    values: Slice<'_>,
    (codes, scales): (SliceMut<'_>, SliceMut<'_>),
) -> Result<()> {
    let (len, block) = (values.len(), block.max(1).min(values.len().max(1)));
    same_dtype(DType::F32, values.dtype())?;
    same_dtype(DType::U8, codes.dtype())?;
    same_dtype(DType::F32, scales.dtype())?;
    same_length(len, codes.len())?;
    let blocks = len.div_ceil(block);
    same_length(blocks, scales.len())?;
    let (values, codes, scales) = (cuda.view(values)?, cuda.view_mut(codes)?, cuda.view_mut(scales)?);
    if len == 0 {
        return Ok(());
    }
    clear(cuda, scales)?;
    let together = block.div_ceil(EACH);
    let threads = (block.div_ceil(32) * 32).min(THREADS as usize) as u32;
    let grid = u32::try_from(blocks * together).unwrap_or(u32::MAX).min(i32::MAX as u32);
    if grid as usize != blocks * together {
        candle_core::bail!("{blocks} blocks of {block} elements are more than one launch takes");
    }
    let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
    let args = [values.into(), scales.into(), len.into(), block.into(), together.into()];
    // SAFETY: the kernel's arguments; a scale has room for the bits of a float.
    unsafe { cuda.launch("largest", config, &args)? };
    let (kernel, most, of_zeros) = match bits {
        EightBits::Int8 => ("quantise_int8", 127., 0.),
        EightBits::E4M3 => ("quantise_e4m3", 448., 1.),
        EightBits::Signed => ("quantise_signed", 1., 0.),
        EightBits::Unsigned => ("quantise_unsigned", 1., 0.),
    };
    let args = [scales.into(), blocks.into(), Arg::Float(most), Arg::Float(of_zeros)];
    // SAFETY: the kernel's arguments.
    unsafe { cuda.launch("scales_of", for_each_of(blocks), &args)? };
    let args = [values.into(), scales.into(), codes.into(), len.into(), block.into()];
    // SAFETY: the kernel's arguments; there is a code for each value and a scale for each block.
    unsafe { cuda.launch(kernel, for_each_of(len), &args) }
}

pub(super) fn dequantise(
    cuda: &Cuda,
    bits: EightBits,
    block: usize,
    (codes, scales): (Slice<'_>, Slice<'_>),
    values: SliceMut<'_>,
) -> Result<()> {
    let (len, block) = (values.len(), block.max(1));
    let bits = match bits {
        EightBits::Int8 => "int8",
        EightBits::E4M3 => "e4m3",
        EightBits::Signed => "signed",
        EightBits::Unsigned => "unsigned",
    };
    let kernel = format!("dequantise_{bits}_{}", of_float(values.dtype())?);
    same_dtype(DType::U8, codes.dtype())?;
    same_dtype(DType::F32, scales.dtype())?;
    same_length(len, codes.len())?;
    same_length(len.div_ceil(block), scales.len())?;
    let (codes, scales, values) = (cuda.view(codes)?, cuda.view(scales)?, cuda.view_mut(values)?);
    if len == 0 {
        return Ok(());
    }
    let args = [codes.into(), scales.into(), values.into(), len.into(), block.into()];
    // SAFETY: the kernel's arguments, of the dtype in its name; there is a code for each value and a scale a block.
    unsafe { cuda.launch(&kernel, for_each_of(len), &args) }
}
