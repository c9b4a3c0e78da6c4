//! Tokens that allow random access, their sequences, and marks of files.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::permutation::Permutation;
use crate::sequence::{Pack, Sequence};

/// Bytes of each sample of a file.
const SAMPLE: u64 = 16 << 10;
/// Files that a message names at most.
const NAMED: usize = 5;

/// Name, size and a checksum of samples of a file, by which a changed file is noticed.
///
/// The samples are at the start, in the middle and at the end, so marking a file does not read it whole. A copy of a file
/// has the same mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Name within the corpus.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Checksum of the samples.
    pub checksum: u64,
}

impl Mark {
    /// Marks a file.
    pub fn of_file(path: &Path, name: String) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(cannot)?;
        let size = file.metadata().with_context(cannot)?.len();
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut buffer = vec![0; SAMPLE.min(size) as usize];
        let last = size.saturating_sub(SAMPLE);
        for start in [0, last / 2, last] {
            file.read_exact_at(&mut buffer, start).with_context(cannot)?;
            digest.update(&buffer);
        }
        Ok(Mark { name, size, checksum: digest.finalize() })
    }

    /// Fails if the marks differ. The error names the files.
    pub fn compare(before: &[Mark], now: &[Mark], since: &str) -> Result<()> {
        if before == now {
            return Ok(());
        }
        fn by_name(marks: &[Mark]) -> HashMap<&str, &Mark> {
            marks.iter().map(|mark| (&*mark.name, mark)).collect()
        }
        let (old, new) = (by_name(before), by_name(now));
        let mut found = Vec::new();
        for mark in before {
            match new.get(&*mark.name) {
                None => found.push(format!("{} is missing", mark.name)),
                Some(now) if now.size != mark.size => {
                    found.push(format!("{} had {} bytes and has {}", mark.name, mark.size, now.size));
                }
                Some(&now) if now != mark => found.push(format!("the content of {} has changed", mark.name)),
                Some(_) => {}
            }
            if found.len() > NAMED {
                break;
            }
        }
        let added = now.iter().filter(|mark| !old.contains_key(&*mark.name));
        found.extend(added.take(NAMED).map(|mark| format!("{} is new", mark.name)));
        if found.is_empty() {
            found.push("the files have another order".into());
        }
        let more = if found.len() > NAMED { ", and more" } else { "" };
        found.truncate(NAMED);
        bail!("the corpus has changed since {since}: {}{more}. Restore the files, or start a new run", found.join(", "))
    }
}

/// Tokens that allow random access.
pub trait TokenSource: Send + Sync {
    /// Returns the number of tokens.
    fn len(&self) -> u64;

    /// Returns whether the number of tokens is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the tokens `start..start + out.len()`.
    ///
    /// # Errors
    /// The range is beyond the end, a file can't be read, or an id is beyond the vocabulary.
    fn read(&self, start: u64, out: &mut [u32]) -> Result<()>;

    /// Returns the tokens of a range that start a document, in order.
    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>>;

    /// Returns marks of the files.
    fn marks(&self) -> Result<Vec<Mark>>;
}

/// Sequences of tokens that allow random access, shuffled in each epoch or in order.
///
/// Sequence k of an epoch has the inputs `k * T .. k * T + T`, and one more token.
#[derive(Clone)]
pub struct Sequences {
    tokens: Arc<dyn TokenSource>,
    seq_len: usize,
    seed: Option<u64>,
    pack: Pack,
    position: u64,
    marks: Arc<Vec<Mark>>,
}

/// Place in [`Sequences`], for a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequencesPlace {
    /// Number of sequences consumed.
    pub position: u64,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Seed of the order, if it is shuffled.
    pub seed: Option<u64>,
    /// Marks of the files.
    pub files: Vec<Mark>,
}

impl Sequences {
    /// Creates the sequences of tokens, from the first on. Shuffles them if there is a seed. Looks up where documents start
    /// for [`Pack::Documents`] only.
    ///
    /// # Errors
    /// There are fewer tokens than a sequence needs.
    pub fn new(tokens: Arc<dyn TokenSource>, seq_len: usize, seed: Option<u64>, pack: Pack) -> Result<Self> {
        ensure!(seq_len > 0, "a sequence needs at least one token");
        ensure!(
            tokens.len() > seq_len as u64,
            "the data has {} tokens, but a sequence needs {} (the sequence length and one to predict)",
            tokens.len(),
            seq_len as u64 + 1
        );
        let marks = Arc::new(tokens.marks()?);
        Ok(Sequences { tokens, seq_len, seed, pack, position: 0, marks })
    }

    /// Returns the number of sequences in an epoch.
    pub fn count(&self) -> u64 {
        (self.tokens.len() - 1) / self.seq_len as u64
    }

