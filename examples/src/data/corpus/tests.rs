use std::fs;

use fsdp_candle::nn::IGNORED;
use fsdp_core::process_group::local;

use super::*;
use crate::data::batches::{BatchShape, Batches, MicroBatch, Source as BatchSource};
use crate::data::text::tests::TOKENIZER;

const SEQ_LEN: usize = 24;

/// Inputs and targets of a sequence.
type Row = (Vec<u32>, Vec<u32>);

fn options(pack: Pack) -> CorpusOptions {
    CorpusOptions { field: None, width: None, pack, seq_len: SEQ_LEN, vocab_size: 256 }
}

fn find(path: &Path, pack: Pack) -> Result<Corpora> {
    Corpora::find(path, options(pack))
}

fn bytes() -> Text {
    Text::new(None).unwrap()
}

/// Writes JSON Lines whose documents are `name` and a number, of several lengths.
fn write_lines(path: &Path, name: &str, count: usize) {
    let line = |index: usize| format!("{{\"text\": \"{name}{index}{}\"}}\n", ".".repeat(index * 7 % 40));
    fs::write(path, (0..count).map(line).collect::<String>()).unwrap();
}

fn error<T>(outcome: Result<T>) -> String {
    format!("{:#}", outcome.err().unwrap())
}

#[test]
fn small_text_and_16_bit_ids_are_left_to_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("texts")).unwrap();
    for name in ["a.txt", "texts/b.txt", "texts/c.json"] {
        fs::write(path(name), "text").unwrap();
    }
    fs::write(path("raw.bin"), [1, 0, 2, 0]).unwrap();
    write_lines(&path("a.jsonl"), "a", 3);
    let llmc: Vec<u8> = [20_240_520_u32, 1, 2].into_iter().flat_map(u32::to_le_bytes).collect();
    fs::write(path("llmc.bin"), [llmc, vec![0; 1012], vec![1, 0, 2, 0]].concat()).unwrap();
    for name in ["a.txt", "texts", "raw.bin"] {
        assert!(find(&path(name), Pack::Stream).unwrap().are_plain().unwrap(), "{name}");
        assert!(!find(&path(name), Pack::Documents).unwrap().are_plain().unwrap(), "{name}");
    }
    // Together they are too large to be kept in memory.
    fs::create_dir(path("large")).unwrap();
    for name in ["large/a.txt", "large/b.txt"] {
        fs::write(path(name), "text ".repeat(PLAIN as usize / 5)).unwrap();
    }
    assert!(find(&path("large/a.txt"), Pack::Stream).unwrap().are_plain().unwrap());
    for name in ["a.jsonl", "llmc.bin", "*.txt", "large"] {
        assert!(!find(&path(name), Pack::Stream).unwrap().are_plain().unwrap(), "{name}");
    }
    let wide = CorpusOptions { width: Some(Width::U32), ..options(Pack::Stream) };
    assert!(!Corpora::find(&path("raw.bin"), wide).unwrap().are_plain().unwrap());
}

#[test]
fn bad_corpora_are_refused_with_a_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    write("chats.jsonl", "{\"messages\": []}\n");
    write("pairs.json", "[{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}]");
    write("body.jsonl", "{\"body\": \"a\"}\n");
    write("table.csv", "text\na\n");
    write("a.txt", "a");
    let train = |name: &str, options: CorpusOptions| {
        let corpora = Corpora::find(&dir.path().join(name), options)?;
        corpora.check_flags()?;
        corpora.train(&bytes(), None, None, local::run(1, |group| group.clone()).remove(0)).map(drop)
    };
    let plain = options(Pack::Stream);
    for (name, expected) in [
        ("chats.jsonl", "pass the file as --sft FILE"),
        ("pairs.json", "pass the file as --dpo FILE"),
        ("body.jsonl", "pass one of them as --text-field NAME"),
        ("table.csv", "--task classify"),
        ("missing.parquet", "No such file"),
    ] {
        let message = error(train(name, plain.clone()));
        assert!(message.contains(name) && message.contains(expected), "{message}");
    }
    let documents = options(Pack::Documents);
    let field = CorpusOptions { field: Some("body".into()), ..documents.clone() };
    assert!(error(train("a.txt", field.clone())).contains("--text-field body is for records"));
    train("body.jsonl", field).unwrap();
    let width = CorpusOptions { width: Some(Width::U32), ..plain };
    assert!(error(train("body.jsonl", width)).contains("--token-bits is for .bin files"));
}

/// Reads steps of six sequences from a mixture of JSON Lines and a text, and returns their rows in the order of the
/// data, the numbers of targets, and the place afterwards.
fn read(
    dir: &Path,
    (ranks, batch_size, grad_accum): (usize, usize, usize),
    pack: Pack,
    place: Option<&serde_json::Value>,
    steps: u64,
) -> (Vec<Row>, Vec<u64>, serde_json::Value) {
    let list = format!("{0}/a.jsonl:0.7,{0}/b.txt:0.3", dir.display());
    let mut found = local::run(ranks, |group| {
        let shape = BatchShape { world_size: ranks, rank: group.rank(), batch_size, grad_accum, seq_len: SEQ_LEN };
        let corpora = find(list.as_ref(), pack).unwrap();
        let corpus = corpora.train(&bytes(), None, Some(3), group.clone()).unwrap();
        corpus.resume(place).unwrap();
        let batches = Batches::new(BatchSource::Corpus(Box::new(corpus)), shape).unwrap();
        let (mut read, mut counted): (Vec<MicroBatch>, Vec<u64>) = (vec![], vec![]);
        for step in 0..steps {
            let position = 6 * step;
            counted.push(batches.counted(position).unwrap());
            // A prompt does not change the place, and a batch may be read again.
            batches.prompt(9).unwrap();
            batches.micro_batch(position, 0).unwrap();
            read.extend((0..grad_accum).map(|a| batches.micro_batch(position, a).unwrap()));
        }
        // Streams have no random access.
        let message = error(batches.micro_batch(6 * steps + 1, 0));
        assert!(message.contains(&format!("expected the step at sequence {}", 6 * steps)), "{message}");
        let own: u64 = read.iter().map(|batch| batch.counted).sum();
        (read, counted, own, batches.corpus().unwrap().place().unwrap())
    });
    let own: u64 = found.iter().map(|(_, _, own, _)| own).sum();
    assert_eq!(own, found[0].1.iter().sum::<u64>());
    let mut rows = vec![];
    for batch in 0..found[0].0.len() {
        for (read, ..) in &found {
            let MicroBatch { inputs, targets, documents, .. } = &read[batch];
            assert_eq!(documents.is_some(), pack == Pack::Documents);
            rows.extend(inputs.chunks(SEQ_LEN).zip(targets.chunks(SEQ_LEN)).map(|(a, b)| (a.to_vec(), b.to_vec())));
        }
    }
    let (_, counted, _, place) = found.remove(0);
    (rows, counted, place)
}

