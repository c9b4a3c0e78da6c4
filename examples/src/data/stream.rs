//! Sequences of a token stream, and their shuffled order.

use anyhow::Result;
use fsdp_candle::nn::IGNORED;

use crate::data::tokens::Data;

/// Sequences of a stream. Sequence k has inputs `tokens[k*T .. k*T+T]` and targets `tokens[k*T+1 .. k*T+T+1]`, with T =
/// `seq_len`.
pub(super) struct Stream {
    pub(super) data: Data,
    seq_len: usize,
    shuffle: Option<u64>,
}

impl Stream {
    pub(super) fn new(data: Data, seq_len: usize, shuffle: Option<u64>) -> Self {
        Stream { data, seq_len, shuffle }
    }

    /// Returns the number of sequences per epoch.
    pub(super) fn count(&self) -> u64 {
        self.data.len().saturating_sub(1) / self.seq_len as u64
    }

    /// Returns the sequence at `offset` after `position`.
    pub(super) fn place(&self, position: u64, offset: u64) -> u64 {
        let count = self.count();
        let past = position % count + offset;
        match self.shuffle {
            Some(seed) => Permutation::new(count, seed, position / count + past / count).at(past % count),
            None => past % count,
        }
    }

    /// Appends a sequence to inputs and targets.
    pub(super) fn read(&self, sequence: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let (from, to) = (inputs.len(), targets.len());
        inputs.resize(from + self.seq_len, 0);
        targets.resize(to + self.seq_len, IGNORED);
        let start = sequence * self.seq_len as u64;
        self.data.copy_to(start, &mut inputs[from..])?;
        let (last, others) = (self.seq_len - 1, &inputs[from + 1..]);
        targets[to..to + last].copy_from_slice(others);
        self.data.copy_to(start + self.seq_len as u64, &mut targets[to + last..])
    }
}

/// A pseudo-random permutation of `0..len` for each seed and epoch, evaluated without storing it.
///
/// Uses a Feistel network (Luby and Rackoff, 1988) over an even number of bits, and repeats it for values beyond the
/// end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
    len: u64,
    key: u64,
    /// Number of bits in half a value.
    half: u32,
}

/// Four rounds suffice for pseudo-randomness.
const ROUNDS: u64 = 6;

impl Permutation {
    pub(super) fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Permutation { len, key: mix(mix(seed).wrapping_add(epoch)), half: bits.div_ceil(2).max(1) }
    }

    /// Returns the item at `index`, which is below the length.
    pub(super) fn at(&self, index: u64) -> u64 {
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
fn mix(x: u64) -> u64 {
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
