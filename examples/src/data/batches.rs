//! Distribution of sequences over ranks, steps and micro-batches.

use std::fmt;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use fsdp_candle::nn::IGNORED;
use fsdp_corpus::sequence::{Pack, Sequence};
use indicatif::{HumanBytes, HumanCount};

use crate::data::corpus::{EvaluationCorpus, MixedCorpus};
use crate::data::masking::Masking;
use crate::data::sft::Examples;
use crate::data::sft::packing::{Packed, PackingOptions};
use crate::data::sft::pairs::Pairs;
use crate::data::stream::Stream;
use crate::data::tokens::Data;

/// Sizes of an optimizer step. All but `rank` are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Number of data-parallel ranks.
    pub world_size: usize,
    /// This rank's index, below `world_size`.
    pub rank: usize,
    /// Sequences of a rank's micro-batch.
    pub batch_size: usize,
    /// Micro-batches per step.
    pub grad_accum: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
}

/// Source of sequences.
pub enum Source {
    /// One stream of tokens, and the seed that shuffles its sequences in each epoch, if any.
    Stream(Data, Option<u64>),
    /// Corpora to train on, which are read step by step.
    Corpus(Box<MixedCorpus>),
    /// A corpus to evaluate on.
    Evaluation(EvaluationCorpus),
    /// Examples, each with its own tokens.
    Examples(Examples, PackingOptions),
    /// Preference pairs. A sequence is a pair, in two rows of a batch.
    Pairs(Pairs),
}

/// Sequences of `seq_len` tokens, distributed over the ranks.
///
/// After `position` consumed sequences, rank r reads in micro-batch a the sequences `position + (a*world_size +
/// r)*batch_size + b` for b in `0..batch_size`. A step takes the next `world_size * batch_size * grad_accum` sequences,
/// for any factors of this product. A run that resumes at `position` on another number of ranks therefore continues
/// with the same data. Each epoch has the same sequences, in the same order or shuffled.
///
/// ```no_run
/// use fsdp_train::data::{BatchShape, Batches, Data, Source, Text};
///
/// let text = Text::new(None)?;
/// let data = Data::load(Some("input.txt".as_ref()), &text, 256)?;
/// let shape = BatchShape { world_size: 2, rank: 0, batch_size: 4, grad_accum: 2, seq_len: 128 };
/// let batches = Batches::new(Source::Stream(data, None), shape)?;
/// let mut position = 0; // or where the checkpoint says
/// for _step in 0..100 {
///     for a in 0..2 {
///         let read = batches.micro_batch(position, a)?;
///         assert_eq!((read.inputs.len(), read.targets.len()), (4 * 128, 4 * 128));
///     }
///     position += batches.sequences_per_step();
/// }
/// # anyhow::Ok(())
/// ```
pub struct Batches {
    sequences: Sequences,
    shape: BatchShape,
    sequences_per_step: u64,
    masking: Option<Masking>,
}

enum Sequences {
    Stream(Stream),
    Corpus(Box<MixedCorpus>),
    Evaluation(EvaluationCorpus),
    Packed(Packed),
    Pairs(Pairs),
}

/// Sequences that a rank reads at once, concatenated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// Token ids.
    pub inputs: Vec<u32>,
    /// Id that follows each token, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// Number of targets that are not ignored.
    pub counted: u64,
    /// Lengths of the documents packed in each sequence, if attention stays within them.
    pub documents: Option<Vec<Vec<usize>>>,
    /// Number of data tokens in each row. Padding follows them.
    pub filled: Vec<usize>,
    /// Number of preference pairs, without those that only fill up the batch. The rows are chosen and rejected in turn.
    pub pairs: Option<u64>,
}

/// Returns the lengths of the documents in a row of which `filled` tokens are data. Padding is a separate document.
pub(crate) fn with_padding(filled: usize, width: usize) -> Vec<usize> {
    match filled {
        0 => vec![width],
        filled if filled == width => vec![width],
        filled => vec![filled, width - filled],
    }
}