#[test]
fn steps_do_not_depend_on_ranks_and_continue_at_a_place() {
    let dir = tempfile::tempdir().unwrap();
    write_lines(&dir.path().join("a.jsonl"), "a", 40);
    fs::write(dir.path().join("b.txt"), "BCDEFGHIJ ".repeat(40)).unwrap();
    for pack in [Pack::Stream, Pack::Documents] {
        // More than an epoch of both.
        let whole = read(dir.path(), (1, 6, 1), pack, None, 20);
        assert_eq!(read(dir.path(), (2, 1, 3), pack, None, 20), whole);
        let (mut rows, mut counted, place) = read(dir.path(), (2, 3, 1), pack, None, 7);
        let (more, later, place) = read(dir.path(), (3, 1, 2), pack, Some(&place), 13);
        rows.extend(more);
        counted.extend(later);
        assert_eq!((rows, counted, place), whole);
        let ignored = whole.0.iter().flat_map(|(_, targets)| targets).filter(|&&target| target == IGNORED).count();
        assert_eq!(ignored > 0, pack == Pack::Documents);
    }
}

#[test]
fn changed_files_and_other_places_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_lines(&dir.path().join("a.jsonl"), "a", 40);
    fs::write(dir.path().join("b.txt"), "text ".repeat(40)).unwrap();
    let (.., place) = read(dir.path(), (1, 6, 1), Pack::Stream, None, 2);
    write_lines(&dir.path().join("a.jsonl"), "a", 41);
    let group = local::run(1, |group| group.clone()).remove(0);
    let list = format!("{0}/a.jsonl:0.7,{0}/b.txt:0.3", dir.path().display());
    let corpora = find(list.as_ref(), Pack::Stream).unwrap();
    let corpus = corpora.train(&bytes(), None, Some(3), group).unwrap();
    assert!(error(corpus.resume(Some(&place))).contains("a.jsonl had "));
    assert!(error(corpus.resume(Some(&"no place".into()))).contains("can't be read"));
}

/// The tokenizer puts `b` before a text, and the configuration names `rare` as the end token.
#[test]
fn documents_have_the_tokenizers_start_and_end() {
    let model = tempfile::tempdir().unwrap();
    let template = r#"{"type": "TemplateProcessing", "special_tokens": {"b": {"id": "b", "ids": [2], "tokens": ["b"]}},
        "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}"#;
    let with = TOKENIZER.replace("\"post_processor\": null", &format!("\"post_processor\": {template}"));
    let tokenizer = |json: &str| {
        fs::write(model.path().join("tokenizer.json"), json).unwrap();
        CorpusTokenizer::new(&Text::new(Some(model.path())).unwrap(), Some(model.path()), None).unwrap()
    };
    let (bare, templated) = (tokenizer(TOKENIZER), tokenizer(&with));
    assert_eq!((bare.start(), bare.end(), bare.vocab_size()), (None, None, 4));
    assert_eq!((templated.start(), templated.end()), (Some(2), None));
    assert_ne!(bare.fingerprint(), templated.fingerprint());
    fs::write(model.path().join("config.json"), r#"{"eos_token_id": 999}"#).unwrap();
    assert_eq!(tokenizer(&with).end(), Some(999));
    assert_eq!(bare.encode(&["a b", "rare"]).unwrap(), [vec![1, 2], vec![999]]);
}

#[test]
fn evaluation_reads_each_sequence_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    write_lines(&path, "a", 9);
    let shape = BatchShape { world_size: 1, rank: 0, batch_size: 2, grad_accum: 1, seq_len: SEQ_LEN };
    for pack in [Pack::Stream, Pack::Documents] {
        let corpus = find(&path, pack).unwrap().evaluate(&bytes(), None).unwrap();
        let batches = Batches::for_evaluation(BatchSource::Evaluation(corpus), shape).unwrap();
        let all: Vec<MicroBatch> = (0..batches.rounds()).map(|round| batches.pass(round).unwrap()).collect();
        let inputs: Vec<u32> = all.iter().flat_map(|batch| batch.inputs.clone()).collect();
        let text: String = inputs.iter().map(|&id| char::from(id as u8)).collect();
        assert!(text.starts_with("a0\0a1.......\0a2..............\0"), "{text:?}");
        assert_eq!(all[0].documents.is_some(), pack == Pack::Documents);
    }
    let list = format!("{0}:0.5,{0}:0.5", path.display());
    let corpora = find(list.as_ref(), Pack::Stream).unwrap();
    assert!(error(corpora.evaluate(&bytes(), None)).contains("2 sources, expected one"));
}
