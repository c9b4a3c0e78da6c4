use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::*;
use crate::documents::Options;
use crate::format::PART;
use crate::tokenise::Bytes;

const SEED: Option<u64> = Some(7);

type BoxedExchange = Box<dyn Fn(Vec<u8>) -> Result<Vec<Vec<u8>>> + Send>;

/// Returns the exchanges of ranks in threads.
fn exchanges(ranks: usize) -> Vec<BoxedExchange> {
    let mut senders: Vec<Vec<Sender<Vec<u8>>>> = (0..ranks).map(|_| Vec::new()).collect();
    let mut receivers = Vec::new();
    for _ in 0..ranks {
        receivers.push(Vec::new());
        for from in &mut senders {
            let (sender, receiver) = channel();
            from.push(sender);
            receivers.last_mut().unwrap().push(receiver);
        }
    }
    senders
        .into_iter()
        .zip(receivers)
        .map(|(senders, receivers)| {
            let exchange = move |bytes: Vec<u8>| -> Result<Vec<Vec<u8>>> {
                for sender in &senders {
                    let _ = sender.send(bytes.clone());
                }
                receivers.iter().map(|receiver| Ok(receiver.recv()?)).collect()
            };
            Box::new(exchange) as BoxedExchange
        })
        .collect()
}

