use proptest::prelude::*;

use crate::data::batches::*;
use crate::data::tokens::tests::data_of;

fn counting(len: u32) -> Source {
    let ids: Vec<u32> = (0..len).collect();
    let (start, end) = ids.split_at(ids.len() / 3);
    Source::Stream(data_of(&[start, end]), None)
}

fn shape(world_size: usize, rank: usize, batch_size: usize, grad_accum: usize, seq_len: usize) -> BatchShape {
    BatchShape { world_size, rank, batch_size, grad_accum, seq_len }
}

/// Returns the sequences of the steps, in the order micro-batch, rank, row.
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
                let read = rank.micro_batch(position + step * rank.sequences_per_step(), a).unwrap();
                let MicroBatch { inputs, targets, counted, documents, filled, .. } = read;
                assert_eq!((inputs.len(), targets.len()), (batch_size * seq_len, batch_size * seq_len));
                assert_eq!((counted, documents), ((batch_size * seq_len) as u64, None));
                assert_eq!(filled, vec![seq_len; batch_size]);
                all.extend(inputs.chunks(seq_len).map(Vec::from).zip(targets.chunks(seq_len).map(Vec::from)));
            }
        }
    }
    all
}

proptest! {
    #[test]
    fn steps_do_not_depend_on_the_number_of_ranks(
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
fn sequences_match_the_recorded_runs() {
    // k = ((step - 1) * W + rank) * B + b
    let batches = Batches::new(counting(200), shape(2, 1, 2, 1, 4)).unwrap();
    assert_eq!(batches.sequences_per_step(), 4);
    assert_eq!(batches.tokens_per_step(), 16);
    let MicroBatch { inputs, targets, .. } = batches.micro_batch(2 * 4, 0).unwrap();
    assert_eq!(inputs, [40, 41, 42, 43, 44, 45, 46, 47]);
    assert_eq!(targets, [41, 42, 43, 44, 45, 46, 47, 48]);
}

#[test]
fn data_repeats_after_its_last_sequence() {
    // 11 tokens: sequences at 0, 3 and 6. Token 10 is not used.
    let batches = Batches::new(counting(11), shape(1, 0, 2, 1, 3)).unwrap();
    assert_eq!(batches.num_sequences(), 3);
    let read = batches.micro_batch(2, 0).unwrap();
    assert_eq!((read.inputs, read.targets), (vec![6, 7, 8, 0, 1, 2], vec![7, 8, 9, 1, 2, 3]));
    assert_eq!(batches.micro_batch(u64::MAX, 0).unwrap(), batches.micro_batch(u64::MAX % 3, 0).unwrap());
}

#[test]
fn data_must_cover_one_step() {
    assert!(Batches::new(counting(2 * 3 * 2 * 5 + 1), shape(2, 0, 3, 2, 5)).is_ok());
    let error = Batches::new(counting(2 * 3 * 2 * 5), shape(2, 0, 3, 2, 5)).err().unwrap().to_string();
    assert!(error.contains("60 tokens of a test, but one step needs 61 tokens"), "{error}");
    assert!(error.contains("smaller --seq-len, --batch-size or --grad-accum"), "{error}");
    assert!(Batches::new(counting(0), shape(1, 0, 1, 1, 1)).err().unwrap().to_string().contains("0 tokens of"));
}

#[test]
fn prompt_is_the_start_of_the_data() {
    let batches = Batches::new(counting(9), shape(1, 0, 1, 1, 2)).unwrap();
    assert_eq!(batches.prompt(4).unwrap(), [0, 1, 2, 3]);
    assert_eq!((batches.prompt(0).unwrap().len(), batches.prompt(100).unwrap().len()), (0, 9));
}

/// Returns examples whose tokens all count, except the first ones.
fn chats() -> Source {
    let tokens: Vec<Vec<u32>> = (0..50).map(|i| (0..2 + i * 7 % 5).map(|at| 10 * i + at).collect()).collect();
    let learnt: Vec<Vec<bool>> = tokens.iter().map(|tokens| (0..tokens.len()).map(|at| at > 0).collect()).collect();
    let all: Vec<(&[u32], &[bool])> = tokens.iter().zip(&learnt).map(|(t, l)| (&t[..], &l[..])).collect();
    Source::Examples(Examples::of(&all), PackingOptions { packing: true, shuffle: Some(5) })
}

fn shuffled() -> Source {
    let Source::Stream(data, _) = counting(100) else { unreachable!() };
    Source::Stream(data, Some(5))
}

/// Inputs and targets.
type Row = (Vec<u32>, Vec<u32>);

/// Returns the rows that all ranks read from `position` on, in order, and the counted targets of each step.
fn rows(
    source: fn() -> Source,
    (world, batch_size, grad_accum): (usize, usize, usize),
    mut position: u64,
    steps: usize,
) -> (Vec<Row>, Vec<u64>) {
    let make = |rank| Batches::new(source(), shape(world, rank, batch_size, grad_accum, 8)).unwrap();
    let ranks: Vec<Batches> = (0..world).map(make).collect();
    let (mut rows, mut counts) = (vec![], vec![]);
    for _ in 0..steps {
        let before = rows.len();
        for a in 0..grad_accum {
            for rank in &ranks {
                let read = rank.micro_batch(position, a).unwrap();
                rows.extend(read.inputs.chunks(8).map(Vec::from).zip(read.targets.chunks(8).map(Vec::from)));
                let documents = read.documents.unwrap_or_else(|| vec![vec![8]; batch_size]);
                assert!(documents.len() == batch_size && documents.iter().all(|row| row.iter().sum::<usize>() == 8));
                // All data tokens count here.
                let data = |(filled, targets): (&usize, &[u32])| {
                    targets.iter().rposition(|&id| id != IGNORED) == filled.checked_sub(1)
                };
                assert!(read.filled.len() == batch_size && read.filled.iter().zip(read.targets.chunks(8)).all(data));
            }
        }
        let learnt = |row: &Row| row.1.iter().filter(|&&target| target != IGNORED).count() as u64;
        counts.push(rows[before..].iter().map(learnt).sum());
        assert!(ranks.iter().all(|rank| rank.counted(position).unwrap() == counts[counts.len() - 1]));
        position += ranks[0].sequences_per_step();
    }
    (rows, counts)
}

/// One, two and three ranks read the same, also from any position and across the end of an epoch.
#[test]
fn shuffling_does_not_depend_on_ranks_or_resuming() {
    for source in [chats as fn() -> Source, shuffled] {
        let (whole, counts) = rows(source, (1, 6, 1), 0, 12);
        assert_eq!((whole.len(), counts.len()), (72, 12));
        for dealt in [(2, 3, 1), (3, 2, 1), (3, 1, 2), (2, 1, 3), (1, 2, 3)] {
            assert_eq!(rows(source, dealt, 0, 12), (whole.clone(), counts.clone()), "{dealt:?}");
            assert_eq!(rows(source, dealt, 24, 8), (whole[24..].to_vec(), counts[4..].to_vec()), "{dealt:?}");
        }
    }
}

#[test]
fn shuffled_epoch_has_every_sequence_once() {
    let batches = Batches::new(shuffled(), shape(1, 0, 4, 1, 8)).unwrap();
    assert_eq!(batches.num_sequences(), 12);
    let order = |epoch: u64| -> Vec<u32> {
        let read = (0..3).map(|step| batches.micro_batch(12 * epoch + 4 * step, 0).unwrap().inputs);
        read.flat_map(|inputs| inputs.chunks(8).map(|row| row[0] / 8).collect::<Vec<_>>()).collect()
    };
    let sorted = |mut order: Vec<u32>| {
        order.sort_unstable();
        order
    };
    assert_ne!(order(0), order(1));
    assert!([order(0), order(1)].into_iter().all(|order| sorted(order) == (0..12).collect::<Vec<_>>()));
}

/// The ranks read every sequence once. The last round is padded with ignored targets.
#[test]
fn pass_covers_every_sequence() {
    for source in [chats as fn() -> Source, || counting(100)] {
        for (world, batch_size) in [(1, 1), (1, 5), (2, 3), (3, 4), (5, 7)] {
            let make = |rank| Batches::for_evaluation(source(), shape(world, rank, batch_size, 3, 8)).unwrap();
            let ranks: Vec<Batches> = (0..world).map(make).collect();
            let mut rows = vec![];
            for round in 0..ranks[0].rounds() {
                for rank in &ranks {
                    let read = rank.pass(round).unwrap();
                    assert_eq!(read.inputs.len(), 8 * batch_size);
                    let found = read.inputs.chunks(8).zip(read.targets.chunks(8));
                    rows.extend(found.map(|(inputs, targets)| (inputs.to_vec(), targets.to_vec())));
                }
            }
            let count = ranks[0].num_sequences() as usize;
            let (read, filled) = rows.split_at(count);
            let one = Batches::for_evaluation(source(), shape(1, 0, count, 1, 8)).unwrap().pass(0).unwrap();
            assert_eq!(read.iter().flat_map(|row| row.1.clone()).collect::<Vec<_>>(), one.targets);
            assert!(filled.iter().all(|row| row.1 == [IGNORED; 8]), "{world} x {batch_size}");
            assert!(filled.len() < world * batch_size);
        }
    }
    let error = Batches::for_evaluation(counting(8), shape(1, 0, 1, 1, 8)).err().unwrap().to_string();
    assert!(error.contains("8 tokens of a test, but a sequence needs 9 tokens") && error.contains("--eval"), "{error}");
}

#[test]
fn too_few_examples_are_refused() {
    let error = Batches::new(chats(), shape(2, 0, 20, 1, 8)).err().unwrap().to_string();
    let parts = ["50 examples of a test make ", " sequences, but one step needs 40", "--packing off", "more examples"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn impossible_shapes_are_refused() {
    for bad in
        [shape(0, 0, 1, 1, 1), shape(1, 0, 0, 1, 1), shape(1, 0, 1, 0, 1), shape(1, 0, 1, 1, 0), shape(2, 2, 1, 1, 1)]
    {
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
