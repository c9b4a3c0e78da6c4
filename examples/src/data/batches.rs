//! Which tokens each rank reads at each step.

use std::fmt;

use anyhow::{Context, Result, ensure};
use indicatif::{HumanBytes, HumanCount};

use super::tokens::Data;

/// How one optimizer step's sequences are laid out over ranks and micro-batches. None of the numbers but `rank` may be
/// 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Data-parallel ranks.
    pub world_size: usize,
    /// This one's number, below `world_size`.
    pub rank: usize,
    /// Sequences that a rank reads at once.
    pub batch_size: usize,
    /// Micro-batches a step, whose gradients are summed.
    pub grad_accum: usize,
    /// Tokens a sequence.
    pub seq_len: usize,
}

/// The data, cut into sequences of `seq_len` tokens and dealt out to the ranks.
///
/// Sequence k reads `tokens[k*T .. k*T+T]` and predicts `tokens[k*T+1 .. k*T+T+1]`, T being `seq_len`. With `position`
/// sequences consumed before a step, rank r reads in micro-batch a the sequences
/// `position + (a*world_size + r)*batch_size + b` for b in `0..batch_size`. So a step takes the next
/// `world_size * batch_size * grad_accum` sequences however this product is made up: a run that is resumed at
/// `position` with another number of ranks goes on with the same data. After the last of the `(len - 1) / T` sequences
/// the first one follows again.
///
/// ```no_run
/// use fsdp_examples::data::{BatchShape, Batches, Data, Text};
///
/// let text = Text::new(None)?;
/// let data = Data::load(Some("input.txt".as_ref()), &text, 256)?;
/// let shape = BatchShape { world_size: 2, rank: 0, batch_size: 4, grad_accum: 2, seq_len: 128 };
/// let batches = Batches::new(data, shape)?;
/// let mut position = 0; // or where the checkpoint says
/// for _step in 0..100 {
///     for a in 0..2 {
///         let (inputs, targets) = batches.micro_batch(position, a)?; // 4 * 128 tokens each
///     }
///     position += batches.sequences_per_step();
/// }
/// # anyhow::Ok(())
/// ```
pub struct Batches {
    data: Data,
    shape: BatchShape,
    sequences_per_step: u64,
}

impl BatchShape {
    /// The sequences of one step, of all ranks and micro-batches.
    ///
    /// # Errors
    /// A number is 0, or the tokens of one step are more than can be counted.
    pub fn sequences_per_step(&self) -> Result<u64> {
        let BatchShape { world_size, batch_size, grad_accum, seq_len, .. } = *self;
        let factors = [world_size, batch_size, grad_accum, seq_len];
        ensure!(!factors.contains(&0), "a batch of nothing: {self}");
        let tokens = factors.iter().try_fold(1, |product: u64, &factor| product.checked_mul(factor as u64));
        // Their bytes can be counted too.
        let tokens = tokens.filter(|&tokens| tokens < u64::MAX / 4).with_context(|| {
            format!(
                "no data is large enough for one step of {self}: use a smaller --seq-len, --batch-size or --grad-accum"
            )
        })?;
        Ok(tokens / seq_len as u64)
    }
}

/// `2 ranks x 4 sequences x 1 micro-batches x 128 tokens`
impl fmt::Display for BatchShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatchShape { world_size, batch_size, grad_accum, seq_len, .. } = self;
        write!(f, "{world_size} ranks x {batch_size} sequences x {grad_accum} micro-batches x {seq_len} tokens")
    }
}

impl Batches {
    /// Deals out `data`.
    ///
    /// # Errors
    /// A number of `shape` is 0, the rank is none of the world, or the data is shorter than one step of all ranks.
    pub fn new(data: Data, shape: BatchShape) -> Result<Self> {
        ensure!(shape.rank < shape.world_size, "rank {} is none of {}", shape.rank, shape.world_size);
        let sequences_per_step = shape.sequences_per_step()?;
        let needed = sequences_per_step * shape.seq_len as u64 + 1;
        ensure!(
            data.len() >= needed,
            "the data is too short: {data}, but one step needs {} tokens ({shape}, and one to predict). Use a smaller \
             --seq-len, --batch-size or --grad-accum, or more data (--data)",
            HumanCount(needed)
        );
        Ok(Batches { data, shape, sequences_per_step })
    }

