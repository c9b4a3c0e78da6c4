//! Sequences of a token stream, and their shuffled order.

use anyhow::Result;
use fsdp_candle::nn::IGNORED;
use fsdp_corpus::permutation::Permutation;

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