impl BatchShape {
    /// Returns the sequences of a step over all ranks and micro-batches.
    pub fn sequences_per_step(&self) -> Result<u64> {
        let BatchShape { world_size, batch_size, grad_accum, seq_len, .. } = *self;
        let factors = [world_size, batch_size, grad_accum, seq_len];
        ensure!(!factors.contains(&0), "a size is 0: {self}");
        let tokens = factors.iter().try_fold(1, |product: u64, &factor| product.checked_mul(factor as u64));
        // Their size in bytes must not overflow either.
        let tokens = tokens.filter(|&tokens| tokens < u64::MAX / 4).with_context(|| {
            format!(
                "no data is large enough for one step of {self}: use a smaller --seq-len, --batch-size or --grad-accum"
            )
        })?;
        Ok(tokens / seq_len as u64)
    }
}

/// Formats as `2 ranks x 4 sequences x 1 micro-batches x 128 tokens`.
impl fmt::Display for BatchShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatchShape { world_size, batch_size, grad_accum, seq_len, .. } = self;
        write!(f, "{world_size} ranks x {batch_size} sequences x {grad_accum} micro-batches x {seq_len} tokens")
    }
}

impl Sequences {
    fn new(source: Source, seq_len: usize) -> Result<Self> {
        Ok(match source {
            Source::Stream(data, shuffle) => Sequences::Stream(Stream::new(data, seq_len, shuffle)),
            Source::Corpus(corpus) => Sequences::Corpus(corpus),
            Source::Evaluation(corpus) => Sequences::Evaluation(corpus),
            Source::Pairs(pairs) => Sequences::Pairs(pairs),
            Source::Examples(examples, options) => Sequences::Packed(Packed::new(examples, seq_len, options)?),
        })
    }

    /// Returns the number of sequences in the first epoch, or `None` if it is not known.
    fn count(&self) -> Option<u64> {
        match self {
            Sequences::Stream(stream) => Some(stream.count()),
            Sequences::Corpus(_) => None,
            Sequences::Evaluation(corpus) => Some(corpus.sequences.count()),
            Sequences::Packed(packed) => Some(packed.count()),
            Sequences::Pairs(pairs) => Some(pairs.len() as u64),
        }
    }

    /// Returns how the sequences of a corpus are packed.
    fn pack(&self) -> Option<Pack> {
        match self {
            Sequences::Corpus(corpus) => Some(corpus.pack()),
            Sequences::Evaluation(corpus) => Some(corpus.pack),
            Sequences::Stream(_) | Sequences::Packed(_) | Sequences::Pairs(_) => None,
        }
    }
}

impl Batches {
    /// Creates batches to train on. Fails if a size of `shape` is 0, the rank is out of range, or the data is shorter
    /// than one step. Corpora repeat within a step if they are shorter.
    pub fn new(source: Source, shape: BatchShape) -> Result<Self> {
        let batches = Self::of_any_length(source, shape)?;
        let (steps, found) = (batches.sequences_per_step, batches.num_sequences());
        match &batches.sequences {
            Sequences::Stream(Stream { data, .. }) => ensure!(
                found >= steps,
                "the data is too short: {data}, but one step needs {} tokens ({shape}, and one to predict). Use a \
                 smaller --seq-len, --batch-size or --grad-accum, or more data (--data)",
                HumanCount(steps * shape.seq_len as u64 + 1)
            ),
            Sequences::Packed(packed) => ensure!(
                found >= steps,
                "the data is too short: {} make {} sequences, but one step needs {} ({shape}). Use a smaller \
                 --batch-size or --grad-accum, a smaller --seq-len or --packing off, or more examples",
                packed.examples(),
                HumanCount(found),
                HumanCount(steps)
            ),
            Sequences::Pairs(pairs) => ensure!(
                found >= steps,
                "the data is too short: {pairs}, but one step needs {} ({shape}). Use a smaller --batch-size or \
                 --grad-accum, or more pairs",
                HumanCount(steps)
            ),
            Sequences::Corpus(_) | Sequences::Evaluation(_) => {}
        }
        Ok(batches)
    }

