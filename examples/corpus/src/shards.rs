//! Corpora that [`prepare`](crate::prepare) has written.
//!
//! A directory holds `shard-00000.bin` with ids (unsigned 16-bit or 32-bit little-endian), `shard-00000.idx` with the
//! ends of documents (64-bit, in tokens of the shard), and `index.json`, which is written last.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::checked::{BLOCK, CheckedFile};
use crate::source::{Mark, TokenSource, within};
use crate::tokenise::Tokenise;

/// Name of the file that describes a prepared corpus.
pub const INDEX: &str = "index.json";
/// Name of the file that describes a corpus which is being prepared.
pub(crate) const UNFINISHED: &str = "unfinished.json";
/// Value of [`Index::format`].
pub(crate) const FORMAT: &str = "fsdp-corpus";
/// Value of [`Index::version`].
pub(crate) const VERSION: u32 = 1;

/// Description of a prepared corpus, in `index.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// `fsdp-corpus`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of documents.
    pub documents: u64,
    /// Number of records without a text.
    pub skipped: u64,
    /// Inputs of the run that wrote the shards.
    pub inputs: Inputs,
    /// The shards.
    pub shards: Vec<Shard>,
}

/// Files, field and tokenizer from which shards were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// Name of the tokenizer.
    pub tokenizer: String,
    /// Checksum of the tokenizer.
    pub tokenizer_fingerprint: String,
    /// Number of ids.
    pub vocab_size: usize,
    /// Token that starts documents.
    pub start: Option<u32>,
    /// Token that ends documents.
    pub end: Option<u32>,
    /// Field or column of the texts.
    pub field: String,
    /// Tokens after which a shard ends with its document.
    pub shard_tokens: u64,
    /// Files of the corpus.
    pub files: Vec<Mark>,
}

/// Description of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of documents.
    pub documents: u64,
    /// CRC-32C of each MiB of ids.
    pub checksums: Vec<u32>,
    /// CRC-32C of each MiB of document ends.
    pub index_checksums: Vec<u32>,
}

impl Inputs {
    /// Returns the bytes of an id.
    pub fn width(&self) -> u64 {
        if self.vocab_size > 1 << 16 { 4 } else { 2 }
    }

    /// Returns whether a tokenizer makes the same tokens of a document.
    pub fn are_of(&self, tokenizer: &dyn Tokenise) -> bool {
        let Inputs { tokenizer_fingerprint, start, end, .. } = self;
        (tokenizer_fingerprint, *start, *end) == (&tokenizer.fingerprint(), tokenizer.start(), tokenizer.end())
    }

    /// Describes a tokenizer and files.
    pub(crate) fn new(tokenizer: &dyn Tokenise, field: &str, shard_tokens: u64, files: Vec<Mark>) -> Self {
        Inputs {
            tokenizer: tokenizer.name(),
            tokenizer_fingerprint: tokenizer.fingerprint(),
            vocab_size: tokenizer.vocab_size(),
            start: tokenizer.start(),
            end: tokenizer.end(),
            field: field.into(),
            shard_tokens,
            files,
        }
    }

    /// Fails if shards made from `self` differ from those that `now` would give.
    pub(crate) fn compare(&self, now: &Inputs, directory: &Path) -> Result<()> {
        let since = format!("{} was begun", directory.display());
        Mark::compare(&self.files, &now.files, &since)?;
        let other = |what: &str, before: &str, now: &str| -> Result<()> {
            ensure!(
                before == now,
                "{} was begun with the {what} {before}, but this run has {now}. Use the same, or another directory",
                directory.display()
            );
            Ok(())
        };
        let ids = |inputs: &Inputs| {
            let Inputs { tokenizer, tokenizer_fingerprint, vocab_size, start, end, .. } = inputs;
            format!("{tokenizer} ({tokenizer_fingerprint}, {vocab_size} ids, start {start:?}, end {end:?})")
        };
        // A tokenizer may have moved.
        let before = Inputs { tokenizer: now.tokenizer.clone(), ..self.clone() };
        if ids(&before) != ids(now) {
            other("tokenizer", &ids(self), &ids(now))?;
        }
        other("field", &self.field, &now.field)
    }
}

