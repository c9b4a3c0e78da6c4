//! A run as a training program does it: a mixture of a streamed and a prepared corpus, on several ranks.

#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::Result;
use fsdp_corpus::documents;
use fsdp_corpus::files::{Content, Files};
use fsdp_corpus::mixture::{Mixture, Place, Source, parse};
use fsdp_corpus::prepare::{self, prepare};
use fsdp_corpus::sequence::Pack;
use fsdp_corpus::sequence::Sequence;
use fsdp_corpus::shards::Shards;
use fsdp_corpus::source::Sequences;
use fsdp_corpus::stream::{Corpus, Stream};
use fsdp_corpus::tokenise::Bytes;

const SEQ_LEN: usize = 2048;

/// Makes 4 MB of JSON Lines, and 1 MB that is prepared.
fn corpora(directory: &Path) -> String {
    for (name, documents) in [("streamed", 4000), ("prepared", 1000)] {
        let line = |index: usize| {
            let words: String = (0..100 + index * 31 % 200).map(|word| format!("{} ", index * word % 1000)).collect();
            format!("{{\"text\": \"{name} {index}: {words}\"}}\n")
        };
        let lines: Vec<String> = (0..documents).map(line).collect();
        let half = lines.len() / 2;
        let root = directory.join(name);
        fs::create_dir(&root).unwrap();
        fs::write(root.join("1.jsonl"), lines[..half].concat()).unwrap();
        fs::write(root.join("2.jsonl.zst"), zstd::encode_all(lines[half..].concat().as_bytes(), 1).unwrap()).unwrap();
    }
    let out = directory.join("tokens");
    let files = Files::find(directory.join("prepared")).unwrap();
    prepare(&files, &out, &Bytes::with_end(), &prepare::Options::default(), &mut |_| Ok(())).unwrap();
    format!("{}/streamed/*:0.75,{}:0.25", directory.display(), out.display())
}

fn mixture(data: &str, rank: usize, ranks: usize) -> Result<Mixture> {
    let mut sources = Vec::new();
    for source in parse(data)? {
        let files = Files::find(&source.name)?;
        let opened = match &files.content {
            Content::Prepared(path) => Source::Sequences(Sequences::new(
                Arc::new(Shards::open(path, 257)?),
                SEQ_LEN,
                Some(5),
                Pack::Documents,
            )?),
            Content::Documents(_) => {
                let corpus = Arc::new(Corpus::open(&files, &documents::Options::default())?);
                Source::Stream(Box::new(Stream::new(corpus, Arc::new(Bytes::with_end()), Some(5), rank, ranks)?))
            }
            Content::Tokens(_) => panic!("there are no token files"),
        };
        sources.push((source.name, source.weight, opened));
    }
    Mixture::new(sources, SEQ_LEN)
}

/// Reads `count` sequences from a place on at some number of ranks, in micro-batches of two.
fn read(data: &str, ranks: usize, place: Option<&Place>, count: usize) -> (Vec<(usize, Sequence)>, Place) {
    let found: Mutex<Vec<Option<(usize, Sequence)>>> = Mutex::new(vec![None; count]);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel::<(usize, Vec<u8>)>()).unzip();
    let barrier = std::sync::Barrier::new(ranks);
    let places: Vec<Place> = thread::scope(|scope| {
        let threads: Vec<_> = receivers
            .into_iter()
            .enumerate()
            .map(|(rank, receiver)| {
                let (senders, barrier, found) = (senders.clone(), &barrier, &found);
                scope.spawn(move || {
                    let exchange = |bytes: Vec<u8>| {
                        senders.iter().try_for_each(|sender| sender.send((rank, bytes.clone())))?;
                        let mut all: Vec<(usize, Vec<u8>)> =
                            (0..ranks).map(|_| receiver.recv()).collect::<Result<_, _>>()?;
                        all.sort();
                        barrier.wait();
                        Ok(all.into_iter().map(|(_, bytes)| bytes).collect())
                    };
                    let mut mixture = mixture(data, rank, ranks).unwrap();
                    if let Some(place) = place {
                        mixture.resume(place).unwrap();
                    }
                    for index in 0..count {
                        if index / 2 % ranks == rank {
                            let sequence = mixture.next_sequence(&exchange).unwrap();
                            found.lock().unwrap()[index] = Some(sequence);
                        } else {
                            mixture.skip(1, &exchange).unwrap();
                        }
                    }
                    mixture.place()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(places.iter().all(|place| *place == places[0]));
    let found = found.into_inner().unwrap().into_iter().map(Option::unwrap).collect();
    (found, places[0].clone())
}

#[test]
fn runs_are_the_same_at_every_number_of_ranks_and_after_resumes() {
    let directory = tempfile::tempdir().unwrap();
    let data = corpora(directory.path());
    // More than an epoch of either source.
    let (expected, last) = read(&data, 1, None, 2400);
    assert_eq!(expected.iter().filter(|(source, _)| *source == 1).count(), 600);
    let text = |sequence: &Sequence| -> String { sequence.inputs().iter().map(|&id| char::from(id as u8)).collect() };
    assert!(expected.iter().all(|(source, sequence)| {
        text(sequence).contains(["streamed", "prepared"][*source]) && sequence.ids.len() == SEQ_LEN + 1
    }));
    let (mut found, mut place) = (Vec::new(), None);
    for (ranks, count) in [(4, 700), (2, 1), (3, 1100), (1, 599)] {
        let (sequences, next) = read(&data, ranks, place.as_ref(), count);
        found.extend(sequences);
        place = Some(serde_json::from_str(&serde_json::to_string(&next).unwrap()).unwrap());
    }
    assert!(found == expected);
    assert_eq!(place.unwrap(), last);
}
