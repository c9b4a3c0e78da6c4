use std::collections::BTreeMap;
use std::path::PathBuf;

use super::*;
use crate::shards::Shards;
use crate::source::TokenSource;
use crate::tokenise::Bytes;
use crate::tokens;

/// Makes a corpus of three files with 600 texts, and records without one.
fn corpus(directory: &Path) -> Files {
    let root = directory.join("corpus");
    fs::create_dir(&root).unwrap();
    for file in 0..3 {
        let mut lines = String::new();
        for line in 0..200 {
            let text = format!("{file} {line} {}", "x".repeat(line * 7 % 50));
            lines += &format!("{}\n", serde_json::json!({ "text": text }));
            if line % 9 == 0 {
                lines += "{\"text\": null}\n";
            }
        }
        match file {
            1 => {
                let zstd = zstd::encode_all(lines.as_bytes(), 1).unwrap();
                fs::write(root.join("1.jsonl.zst"), zstd).unwrap();
            }
            file => fs::write(root.join(format!("{file}.jsonl")), lines).unwrap(),
        }
    }
    Files::find(&root).unwrap()
}

fn options(threads: usize) -> Options {
    let documents = documents::Options { block: 1000, ..documents::Options::default() };
    Options { documents, shard_tokens: 3000, threads }
}

fn run(files: &Files, out: &Path, threads: usize) -> Result<Prepared> {
    prepare(files, out, &Bytes::with_end(), &options(threads), &mut |_| Ok(()))
}

fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect()
}

fn texts(out: &Path) -> Vec<String> {
    let shards = Shards::open(out, 300).unwrap();
    let mut ids = vec![0; shards.len() as usize];
    shards.read(0, &mut ids).unwrap();
    let documents = ids.split(|&id| id == 256).map(|ids| ids.iter().map(|&id| char::from(id as u8)).collect());
    let mut documents: Vec<String> = documents.collect();
    assert_eq!(documents.pop().as_deref(), Some(""));
    documents
}

#[test]
fn shards_hold_the_documents_in_order_at_any_number_of_threads() {
    let directory = tempfile::tempdir().unwrap();
    let files = corpus(directory.path());
    let (one, four) = (directory.path().join("one"), directory.path().join("four"));
    let prepared = run(&files, &one, 1).unwrap();
    assert_eq!((prepared.index.documents, prepared.index.skipped), (600, 69));
    assert!(prepared.index.shards.len() > 3);
    assert_eq!(run(&files, &four, 4).unwrap(), prepared);
    assert_eq!(contents(&one), contents(&four));
    let texts = texts(&one);
    assert_eq!(texts.len(), 600);
    assert!(texts[0].starts_with("0 0 ") && texts[399].starts_with("1 199 ") && texts[599].starts_with("2 199 "));
    let shards = Shards::open(&one, 300).unwrap();
    let starts = shards.starts(0..shards.len()).unwrap();
    let lengths = texts.iter().scan(0, |at, text| Some(std::mem::replace(at, *at + text.len() as u64 + 1)));
    assert_eq!(starts, lengths.collect::<Vec<_>>());
    for range in [5..9, starts[3]..starts[3] + 1, starts[300] + 1..starts[310]] {
        let expected: Vec<u64> = starts.iter().copied().filter(|start| range.contains(start)).collect();
        assert_eq!(shards.starts(range).unwrap(), expected);
    }
    let shard = Files::find(one.join("shard-00000.bin")).unwrap();
    let options = tokens::Options { width: tokens::Width::U16, vocab_size: 300, end: None };
    let message = tokens::Tokens::open(&shard, options).err().unwrap().to_string();
    assert!(message.contains("is a shard of a prepared corpus: pass the directory"), "{message}");
    assert_eq!(Files::find(&one).unwrap().content, Content::Prepared(one));
}

#[test]
fn stopped_runs_continue_with_the_same_shards() {
    let directory = tempfile::tempdir().unwrap();
    let files = corpus(directory.path());
    let whole = directory.path().join("whole");
    let expected = run(&files, &whole, 2).unwrap();
    // Each run ends after the next shard.
    let sources: Vec<Source> = match &files.content {
        Content::Documents(found) => found.iter().map(|file| Source::open(file, &options(1).documents).unwrap()),
        _ => panic!("expected documents"),
    }
    .collect();
    let out = directory.path().join("stopped");
    let mut stops = 0;
    for shards in 0..expected.index.shards.len() {
        // A run that ends in the middle of a shard, as a kill would.
        let inputs = Inputs::new(
            &Bytes::with_end(),
            "text",
            3000,
            match &files.content {
                Content::Documents(found) => {
                    found.iter().map(|file| Mark::of_file(&file.path, files.name(&file.path)).unwrap()).collect()
                }
                _ => panic!("expected documents"),
            },
        );
        let lock = lock(&out).unwrap();
        let Begun::Unfinished(mut unfinished) = begin(&out, inputs, 1000).unwrap() else { break };
        assert_eq!(unfinished.index.shards.len(), shards);
        let from = unfinished.next;
        let mut writer = Writer::new(&out, &mut unfinished, 3000, &sources);
        let mut give = |batch: Batch| {
            for (index, part) in batch.parts.iter().enumerate() {
                let Origin { file, block, skipped } = batch.origins[index];
                let one = Batch {
                    parts: vec![part.clone()],
                    origins: vec![Origin { file, block, skipped }],
                    skipped: 0,
                    file_bytes: 0,
                };
                let ids = encode_parts(&Bytes::with_end(), &one.parts).unwrap();
                writer.write(&one, &ids).unwrap();
                if writer.progress.shards > shards && writer.shard.as_ref().is_some_and(|shard| shard.tokens() > 900) {
                    return false;
                }
            }
            true
        };
        read(&sources, from, &mut give).unwrap();
        stops += 1;
        drop(lock);
        let message = format!("{:#}", Shards::open(&out, 300).err().unwrap());
        assert!(message.contains("is not complete: run the same preparation again"), "{message}");
    }
    assert!(stops > 2);
    let prepared = run(&files, &out, 2).unwrap();
    assert!(prepared.reused > 2);
    assert_eq!(prepared.index, expected.index);
    assert_eq!(contents(&out), contents(&whole));
    // A complete corpus is not made again.
    let again = prepare(&files, &out, &Bytes::with_end(), &options(1), &mut |_| panic!("nothing is left to do"));
    assert_eq!(again.unwrap().reused, expected.index.shards.len());
}

