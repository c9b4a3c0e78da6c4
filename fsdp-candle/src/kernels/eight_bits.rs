//! Floats as 8-bit codes with a scale for each block of them.

use std::sync::LazyLock;

/// What a code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EightBits {
    /// A whole number from -127 to 127; a block's scale is its largest magnitude / 127.
    Int8,
    /// A float of 4 bits of exponent and 3 of mantissa; a block's scale is its largest magnitude / 448.
    E4M3,
    /// A sign, and one of 128 magnitudes over six decades ([`SIGNED`]); a block's scale is its largest magnitude.
    Signed,
    /// One of 256 magnitudes over seven decades ([`UNSIGNED`]); a block's scale is its largest magnitude. Values are
    /// not negative.
    Unsigned,
}

/// How many values of an optimizer's state share a scale.
pub(crate) const STATE_BLOCK: usize = 256;

/// Magnitudes from 0 to 1, in order: the dynamic quantisation of Dettmers et al., "8-bit Optimizers via Block-wise
/// Quantization" (arXiv:2110.02861). Each decade has twice as many as the one below, from 10^-7 on.
pub(crate) struct Magnitudes {
    /// What codes stand for.
    pub(crate) values: Vec<f32>,
    /// Between each and the next.
    pub(crate) middles: Vec<f32>,
    /// The code of the least number of each bucket, numbers whose bits of exponent and upper mantissa are the same.
    first: Vec<u8>,
}

/// 128 magnitudes from 3e-6.
pub(crate) static SIGNED: LazyLock<Magnitudes> = LazyLock::new(|| Magnitudes::new(1));
/// 256 magnitudes from 3e-7.
pub(crate) static UNSIGNED: LazyLock<Magnitudes> = LazyLock::new(|| Magnitudes::new(0));

/// The upper 16 bits of 2^-24, below which all is 0, and of 1.
const LOWEST: u32 = 0x3380;
const HIGHEST: u32 = 0x3f80;

/// The largest numbers of the decades.
const UNITS: [f64; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.];

impl Magnitudes {
    /// Those of decades, the first of which has two.
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

    /// The code of the nearest to a number of 0 to 1. What is above has the code of 1, what is no number that of 0.
    #[inline(always)]
    pub(crate) fn code(&self, number: f32) -> u8 {
        let bucket = (number.to_bits() >> 16).clamp(LOWEST, HIGHEST) - LOWEST;
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
    fn every_number_gets_the_nearest_magnitude() {
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
        }
    }
}
