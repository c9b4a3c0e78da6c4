//! Token files of other programs: raw ids, nanoGPT's, llm.c's and Megatron-LM's.
//!
//! A file is opened by its header and a sample of its ids. Ranges are checked against the vocabulary when they are read.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::checked::open_file;
use crate::files::{Content, Files};
use crate::shards::is_prepared;
use crate::source::{Mark, TokenSource, within};

mod megatron;

#[cfg(test)]
mod tests;

/// Bytes at the start of a file that are checked when it is opened.
const SAMPLE: usize = 64 << 10;
/// Minimal number of 32-bit words to recognise wider tokens.
const ENOUGH: usize = 16;
/// Bytes of llm.c's header.
const HEADER: u64 = 1024;

/// Width of the ids of files without a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Width {
    /// Unsigned 16-bit little-endian, as nanoGPT writes them.
    #[default]
    U16,
    /// Unsigned 32-bit little-endian.
    U32,
}

/// Settings of token files.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Width of the ids of files without a header.
    pub width: Width,
    /// Number of ids of the model.
    pub vocab_size: usize,
    /// Token that ends documents. Files without an index have document boundaries only if it is known.
    pub end: Option<u32>,
}

/// Concatenated tokens of files.
///
/// ```
/// use fsdp_corpus::files::Files;
/// use fsdp_corpus::source::TokenSource;
/// use fsdp_corpus::tokens::{Options, Tokens, Width};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("train.bin");
/// std::fs::write(&path, [5, 0, 6, 0, 9, 0, 7, 0])?;
/// let options = Options { width: Width::U16, vocab_size: 10, end: Some(9) };
/// let tokens = Tokens::open(&Files::find(&path)?, options)?;
/// let mut ids = [0; 3];
/// tokens.read(1, &mut ids)?;
/// assert_eq!(ids, [6, 9, 7]);
/// assert_eq!(tokens.starts(0..4)?, [0, 3]);
/// # anyhow::Ok(())
/// ```
pub struct Tokens {
    files: Vec<TokenFile>,
    names: Vec<String>,
    len: u64,
}

/// A token file, whose first token is token `start` of all.
struct TokenFile {
    path: PathBuf,
    file: File,
    start: u64,
    len: u64,
    /// Offset of the first id in bytes.
    offset: u64,
    dtype: Dtype,
    vocab_size: usize,
    end: Option<u32>,
    index: Option<megatron::Index>,
}

/// Type of the ids of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dtype {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Tokens {
    /// Opens token files. A file has a header of llm.c, an index of Megatron-LM beside it, or raw ids.
    ///
    /// # Errors
    /// The files are not token files, a file can't be read, its header or size is not valid, or its first ids are not of the expected width or
    /// vocabulary.
    pub fn open(files: &Files, options: Options) -> Result<Self> {
        let Content::Tokens(paths) = &files.content else {
            bail!("expected files of token ids, found others in {}", files.root.display())
        };
        let mut tokens = Tokens { files: Vec::new(), names: Vec::new(), len: 0 };
        for path in paths {
            let mut file = TokenFile::open(path, options)?;
            file.start = tokens.len;
            tokens.len += file.len;
            tokens.names.push(files.name(path));
            tokens.files.push(file);
        }
        Ok(tokens)
    }

    /// Calls `each` for the files that overlap a range, with the part of the range in the file.
    fn for_each(&self, range: Range<u64>, mut each: impl FnMut(&TokenFile, Range<u64>) -> Result<()>) -> Result<()> {
        let first = self.files.partition_point(|file| file.start + file.len <= range.start);
        for file in &self.files[first..] {
            let (from, to) = (range.start.max(file.start), range.end.min(file.start + file.len));
            if from < to {
                each(file, from - file.start..to - file.start)?;
            } else if file.start >= range.end {
                break;
            }
        }
        Ok(())
    }
}

