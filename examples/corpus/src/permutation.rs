//! Shuffled orders that are not stored.

/// A pseudo-random permutation of `0..len` for each seed and epoch, evaluated without storing it.
///
/// Uses a Feistel network (Luby and Rackoff, 1988) over an even number of bits, and repeats it for values beyond the
/// end.
///
/// ```
/// use fsdp_corpus::permutation::Permutation;
///
/// let permutation = Permutation::new(5, 42, 0);
/// let mut order: Vec<u64> = (0..5).map(|index| permutation.at(index)).collect();
/// order.sort();
/// assert_eq!(order, [0, 1, 2, 3, 4]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    key: u64,
    /// Number of bits in half a value.
    half: u32,
}

/// Four rounds suffice for pseudo-randomness.
const ROUNDS: u64 = 6;

impl Permutation {
    /// Creates the permutation of an epoch.
    pub fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Permutation { len, key: mix(mix(seed).wrapping_add(epoch)), half: bits.div_ceil(2).max(1) }
    }

    /// Returns the item at `index`, which is below the length.
    pub fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.shuffled(value);
            if value < self.len {
                return value;
            }
        }
    }

    /// Permutes all values with this number of bits.
    fn shuffled(&self, value: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (value >> self.half, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(self.key ^ mix((right << 3) + round)) & mask));
        }
        left << self.half | right
    }
}

/// Finalizer of SplitMix64 (Steele et al., 2014): every input bit affects every output bit.
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(len, seed, epoch);
        (0..len).map(|index| permutation.at(index)).collect()
    }

    #[test]
    fn permutation_is_bijective() {
        for len in (0..70).chain([1000, 1 << 12, (1 << 12) + 1]) {
            for seed in 0..3 {
                let mut order = order(len, seed, 1);
                order.sort_unstable();
                assert_eq!(order, (0..len).collect::<Vec<_>>(), "{len}, seed {seed}");
            }
        }
        let huge = Permutation::new(u64::MAX, 1, 1);
        assert!(huge.at(u64::MAX - 1) < u64::MAX);
    }

    #[test]
    fn order_depends_on_seed_and_epoch() {
        let first = order(100, 7, 0);
        assert_eq!(first, order(100, 7, 0));
        assert_ne!(first, (0..100).collect::<Vec<_>>());
        for other in [order(100, 7, 1), order(100, 8, 0)] {
            // Random orders of a hundred items agree in one place on average.
            assert!(first.iter().zip(&other).filter(|(a, b)| a == b).count() < 8);
        }
    }

    /// Over many epochs, every item is in each place equally often.
    #[test]
    fn places_are_uniform() {
        let (len, epochs) = (12, 12_000);
        let mut counts = vec![0f64; 12];
        for epoch in 0..epochs {
            counts[order(len, 3, epoch).iter().position(|&item| item == 5).unwrap()] += 1.;
        }
        // A chi-square value with 11 degrees of freedom exceeds 40 once in 30,000 times.
        let chi: f64 = counts.iter().map(|count| (count - 1000.).powi(2) / 1000.).sum();
        assert!(chi < 40., "{chi}: {counts:?}");
    }
}
