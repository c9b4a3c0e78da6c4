//! Extensions of the all-gather, which change the encoding of parameters between ranks.

use candle_core::{DType, Result, Tensor, bail};
use fsdp_core::{Buffer, DType as CoreDType};

use crate::error::Error;
use crate::kernels::{self, EightBits, Slice, SliceMut};
use crate::storage::{to_dtype, with_slice};

/// Changes the encoding of a parameter in the all-gather, such as trained weights in 8 bits. Frozen weights can be stored
/// in few bits: see [`WeightFormat`](crate::WeightFormat).
///
/// Each rank encodes its shard into one or more buffers. Each buffer is gathered, and every rank decodes the gathered
/// buffers into the concatenation of all shards. The number of buffers, their dtypes and lengths must follow from the
/// shard's length only, because every rank computes those of the others.
///
/// ```
/// use std::sync::Arc;
/// use fsdp_candle::{AllGatherExtension, Float8};
/// # use fsdp_candle::doc_example::*;
/// # let (world, vars, opts, vb) = one_rank()?;
/// # let x = Tensor::ones((3, 4), DType::F32, world.device())?;
///
/// let float8: Arc<dyn AllGatherExtension> = Arc::new(Float8);
/// let opts = FullyShard::new(&vars).all_gather_extension(move |fqn| (fqn == "weight").then(|| float8.clone()));
/// let model = fully_shard(&opts, vars.builder(DType::F32), |vb| nn::linear(4, 8, vb))?;
/// let grads = model.backward(&model.forward(&x)?.sum_all()?)?;
/// assert!(vars.params().iter().all(|param| grads.get(param.var()).is_some()));
///
/// // Encode a shard and decode it, as every rank does.
/// let shard = Tensor::new(&[1f32, -0.5, 0.3], world.device())?;
/// let encoded = Float8.pre_all_gather(&shard)?;
/// assert_eq!(encoded.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), Float8.lengths(3));
/// let mut full = fsdp_core::Buffer::F32(vec![0.; 3]);
/// Float8.post_all_gather(&encoded, &[3], &mut full)?;
/// let fsdp_core::Buffer::F32(full) = full else { unreachable!() };
/// assert!((full[2] - 0.3).abs() < 0.3 / 16.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AllGatherExtension: Send + Sync {
    /// Returns the lengths of the buffers that encode a shard of `elements` elements.
    fn lengths(&self, elements: usize) -> Vec<usize>;

    /// Encodes a contiguous shard in the compute dtype: one buffer for each of [`AllGatherExtension::lengths`]. Fails
    /// if the shard cannot be encoded.
    fn pre_all_gather(&self, shard: &Tensor) -> Result<Vec<Buffer>>;

    /// Decodes into `full`, the concatenation of shards of `counts` elements. `gathered` contains each buffer's
    /// concatenation over the ranks. Fails if the buffers cannot be decoded.
    fn post_all_gather(&self, gathered: &[Buffer], counts: &[usize], full: &mut Buffer) -> Result<()>;
}

/// Weights gathered as 8-bit E4M3 floats with one scale for each shard.
///
/// A shard's largest magnitude maps to E4M3's largest, 448. With `scale = max|x| / 448`, a gathered value differs from
/// the shard's by at most 1/16 of its magnitude (half a step of 3 mantissa bits). Below 2^-6 of the scale it differs by
/// at most 2^-10 of the scale (Micikevicius et al., arXiv:2209.05433).
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

/// Encodes a shard as codes and scales, in buffers of these lengths. Values that are not finite are not an error here,
/// because the other ranks would wait in the all-gather.
fn encode(bits: EightBits, block: usize, shard: &Tensor, lengths: &[usize]) -> Result<Vec<Buffer>> {
    let &[codes, scales] = lengths else { bail!("expected two buffers: codes and scales") };
    let kernels = kernels::of_device(shard.device())?;
    let mut codes = kernels.zeros(CoreDType::U8, codes).map_err(Error::from)?;
    let mut scales = kernels.zeros(CoreDType::F32, scales).map_err(Error::from)?;
    // An empty shard may have a scale, which is not read.
    let blocks = codes.len().div_ceil(block.max(1));
    let scales_of_blocks = SliceMut::from(&mut scales).range(0..blocks)?;
    with_slice(&to_dtype(&shard.detach(), DType::F32)?.contiguous()?, |kernels, values| {
        kernels.quantise(bits, block, values, (&mut codes).into(), scales_of_blocks)
    })?;
    Ok(vec![codes, scales])
}

/// Decodes the codes and scales of shards of `(elements, block, scales)` each.
fn decode(
    bits: EightBits,
    gathered: &[Buffer],
    shards: impl Iterator<Item = (usize, usize, usize)>,
    full: &mut Buffer,
) -> Result<()> {
    let [codes, scales] = gathered else { bail!("expected two buffers: codes and scales") };
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn float8_errors_are_at_most_a_sixteenth() {
        let values: Vec<f32> = (1..400).map(|i| (i as f32 * 0.37).sin() * 3. / (1. + (i % 17) as f32)).collect();
        let shard = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap();
        let encoded = Float8.pre_all_gather(&shard).unwrap();
        assert_eq!(encoded.iter().map(Buffer::len).collect::<Vec<_>>(), Float8.lengths(values.len()));
        let mut full = Buffer::zeros(CoreDType::F32, values.len());
        Float8.post_all_gather(&encoded, &[values.len()], &mut full).unwrap();
        let (Buffer::F32(decoded), Buffer::F32(scale)) = (full, &encoded[1]) else { panic!() };
        for (got, want) in decoded.iter().zip(&values) {
            let bound = (want.abs() / 16.).max(scale[0] / 1024.);
            assert!((got - want).abs() <= bound * 1.0001, "{got} {want}");
        }
    }
}