    /// Returns the marks of the files.
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// Returns the number of sequences consumed.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the number of epochs completed.
    pub fn epoch(&self) -> u64 {
        self.position / self.count()
    }

    /// Returns the sequence at a position of the run, which is not consumed.
    pub fn at(&self, position: u64) -> Result<Sequence> {
        let (count, seq_len) = (self.count(), self.seq_len as u64);
        let mut sequence = position % count;
        if let Some(seed) = self.seed {
            sequence = Permutation::new(count, seed, position / count).at(sequence);
        }
        let start = sequence * seq_len;
        let mut ids = vec![0; self.seq_len + 1];
        self.tokens.read(start, &mut ids)?;
        let starts = match self.pack {
            Pack::Documents => self.tokens.starts(start..start + seq_len + 1)?,
            Pack::Stream => Vec::new(),
        };
        Ok(Sequence { ids, starts: starts.into_iter().map(|at| (at - start) as usize).collect() })
    }

    /// Consumes the next sequence.
    pub fn next_sequence(&mut self) -> Result<Sequence> {
        let sequence = self.at(self.position)?;
        self.position += 1;
        Ok(sequence)
    }

    /// Consumes sequences without reading them.
    pub fn skip(&mut self, sequences: u64) {
        self.position += sequences;
    }

    /// Returns the place, from which [`Sequences::resume`] continues.
    pub fn place(&self) -> SequencesPlace {
        let Sequences { position, seq_len, seed, .. } = *self;
        SequencesPlace { position, seq_len, seed, files: self.marks.to_vec() }
    }

    /// Continues at a place.
    ///
    /// # Errors
    /// The files, the sequence length or the seed are others.
    pub fn resume(&mut self, place: &SequencesPlace) -> Result<()> {
        Mark::compare(&place.files, &self.marks, "the checkpoint")?;
        ensure!(
            place.seq_len == self.seq_len,
            "the checkpoint counts sequences of {} tokens, but they have {}: continue with --seq-len {}",
            place.seq_len,
            self.seq_len,
            place.seq_len
        );
        ensure!(
            place.seed == self.seed,
            "the checkpoint's order has {}, but this run has {}: continue with the same",
            described(place.seed),
            described(self.seed)
        );
        self.position = place.position;
        Ok(())
    }
}

/// Describes a seed for messages.
pub(crate) fn described(seed: Option<u64>) -> String {
    seed.map_or("no shuffling".into(), |seed| format!("the seed {seed}"))
}

/// Returns the values of an increasing list that are in a range. `get` returns the item at an index below `count`.
pub(crate) fn within(count: u64, range: Range<u64>, get: impl Fn(u64) -> Result<u64>) -> Result<Vec<u64>> {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if get(middle)? < range.start { low = middle + 1 } else { high = middle }
    }
    let mut found: Vec<u64> = Vec::new();
    for index in low..count {
        let value = get(index)?;
        if value >= range.end {
            break;
        }
        if let Some(&last) = found.last() {
            ensure!(value >= last, "document {index} starts at token {value}, before the document ahead of it");
        }
        if found.last() != Some(&value) && value >= range.start {
            found.push(value);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn changed_missing_and_new_files_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let mark = |name: &str, content: &[u8]| {
            fs::write(directory.path().join(name), content).unwrap();
            Mark::of_file(&directory.path().join(name), name.into()).unwrap()
        };
        let before = [mark("a", b"1"), mark("b", b"2"), mark("c", b"3"), mark("d", &[7; 100_000])];
        let mut long = vec![7; 100_000];
        long[50_000] = 8;
        let now = [mark("a", b"1"), mark("b", b"20"), mark("d", &long), mark("e", b"")];
        let message = Mark::compare(&before, &now, "the checkpoint").unwrap_err().to_string();
        for expected in ["b had 1 bytes and has 2", "c is missing", "the content of d has changed", "e is new"] {
            assert!(message.contains(expected), "{message}");
        }
        assert!(!message.contains("a had"));
        Mark::compare(&before, &before, "the checkpoint").unwrap();
        let swapped = [before[1].clone(), before[0].clone(), before[2].clone(), before[3].clone()];
        assert!(Mark::compare(&before, &swapped, "x").unwrap_err().to_string().contains("another order"));
    }

    #[test]
    fn values_of_a_range_are_found() {
        let list = [0, 3, 3, 7, 9];
        let get = |range| within(5, range, |index| Ok(list[index as usize])).unwrap();
        assert_eq!(get(0..10), [0, 3, 7, 9]);
        assert_eq!(get(1..9), [3, 7]);
        assert_eq!(get(4..7), [0_u64; 0]);
        assert!(within(3, 0..9, |index| Ok([0, 5, 2][index as usize])).is_err());
    }
}