#[test]
fn an_error_of_progress_stops_and_the_corpus_continues() {
    let directory = tempfile::tempdir().unwrap();
    let files = corpus(directory.path());
    let out = directory.path().join("out");
    let stop = prepare(&files, &out, &Bytes::with_end(), &options(3), &mut |progress| {
        ensure!(progress.documents < 300, "stopped at {} documents", progress.documents);
        Ok(())
    });
    assert!(stop.unwrap_err().to_string().contains("stopped at"));
    let mut other = options(3);
    other.documents.block += 1;
    let message = prepare(&files, &out, &Bytes::with_end(), &other, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("was begun with blocks of 1000 bytes, but this run has 1001"), "{message}");
    assert_eq!(run(&files, &out, 3).unwrap().index.documents, 600);
}

#[test]
fn changed_inputs_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let files = corpus(directory.path());
    let out = directory.path().join("out");
    run(&files, &out, 1).unwrap();
    let refused = |files: &Files, tokenizer: &dyn Tokenise| {
        format!("{:#}", prepare(files, &out, tokenizer, &options(1), &mut |_| Ok(())).unwrap_err())
    };
    let message = refused(&files, &Bytes::new());
    assert!(message.contains("was begun with the tokenizer bytes (bytes-257"), "{message}");
    let path = files.root.join("2.jsonl");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"text\": \"more\"}\n").unwrap();
    let message = refused(&files, &Bytes::with_end());
    assert!(message.contains("the corpus has changed since") && message.contains("2.jsonl had"), "{message}");
}

#[test]
fn other_directories_and_runs_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let files = corpus(directory.path());
    let message = |out: &Path| format!("{:#}", run(&files, out, 1).unwrap_err());
    let out = directory.path().join("out");
    let held = lock(&out).unwrap();
    assert!(message(&out).contains("another process prepares"));
    drop(held);
    run(&files, &out, 1).unwrap();
    assert!(message(&files.root.join("tokens")).contains("would be read as a part of it"));
    let other = directory.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "x").unwrap();
    assert!(message(&other).contains("holds thesis.tex, which is not of a preparation"));
    let empty = directory.path().join("empty.jsonl");
    fs::write(&empty, "{\"text\": null}\n").unwrap();
    let nothing = run(&Files::find(&empty).unwrap(), &directory.path().join("nothing"), 1).unwrap_err();
    assert!(nothing.to_string().contains("has no texts"));
}

#[test]
fn damaged_lines_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.jsonl");
    fs::write(&path, "{\"text\": \"a\"}\n".repeat(500) + "{\"text\": \"b\n").unwrap();
    let out = directory.path().join("out");
    let message = format!("{:#}", run(&Files::find(&path).unwrap(), &out, 4).unwrap_err());
    assert!(message.contains("a.jsonl, line at byte 7000: invalid JSON"), "{message}");
}

#[test]
fn damaged_shards_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.txt");
    fs::write(&path, "0123456789".repeat(200_000)).unwrap();
    let out = directory.path().join("out");
    prepare(&Files::find(&path).unwrap(), &out, &Bytes::with_end(), &Options::default(), &mut |_| Ok(())).unwrap();
    let ids = out.join("shard-00000.bin");
    let mut bytes = fs::read(&ids).unwrap();
    bytes[(2 << 20) + 5] ^= 1;
    fs::write(&ids, &bytes).unwrap();
    let shards = Shards::open(&out, 300).unwrap();
    let mut out_ids = [0; 100];
    shards.read(100, &mut out_ids).unwrap();
    let message = format!("{:#}", shards.read((1 << 20) + 500, &mut out_ids).unwrap_err());
    assert!(message.contains("block 2 of") && message.contains("shard-00000.bin is damaged"), "{message}");
    let small = format!("{:#}", Shards::open(&out, 256).err().unwrap());
    assert!(small.contains("was prepared with the tokenizer bytes of 257 ids"), "{small}");
    fs::write(&ids, &bytes[..99]).unwrap();
    let cut = format!("{:#}", Shards::open(&out, 300).err().unwrap());
    assert!(cut.contains("has 99 bytes, but 4000002 were written"), "{cut}");
    fs::write(out.join(INDEX), "{\"format\": \"fsdp-corpus\"").unwrap();
    assert!(format!("{:#}", Shards::open(&out, 300).err().unwrap()).contains("index.json is damaged"));
}