    /// The inputs and targets of this rank's micro-batch `a` (from 0) of the step before which all ranks together had
    /// consumed `position` sequences: `batch_size * seq_len` token ids each, sequence after sequence.
    ///
    /// # Errors
    /// There is no memory for them, or the file that they are in has been cut short or can't be read any more.
    pub fn micro_batch(&self, position: u64, a: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        let BatchShape { batch_size, seq_len, .. } = self.shape;
        let room = |tokens: usize| -> Result<Vec<u32>> {
            let mut room = Vec::new();
            let wanted = HumanBytes(4 * tokens as u64);
            room.try_reserve_exact(tokens).with_context(|| {
                format!(
                    "there are no {wanted} of memory for {batch_size} sequences of {seq_len} tokens: use a smaller \
                     --batch-size"
                )
            })?;
            Ok(room)
        };
        let (mut inputs, mut targets) = (room(batch_size * seq_len)?, room(batch_size * seq_len)?);
        let mut tokens = room(seq_len + 1)?;
        tokens.resize(seq_len + 1, 0);
        let first = self.first_sequence(position % self.num_sequences(), a);
        for b in 0..batch_size as u64 {
            let sequence = (first + b) % self.num_sequences();
            self.data.copy_to(sequence * seq_len as u64, &mut tokens)?;
            inputs.extend_from_slice(&tokens[..seq_len]);
            targets.extend_from_slice(&tokens[1..]);
        }
        Ok((inputs, targets))
    }

    /// The number of the first sequence of that micro-batch among all that a run reads, those that it reads again
    /// included.
    pub fn first_sequence(&self, position: u64, a: usize) -> u64 {
        let BatchShape { world_size, rank, batch_size, .. } = self.shape;
        position.wrapping_add(((a * world_size + rank) * batch_size) as u64)
    }

    /// By how much a step moves the position: the sequences of all ranks and micro-batches.
    pub fn sequences_per_step(&self) -> u64 {
        self.sequences_per_step
    }

