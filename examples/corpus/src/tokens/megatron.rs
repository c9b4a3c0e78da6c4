//! Index files of Megatron-LM, as its `indexed_dataset.py` writes them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::Dtype;
use crate::checked::open_file;
use crate::format::shown;

const MAGIC: &[u8] = b"MMIDIDX\0\0";
/// Bytes before the lists: magic, version, type, and the numbers of sequences and documents.
const HEADER: usize = 34;

/// An index: lengths and offsets of sequences, and the sequences that start documents.
pub(super) struct Index {
    path: PathBuf,
    file: File,
    dtype: Dtype,
    sequences: u64,
    /// Documents and their end.
    documents: u64,
    tokens: u64,
}

impl Index {
    /// Opens the index of the tokens `data`, a file of `size` bytes.
    pub(super) fn open(path: &Path, data: &Path, size: u64) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let file = open_file(path).with_context(cannot)?;
        let len = file.metadata().with_context(cannot)?.len();
        let mut header = [0; HEADER];
        let read = file.read_at(&mut header, 0).with_context(cannot)?;
        ensure!(
            read == HEADER || !header[..read].starts_with(MAGIC),
            "{} is cut off after {len} bytes: the header of an index of Megatron-LM has {HEADER}. Copy it again",
            path.display()
        );
        ensure!(
            header.starts_with(MAGIC),
            "{} is not an index of Megatron-LM: its first bytes are {}, not MMIDIDX. Remove it if {} holds raw ids",
            path.display(),
            shown(&header[..read.min(MAGIC.len())]),
            data.display()
        );
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        ensure!(word(9) == 1, "{} has version {}, but version 1 is read", path.display(), word(9));
        let dtype = match header[17] {
            1 => Dtype::U8,
            2 => Dtype::I8,
            3 => Dtype::I16,
            4 => Dtype::I32,
            5 => Dtype::I64,
            8 => Dtype::U16,
            6 | 7 => bail!("{} says that {} holds floats, which are not ids", path.display(), data.display()),
            code => bail!("{} has the type code {code}, but 1 to 5 and 8 are integers", path.display()),
        };
        let (sequences, documents) = (word(18), word(26));
        let expected = sequences
            .checked_mul(12)
            .zip(documents.checked_mul(8))
            .and_then(|(sequences, documents)| sequences.checked_add(documents)?.checked_add(HEADER as u64));
        ensure!(
            expected.is_some_and(|expected| expected == len || expected.checked_add(sequences) == Some(len)),
            "{} has {len} bytes, but its header says {sequences} sequences and {documents} documents. Copy it again",
            path.display()
        );
        let tokens = size / dtype.size();
        let index = Index { path: path.to_owned(), file, dtype, sequences, documents, tokens };
        ensure!(
            size.is_multiple_of(dtype.size()) && index.end()? == size,
            "{} has {size} bytes, but its index {} says {}. Copy both again",
            data.display(),
            path.display(),
            index.end()?
        );
        if documents > 0 {
            let (first, last) = (index.sequence_of(0)?, index.sequence_of(documents - 1)?);
            ensure!(
                first == 0 && last == sequences,
                "{} has documents of sequences {first} to {last}, but {sequences} sequences",
                path.display()
            );
        }
        Ok(index)
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the number of documents.
    pub(super) fn documents(&self) -> u64 {
        self.documents.saturating_sub(1)
    }

    /// Returns the first token of a document.
    pub(super) fn start(&self, document: u64) -> Result<u64> {
        let sequence = self.sequence_of(document)?;
        ensure!(
            sequence <= self.sequences,
            "{} has {} sequences, but document {document} starts at sequence {sequence}",
            self.path.display(),
            self.sequences
        );
        if sequence == self.sequences {
            return Ok(self.tokens);
        }
        let byte = self.pointer(sequence)?;
        ensure!(
            byte.is_multiple_of(self.dtype.size()) && byte / self.dtype.size() <= self.tokens,
            "{} has document {document} at byte {byte}, which is not in the data",
            self.path.display()
        );
        Ok(byte / self.dtype.size())
    }

    /// Returns the end of the last sequence in bytes.
    fn end(&self) -> Result<u64> {
        let Some(last) = self.sequences.checked_sub(1) else { return Ok(0) };
        let mut len = [0; 4];
        self.read(&mut len, HEADER as u64 + 4 * last)?;
        let bytes = u64::from(u32::from_le_bytes(len)) * self.dtype.size();
        Ok(self.pointer(last)?.saturating_add(bytes))
    }

    /// Returns the offset of a sequence in bytes.
    fn pointer(&self, sequence: u64) -> Result<u64> {
        self.word(HEADER as u64 + 4 * self.sequences + 8 * sequence)
    }

    /// Returns the first sequence of a document.
    fn sequence_of(&self, document: u64) -> Result<u64> {
        self.word(HEADER as u64 + 12 * self.sequences + 8 * document)
    }

    fn word(&self, offset: u64) -> Result<u64> {
        let mut word = [0; 8];
        self.read(&mut word, offset)?;
        Ok(u64::from_le_bytes(word))
    }

    fn read(&self, out: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(out, offset).with_context(|| format!("cannot read {}", self.path.display()))
    }
}