/// Runs `each` on every rank, and returns the results in the order of ranks.
pub(crate) fn on_ranks<T: Send>(ranks: usize, each: impl Fn(usize, &Exchange<'_>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = exchanges(ranks)
            .into_iter()
            .enumerate()
            .map(|(rank, exchange)| scope.spawn(move || each(rank, &*exchange)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Makes a corpus of several formats. Returns its texts too.
fn corpus(directory: &Path) -> (Arc<Corpus>, Vec<String>) {
    let mut texts = Vec::new();
    let mut lines = |file: usize, count: usize| {
        let mut lines = String::new();
        for line in 0..count {
            let text = format!("{file} {line} {}", "x".repeat(line * 7 % 90));
            lines += &format!("{}\n", serde_json::json!({ "text": text }));
            texts.push(text);
            if line % 9 == 0 {
                lines += "{\"text\": \"\"}\n";
            }
        }
        lines
    };
    for (name, file, count) in [("a.jsonl", 0, 160), ("b.jsonl", 1, 1), ("d.jsonl", 3, 90)] {
        fs::write(directory.join(name), lines(file, count)).unwrap();
    }
    fs::write(directory.join("c.jsonl.zst"), zstd::encode_all(lines(2, 40).as_bytes(), 1).unwrap()).unwrap();
    for name in ["empty1.jsonl", "empty2.jsonl"] {
        fs::write(directory.join(name), "").unwrap();
    }
    texts.sort();
    (opened(directory), texts)
}

fn opened(path: &Path) -> Arc<Corpus> {
    Arc::new(Corpus::open(&Files::find(path).unwrap(), &Options::default()).unwrap())
}

fn stream(corpus: &Arc<Corpus>, seed: Option<u64>, rank: usize, ranks: usize) -> Stream {
    Stream::new(corpus.clone(), Arc::new(Bytes::with_end()), seed, rank, ranks).unwrap()
}

/// Reads sequences of these lengths from a place on, each on one rank. Returns them in order, with the place after them.
fn read(
    corpus: &Arc<Corpus>,
    seed: Option<u64>,
    ranks: usize,
    place: Option<&Place>,
    lens: &[usize],
) -> Result<(Vec<Sequence>, Place)> {
    let outcomes = on_ranks(ranks, |rank, exchange| {
        let mut stream = stream(corpus, seed, rank, ranks);
        if let Some(place) = place {
            stream.resume(place)?;
            assert_eq!(stream.place(), *place);
        }
        let mut own = Vec::new();
        for (index, &len) in lens.iter().enumerate() {
            if index % ranks == rank {
                own.push(stream.next_sequence(len, exchange)?);
            } else {
                stream.skip(1, len, exchange)?;
            }
        }
        Ok((own, stream.place()))
    });
    let read: Vec<(Vec<Sequence>, Place)> = outcomes.into_iter().collect::<Result<_>>()?;
    assert!(read.iter().all(|(_, place)| *place == read[0].1));
    let sequences = (0..lens.len()).map(|index| read[index % ranks].0[index / ranks].clone()).collect();
    Ok((sequences, read[0].1.clone()))
}

/// Joins sequences that follow each other, and returns the texts of their documents.
fn texts(sequences: &[Sequence]) -> Vec<String> {
    let mut ids: Vec<u32> = Vec::new();
    let mut starts = Vec::new();
    for sequence in sequences {
        if let Some(last) = ids.pop() {
            assert_eq!(last, sequence.ids[0]);
        }
        starts.extend(sequence.starts.iter().map(|start| start + ids.len()));
        ids.extend(&sequence.ids);
    }
    starts.dedup();
    let ends = ids.iter().enumerate().filter(|&(_, &id)| id == 256).map(|(end, _)| end + 1);
    let expected: Vec<usize> = [0].into_iter().chain(ends).filter(|&start| start < ids.len()).collect();
    assert_eq!(starts, expected);
    let mut texts: Vec<String> =
        ids.split(|&id| id == 256).map(|ids| ids.iter().map(|&id| char::from(id as u8)).collect()).collect();
    texts.pop();
    texts
}

#[test]
fn each_epoch_has_every_document_once_in_another_order() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, expected) = corpus(directory.path());
    assert!(corpus.num_blocks() > LANES as u64 + 4);
    let tokens: usize = expected.iter().map(|text| text.len() + 1).sum();
    for seed in [SEED, None] {
        let (sequences, place) = read(&corpus, seed, 1, None, &vec![tokens / 10; 31]).unwrap();
        assert_eq!(place.epoch, 3);
        let texts = texts(&sequences);
        let mut epochs: Vec<Vec<String>> = texts.chunks_exact(expected.len()).take(3).map(<[_]>::to_vec).collect();
        assert_eq!(epochs.len(), 3);
        assert_eq!(epochs[0] == epochs[1], seed.is_none());
        for epoch in &mut epochs {
            epoch.sort();
            assert_eq!(*epoch, expected);
        }
        assert_eq!(place.counters.documents as usize / expected.len(), 3);
        assert!(place.counters.skipped >= 3 * 31);
    }
    let (first, _) = read(&corpus, SEED, 1, None, &[500]).unwrap();
    assert_ne!(first, read(&corpus, Some(8), 1, None, &[500]).unwrap().0);
}

#[test]
fn order_is_the_same_at_every_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let lens: Vec<usize> = (0..400).map(|index| 20 + index % 90).collect();
    let expected = read(&corpus, SEED, 1, None, &lens).unwrap();
    assert!(expected.1.epoch > 0);
    for ranks in [2, 3, 4, 16, 20] {
        assert_eq!(read(&corpus, SEED, ranks, None, &lens).unwrap(), expected, "{ranks} ranks");
    }
}

#[test]
fn resumed_runs_lose_and_repeat_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let len = 41;
    let expected = read(&corpus, SEED, 1, None, &vec![len; 900]).unwrap();
    let mut random = 12_345_u64;
    let mut below = |limit: u64| {
        random = mix(random);
        random % limit
    };
    for schedule in 0..50 {
        let (mut found, mut place) = (Vec::new(), None::<Place>);
        while found.len() < 900 {
            let ranks = 1 + below(6) as usize;
            let steps = (1 + below(if schedule % 2 == 0 { 40 } else { 600 }) as usize).min(900 - found.len());
            let (sequences, next) = read(&corpus, SEED, ranks, place.as_ref(), &vec![len; steps]).unwrap();
            found.extend(sequences);
            // As a checkpoint stores it.
            let stored = serde_json::to_string(&next).unwrap();
            place = Some(serde_json::from_str(&stored).unwrap());
        }
        assert!(found == expected.0, "schedule {schedule}");
        assert_eq!(place.unwrap(), expected.1);
    }
}