    /// Creates batches to read once, by [`Batches::pass`].
    pub fn for_evaluation(source: Source, shape: BatchShape) -> Result<Self> {
        let batches = Self::of_any_length(source, BatchShape { grad_accum: 1, ..shape })?;
        if let Sequences::Stream(Stream { data, .. }) = &batches.sequences {
            ensure!(
                batches.num_sequences() > 0,
                "the data to evaluate on is too short: {data}, but a sequence needs {} tokens (--seq-len {}, and one \
                 to predict). Use a smaller --seq-len, or more data (--eval)",
                HumanCount(shape.seq_len as u64 + 1),
                shape.seq_len
            );
        }
        Ok(batches)
    }

    fn of_any_length(source: Source, shape: BatchShape) -> Result<Self> {
        ensure!(shape.rank < shape.world_size, "rank {} is not below the world size {}", shape.rank, shape.world_size);
        let sequences_per_step = shape.sequences_per_step()?;
        let sequences = Sequences::new(source, shape.seq_len)?;
        Ok(Batches { sequences, shape, sequences_per_step, masking: None })
    }

    /// Masks tokens for a masked language model: the targets are the masked tokens, and [`IGNORED`] elsewhere.
    pub fn masked(mut self, masking: Option<Masking>) -> Self {
        self.masking = masking;
        self
    }

    /// Returns the masking, if any.
    pub fn masking(&self) -> Option<&Masking> {
        self.masking.as_ref()
    }

    /// Reads this rank's micro-batch `a` (from 0) of the step that starts at `position`. Fails if there is not enough
    /// memory, or the file has been truncated or can't be read any more.
    pub fn micro_batch(&self, position: u64, a: usize) -> Result<MicroBatch> {
        let first = self.first_sequence(0, a);
        self.read(position, first..first + self.shape.batch_size as u64)
    }

    /// Returns the index of the first row of micro-batch `a` of the step at `position`, over the whole run. A pair has two
    /// rows.
    pub fn first_row(&self, position: u64, a: usize) -> u64 {
        let rows = if matches!(self.sequences, Sequences::Pairs(_)) { 2 } else { 1 };
        self.first_sequence(position, a).wrapping_mul(rows)
    }

    /// Returns the index of the first sequence in micro-batch `a` of the step at `position`, over the whole run.
    fn first_sequence(&self, position: u64, a: usize) -> u64 {
        let BatchShape { world_size, rank, batch_size, .. } = self.shape;
        position + ((a * world_size + rank) * batch_size) as u64
    }

    /// Reads this rank's part of round `round` (from 0) of a pass over all sequences. Missing sequences have only
    /// ignored targets, so every rank has the same work.
    pub fn pass(&self, round: u64) -> Result<MicroBatch> {
        let BatchShape { world_size, rank, batch_size, .. } = self.shape;
        let first = (round * world_size as u64 + rank as u64) * batch_size as u64;
        let end = self.num_sequences();
        self.read(0, first.min(end)..(first + batch_size as u64).min(end))
    }

    /// Returns the number of rounds of a pass.
    pub fn rounds(&self) -> u64 {
        self.num_sequences().div_ceil((self.shape.world_size * self.shape.batch_size) as u64)
    }

