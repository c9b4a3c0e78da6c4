//! Frozen weights gathered as 8-bit integers with a scale for each block: a quarter of the bytes of f32. The QLoRA
//! case.

use candle_core::{Result, Tensor};
use fsdp_core::Buffer;

use super::all_gather::AllGatherExtension;
use super::eight_bits::{decode, encode};
use crate::kernels::EightBits;

/// Symmetric 8-bit quantisation in blocks: `q = round(x / s)` with `s = max|x| / 127` over the block, so that each
/// gathered value differs from its shard's by at most `s / 2`, 1/254 of the block's largest magnitude. Shards keep
/// their precision; what is lost is lost in compute only.
#[derive(Clone, Copy, Debug)]
pub struct Int8Blocks {
    block: usize,
}

impl Int8Blocks {
    /// Blocks of `block` elements of a shard, one scale each; 64 is usual. 0 is taken as 1.
    pub fn new(block: usize) -> Self {
        Int8Blocks { block: block.max(1) }
    }
}

impl AllGatherExtension for Int8Blocks {
    fn lengths(&self, elements: usize) -> Vec<usize> {
        vec![elements, elements.div_ceil(self.block)]
    }

    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>> {
        encode(EightBits::Int8, self.block, shard, &self.lengths(shard.elem_count()))
    }

    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()> {
        let shards = counts.iter().map(|&count| (count, self.block, count.div_ceil(self.block)));
        decode(EightBits::Int8, gathered, shards, full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_error_is_at_most_half_a_step_of_its_block() {
        let values: Vec<f32> = (0..150).map(|i| ((i * 7919) % 1000) as f32 / 100. - 5.).collect();
        let int8 = Int8Blocks::new(64);
        let counts = [100, 50];
        let shards = [&values[..100], &values[100..]];
        let encoded: Vec<Vec<Buffer>> = shards
            .iter()
            .map(|shard| int8.pre_all_gather(&Tensor::from_slice(shard, shard.len(), &Device::Cpu).unwrap()).unwrap())
            .collect();
        let (mut bytes, mut scales) = (vec![], vec![]);
        for (rank, buffers) in encoded.iter().enumerate() {
            assert_eq!(buffers.iter().map(Buffer::len).collect::<Vec<_>>(), int8.lengths(counts[rank]));
            let [Buffer::U8(b), Buffer::F32(s)] = &buffers[..] else { panic!() };
            bytes.extend(b);
            scales.extend(s);
        }
        let mut full = Buffer::zeros(fsdp_core::DType::F32, 150);
        int8.post_all_gather(&[Buffer::U8(bytes), Buffer::F32(scales)], &counts, &mut full).unwrap();
        let Buffer::F32(decoded) = full else { panic!() };
        for shard in [0..100, 100..150] {
            for (block, want) in decoded[shard.clone()].chunks(64).zip(values[shard].chunks(64)) {
                let largest = want.iter().fold(0f32, |max, value| max.max(value.abs()));
                for (got, want) in block.iter().zip(want) {
                    assert!((got - want).abs() <= largest / 254. * 1.0001, "{got} {want}");
                }
            }
        }
    }
}
