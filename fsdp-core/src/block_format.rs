//! Floats in blocks of few bits, as frozen weights are stored, gathered and saved.

use half::bf16;

use crate::layout::Region;

/// Number of floats in a block, which share a scale.
pub const BLOCK: usize = 64;

/// Bytes of a block's scale, a little-endian BF16 before its codes.
pub const BLOCK_SCALE: usize = 2;

/// A format of blocks. A block is [`BLOCK`] neighbours of a tensor's last dimension: a scale, then their codes.
///
/// The bytes of a block depend on its floats only, and a tensor in blocks is an ordinary tensor of bytes, whose last
/// dimension has the bytes of the blocks. So shards of blocks hold the same values at every number of ranks, and
/// checkpoints reshard them as any tensor.
///
/// ```
/// use fsdp_core::BlockFormat;
///
/// let weights: Vec<f32> = (0..128).map(|i| (i as f32).sin()).collect();
/// for (format, bytes, error) in [(BlockFormat::Nf4, 2 * 34, 0.16), (BlockFormat::Int8, 2 * 66, 0.006)] {
///     let mut blocks = vec![0; bytes];
///     format.encode(&weights, &mut blocks);
///     let mut decoded = vec![0.; weights.len()];
///     format.decode(&blocks, &mut decoded, |value| value);
///     assert!(weights.iter().zip(&decoded).all(|(weight, value)| (weight - value).abs() < error));
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 4-bit NormalFloat: 16 levels, which are quantiles of the normal distribution (Dettmers et al., "QLoRA",
    /// arXiv:2305.14314, appendix E). 34 bytes a block, 0.53 a float.
    ///
    /// The codes are those of bitsandbytes with blocks of 64, two in a byte with the first in the upper half. The scale
    /// is the largest magnitude in BF16. bitsandbytes keeps the magnitude in F32, or quantizes it again to 8 bits ("double
    /// quantization"). Its double quantization needs groups of 16,384 floats and a mean over the whole tensor. Such groups
    /// span ranks. BF16 has the precision of 8 bits, and takes 0.015 bytes a float more.
    Nf4,
    /// Integers from -127 to 127. The scale is the largest magnitude / 127. 66 bytes a block, 1.03 a float.
    Int8,
}

/// The levels of NF4.
const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The middle between each level and the next.
const MIDDLES: [f32; 15] = {
    let (mut middles, mut at) = ([0.; 15], 0);
    while at < 15 {
        middles[at] = (LEVELS[at] + LEVELS[at + 1]) / 2.;
        at += 1;
    }
    middles
};

/// The two levels of each byte.
const PAIRS: [[f32; 2]; 256] = {
    let (mut pairs, mut byte) = ([[0.; 2]; 256], 0);
    while byte < 256 {
        pairs[byte] = [LEVELS[byte >> 4], LEVELS[byte & 15]];
        byte += 1;
    }
    pairs
};

impl BlockFormat {
    /// All formats.
    pub const ALL: [BlockFormat; 2] = [BlockFormat::Nf4, BlockFormat::Int8];