    /// Reads the sequences at these offsets from a position, and pads the batch.
    fn read(&self, position: u64, offsets: Range<u64>) -> Result<MicroBatch> {
        let BatchShape { batch_size, seq_len, .. } = self.shape;
        if let Sequences::Pairs(pairs) = &self.sequences {
            return Ok(pairs.micro_batch(offsets.map(|offset| pairs.place(position, offset)), batch_size));
        }
        let tokens = batch_size * seq_len;
        let room = || -> Result<Vec<u32>> {
            let mut room = Vec::new();
            let wanted = HumanBytes(4 * tokens as u64);
            room.try_reserve_exact(tokens).with_context(|| {
                format!(
                    "can't allocate {wanted} for {batch_size} sequences of {seq_len} tokens: use a smaller \
                     --batch-size"
                )
            })?;
            Ok(room)
        };
        let (mut inputs, mut targets) = (room()?, room()?);
        let (mut documents, mut filled) = (Vec::new(), Vec::new());
        let first = position.wrapping_add(offsets.start);
        for offset in offsets {
            match &self.sequences {
                Sequences::Stream(stream) => {
                    stream.read(stream.place(position, offset), &mut inputs, &mut targets)?;
                    filled.push(seq_len);
                }
                Sequences::Packed(packed) => {
                    let (epoch, sequence) = packed.place(position, offset)?;
                    let mut lengths = packed.read(&epoch, sequence, &mut inputs, &mut targets);
                    let data = lengths.iter().sum();
                    filled.push(data);
                    // Padding is a separate document.
                    lengths.extend((data < seq_len).then(|| seq_len - data));
                    documents.push(lengths);
                }
                Sequences::Corpus(corpus) => {
                    let sequence = corpus.sequence(position, offset, self.shape)?;
                    push_sequence(&sequence, corpus.pack(), &mut inputs, &mut targets, &mut documents);
                    filled.push(seq_len);
                }
                Sequences::Evaluation(corpus) => {
                    let sequence = corpus.sequences.at(position.wrapping_add(offset))?;
                    push_sequence(&sequence, corpus.pack, &mut inputs, &mut targets, &mut documents);
                    filled.push(seq_len);
                }
                Sequences::Pairs(_) => {}
            }
        }
        if let Some(masking) = &self.masking {
            (inputs, targets) = masking.apply(first, seq_len, inputs);
        }
        inputs.resize(tokens, 0);
        filled.resize(batch_size, 0);
        targets.resize(tokens, IGNORED);
        let has_documents =
            matches!(self.sequences, Sequences::Packed(_)) || self.sequences.pack() == Some(Pack::Documents);
        let documents = has_documents.then(|| {
            documents.resize(batch_size, vec![seq_len]);
            documents
        });
        let counted = targets.iter().filter(|&&target| target != IGNORED).count() as u64;
        Ok(MicroBatch { inputs, targets, counted, documents, filled, pairs: None })
    }

    /// Returns the sequences of a step over all ranks and micro-batches, by which it advances the position.
    pub fn sequences_per_step(&self) -> u64 {
        self.sequences_per_step
    }

