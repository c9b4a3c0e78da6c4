//! A stream of tokens from one or more files.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::{env, fmt};

use anyhow::{Context, Result, anyhow, bail, ensure};
use crc_fast::{CrcAlgorithm, Digest};
use indicatif::HumanCount;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::data::files::{DataFiles, Files, read_text};
use crate::data::text::Text;
use crate::input::check_data;

/// Minimal number of 32-bit words to recognise wider tokens.
const ENOUGH: usize = 16;

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
    /// A file of tokens.
    Stored(TokenFile),
}

/// A file of u16 little-endian tokens. It is read and not mapped: truncating a mapped file would kill the process with
/// SIGBUS.
struct TokenFile {
    path: PathBuf,
    file: File,
    /// Number of tokens when the file was opened.
    len: usize,
}

impl Data {
    /// Loads a `.bin` file of u16 little-endian tokens, a text file, or a directory. Records are read as text: find them by
    /// [`Corpora`](crate::data::Corpora) first.
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
            Files::Tokens(files) => {
                for file in &files {
                    let tokens = TokenFile::open(file, vocab_size, &mut data.digest)?;
                    data.push(Ids::Stored(tokens));
                }
                (files.len(), "token")
            }
            Files::Text(file) => {
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
            Files::MaybeText(files) => (data.push_texts(files, &found.root, text, vocab_size)?, "text"),
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
            Ids::Stored(file) => bail!("{} is no text", file.path.display()),
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
            Ids::Stored(file) => file.len,
        }
    }

    fn copy_to(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let range = start..start + out.len();
        match self {
            Ids::Bytes(bytes) => {
                out.iter_mut().zip(&bytes.as_bytes()[range]).for_each(|(out, &byte)| *out = byte.into())
            }
            Ids::Tokenised(ids) => out.copy_from_slice(&ids[range]),
            Ids::Stored(file) => file.copy_to(start, out)?,
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

impl TokenFile {
    /// Opens a file, and reads it once to check ids and compute the digest.
    fn open(path: &Path, vocab_size: usize, digest: &mut Digest) -> Result<Self> {
        check_data(path)?;
        let cannot = || format!("cannot read {}", path.display());
        let mut file = open(path).with_context(cannot)?;
        let bytes = usize::try_from(file.metadata().with_context(cannot)?.len())?;
        ensure!(
            bytes.is_multiple_of(2),
            "{} has {bytes} bytes, an odd number: a .bin file is a sequence of unsigned 16-bit little-endian tokens \
            and \
             nothing else",
            path.display()
        );
        let mut buffer = vec![0; bytes.min(1 << 20)];
        let mut done = 0;
        while done < bytes {
            let part = &mut buffer[..(bytes - done).min(1 << 20)];
            file.read_exact(part).with_context(cannot)?;
            digest.update(part);
            if done == 0 && are_wider(part, vocab_size) {
                bail!(
                    "{} holds tokens of 32 bits or more, as far as one can tell: every second number of 16 bits is 0, or at \
                     most the upper half of an id. A .bin file is read as unsigned 16-bit little-endian tokens: write ids \
                     below 65536 so, such as by ids.astype('<u2').tofile(...), or pass text",
                    path.display()
                );
            }
            let ids = part.as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair));
            if ids.clone().fold(0, u16::max) as usize >= vocab_size {
                let bad = ids.enumerate().find(|&(_, id)| usize::from(id) >= vocab_size);
                let (at, id) = bad.context("the largest id is one of them")?;
                bail!(
                    "{} Tokenise the data with the tokenizer that belongs to this model (a .bin file is read as \
                     unsigned 16-bit little-endian)",
                    beyond_vocabulary((done / 2 + at) as u64, path, id.into(), vocab_size)
                );
            }
            done += part.len();
        }
        Ok(TokenFile { path: path.to_owned(), file, len: bytes / 2 })
    }

    /// Reads tokens from index `start` on.
    fn copy_to(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let mut bytes = vec![0; 2 * out.len()];
        self.file.read_exact_at(&mut bytes, 2 * start as u64).with_context(|| {
            let (path, last) = (self.path.display(), start + out.len() - 1);
            format!("cannot read tokens {start} to {last} of {path}, which had {} when the run began", self.len)
        })?;
        let pairs = bytes.as_chunks().0.iter();
        out.iter_mut().zip(pairs).for_each(|(out, &pair)| *out = u16::from_le_bytes(pair).into());
        Ok(())
    }
}

/// Returns whether bytes are tokens of 32 or 64 bits: all upper halves are those of ids, and not all lower ones are 0.
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

/// Opens a file. Token files stay open, so the limit of open files is raised if necessary.
fn open(path: &Path) -> io::Result<File> {
    match File::open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
            let limit = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
            File::open(path)
        }
        outcome => outcome,
    }
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