impl TokenSource for Tokens {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        ensure!(end <= self.len, "tokens {start} to {end} were to be read, but there are {}", self.len);
        let mut rest = out;
        self.for_each(start..end, |file, range| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            rest = later;
            file.read(range.start, now)
        })
    }

    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let mut starts = Vec::new();
        self.for_each(range, |file, range| {
            starts.extend(file.starts(range)?.into_iter().map(|at| file.start + at));
            Ok(())
        })?;
        Ok(starts)
    }

    fn marks(&self) -> Result<Vec<Mark>> {
        self.files.iter().zip(&self.names).map(|(file, name)| Mark::of_file(&file.path, name.clone())).collect()
    }
}

impl TokenFile {
    fn open(path: &Path, options: Options) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let file = open_file(path).with_context(cannot)?;
        let size = file.metadata().with_context(cannot)?.len();
        let mut sample = vec![0; SAMPLE.min(size as usize)];
        file.read_exact_at(&mut sample, 0).with_context(cannot)?;
        ensure!(
            !sample.starts_with(b"\x93NUMPY"),
            "{} is a NumPy file: write the ids without a header, such as by ids.astype('<u2').tofile(...)",
            path.display()
        );
        if let Some(directory) = path.parent().filter(|directory| is_prepared(directory)) {
            bail!("{} is a shard of a prepared corpus: pass the directory {}", path.display(), directory.display());
        }
        let index = path.with_extension("idx");
        let mut tokens = TokenFile {
            path: path.to_owned(),
            file,
            start: 0,
            len: 0,
            offset: 0,
            dtype: match options.width {
                Width::U16 => Dtype::U16,
                Width::U32 => Dtype::U32,
            },
            vocab_size: options.vocab_size,
            end: options.end,
            index: None,
        };
        if index.exists() {
            let index = megatron::Index::open(&index, path, size)?;
            (tokens.dtype, tokens.index) = (index.dtype(), Some(index));
        } else if let Some((dtype, len)) = header_of(&sample) {
            (tokens.dtype, tokens.offset) = (dtype, HEADER);
            let expected = HEADER + len * dtype.size();
            ensure!(
                size == expected,
                "{} has {size} bytes, but its header says {len} tokens, {expected} bytes. Download it again",
                path.display()
            );
        } else {
            let what = match tokens.dtype {
                Dtype::U32 => "32-bit",
                _ => "16-bit",
            };
            ensure!(
                size.is_multiple_of(tokens.dtype.size()),
                "{} has {size} bytes, which is not a multiple of {}: a .bin file without a header is a sequence of \
                 unsigned {what} little-endian tokens and nothing else",
                path.display(),
                tokens.dtype.size()
            );
            ensure!(
                !are_64_bit(&sample),
                "{} holds ids of 64 bits: every second number of 32 bits is 0. Write 32-bit ids by \
                 ids.astype('<u4').tofile(...), and pass --token-bits 32",
                path.display()
            );
            ensure!(
                tokens.dtype != Dtype::U16 || !are_wider(&sample, options.vocab_size),
                "{} holds ids of 32 bits: every second number of 16 bits is 0, or at most the upper half of an id. Pass \
                 --token-bits 32",
                path.display()
            );
        }
        tokens.len = (size - tokens.offset) / tokens.dtype.size();
        // A vocabulary that does not fit is found before training.
        let checked = (SAMPLE as u64 / 8).min(tokens.len) as usize;
        tokens.read(0, &mut vec![0; checked])?;
        Ok(tokens)
    }

    fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let size = self.dtype.size();
        let mut bytes = vec![0; out.len() * size as usize];
        self.file.read_exact_at(&mut bytes, self.offset + start * size).with_context(|| {
            let (path, end) = (self.path.display(), start + out.len() as u64);
            format!("cannot read tokens {start} to {end} of {path}, which had {} when the run began", self.len)
        })?;
        for (index, (id, bytes)) in out.iter_mut().zip(bytes.chunks_exact(size as usize)).enumerate() {
            let value = self.dtype.value(bytes);
            match u32::try_from(value) {
                Ok(value) if (value as usize) < self.vocab_size => *id = value,
                _ => bail!(
                    "token {} of {} has id {value}, but the model's vocabulary has {} ids, 0 to {}. Tokenise the data \
                     with the tokenizer that belongs to this model (the file is read as {:?})",
                    start + index as u64,
                    self.path.display(),
                    self.vocab_size,
                    self.vocab_size.saturating_sub(1),
                    self.dtype
                ),
            }
        }
        Ok(())
    }

    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let mut starts = match (&self.index, self.end) {
            (Some(index), _) => within(index.documents(), range.clone(), |document| index.start(document))
                .with_context(|| format!("in the index of {}", self.path.display()))?,
            (None, Some(end)) => {
                let first = range.start.max(1);
                let mut before = vec![0; range.end.saturating_sub(first) as usize];
                self.read(first - 1, &mut before)?;
                let ends = before.iter().enumerate().filter(|&(_, &id)| id == end);
                ends.map(|(index, _)| first + index as u64).collect()
            }
            (None, None) => Vec::new(),
        };
        if range.start == 0 && starts.first() != Some(&0) {
            starts.insert(0, 0);
        }
        Ok(starts)
    }
}