    /// Returns the largest number of tokens in a step over all ranks and micro-batches.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step * self.shape.seq_len as u64
    }

    /// Returns the tokens of the step at `position`, over all ranks and micro-batches. Padding counts, except the
    /// padding of preference pairs.
    pub fn tokens(&self, position: u64) -> u64 {
        match &self.sequences {
            Sequences::Stream(_) | Sequences::Corpus(_) | Sequences::Evaluation(_) | Sequences::Packed(_) => {
                self.tokens_per_step()
            }
            Sequences::Pairs(pairs) => {
                (0..self.sequences_per_step).map(|offset| pairs.tokens(pairs.place(position, offset))).sum()
            }
        }
    }

    /// Returns what the loss of the step at `position` is the mean of, over all ranks: counted targets, or preference
    /// pairs. Collective for a corpus.
    pub fn counted(&self, position: u64) -> Result<u64> {
        match &self.sequences {
            Sequences::Pairs(_) => Ok(self.sequences_per_step),
            Sequences::Stream(_) | Sequences::Corpus(_) | Sequences::Evaluation(_) => {
                match (&self.masking, &self.sequences) {
                    (Some(masking), _) => Ok(masking.count(position, self.shape.seq_len, self.tokens_per_step())),
                    (None, Sequences::Corpus(corpus)) => corpus.counted(position, self.shape),
                    (None, _) => Ok(self.tokens_per_step()),
                }
            }
            Sequences::Packed(packed) => (0..self.sequences_per_step)
                .map(|offset| packed.place(position, offset).map(|(epoch, sequence)| epoch.learnt(sequence)))
                .sum(),
        }
    }

    /// Returns the number of sequences in the first epoch, or 0 if it is not known.
    pub fn num_sequences(&self) -> u64 {
        self.sequences.count().unwrap_or(0)
    }

    /// Returns the corpora to train on, if the data is of them.
    pub fn corpus(&self) -> Option<&MixedCorpus> {
        match &self.sequences {
            Sequences::Corpus(corpus) => Some(corpus),
            _ => None,
        }
    }

    /// Returns a prompt to continue: that of the first example, or up to `tokens` tokens of the stream. Collective
    /// for a corpus.
    pub fn prompt(&self, tokens: usize) -> Result<Vec<u32>> {
        match &self.sequences {
            Sequences::Stream(Stream { data, .. }) => {
                let mut prompt = vec![0; data.len().min(tokens as u64) as usize];
                data.copy_to(0, &mut prompt)?;
                Ok(prompt)
            }
            Sequences::Corpus(corpus) => corpus.prompt(tokens),
            Sequences::Evaluation(corpus) => {
                let mut sequence = corpus.sequences.at(0)?;
                sequence.ids.truncate(tokens);
                Ok(sequence.ids)
            }
            Sequences::Packed(packed) => Ok(packed.examples().first_prompt().to_vec()),
            Sequences::Pairs(pairs) => Ok(pairs.examples().first_prompt().to_vec()),
        }
    }

    /// Returns the ids that end an answer.
    pub fn stops(&self) -> &[u32] {
        match &self.sequences {
            Sequences::Stream(_) | Sequences::Corpus(_) | Sequences::Evaluation(_) => &[],
            Sequences::Packed(packed) => packed.examples().stops(),
            Sequences::Pairs(pairs) => pairs.examples().stops(),
        }
    }

    /// Describes the data for the user, such as `2,561 tokens of tokens.bin`.
    pub fn description(&self) -> String {
        match &self.sequences {
            Sequences::Stream(Stream { data, .. }) => data.to_string(),
            Sequences::Corpus(corpus) => corpus.description().into(),
            Sequences::Evaluation(corpus) => corpus.to_string(),
            Sequences::Packed(packed) => packed.examples().to_string(),
            Sequences::Pairs(pairs) => pairs.to_string(),
        }
    }

    /// Describes the data by size and checksum, for comparison.
    pub fn summary(&self) -> String {
        match &self.sequences {
            Sequences::Stream(Stream { data, .. }) => {
                format!("{} tokens with checksum {:016x}", data.len(), data.checksum())
            }
            Sequences::Corpus(corpus) => corpus.summary().into(),
            Sequences::Evaluation(corpus) => corpus.summary().into(),
            Sequences::Packed(packed) => {
                let examples = packed.examples();
                format!("{} examples with checksum {:016x}", examples.len(), examples.checksum())
            }
            Sequences::Pairs(pairs) => {
                format!("{} pairs with checksum {:016x}", pairs.len(), pairs.examples().checksum())
            }
        }
    }

    /// Returns a warning about the data, if any.
    pub fn warning(&self) -> Option<String> {
        match &self.sequences {
            Sequences::Stream(_) | Sequences::Corpus(_) | Sequences::Evaluation(_) => None,
            Sequences::Packed(packed) => packed.examples().truncation_warning(),
            Sequences::Pairs(pairs) => pairs.truncation_warning(),
        }
    }
}

/// Appends a sequence of a corpus to inputs and targets, and its documents to the documents of the batch.
fn push_sequence(
    sequence: &Sequence,
    pack: Pack,
    inputs: &mut Vec<u32>,
    targets: &mut Vec<u32>,
    documents: &mut Vec<Vec<usize>>,
) {
    inputs.extend_from_slice(sequence.inputs());
    targets.extend(sequence.targets(pack, IGNORED));
    documents.push(sequence.lengths());
}

#[cfg(test)]
mod tests;
