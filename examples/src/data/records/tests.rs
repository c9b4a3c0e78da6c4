use super::*;
use crate::data::BatchShape;
use fsdp_candle::nn::IGNORED;
use std::fs;

fn load(content: &str, seq_len: usize) -> Result<(Records, Labels)> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.csv");
    fs::write(&path, content).unwrap();
    let text = Text::new(None).unwrap();
    RecordReader { text: &text, seq_len, vocabulary: 256, types: 0, classes: None }.labelled(&path, None, false)
}

fn pairs(content: &str) -> Result<Records> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.csv");
    fs::write(&path, content).unwrap();
    let text = Text::new(None).unwrap();
    RecordReader { text: &text, seq_len: 8, vocabulary: 256, types: 0, classes: None }.pairs(&path)
}

fn error<T>(result: Result<T>) -> String {
    format!("{:#}", result.err().unwrap())
}

fn shape(world_size: usize, rank: usize, batch_size: usize, grad_accum: usize) -> BatchShape {
    BatchShape { world_size, rank, batch_size, grad_accum, seq_len: 8 }
}

#[test]
fn long_texts_are_cut_and_counted() {
    let (records, labels) = load("text,label\nabc,x\nabcdefghij,y\n", 4).unwrap();
    assert_eq!((records.ids(0, 0), records.ids(1, 0)), (&b"abc".map(u32::from)[..], &b"abcd".map(u32::from)[..]));
    assert_eq!((records.labels.as_slice(), labels.names()), (&[0, 1][..], &["x".to_owned(), "y".into()][..]));
    assert!(records.warning().unwrap().starts_with("1 of the 2 texts in "));
    assert_eq!(load("text,label\nabc,x\nab,y\n", 4).unwrap().0.warning(), None);
}

#[test]
fn bad_files_are_refused() {
    for (content, expected) in [
        ("", "has no records; expected the columns \"text\" and \"label\""),
        ("text,label\n", "has no records"),
        ("text,class\na,x\n", "line 2: it has the columns \"class\", \"text\"; expected"),
        ("text,label\na,\n", "line 2: the label is empty"),
        ("text,label\n,x\nb,y\n", "line 2: a text is empty"),
        ("text,text_pair,label\na,b,x\n", "has no tokenizer.json"),
    ] {
        let error = error(load(content, 8));
        assert!(error.contains(expected), "{content:?}: {error}");
    }
    for (content, expected) in [
        ("anchor,other\na,b\n", "it has the columns \"anchor\", \"other\"; expected"),
        ("anchor,positive\n", "has no records"),
    ] {
        let error = error(pairs(content));
        assert!(error.contains(expected), "{content:?}: {error}");
    }
}

#[test]
fn labels_beyond_the_head_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.csv");
    let text = Text::new(None).unwrap();
    let reader = RecordReader { text: &text, seq_len: 8, vocabulary: 256, types: 0, classes: Some(3) };
    let load = |content: &str| {
        fs::write(&path, content).unwrap();
        reader.labelled(&path, None, false)
    };
    assert_eq!(load("text,label\na,0\nb,1\n").unwrap().1.names().len(), 3);
    for (content, expected) in [
        ("text,label\na,0\nb,4\n", "data.csv, line 3: the label \"4\" is class 4, but the head"),
        (
            "text,label\na,x\nb,y\nc,z\nd,w\n",
            "line 4: the label \"z\" is class 3, but the head in the model's weights has 3",
        ),
        ("text,label\na,x\nb,y\n", "the labels are x, y, but the head in the model's weights has 3 classes"),
    ] {
        let error = error(load(content));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn every_split_reads_the_same_records() {
    let text: String = (0..7).map(|i| format!("{},{}\n", "x".repeat(i + 1), i % 2)).collect();
    let of = |world_size, rank, batch_size, grad_accum| {
        let records = load(&format!("text,label\n{text}"), 8).unwrap().0;
        RecordBatches::new(records, shape(world_size, rank, batch_size, grad_accum), Some(3), None).unwrap()
    };
    let one = of(1, 0, 4, 1);
    for position in [0, 4, 8, 12] {
        let whole = one.micro_batch(position, 0);
        let mut parts = RecordBatch { steps: whole.steps, ..RecordBatch::default() };
        for a in 0..2 {
            for rank in 0..2 {
                let part = of(2, rank, 1, 2).micro_batch(position, a);
                assert_eq!(part.steps, whole.steps);
                parts.ids.extend(part.ids);
                parts.filled.extend(part.filled);
                parts.last.extend(part.last);
                parts.labels.extend(part.labels);
                parts.counted += part.counted;
            }
        }
        assert_eq!(parts, whole);
        assert_eq!(one.tokens(position), whole.filled.iter().sum::<usize>() as u64);
    }
    let error = error(RecordBatches::new(load("text,label\na,0\nb,1\n", 8).unwrap().0, shape(2, 0, 2, 1), None, None));
    assert!(error.contains("2 records of") && error.contains("which is 4 (2 ranks x 2 records"), "{error}");
}

/// The last round is uneven: rank 1 has an empty row.
#[test]
fn a_pass_reads_each_record_once() {
    let of = |rank| {
        let records = pairs("anchor,positive,negative\na,bb,c\nd,e,ffff\ng,h,i\n").unwrap();
        RecordBatches::for_evaluation(records, shape(2, rank, 1, 1), None).unwrap()
    };
    assert_eq!(of(0).rounds(), 2);
    let (first, second) = (of(0).pass(0), of(1).pass(0));
    assert_eq!((first.filled, second.filled), (vec![1, 2, 1], vec![1, 1, 4]));
    assert_eq!((first.steps, first.ids.len(), first.labels), (4, 12, vec![IGNORED]));
    let (third, none) = (of(0).pass(1), of(1).pass(1));
    assert_eq!((third.filled, third.counted), (vec![1, 1, 1], 1));
    assert_eq!((none.filled, none.counted, none.steps), (vec![0, 0, 0], 0, 1));
}

#[test]
fn the_last_token_is_not_padding() {
    let (records, _) = load("text,label\nabc,x\nbaa,y\n", 8).unwrap();
    let batch = RecordBatches::for_evaluation(records, shape(1, 0, 2, 1), Some(u32::from(b'a'))).unwrap().pass(0);
    assert_eq!(batch.last, [2, 0]);
}
