//! Weights gathered as 8-bit floats with one scale for each shard.

use candle_core::{Result, Tensor};
use fsdp_core::Buffer;

use super::all_gather::AllGatherExtension;
use super::eight_bits::{decode, encode};
use crate::kernels::EightBits;

/// E4M3 floats, scaled so that a shard's largest magnitude is E4M3's largest, 448. Each gathered value differs from its
/// shard's by at most 1/16 of its own magnitude (half a step of 3 mantissa bits), or, where it is below 2^-6 of the
/// scale, by 2^-10 of the scale, with `scale = max|x| / 448` (Micikevicius et al., arXiv:2209.05433).
#[derive(Clone, Copy, Debug, Default)]
pub struct Float8;

impl AllGatherExtension for Float8 {
    fn lengths(&self, elements: usize) -> Vec<usize> {
        vec![elements, 1]
    }

    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>> {
        encode(EightBits::E4M3, shard.elem_count(), shard, &self.lengths(shard.elem_count()))
    }

    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()> {
        decode(EightBits::E4M3, gathered, counts.iter().map(|&count| (count, count, 1)), full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_error_is_at_most_a_sixteenth() {
        let values: Vec<f32> = (1..400).map(|i| (i as f32 * 0.37).sin() * 3. / (1. + (i % 17) as f32)).collect();
        let shard = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap();
        let encoded = Float8.pre_all_gather(&shard).unwrap();
        assert_eq!(encoded.iter().map(Buffer::len).collect::<Vec<_>>(), Float8.lengths(values.len()));
        let mut full = Buffer::zeros(fsdp_core::DType::F32, values.len());
        Float8.post_all_gather(&encoded, &[values.len()], &mut full).unwrap();
        let (Buffer::F32(decoded), Buffer::F32(scale)) = (full, &encoded[1]) else { panic!() };
        for (got, want) in decoded.iter().zip(&values) {
            let bound = (want.abs() / 16.).max(scale[0] / 1024.);
            assert!((got - want).abs() <= bound * 1.0001, "{got} {want}");
        }
    }
}