    /// Returns the name, such as `nf4`.
    pub const fn name(self) -> &'static str {
        match self {
            BlockFormat::Nf4 => "nf4",
            BlockFormat::Int8 => "int8",
        }
    }

    /// Returns the bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            BlockFormat::Nf4 => BLOCK_SCALE + BLOCK / 2,
            BlockFormat::Int8 => BLOCK_SCALE + BLOCK,
        }
    }

    /// Returns the bytes of `floats` floats, which must be whole blocks.
    pub const fn bytes(self, floats: usize) -> usize {
        floats / BLOCK * self.block_bytes()
    }

    /// Returns the shape in bytes of a tensor of floats; `None` if its last dimension is not a multiple of [`BLOCK`].
    pub fn encoded_shape(self, shape: &[usize]) -> Option<Vec<usize>> {
        self.with_last(shape, BLOCK, self.block_bytes())
    }

    /// Returns the shape of the floats in a tensor of bytes; `None` if its last dimension is not whole blocks.
    pub fn decoded_shape(self, shape: &[usize]) -> Option<Vec<usize>> {
        self.with_last(shape, self.block_bytes(), BLOCK)
    }

    /// Returns the box of bytes that has the blocks of a box of floats; `None` if the box cuts a block.
    pub fn encoded_region(self, region: &Region) -> Option<Region> {
        Some(Region { offsets: self.encoded_shape(&region.offsets)?, sizes: self.encoded_shape(&region.sizes)? })
    }

    fn with_last(self, sizes: &[usize], from: usize, to: usize) -> Option<Vec<usize>> {
        let (last, rest) = sizes.split_last().filter(|(last, _)| last.is_multiple_of(from))?;
        Some(rest.iter().copied().chain([last / from * to]).collect())
    }

    /// Returns the name in a checkpoint of a tensor that is saved in blocks: `name.nf4`.
    pub fn encoded_name(self, name: &str) -> String {
        format!("{name}.{}", self.name())
    }

    /// Returns the format and the name of the floats, if this is the name of a tensor in blocks.
    pub fn of_name(name: &str) -> Option<(Self, &str)> {
        let (floats, end) = name.rsplit_once('.')?;
        Some((Self::ALL.into_iter().find(|format| format.name() == end)?, floats))
    }

    /// Encodes whole blocks. All floats of a block with a NaN or an infinity decode to NaN.
    ///
    /// # Panics
    /// If `blocks` does not have [`BlockFormat::bytes`] of the floats.
    pub fn encode(self, floats: &[f32], blocks: &mut [u8]) {
        let (floats, rest) = floats.as_chunks::<BLOCK>();
        let count = blocks.len() / self.block_bytes();
        assert!(rest.is_empty() && blocks.len() == floats.len() * self.block_bytes(), "{count} blocks");
        for (floats, block) in floats.iter().zip(blocks.chunks_exact_mut(self.block_bytes())) {
            let largest = floats.iter().fold(0f32, |most, float| most.max(float.abs()));
            let (scale, codes) = block.split_at_mut(BLOCK_SCALE);
            let steps = match self {
                BlockFormat::Nf4 => 1.,
                BlockFormat::Int8 => 127.,
            };
            let is_finite = floats.iter().all(|float| float.is_finite());
            // Smaller magnitudes have no inverse.
            let is_zero = largest < f32::MIN_POSITIVE * steps;
            let of_block = match is_finite {
                true if is_zero => bf16::ZERO,
                true => bf16::from_f32(largest / steps).min(bf16::MAX),
                false => bf16::NAN,
            };
            scale.copy_from_slice(&of_block.to_le_bytes());
            match self {
                BlockFormat::Nf4 => {
                    let inverse = if is_finite && !is_zero { 1. / largest } else { 0. };
                    let code =
                        |float: f32| MIDDLES.iter().fold(0, |code, middle| code + u8::from(float * inverse > *middle));
                    for (byte, [first, second]) in codes.iter_mut().zip(floats.as_chunks().0) {
                        *byte = code(*first) << 4 | code(*second);
                    }
                }
                BlockFormat::Int8 => {
                    let inverse = if is_finite && !is_zero { 1. / of_block.to_f32() } else { 0. };
                    for (byte, float) in codes.iter_mut().zip(floats) {
                        *byte = (float * inverse).round_ties_even().clamp(-127., 127.) as i8 as u8;
                    }
                }
            }
        }
    }

    /// Decodes whole blocks, and converts each float.
    ///
    /// # Panics
    /// If `blocks` does not have [`BlockFormat::bytes`] of the floats.
    pub fn decode<T>(self, blocks: &[u8], floats: &mut [T], convert: impl Fn(f32) -> T) {
        let count = blocks.len() / self.block_bytes();
        let (floats, rest) = floats.as_chunks_mut::<BLOCK>();
        assert!(rest.is_empty() && blocks.len() == floats.len() * self.block_bytes(), "{count} blocks");
        for (block, floats) in blocks.chunks_exact(self.block_bytes()).zip(floats) {
            let scale = bf16::from_le_bytes([block[0], block[1]]).to_f32();
            let mut levels = [0f32; BLOCK];
            match self {
                BlockFormat::Nf4 => {
                    let pairs = levels.as_chunks_mut::<2>().0.iter_mut();
                    pairs.zip(&block[BLOCK_SCALE..]).for_each(|(pair, &byte)| *pair = PAIRS[usize::from(byte)]);
                }
                BlockFormat::Int8 => {
                    levels
                        .iter_mut()
                        .zip(&block[BLOCK_SCALE..])
                        .for_each(|(level, &byte)| *level = f32::from(byte as i8));
                }
            }
            floats.iter_mut().zip(levels).for_each(|(float, level)| *float = convert(level * scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(format: BlockFormat, floats: &[f32]) -> Vec<f32> {
        let mut blocks = vec![0; format.bytes(floats.len())];
        format.encode(floats, &mut blocks);
        let mut decoded = vec![0.; floats.len()];
        format.decode(&blocks, &mut decoded, |float| float);
        decoded
    }

    #[test]
    fn nf4_decodes_to_the_nearest_level() {
        let floats: Vec<f32> = (0..BLOCK).map(|i| (i as f32 * 1.7).sin() * 0.03).collect();
        let largest = floats.iter().fold(0f32, |most, float| most.max(float.abs()));
        let scale = bf16::from_f32(largest).to_f32();
        for (float, decoded) in floats.iter().zip(decoded(BlockFormat::Nf4, &floats)) {
            let distance = |level: &f32| (level - float / largest).abs();
            let nearest = LEVELS.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
            assert_eq!(decoded, nearest * scale, "{float}");
        }
        // Levels are their own codes.
        let mut levels = LEVELS.repeat(4);
        assert_eq!(decoded(BlockFormat::Nf4, &levels), levels);
        levels[3] = -2.;
        assert_eq!(decoded(BlockFormat::Nf4, &levels)[3], -2.);
    }

    #[test]
    fn int8_errors_are_at_most_half_a_step() {
        let floats: Vec<f32> = (0..3 * BLOCK).map(|i| ((i * 7919) % 1000) as f32 / 100. - 5.).collect();
        for (floats, decoded) in floats.chunks(BLOCK).zip(decoded(BlockFormat::Int8, &floats).chunks(BLOCK)) {
            let step = floats.iter().fold(0f32, |most, float| most.max(float.abs())) / 127.;
            assert!(floats.iter().zip(decoded).all(|(float, decoded)| (float - decoded).abs() <= 0.502 * step));
        }
    }

    #[test]
    fn blocks_of_zeros_stay_zeros_and_other_numbers_become_nan() {
        for format in BlockFormat::ALL {
            for zero in [0., 1e-40, -1e-39] {
                assert_eq!(decoded(format, &[zero; BLOCK]), [0.; BLOCK]);
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut floats = vec![1.; 2 * BLOCK];
                floats[5] = bad;
                let decoded = decoded(format, &floats);
                assert!(decoded[..BLOCK].iter().all(|float| float.is_nan()));
                assert!(decoded[BLOCK..].iter().all(|float| (float - 1.).abs() < 0.01));
            }
            assert!(decoded(format, &[f32::MAX; BLOCK]).iter().all(|float| *float > 3e38));
        }
    }

    #[test]
    fn shapes_and_names_convert_both_ways() {
        let region = Region { offsets: vec![3, 128], sizes: vec![2, 64] };
        for format in BlockFormat::ALL {
            let bytes = format.block_bytes();
            assert_eq!(format.encoded_shape(&[5, 192]), Some(vec![5, 3 * bytes]));
            assert_eq!(format.decoded_shape(&[5, 3 * bytes]), Some(vec![5, 192]));
            assert_eq!((format.encoded_shape(&[5, 100]), format.encoded_shape(&[])), (None, None));
            let encoded = Region { offsets: vec![3, 2 * bytes], sizes: vec![2, bytes] };
            assert_eq!(format.encoded_region(&region), Some(encoded));
            assert_eq!(BlockFormat::of_name(&format.encoded_name("a.weight")), Some((format, "a.weight")));
        }
        assert_eq!(BlockFormat::of_name("a.weight"), None);
    }
}