impl Dtype {
    fn size(self) -> u64 {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::U16 | Dtype::I16 => 2,
            Dtype::U32 | Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }

    /// Returns the value of an id's bytes.
    fn value(self, bytes: &[u8]) -> i64 {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        let value = i64::from_le_bytes(all);
        match self {
            Dtype::I8 => (value as i8).into(),
            Dtype::I16 => (value as i16).into(),
            Dtype::I32 => (value as i32).into(),
            Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::I64 => value,
        }
    }
}

/// Returns whether a token file has neither a header of llm.c nor an index of Megatron-LM beside it.
///
/// # Errors
/// The file can't be read.
pub fn is_raw(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    let mut read = || -> io::Result<()> {
        File::open(path)?.take(HEADER).read_to_end(&mut start)?;
        Ok(())
    };
    read().with_context(|| format!("cannot read {}", path.display()))?;
    Ok(header_of(&start).is_none() && !path.with_extension("idx").exists())
}

/// Returns the type and number of ids in a header of llm.c.
fn header_of(start: &[u8]) -> Option<(Dtype, u64)> {
    let (words, _) = start.get(..HEADER as usize)?.as_chunks::<4>();
    let len = u32::from_le_bytes(words[2]).into();
    match [u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1])] {
        [20_240_520, 1] => Some((Dtype::U16, len)),
        [20_240_801, 7] => Some((Dtype::U32, len)),
        _ => None,
    }
}

/// Returns whether bytes are ids of 64 bits: all upper halves are 0, and most lower halves are not.
fn are_64_bit(bytes: &[u8]) -> bool {
    let (ids, rest) = bytes.as_chunks::<8>();
    let ids = || ids.iter().map(|&bytes| u64::from_le_bytes(bytes));
    rest.is_empty()
        && ids().count() >= ENOUGH
        && ids().all(|id| id >> 32 == 0)
        && 2 * ids().filter(|&id| id != 0).count() > ids().count()
}

/// Returns whether bytes are ids of 32 bits: all upper halves can be upper halves of ids, and not all lower halves are 0.
fn are_wider(bytes: &[u8], vocab_size: usize) -> bool {
    let (quads, rest) = bytes.as_chunks::<4>();
    let halves = || quads.iter().map(|&[a, b, c, d]| (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])));
    let highest = vocab_size.saturating_sub(1) >> 16;
    rest.is_empty()
        && quads.len() >= ENOUGH
        && halves().all(|(_, upper)| usize::from(upper) <= highest)
        && halves().any(|(lower, _)| lower != 0)
        && 2 * halves().filter(|(_, upper)| *upper == 0).count() > quads.len()
}