#[test]
fn long_documents_stay_whole() {
    let directory = tempfile::tempdir().unwrap();
    let lines = |name: &str| (0..70_000).map(|line| format!("{name} {line}\n")).collect::<String>();
    let mut expected: Vec<String> = ["a", "b"].map(lines).to_vec();
    assert!(expected[0].len() > 2 * PART);
    fs::write(directory.path().join("a.txt"), &expected[0]).unwrap();
    let one = read(&opened(directory.path()), SEED, 2, None, &[expected[0].len()]).unwrap();
    assert_eq!((one.0[0].starts.clone(), one.1.counters.documents), (vec![0], 1));
    assert_eq!(texts(&one.0), expected[..1]);
    // Two documents in turn, each in order.
    fs::write(directory.path().join("b.txt"), &expected[1]).unwrap();
    let corpus = opened(directory.path());
    let tokens = expected.iter().map(|text| text.len() + 1).sum::<usize>();
    let whole = read(&corpus, SEED, 1, None, &[tokens]).unwrap();
    assert_eq!(whole.1.counters.documents, 2);
    assert!(whole.0[0].starts.len() > 3);
    // A place within a document.
    let lens = [2 * tokens / 3, tokens / 6];
    let halves = read(&corpus, SEED, 1, None, &lens).unwrap();
    let first = read(&corpus, SEED, 2, None, &lens[..1]).unwrap();
    assert!(first.1.open.is_some());
    assert_eq!(read(&corpus, SEED, 3, Some(&first.1), &lens[1..]).unwrap().0[0], halves.0[1]);
    let mut found: BTreeMap<u8, String> = BTreeMap::new();
    for line in whole.0[0].ids[..tokens].split_inclusive(|&id| id == 10 || id == 256) {
        let line: String = line.iter().filter(|&&id| id != 256).map(|&id| char::from(id as u8)).collect();
        if let Some(name) = line.bytes().next() {
            found.entry(name).or_default().push_str(&line);
        }
    }
    expected.sort();
    assert_eq!(found.into_values().collect::<Vec<_>>(), expected);
}

#[test]
fn corpora_with_few_documents_are_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.jsonl");
    fs::write(&path, "{\"text\": \"abc\"}\n").unwrap();
    let (sequences, place) = read(&opened(&path), SEED, 3, None, &[10; 4]).unwrap();
    assert_eq!(texts(&sequences), vec!["abc"; 10]);
    assert_eq!((place.epoch, place.counters.tokens, place.counters.documents), (10, 40, 10));
    fs::write(&path, "{\"text\": null}\n").unwrap();
    let error = format!("{:#}", read(&opened(&path), SEED, 3, None, &[10]).unwrap_err());
    assert!(error.contains("a.jsonl has no texts to train on"), "{error}");
    fs::write(&path, "").unwrap();
    let empty = Stream::new(opened(&path), Arc::new(Bytes::new()), None, 0, 1).err().unwrap();
    assert!(empty.to_string().contains("a.jsonl is empty"));
}

#[test]
fn an_error_of_one_rank_reaches_all() {
    let directory = tempfile::tempdir().unwrap();
    let (_, _) = corpus(directory.path());
    let damaged = directory.path().join("d.jsonl");
    let content = fs::read_to_string(&damaged).unwrap();
    fs::write(&damaged, format!("{content}{{\"text\": 3}}\n{content}")).unwrap();
    let corpus = opened(directory.path());
    let messages = on_ranks(3, |rank, exchange| {
        let mut stream = stream(&corpus, SEED, rank, 3);
        let error = loop {
            if let Err(error) = stream.next_sequence(50, exchange) {
                break format!("{error:#}");
            }
        };
        // The stream stays failed, without an exchange.
        assert_eq!(format!("{:#}", stream.next_sequence(50, &alone).unwrap_err()), error);
        error
    });
    assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
    assert!(messages[0].starts_with("rank ") && messages[0].contains("d.jsonl, line at byte"), "{}", messages[0]);
    assert!(messages[0].contains("the field `text` is a number"), "{}", messages[0]);
}

#[test]
fn ranks_that_consume_other_sequences_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let messages = on_ranks(2, |rank, exchange| {
        let mut stream = stream(&corpus, SEED, rank, 2);
        if rank == 1 {
            stream.next = RoundPlace { round: 3, ..RoundPlace::of_epoch(2) };
        }
        format!("{:#}", stream.next_sequence(50, exchange).unwrap_err())
    });
    assert!(messages[0].contains("rank 1: it is at round 3 of epoch 2"), "{messages:?}");
    let messages = on_ranks(2, |rank, exchange| {
        let mut stream = stream(&corpus, Some(rank as u64), rank, 2);
        format!("{:#}", stream.next_sequence(50, exchange).unwrap_err())
    });
    assert!(messages[1].contains("rank 0: its files, tokenizer or seed are others"), "{messages:?}");
}