/// Returns whether a directory holds a prepared corpus, or one that is being prepared.
pub(crate) fn is_prepared(directory: &Path) -> bool {
    directory.join(UNFINISHED).is_file()
        || fs::File::open(directory.join(INDEX)).is_ok_and(|file| {
            let mut start = [0; 64];
            let read = std::os::unix::fs::FileExt::read_at(&file, &mut start, 0).unwrap_or(0);
            start[..read].windows(FORMAT.len()).any(|window| window == FORMAT.as_bytes())
        })
}

/// Reads `index.json` of a prepared corpus.
///
/// # Errors
/// The corpus is not complete, or the file is not valid.
pub(crate) fn read_index(directory: &Path) -> Result<Index> {
    let path = directory.join(INDEX);
    let text = match fs::read(&path) {
        Err(_) if directory.join(UNFINISHED).is_file() => bail!(
            "{} is not complete: run the same preparation again, which continues after the last finished shard",
            directory.display()
        ),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let index: Index = serde_json::from_slice(&text)
        .with_context(|| format!("{} is damaged: copy it again, or prepare the corpus again", path.display()))?;
    ensure!(
        index.format == FORMAT && index.version == VERSION,
        "{} has the format {} {}, but {FORMAT} {VERSION} is read. Prepare the corpus again",
        path.display(),
        index.format,
        index.version
    );
    Ok(index)
}

/// Returns the path of a shard's ids or document ends.
pub(crate) fn shard_path(directory: &Path, shard: usize, extension: &str) -> PathBuf {
    directory.join(format!("shard-{shard:05}.{extension}"))
}

/// A prepared corpus.
///
/// Opening reads `index.json` and the lengths of files. A block of 1 MiB is verified when it is first read.
///
/// ```
/// use fsdp_corpus::files::Files;
/// use fsdp_corpus::prepare::{Options, prepare};
/// use fsdp_corpus::shards::Shards;
/// use fsdp_corpus::source::TokenSource;
/// use fsdp_corpus::tokenise::Bytes;
///
/// let directory = tempfile::tempdir()?;
/// let corpus = directory.path().join("corpus.jsonl");
/// std::fs::write(&corpus, "{\"text\": \"ab\"}\n{\"text\": \"c\"}\n")?;
/// let out = directory.path().join("tokens");
/// prepare(&Files::find(&corpus)?, &out, &Bytes::with_end(), &Options::default(), &mut |_| Ok(()))?;
/// let shards = Shards::open(&out, 257)?;
/// let mut ids = [0; 5];
/// shards.read(0, &mut ids)?;
/// assert_eq!(ids, [97, 98, 256, 99, 256]);
/// assert_eq!(shards.starts(0..5)?, [0, 3]);
/// # anyhow::Ok(())
/// ```
pub struct Shards {
    directory: PathBuf,
    index: Index,
    shards: Vec<OpenShard>,
    vocab_size: usize,
}

struct OpenShard {
    /// First token of the shard.
    start: u64,
    tokens: u64,
    documents: u64,
    ids: CheckedFile,
    ends: CheckedFile,
}

impl Shards {
    /// Opens a prepared corpus for a model of `vocab_size` ids.
    ///
    /// # Errors
    /// The corpus is not complete, a file is missing or has another length, or the tokenizer has more ids than the
    /// model.
    pub fn open(directory: &Path, vocab_size: usize) -> Result<Self> {
        let mut index = read_index(directory)?;
        ensure!(
            index.inputs.vocab_size <= vocab_size,
            "{} was prepared with the tokenizer {} of {} ids, but the model's vocabulary has {vocab_size}. Prepare the \
             corpus with the tokenizer that belongs to this model",
            directory.display(),
            index.inputs.tokenizer,
            index.inputs.vocab_size
        );
        let (mut shards, mut start) = (Vec::new(), 0_u64);
        for (number, shard) in index.shards.iter_mut().enumerate() {
            let too_large = || format!("{} is damaged: shard {number} is too large", directory.join(INDEX).display());
            let bytes = shard.tokens.checked_mul(index.inputs.width()).with_context(too_large)?;
            let index_bytes = shard.documents.checked_mul(8).with_context(too_large)?;
            let open = |extension, len, checksums: &mut Vec<u32>| {
                CheckedFile::open(shard_path(directory, number, extension), len, std::mem::take(checksums))
            };
            shards.push(OpenShard {
                start,
                tokens: shard.tokens,
                documents: shard.documents,
                ids: open("bin", bytes, &mut shard.checksums)?,
                ends: open("idx", index_bytes, &mut shard.index_checksums)?,
            });
            start = start.checked_add(shard.tokens).with_context(too_large)?;
        }
        ensure!(
            start == index.tokens,
            "{} says {} tokens, but its shards have {start}",
            directory.join(INDEX).display(),
            index.tokens
        );
        Ok(Shards { directory: directory.to_owned(), index, shards, vocab_size })
    }

    /// Returns the description of the corpus, without its checksums.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Calls `each` for the shards that overlap a range, with the part of the range in the shard.
    fn for_each(&self, range: Range<u64>, mut each: impl FnMut(&OpenShard, Range<u64>) -> Result<()>) -> Result<()> {
        let first = self.shards.partition_point(|shard| shard.start + shard.tokens <= range.start);
        for shard in self.shards[first..].iter().take_while(|shard| shard.start < range.end) {
            let (from, to) = (range.start.max(shard.start), range.end.min(shard.start + shard.tokens));
            if from < to {
                each(shard, from - shard.start..to - shard.start)?;
            }
        }
        Ok(())
    }
}

impl OpenShard {
    fn read(&self, start: u64, out: &mut [u32], width: u64, vocab_size: usize) -> Result<()> {
        let mut bytes = vec![0; out.len() * width as usize];
        self.ids.read_exact_at(&mut bytes, start * width)?;
        if width == 2 {
            let pairs = bytes.as_chunks().0.iter();
            out.iter_mut().zip(pairs).for_each(|(out, &pair)| *out = u16::from_le_bytes(pair).into());
        } else {
            let quads = bytes.as_chunks().0.iter();
            out.iter_mut().zip(quads).for_each(|(out, &quad)| *out = u32::from_le_bytes(quad));
        }
        if let Some((at, id)) = out.iter().enumerate().find(|&(_, &id)| id as usize >= vocab_size) {
            bail!(
                "token {} of {} has id {id}, but the model's vocabulary has {vocab_size} ids",
                start + at as u64,
                self.ids.path().display()
            );
        }
        Ok(())
    }

    /// Returns the tokens of a range that start a document.
    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let start_of = |document: u64| {
            if document == 0 {
                return Ok(0);
            }
            let mut end = [0; 8];
            self.ends.read_exact_at(&mut end, 8 * (document - 1))?;
            Ok(u64::from_le_bytes(end))
        };
        within(self.documents, range, start_of).with_context(|| format!("in {}", self.ends.path().display()))
    }
}

impl TokenSource for Shards {
    fn len(&self) -> u64 {
        self.index.tokens
    }

    fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        ensure!(
            end <= self.len(),
            "tokens {start} to {end} of {} were to be read, but there are {}",
            self.directory.display(),
            self.len()
        );
        let width = self.index.inputs.width();
        let mut rest = out;
        self.for_each(start..end, |shard, range| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            rest = later;
            shard.read(range.start, now, width, self.vocab_size)
        })
    }

    fn starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        let mut starts = Vec::new();
        self.for_each(range, |shard, range| {
            starts.extend(shard.starts(range)?.into_iter().map(|at| shard.start + at));
            Ok(())
        })?;
        Ok(starts)
    }

    /// Marks `index.json`, which has the checksums of all shards.
    fn marks(&self) -> Result<Vec<Mark>> {
        let path = self.directory.join(INDEX);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let checksum = bytes
            .chunks(BLOCK)
            .fold(0, |all, block| crate::permutation::mix(all ^ u64::from(crate::checked::checksum(block))));
        Ok(vec![Mark { name: INDEX.into(), size: bytes.len() as u64, checksum }])
    }
}
