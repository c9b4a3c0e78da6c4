//! Shards as 8-bit codes and scales: two buffers.

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::Buffer;

use crate::error::Error;
use crate::kernels::{self, EightBits, Slice, SliceMut};
use crate::storage::{to_dtype, with_slice};

/// A shard's codes and scales, in buffers of these lengths. There is no error for what is not finite: the other ranks
/// would wait in the all-gather.
pub(super) fn encode(bits: EightBits, block: usize, shard: &Tensor, lengths: &[usize]) -> Result<Vec<Buffer>> {
    let &[codes, scales] = lengths else { bail!("codes and scales are two buffers") };
    let kernels = kernels::of_device(shard.device())?;
    let mut codes = kernels.zeros(fsdp_core::DType::U8, codes).map_err(Error::from)?;
    let mut scales = kernels.zeros(fsdp_core::DType::F32, scales).map_err(Error::from)?;
    // An empty shard may have a scale, which nobody reads.
    let blocks = codes.len().div_ceil(block.max(1));
    let scales_of_blocks = SliceMut::from(&mut scales).range(0..blocks)?;
    with_slice(&to_dtype(&shard.detach(), DType::F32)?.contiguous()?, |kernels, values| {
        kernels.quantise(bits, block, values, (&mut codes).into(), scales_of_blocks)
    })?;
    Ok(vec![codes, scales])
}

/// Decodes the codes and scales of shards of `(elements, block, scales)` each.
pub(super) fn decode(
    bits: EightBits,
    gathered: &[Buffer],
    shards: impl Iterator<Item = (usize, usize, usize)>,
    full: &mut Buffer,
) -> Result<()> {
    let [codes, scales] = gathered else { bail!("codes and scales are two buffers") };
    let kernels = kernels::of_buffer(codes)?;
    let (mut at, mut scale_at) = (0, 0);
    for (count, block, scale_count) in shards {
        let blocks = count.div_ceil(block.max(1));
        let codes = Slice::from(codes).range(at..at + count)?;
        let scales = Slice::from(scales).range(scale_at..scale_at + blocks)?;
        kernels.dequantise(bits, block, codes, scales, SliceMut::from(&mut *full).range(at..at + count)?)?;
        at += count;
        scale_at += scale_count;
    }
    Ok(())
}