#[test]
fn changed_files_and_settings_are_told_on_resume() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let (_, place) = read(&corpus, SEED, 1, None, &[500]).unwrap();
    let refused = |corpus: &Arc<Corpus>, seed, tokenizer: Bytes| {
        let mut stream = Stream::new(corpus.clone(), Arc::new(tokenizer), seed, 0, 1).unwrap();
        format!("{:#}", stream.resume(&place).unwrap_err())
    };
    let message = refused(&corpus, None, Bytes::with_end());
    assert!(message.contains("has the seed 7, but this run has no shuffling"), "{message}");
    let message = refused(&corpus, SEED, Bytes::new());
    let expected = "with the tokenizer bytes-257, start None, end Some(256), but this run reads `text` with bytes-256";
    assert!(message.contains(expected), "{message}");
    fs::write(directory.path().join("b.jsonl"), "{\"text\": \"longer than before, by far\"}\n").unwrap();
    fs::write(directory.path().join("new.jsonl"), "").unwrap();
    fs::rename(directory.path().join("a.jsonl"), directory.path().join("old.jsonl")).unwrap();
    let message = refused(&opened(directory.path()), SEED, Bytes::with_end());
    for expected in ["a.jsonl is missing", "b.jsonl had", "new.jsonl is new", "old.jsonl is new"] {
        assert!(message.contains(expected), "{message}");
    }
}

/// A tokenizer whose start and end tokens are not in its fingerprint.
struct Configured {
    end: Option<u32>,
    /// Whether texts have no tokens.
    is_silent: bool,
}

impl Tokenise for Configured {
    fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        if self.is_silent { Ok(vec![Vec::new(); texts.len()]) } else { Bytes::new().encode(texts) }
    }
    fn start(&self) -> Option<u32> {
        None
    }
    fn end(&self) -> Option<u32> {
        self.end
    }
    fn vocab_size(&self) -> usize {
        256
    }
    fn name(&self) -> String {
        "configured".into()
    }
    fn fingerprint(&self) -> String {
        "configured".into()
    }
}

#[test]
fn another_end_token_or_block_size_is_told_on_resume() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let stream = |end: u32| {
        let tokenizer = Configured { end: Some(end), is_silent: false };
        Stream::new(corpus.clone(), Arc::new(tokenizer), SEED, 0, 1).unwrap()
    };
    let place = stream(3).place();
    let message = format!("{:#}", stream(4).resume(&place).unwrap_err());
    assert!(message.contains("end Some(3)") && message.contains("end Some(4)"), "{message}");
    stream(3).resume(&place).unwrap();
    for other in [Place { block: place.block + 1, ..place.clone() }, Place { order: ORDER + 1, ..place }] {
        let message = format!("{:#}", stream(3).resume(&other).unwrap_err());
        assert!(message.contains("continue with the program that wrote it"), "{message}");
    }
}

#[test]
fn texts_without_tokens_are_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let (corpus, _) = corpus(directory.path());
    let silent = Configured { end: None, is_silent: true };
    let mut stream = Stream::new(corpus, Arc::new(silent), SEED, 0, 1).unwrap();
    let message = format!("{:#}", stream.next_sequence(5, &alone).unwrap_err());
    assert!(message.contains("has no texts to train on"), "{message}");
}

#[test]
fn lanes_read_ahead_by_a_bounded_number_of_pieces() {
    /// Counts the texts that were tokenised.
    struct Counting(std::sync::atomic::AtomicUsize);
    impl Tokenise for Counting {
        fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
            self.0.fetch_add(texts.len(), std::sync::atomic::Ordering::SeqCst);
            Bytes::new().encode(texts)
        }
        fn start(&self) -> Option<u32> {
            None
        }
        fn end(&self) -> Option<u32> {
            None
        }
        fn vocab_size(&self) -> usize {
            256
        }
        fn name(&self) -> String {
            "counting".into()
        }
        fn fingerprint(&self) -> String {
            "counting".into()
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path: PathBuf = directory.path().join("a.jsonl");
    let line = format!("{{\"text\": \"{}\"}}\n", "x".repeat(400));
    fs::write(&path, line.repeat(20_000)).unwrap();
    let counting = Arc::new(Counting(0.into()));
    let mut stream = Stream::new(opened(&path), counting.clone(), SEED, 0, 1).unwrap();
    stream.next_sequence(400, &alone).unwrap();
    // A piece has one text here: one was taken of each lane, four wait, and one more is done.
    let read = || counting.0.load(std::sync::atomic::Ordering::SeqCst);
    let begun = Instant::now();
    while read() < 16 * 6 && begun.elapsed() < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(Duration::from_millis(100));
    assert_eq!(read(), 16 * 6);
    assert!(stream.waited() > Duration::ZERO);
}
