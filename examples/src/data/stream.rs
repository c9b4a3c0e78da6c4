//! The data as one stream, cut into sequences.
//! Orders that any rank computes for itself, at any place, without holding them in memory.

use anyhow::Result;
use fsdp_candle::nn::IGNORED;

use crate::data::tokens::Data;

/// Sequence k reads `tokens[k*T .. k*T+T]` and predicts `tokens[k*T+1 .. k*T+T+1]`, T being `seq_len`.
pub(super) struct Stream {
    pub(super) data: Data,
    seq_len: usize,
    shuffle: Option<u64>,
}

impl Stream {
    pub(super) fn new(data: Data, seq_len: usize, shuffle: Option<u64>) -> Self {
        Stream { data, seq_len, shuffle }
    }

    /// The number of sequences of an epoch.
    pub(super) fn count(&self) -> u64 {
        self.data.len().saturating_sub(1) / self.seq_len as u64
    }

    /// The number of the sequence that is read `offset` after `position`.
    pub(super) fn place(&self, position: u64, offset: u64) -> u64 {
        let count = self.count();
        let past = position % count + offset;
        match self.shuffle {
            Some(seed) => Permutation::new(count, seed, position / count + past / count).at(past % count),
            None => past % count,
        }
    }

    /// Appends a sequence to rows of inputs and targets.
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

/// A permutation of `0..len`, another one for each seed and epoch: a Feistel network (Luby and Rackoff, 1988) over the
/// next even number of bits, whose values beyond the end are sent through once more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
    len: u64,
    key: u64,
    /// Bits of half a value.
    half: u32,
}

/// Four make it look random to any test that does not know the key; a few more cost nothing.
const ROUNDS: u64 = 6;

impl Permutation {
    pub(super) fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Permutation { len, key: mix(mix(seed).wrapping_add(epoch)), half: bits.div_ceil(2).max(1) }
    }

    /// Which one comes at place `index`, which is below the length.
    pub(super) fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.shuffled(value);
            if value < self.len {
                return value;
            }
        }
    }

    /// A permutation of all values of as many bits.
    fn shuffled(&self, value: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (value >> self.half, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(self.key ^ mix((right << 3) + round)) & mask));
        }
        left << self.half | right
    }
}

/// The finalizer of SplitMix64 (Steele et al., 2014): every bit of the input reaches every bit of the output.
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
    fn each_comes_once() {
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
    fn seeds_and_epochs_are_different_orders() {
        let first = order(100, 7, 0);
        assert_eq!(first, order(100, 7, 0));
        assert_ne!(first, (0..100).collect::<Vec<_>>());
        for other in [order(100, 7, 1), order(100, 8, 0)] {
            // Two random orders of a hundred agree in one place, now and then in five.
            assert!(first.iter().zip(&other).filter(|(a, b)| a == b).count() < 8);
        }
    }

    /// Where an item goes is as good as random: over many epochs each place gets it equally often.
    #[test]
    fn every_place_is_as_likely() {
        let (len, epochs) = (12, 12_000);
        let mut counts = vec![0f64; 12];
        for epoch in 0..epochs {
            counts[order(len, 3, epoch).iter().position(|&item| item == 5).unwrap()] += 1.;
        }
        // Chi-square with 11 degrees of freedom is above 40 once in 30,000 times.
        let chi: f64 = counts.iter().map(|count| (count - 1000.).powi(2) / 1000.).sum();
        assert!(chi < 40., "{chi}: {counts:?}");
    }
}
