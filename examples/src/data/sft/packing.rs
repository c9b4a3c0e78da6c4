//! Packing of examples into sequences.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, ensure};
use fsdp_candle::nn::IGNORED;

use crate::data::sft::Examples;
use fsdp_corpus::permutation::Permutation;

/// Maximal number of open sequences.
const OPEN: usize = 64;
/// Largest position that is looked up, in examples.
const MOST_READ: u64 = 1 << 40;

/// Options of packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackingOptions {
    /// Whether several examples may share a sequence.
    pub packing: bool,
    /// Seed that shuffles the examples in each epoch. Unset: the order of the file.
    pub shuffle: Option<u64>,
}

/// Examples packed into sequences of `seq_len` tokens.
///
/// In the order of the epoch, each example goes to the first open sequence with enough room, or to a new one. The
/// oldest sequence is closed when more than 64 are open. Sequences are read in the order in which they are closed. The
/// result depends only on the lengths of the examples, the seed and the epoch, so every rank computes the same.
pub(in crate::data) struct Packed {
    examples: Examples,
    seq_len: usize,
    options: PackingOptions,
    epochs: Mutex<Epochs>,
}

struct Epochs {
    /// First sequence of each known epoch.
    starts: Vec<u64>,
    /// The latest computed epochs, with their numbers.
    recent: VecDeque<(u64, Arc<Epoch>)>,
}

/// Sequences of an epoch.
#[derive(Default)]
pub(in crate::data) struct Epoch {
    /// Examples of all sequences, concatenated.
    examples: Vec<u32>,
    /// End of each sequence in `examples`.
    ends: Vec<usize>,
    /// Number of counted tokens in each sequence.
    learnt: Vec<u32>,
}

impl Epochs {
    fn get(&mut self, number: u64, pack: impl FnOnce() -> Epoch) -> Arc<Epoch> {
        if let Some((_, epoch)) = self.recent.iter().find(|(known, _)| *known == number) {
            return epoch.clone();
        }
        let epoch = Arc::new(pack());
        self.recent.push_back((number, epoch.clone()));
        // A step may span two epochs, and the first epoch is always needed.
        if self.recent.len() > 3 {
            let oldest = self.recent.iter().position(|(number, _)| *number > 0).unwrap_or(0);
            self.recent.remove(oldest);
        }
        epoch
    }
}

/// A sequence that is being filled.
struct Open {
    room: usize,
    examples: Vec<u32>,
}

impl Packed {
    pub(in crate::data) fn new(examples: Examples, seq_len: usize, options: PackingOptions) -> Result<Self> {
        let longest = (0..examples.len()).map(|index| examples.get(index).tokens.len()).max().unwrap_or(0);
        ensure!(longest <= seq_len + 1, "an example of {longest} tokens does not fit into sequences of {seq_len}");
        let epochs = Mutex::new(Epochs { starts: vec![0], recent: VecDeque::new() });
        Ok(Packed { examples, seq_len, options, epochs })
    }

    pub(in crate::data) fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Returns the number of sequences in the first epoch. Other epochs may have slightly more or fewer.
    pub(in crate::data) fn count(&self) -> u64 {
        self.lock().get(0, || self.pack(0)).ends.len() as u64
    }

