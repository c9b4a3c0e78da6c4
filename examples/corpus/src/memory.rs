//! A small corpus in memory, such as the texts to evaluate on.

use std::ops::Range;

use anyhow::{Result, bail, ensure};

use crate::documents::{Cursor, Options, Part, Source};
use crate::files::{Content, Files};
use crate::source::{Mark, TokenSource};
use crate::tokenise::{Tokenise, encode_parts};

/// Bytes of text that are tokenised at once.
const BATCH: usize = 8 << 20;

/// Tokens of a corpus in memory, in the order of its files.
///
/// ```
/// use fsdp_corpus::documents::Options;
/// use fsdp_corpus::files::Files;
/// use fsdp_corpus::memory::InMemory;
/// use fsdp_corpus::source::TokenSource;
/// use fsdp_corpus::tokenise::Bytes;
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("eval.txt");
/// std::fs::write(&path, "abc")?;
/// let tokens = InMemory::read(&Files::find(&path)?, &Options::default(), &Bytes::with_end(), 1000)?;
/// assert_eq!(tokens.len(), 4);
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Debug)]
pub struct InMemory {
    ids: Vec<u32>,
    /// First token of each document.
    starts: Vec<u64>,
    marks: Vec<Mark>,
}

impl InMemory {
    /// Reads and tokenises a corpus of at most `limit` tokens.
    ///
    /// # Errors
    /// A file can't be read or is damaged, or there are more tokens.
    pub fn read(files: &Files, options: &Options, tokenizer: &dyn Tokenise, limit: usize) -> Result<Self> {
        let Content::Documents(found) = &files.content else {
            bail!("{} holds tokens, but texts were expected", files.root.display())
        };
        let mut tokens = InMemory { ids: Vec::new(), starts: Vec::new(), marks: Vec::new() };
        let (mut parts, mut bytes) = (Vec::new(), 0);
        for file in found {
            tokens.marks.push(Mark::of_file(&file.path, files.name(&file.path))?);
            let source = Source::open(file, options)?;
            for block in source.blocks() {
                for part in source.documents(&block, Cursor::default())? {
                    let part = part?;
                    bytes += part.text.len();
                    parts.push(part);
                    if bytes >= BATCH {
                        tokens.push(&std::mem::take(&mut parts), tokenizer)?;
                        bytes = 0;
                        ensure!(
                            tokens.ids.len() <= limit,
                            "{} has more than {limit} tokens, which are not kept in memory: prepare it, or pass a part",
                            files.root.display()
                        );
                    }
                }
            }
        }
        tokens.push(&parts, tokenizer)?;
        ensure!(
            tokens.ids.len() <= limit,
            "{} has {} tokens, but at most {limit} are kept in memory: prepare it, or pass a part",
            files.root.display(),
            tokens.ids.len()
        );
        Ok(tokens)
    }

    fn push(&mut self, parts: &[Part], tokenizer: &dyn Tokenise) -> Result<()> {
        for (part, ids) in parts.iter().zip(encode_parts(tokenizer, parts)?) {
            if part.is_first() {
                self.starts.push(self.ids.len() as u64);
            }
            self.ids.extend(ids);
        }
        Ok(())
    }
}

impl TokenSource for InMemory {
    fn len(&self) -> u64 {
        self.ids.len() as u64
    }

    fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        ensure!(end <= self.len(), "tokens {start} to {end} were to be read, but there are {}", self.len());
        out.copy_from_slice(&self.ids[start as usize..end as usize]);
        Ok(())
    }

    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let at = |token: u64| self.starts.partition_point(|&start| start < token);
        let mut starts = self.starts[at(range.start)..at(range.end.max(range.start))].to_vec();
        // A text may have no tokens.
        starts.dedup();
        Ok(starts)
    }

    fn marks(&self) -> Result<Vec<Mark>> {
        Ok(self.marks.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::sequence::Pack;
    use crate::source::Sequences;
    use crate::tokenise::Bytes;

    #[test]
    fn sequences_overlap_by_a_token_and_have_document_starts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.jsonl");
        fs::write(&path, "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n{\"text\": \"fghi\"}\n").unwrap();
        let files = Files::find(&path).unwrap();
        let read = |limit| InMemory::read(&files, &Options::default(), &Bytes::with_end(), limit);
        assert!(read(11).unwrap_err().to_string().contains("has 12 tokens, but at most 11 are kept"));
        let mut sequences = Sequences::new(Arc::new(read(12).unwrap()), 5, None, Pack::Documents).unwrap();
        assert_eq!(sequences.count(), 2);
        let [first, second] = [0, 1].map(|_| sequences.next_sequence().unwrap());
        assert_eq!((first.ids, first.starts), (vec![97, 98, 99, 256, 100, 101], vec![0, 4]));
        assert_eq!((second.ids, second.starts), (vec![101, 256, 102, 103, 104, 105], vec![2]));
        assert_eq!(sequences.epoch(), 1);
        assert_eq!(sequences.next_sequence().unwrap().ids[0], 97);
        // A shuffled epoch has each sequence once, and a place continues.
        let mut shuffled = Sequences::new(Arc::new(read(12).unwrap()), 2, Some(1), Pack::Documents).unwrap();
        let mut epoch: Vec<u32> = (0..5).map(|_| shuffled.next_sequence().unwrap().ids[0]).collect();
        let place = shuffled.place();
        let next = shuffled.next_sequence().unwrap();
        shuffled.resume(&place).unwrap();
        assert_eq!(shuffled.next_sequence().unwrap(), next);
        epoch.sort_unstable();
        assert_eq!(epoch, [97, 99, 100, 103, 256]);
        let mut other = Sequences::new(Arc::new(read(12).unwrap()), 3, Some(1), Pack::Documents).unwrap();
        assert!(other.resume(&place).unwrap_err().to_string().contains("continue with --seq-len 2"));
        assert!(Sequences::new(Arc::new(read(12).unwrap()), 12, None, Pack::Documents).is_err());
    }
}