    /// Tokens that a step predicts, of all ranks and micro-batches.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step * self.shape.seq_len as u64
    }

    /// Sequences in the data, after which it starts again.
    pub fn num_sequences(&self) -> u64 {
        (self.data.len() - 1) / self.shape.seq_len as u64
    }

    /// The first `tokens` tokens of the data, or all if it has less: something to let a model continue.
    ///
    /// # Errors
    /// The file that they are in has been cut short or can't be read any more.
    pub fn prompt(&self, tokens: usize) -> Result<Vec<u32>> {
        let mut prompt = vec![0; self.data.len().min(tokens as u64) as usize];
        self.data.copy_to(0, &mut prompt)?;
        Ok(prompt)
    }

    /// The data.
    pub fn data(&self) -> &Data {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tokens::tests::data_of, *};
    use proptest::prelude::*;

    fn counting(len: u32) -> Data {
        let ids: Vec<u32> = (0..len).collect();
        let (start, end) = ids.split_at(ids.len() / 3);
        data_of(&[start, end])
    }

    fn shape(world_size: usize, rank: usize, batch_size: usize, grad_accum: usize, seq_len: usize) -> BatchShape {
        BatchShape { world_size, rank, batch_size, grad_accum, seq_len }
    }

    /// All sequences of the steps, in the order micro-batch, rank, row.
    fn sequences(
        len: u32,
        (world, batch_size, grad_accum): (usize, usize, usize),
        seq_len: usize,
        position: u64,
        steps: u64,
    ) -> Vec<(Vec<u32>, Vec<u32>)> {
        let ranks: Vec<_> = (0..world)
            .map(|rank| Batches::new(counting(len), shape(world, rank, batch_size, grad_accum, seq_len)).unwrap())
            .collect();
        let mut all = Vec::new();
        for step in 0..steps {
            for a in 0..grad_accum {
                for rank in &ranks {
                    let (inputs, targets) = rank.micro_batch(position + step * rank.sequences_per_step(), a).unwrap();
                    assert_eq!((inputs.len(), targets.len()), (batch_size * seq_len, batch_size * seq_len));
                    all.extend(inputs.chunks(seq_len).map(Vec::from).zip(targets.chunks(seq_len).map(Vec::from)));
                }
            }
        }
        all
    }

    proptest! {
        #[test]
        fn a_step_takes_the_same_sequences_however_they_are_dealt_out(
            (w, b, a) in (1..5_usize, 1..5_usize, 1..5_usize), seq_len in 1..9_usize, extra in 0..50_u32,
            position in 0..1000_u64, steps in 1..4_u64,
        ) {
            let product = w * b * a;
            let len = (product * seq_len) as u32 + 1 + extra;
            let expected = sequences(len, (w, b, a), seq_len, position, steps);
            let count = u64::from((len - 1) / seq_len as u32);
            for (k, (inputs, targets)) in expected.iter().enumerate() {
                let start = ((position + k as u64) % count) as u32 * seq_len as u32;
                prop_assert_eq!(inputs, &(start..start + seq_len as u32).collect::<Vec<_>>());
                prop_assert_eq!(targets, &(start + 1..start + 1 + seq_len as u32).collect::<Vec<_>>());
            }
            for other in 1..=product {
                if product % other == 0 {
                    let rest = product / other;
                    for dealt in [(other, rest, 1), (other, 1, rest), (1, other, rest)] {
                        prop_assert_eq!(&sequences(len, dealt, seq_len, position, steps), &expected);
                    }
                }
            }
        }
    }

    #[test]
    fn the_rule_of_the_recorded_runs() {
        // k = ((step - 1) * W + rank) * B + b
        let batches = Batches::new(counting(200), shape(2, 1, 2, 1, 4)).unwrap();
        assert_eq!(batches.sequences_per_step(), 4);
        assert_eq!(batches.tokens_per_step(), 16);
        let (inputs, targets) = batches.micro_batch(2 * 4, 0).unwrap();
        assert_eq!(inputs, [40, 41, 42, 43, 44, 45, 46, 47]);
        assert_eq!(targets, [41, 42, 43, 44, 45, 46, 47, 48]);
    }

    #[test]
    fn the_data_starts_again_after_its_last_whole_sequence() {
        // 11 tokens: sequences at 0, 3 and 6; the token 10 is left over.
        let batches = Batches::new(counting(11), shape(1, 0, 2, 1, 3)).unwrap();
        assert_eq!(batches.num_sequences(), 3);
        assert_eq!(batches.micro_batch(2, 0).unwrap(), (vec![6, 7, 8, 0, 1, 2], vec![7, 8, 9, 1, 2, 3]));
        assert_eq!(batches.micro_batch(u64::MAX, 0).unwrap(), batches.micro_batch(u64::MAX % 3, 0).unwrap());
    }

    #[test]
    fn sequences_are_numbered_on_when_the_data_starts_again() {
        let numbers = |rank: usize, position| {
            let batches = Batches::new(counting(31), shape(2, rank, 3, 2, 2)).unwrap();
            [0, 1].map(|a| batches.first_sequence(position, a))
        };
        assert_eq!((numbers(0, 0), numbers(1, 0)), ([0, 6], [3, 9]));
        assert_eq!((numbers(0, 12), numbers(1, 24)), ([12, 18], [27, 33]));
    }

    #[test]
    fn data_of_exactly_one_step_is_enough_and_one_token_less_is_not() {
        assert!(Batches::new(counting(2 * 3 * 2 * 5 + 1), shape(2, 0, 3, 2, 5)).is_ok());
        let error = Batches::new(counting(2 * 3 * 2 * 5), shape(2, 0, 3, 2, 5)).err().unwrap().to_string();
        assert!(error.contains("60 tokens of a test, but one step needs 61 tokens"), "{error}");
        assert!(error.contains("smaller --seq-len, --batch-size or --grad-accum"), "{error}");
        assert!(Batches::new(data_of(&[]), shape(1, 0, 1, 1, 1)).err().unwrap().to_string().contains("0 tokens of"));
    }

    #[test]
    fn a_prompt_is_the_start_of_the_data() {
        let batches = Batches::new(counting(9), shape(1, 0, 1, 1, 2)).unwrap();
        assert_eq!(batches.prompt(4).unwrap(), [0, 1, 2, 3]);
        assert_eq!((batches.prompt(0).unwrap().len(), batches.prompt(100).unwrap().len()), (0, 9));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for bad in [
            shape(0, 0, 1, 1, 1),
            shape(1, 0, 0, 1, 1),
            shape(1, 0, 1, 0, 1),
            shape(1, 0, 1, 1, 0),
            shape(2, 2, 1, 1, 1),
        ] {
            assert!(Batches::new(counting(100), bad).is_err(), "{bad:?}");
        }
        for (huge, words) in [
            (shape(usize::MAX, 0, 2, 1, 1), "18446744073709551615 ranks x 2 sequences"),
            (shape(1, 0, usize::MAX, 1, 1), "18446744073709551615 sequences"),
            (shape(2, 0, 1, 1 << 63, 1), "9223372036854775808 micro-batches"),
            (shape(1, 0, 1, 1, usize::MAX), "18446744073709551615 tokens"),
        ] {
            let error = Batches::new(counting(100), huge).err().unwrap().to_string();
            let parts = ["no data is large enough for one step of", words, "use a smaller --seq-len"];
            assert!(parts.iter().all(|part| error.contains(part)) && !error.contains("BatchShape"), "{error}");
        }
    }
}
