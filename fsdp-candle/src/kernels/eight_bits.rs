//! Floats as 8-bit codes, with a scale for each block of values.

use std::sync::LazyLock;

/// The meaning of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EightBits {
    /// A float with 4 bits of exponent and 3 of mantissa. A block's scale is its largest magnitude / 448.
    E4M3,
    /// A sign, and one of 128 magnitudes over six decades ([`SIGNED`]). A block's scale is its largest magnitude.
    Signed,
    /// One of 256 magnitudes over seven decades ([`UNSIGNED`]), for values that are not negative. A block's scale is
    /// its largest magnitude.
    Unsigned,
}

/// Number of values of an optimizer's state that share a scale.
pub(crate) const STATE_BLOCK: usize = 256;

/// Magnitudes from 0 to 1, in order: the dynamic quantisation of Dettmers et al., "8-bit Optimizers via Block-wise
/// Quantization" (arXiv:2110.02861). From 10^-7 on, each decade has twice as many magnitudes as the one below.
pub(crate) struct Magnitudes {
    /// Magnitude of each code.
    pub(crate) values: Vec<f32>,
    /// Middle between each magnitude and the next.
    pub(crate) middles: Vec<f32>,
    /// Code of the smallest number of each bucket. The numbers of a bucket have the same exponent and upper mantissa
    /// bits.
    first: Vec<u8>,
}

/// 128 magnitudes from 3e-6.
pub(crate) static SIGNED: LazyLock<Magnitudes> = LazyLock::new(|| Magnitudes::new(1));
/// 256 magnitudes from 3e-7.
pub(crate) static UNSIGNED: LazyLock<Magnitudes> = LazyLock::new(|| Magnitudes::new(0));

/// The upper 16 bits of 2^-24, below which every code is 0, and of 1.
const LOWEST: u32 = 0x3380;
const HIGHEST: u32 = 0x3f80;

/// Largest number of each decade.
const UNITS: [f64; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.];

impl Magnitudes {
    /// Returns the magnitudes of the decades from `first` on. The first decade has two.
    fn new(first: usize) -> Self {
        let mut values = vec![0f32];
        for (decade, unit) in UNITS[first..].iter().enumerate() {
            let count = 2u32 << decade;
            let step = 0.9 / f64::from(count);
            values.extend((0..count).map(|at| (unit * (0.1 + (f64::from(at) + 0.5) * step)) as f32));
        }
        values.push(1.);
        let middles: Vec<f32> = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.).collect();
        let code = |number: f32| middles.iter().filter(|middle| number > **middle).count() as u8;
        let codes = (LOWEST..=HIGHEST).map(|bits| if bits == LOWEST { 0 } else { code(f32::from_bits(bits << 16)) });
        let first = codes.collect();
        Magnitudes { values, middles, first }
    }

    /// Returns the code of the magnitude nearest to a number from 0 to 1. Greater numbers have the code of 1, and NaN
    /// the code of 0.
    #[inline(always)]
    pub(crate) fn code(&self, number: f32) -> u8 {
        let bits = if number >= 0. { number.to_bits() } else { 0 };
        let bucket = (bits >> 16).clamp(LOWEST, HIGHEST) - LOWEST;
        let code = self.first[bucket as usize];
        match self.middles.get(usize::from(code)) {
            Some(middle) => code + u8::from(number > *middle),
            None => code,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_the_nearest_magnitude() {
        for (magnitudes, count) in [(&*SIGNED, 128), (&*UNSIGNED, 256)] {
            assert_eq!((magnitudes.values.len(), magnitudes.middles.len()), (count, count - 1));
            assert!(magnitudes.values.windows(2).all(|pair| pair[0] < pair[1]));
            let plain = |number: f32| magnitudes.middles.iter().filter(|middle| number > **middle).count();
            let buckets = (0x3000..=HIGHEST)
                .flat_map(|bits| [0, 0x1fff, 0x8000, 0xffff].map(|low| f32::from_bits(bits << 16 | low).min(1.)));
            let near = magnitudes.middles.iter().flat_map(|&middle| [middle.next_down(), middle, middle.next_up()]);
            for number in buckets.chain(near).chain(magnitudes.values.iter().copied()).chain([0., 1e-30]) {
                assert_eq!(usize::from(magnitudes.code(number)), plain(number), "{number:e}");
            }
            assert_eq!(usize::from(magnitudes.code(1.0f32.next_up())), count - 1);
            assert_eq!(magnitudes.code(f32::NAN), 0);
        }
    }
}