    /// Returns the epoch of the sequence at `offset` after `position`, and the sequence's index in it.
    pub(in crate::data) fn place(&self, position: u64, offset: u64) -> Result<(Arc<Epoch>, usize)> {
        let mut epochs = self.lock();
        let first = epochs.get(0, || self.pack(0));
        let count = first.ends.len() as u64;
        if self.options.shuffle.is_none() {
            return Ok((first, ((position % count + offset) % count) as usize));
        }
        let target = position.saturating_add(offset);
        ensure!(
            target / count < MOST_READ / self.examples.len() as u64,
            "the run is said to have read {position} sequences of {}: no run has come so far; look at the checkpoint \
             that it goes on from",
            self.examples
        );
        // Last known epoch that starts at or before the target.
        let mut number = epochs.starts.partition_point(|&start| start <= target) - 1;
        loop {
            let epoch = epochs.get(number as u64, || self.pack(number as u64));
            let start = epochs.starts[number];
            let end = start + epoch.ends.len() as u64;
            if target < end {
                return Ok((epoch, (target - start) as usize));
            }
            number += 1;
            if epochs.starts.len() == number {
                epochs.starts.push(end);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Epochs> {
        self.epochs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pack(&self, epoch: u64) -> Epoch {
        let count = self.examples.len();
        let order = self.options.shuffle.map(|seed| Permutation::new(count as u64, seed, epoch));
        let (mut packed, mut open) = (Epoch::default(), VecDeque::<Open>::new());
        for index in 0..count as u64 {
            let example = order.map_or(index, |order| order.at(index)) as u32;
            let slots = self.slots(example);
            let found = open.iter_mut().find(|sequence| self.options.packing && sequence.room >= slots);
            match found {
                Some(sequence) => {
                    sequence.room -= slots;
                    sequence.examples.push(example);
                }
                None => open.push_back(Open { room: self.seq_len - slots, examples: vec![example] }),
            }
            if open.len() > OPEN || !self.options.packing {
                self.close(open.pop_front(), &mut packed);
            }
        }
        open.into_iter().for_each(|sequence| self.close(Some(sequence), &mut packed));
        packed
    }

    fn close(&self, sequence: Option<Open>, epoch: &mut Epoch) {
        let Some(Open { examples, .. }) = sequence else { return };
        let learnt = |&example: &u32| self.examples.get(example as usize).learnt[1..].iter().filter(|&&is| is).count();
        epoch.learnt.push(examples.iter().map(learnt).sum::<usize>() as u32);
        epoch.examples.extend(examples);
        epoch.ends.push(epoch.examples.len());
    }

    /// Returns the inputs that an example takes. Its last token is only a target.
    fn slots(&self, example: u32) -> usize {
        self.examples.get(example as usize).tokens.len() - 1
    }

    /// Appends a sequence with padding to inputs and targets. Returns the lengths of its documents.
    pub(in crate::data) fn read(
        &self,
        epoch: &Epoch,
        sequence: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Vec<usize> {
        let mut documents = Vec::new();
        let mut room = self.seq_len;
        for &example in epoch.sequence(sequence) {
            let example = self.examples.get(example as usize);
            let slots = example.tokens.len() - 1;
            inputs.extend_from_slice(&example.tokens[..slots]);
            let learnt = example.tokens.iter().zip(example.learnt).skip(1);
            targets.extend(learnt.map(|(&token, &learnt)| if learnt { token } else { IGNORED }));
            documents.push(slots);
            room -= slots;
        }
        inputs.resize(inputs.len() + room, 0);
        targets.resize(targets.len() + room, IGNORED);
        documents
    }
}

impl Epoch {
    /// Returns the number of counted tokens in a sequence.
    pub(in crate::data) fn learnt(&self, sequence: usize) -> u64 {
        self.learnt[sequence].into()
    }

    fn sequence(&self, number: usize) -> &[u32] {
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.examples[start..self.ends[number]]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns examples with these numbers of inputs, whose last two tokens are counted.
    fn examples(slots: &[usize]) -> Examples {
        let all: Vec<(Vec<u32>, Vec<bool>)> = slots
            .iter()
            .enumerate()
            .map(|(i, &slots)| {
                ((0..=slots).map(|at| (100 * i + at) as u32).collect(), (0..=slots).map(|at| at + 2 > slots).collect())
            })
            .collect();
        Examples::of(&all.iter().map(|(tokens, learnt)| (&tokens[..], &learnt[..])).collect::<Vec<_>>())
    }

    fn packed(slots: &[usize], seq_len: usize, packing: bool, shuffle: Option<u64>) -> Packed {
        Packed::new(examples(slots), seq_len, PackingOptions { packing, shuffle }).unwrap()
    }

    fn sequences(packed: &Packed, epoch: u64) -> Vec<Vec<u32>> {
        let epoch = packed.pack(epoch);
        (0..epoch.ends.len()).map(|sequence| epoch.sequence(sequence).to_vec()).collect()
    }

    #[test]
    fn examples_go_to_the_first_sequence_with_room() {
        let packed = packed(&[3, 3, 1, 4, 1, 2], 5, true, None);
        assert_eq!(sequences(&packed, 0), [vec![0, 2, 4], vec![1, 5], vec![3]]);
        // The oldest of more than 64 open sequences is closed.
        let mut slots = vec![4; OPEN + 1];
        slots.extend([1, 1]);
        let found = sequences(&super::tests::packed(&slots, 5, true, None), 0);
        assert_eq!((&found[0], &found[1], &found[2]), (&vec![0], &vec![1, 65], &vec![2, 66]));
    }

    #[test]
    fn rows_have_documents_and_targets() {
        let packed = packed(&[3, 1], 6, true, None);
        let (epoch, sequence) = packed.place(0, 0).unwrap();
        let (mut inputs, mut targets) = (vec![], vec![]);
        let documents = packed.read(&epoch, sequence, &mut inputs, &mut targets);
        assert_eq!(documents, [3, 1]);
        assert_eq!(inputs, [0, 1, 2, 100, 0, 0]);
        assert_eq!(targets, [IGNORED, 2, 3, 101, IGNORED, IGNORED]);
        assert_eq!(epoch.learnt(sequence), 3);
    }

    #[test]
    fn unpacked_examples_have_their_own_sequence() {
        let packed = packed(&[3, 1, 5], 5, false, None);
        assert_eq!(sequences(&packed, 0), [vec![0], vec![1], vec![2]]);
        assert_eq!(packed.count(), 3);
    }

    #[test]
    fn every_epoch_has_every_example_once() {
        let slots: Vec<usize> = (0..300).map(|i| 1 + i * 7 % 11).collect();
        let packed = packed(&slots, 16, true, Some(3));
        let orders: Vec<Vec<u32>> = (0..3).map(|epoch| sequences(&packed, epoch).concat()).collect();
        for order in &orders {
            assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), (0..300).collect());
            assert_eq!(order.len(), 300);
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2]);
        // Examples of six inputs on average pack tightly.
        let least = slots.iter().sum::<usize>().div_ceil(16);
        assert!(sequences(&packed, 0).len() <= least + 2, "{} of {least}", sequences(&packed, 0).len());
    }

    /// A run that starts at any position reads the same as an uninterrupted one.
    #[test]
    fn any_position_can_be_located() {
        let slots: Vec<usize> = (0..40).map(|i| 1 + i * 5 % 9).collect();
        let make = || packed(&slots, 12, true, Some(1));
        let whole = make();
        let of = |packed: &Packed, position: u64, offset: u64| {
            let (epoch, sequence) = packed.place(position, offset).unwrap();
            epoch.sequence(sequence).to_vec()
        };
        let read: Vec<Vec<u32>> = (0..200).map(|position| of(&whole, position, 0)).collect();
        let expected: Vec<Vec<u32>> = (0..20).flat_map(|epoch| sequences(&make(), epoch)).take(200).collect();
        assert_eq!(read, expected);
        for start in [199, 17, 100, 3] {
            let late = make();
            assert_eq!(of(&late, start, 0), read[start as usize]);
            assert_eq!(of(&late, start / 2, start - start / 2), read[start as usize]);
            assert_eq!(of(&late, 0, 1), read[1]);
        }
        let error = make().place(u64::MAX, 3).err().unwrap().to_string();
        assert!(error.contains("no run has come so far") && error.contains("40 examples of a test"), "{error}");
        // Positions are computed directly in the order of the file.
        assert!(packed(&slots, 12, true, None).place(u64::MAX, 3).is_ok());
    }

    #[test]
    fn too_long_examples_are_refused() {
        let options = PackingOptions { packing: true, shuffle: None };
        let error = Packed::new(examples(&[3, 5]), 4, options).err().unwrap().to_string();
        assert!(error.contains("6 tokens does not fit into sequences of 4"), "{error}");
    }
}
