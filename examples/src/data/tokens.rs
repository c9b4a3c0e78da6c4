//! A stream of tokens from one or more files.

use std::path::{Path, PathBuf};
use std::{env, fmt};

use anyhow::{Context, Result, anyhow, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use fsdp_corpus::files::{Content, Files};
use fsdp_corpus::source::TokenSource;
use fsdp_corpus::tokens::{self, Tokens, Width};
use indicatif::HumanCount;

use crate::data::files::{DataFiles, Files as Found, read_text};
use crate::data::text::Text;

/// Tokens of a part of a token file that is read at once.
const PART: u64 = 1 << 19;

/// Concatenated tokens of one or more files, checked against the vocabulary.
///
/// Token files stay on disk; only the tokens of a batch are in memory.
pub struct Data {
    files: Vec<FileTokens>,
    len: u64,
    origin: String,
    digest: Digest,
}

/// Tokens of a file, which starts at token `start` of the stream.
struct FileTokens {
    start: u64,
    ids: Ids,
}

enum Ids {
    /// Text whose bytes are tokens.
    Bytes(String),
    /// Tokenised text.
    Tokenised(Vec<u32>),
    /// Files of tokens, which stay on disk.
    Stored(Tokens),
}

impl Data {
    /// Loads a `.bin` file of u16 little-endian tokens, a text file, or a directory. Other formats are read by
    /// [`Corpora`](crate::data::Corpora).
    ///
    /// A directory is read recursively in the order of names. Hidden files, directories named `target`, symbolic links
    /// within the directory and binary files are left out, and texts are joined by newlines. Without a path, loads the sources (`.rs`,
    /// `.md`, `.toml`) of the Cargo workspace around the current directory.
    ///
    /// # Errors
    /// No data is found, a `.bin` file has an odd length, a text file is not text, or an id is not below `vocab_size`.
    pub fn load(path: Option<&Path>, text: &Text, vocab_size: usize) -> Result<Self> {
        let found = match path {
            Some(path) => DataFiles::of_path(path)?,
            None => DataFiles::of_workspace(&env::current_dir().context("cannot find the current directory")?)?,
        };
        let mut data = Data::empty(String::new());
        let (count, what) = match found.files {
            Found::Tokens(files) => {
                let tokens = open_tokens(found.root.clone(), &files, vocab_size, &mut data.digest)?;
                data.push(Ids::Stored(tokens));
                (files.len(), "token")
            }
            Found::Text(file) => {
                let content = read_text(&file)?.ok_or_else(|| {
                    anyhow!(
                        "{} is not text (UTF-8 without zero bytes). Tokens (u16 little-endian) are read \
                        from files named .bin",
                        file.display()
                    )
                })?;
                data.push_text(content, &file, text, vocab_size)?;
                (1, "text")
            }
            Found::MaybeText(files) => (data.push_texts(files, &found.root, text, vocab_size)?, "text"),
        };
        let read_as = if what == "text" && text.is_bytes() { ", read as bytes" } else { "" };
        data.origin = if count == 1 {
            format!("{}{read_as}", found.root.display())
        } else {
            format!("{count} {what} files in {}{read_as}", found.root.display())
        };
        Ok(data)
    }

    fn empty(origin: String) -> Self {
        Data { files: Vec::new(), len: 0, origin, digest: Digest::new(CrcAlgorithm::Crc64Nvme) }
    }

    /// Returns a checksum of all tokens.
    pub fn checksum(&self) -> u64 {
        self.digest.finalize()
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the tokens `start..start + out.len()`. Fails if the range is beyond the end, or a file has been truncated
    /// or can't be read any more.
    pub(super) fn copy_to(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let past_the_end = || format!("tokens {start} to {} are not in {self}", start.saturating_add(out.len() as u64));
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.len).with_context(past_the_end)?;
        if start == end {
            return Ok(());
        }
        let first = self.files.partition_point(|file| file.start <= start) - 1;
        let (mut at, mut rest) = ((start - self.files[first].start) as usize, out);
        for file in &self.files[first..] {
            let (now, later) = rest.split_at_mut(rest.len().min(file.ids.len() - at));
            file.ids.copy_to(at, now)?;
            (at, rest) = (0, later);
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn push(&mut self, ids: Ids) {
        let len = ids.len();
        if len > 0 {
            self.files.push(FileTokens { start: self.len, ids });
            self.len += len as u64;
        }
    }

    /// Appends the text files among `files`, joined by newlines. Returns their number.
    fn push_texts(&mut self, files: Vec<PathBuf>, root: &Path, text: &Text, vocab_size: usize) -> Result<usize> {
        let mut count = 0;
        // A file is tokenised together with the newline before the next one.
        let mut last: Option<(PathBuf, String)> = None;
        for file in files {
            let Some(content) = read_text(&file)? else { continue };
            count += 1;
            if let Some((file, mut content)) = last.replace((file, content)) {
                content.push('\n');
                self.push_text(content, &file, text, vocab_size)?;
            }
        }
        let (file, content) =
            last.with_context(|| format!("{} holds no text files (UTF-8 without zero bytes)", root.display()))?;
        self.push_text(content, &file, text, vocab_size)?;
        Ok(count)
    }

    fn push_text(&mut self, content: String, file: &Path, text: &Text, vocab_size: usize) -> Result<()> {
        let ids = tokenise(content, file, text, vocab_size)?;
        match &ids {
            Ids::Bytes(bytes) => self.digest.update(bytes.as_bytes()),
            Ids::Tokenised(ids) => ids.chunks(1 << 16).for_each(|ids| {
                let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                self.digest.update(&bytes);
            }),
            Ids::Stored(_) => bail!("{} is not text", file.display()),
        }
        self.push(ids);
        Ok(())
    }
}

/// Formats as `2,561 tokens of tokens.bin`.
impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens of {}", HumanCount(self.len), self.origin)
    }
}

impl Ids {
    fn len(&self) -> usize {
        match self {
            Ids::Bytes(bytes) => bytes.len(),
            Ids::Tokenised(ids) => ids.len(),
            Ids::Stored(tokens) => tokens.len() as usize,
        }
    }

    fn copy_to(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let range = start..start + out.len();
        match self {
            Ids::Bytes(bytes) => {
                out.iter_mut().zip(&bytes.as_bytes()[range]).for_each(|(out, &byte)| *out = byte.into())
            }
            Ids::Tokenised(ids) => out.copy_from_slice(&ids[range]),
            Ids::Stored(tokens) => tokens.read(start as u64, out)?,
        }
        Ok(())
    }
}

fn tokenise(content: String, file: &Path, text: &Text, vocab_size: usize) -> Result<Ids> {
    let check = |ids: &mut dyn Iterator<Item = u32>| {
        ids.enumerate().find(|&(_, id)| id as usize >= vocab_size).map_or(Ok(()), |(at, id)| {
            Err(anyhow!("{} {}", beyond_vocabulary(at as u64, file, id, vocab_size), text.advice()))
        })
    };
    if text.is_bytes() {
        check(&mut content.bytes().map(u32::from))?;
        return Ok(Ids::Bytes(content));
    }
    let ids = text.encode(&content).with_context(|| format!("cannot tokenise {}", file.display()))?;
    check(&mut ids.iter().copied())?;
    Ok(Ids::Tokenised(ids))
}

/// Opens token files, and reads them once to check ids and compute the digest.
fn open_tokens(root: PathBuf, paths: &[PathBuf], vocab_size: usize, digest: &mut Digest) -> Result<Tokens> {
    for path in paths {
        ensure!(
            tokens::is_raw(path)?,
            "expected 16-bit token ids in {}, found a header of llm.c or an index of Megatron-LM: read it by \
             `Corpora::find`",
            path.display()
        );
    }
    let files = Files { root, content: Content::Tokens(paths.to_vec()) };
    let tokens = Tokens::open(&files, tokens::Options { width: Width::U16, vocab_size, end: None })?;
    let mut ids = vec![0; tokens.len().min(PART) as usize];
    let mut start = 0;
    while start < tokens.len() {
        let part = &mut ids[..(tokens.len() - start).min(PART) as usize];
        tokens.read(start, part)?;
        let bytes: Vec<u8> = part.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect();
        digest.update(&bytes);
        start += part.len() as u64;
    }
    Ok(tokens)
}

fn beyond_vocabulary(at: u64, file: &Path, id: u32, vocab_size: usize) -> String {
    format!(
        "token {at} of {} has id {id}, but the model's vocabulary has {vocab_size} ids, 0 to {}.",
        file.display(),
        vocab_size.saturating_sub(1)
    )
}

#[cfg(test)]
pub(super) mod tests;
