//! Texts of a file, one after another.
//!
//! [`Source::open`] finds the blocks of a file by its size, or by the footer of a Parquet file.
//! [`Documents`] reads the texts of a block. Its memory is bounded by the longest record: texts above 256 KiB are given
//! in parts, and records above a limit are refused.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use flate2::bufread::MultiGzDecoder;
use serde::{Deserialize, Serialize};

use crate::format::{Compression, CorpusFile, Format};

mod fields;
mod json;
mod lines;
#[cfg(feature = "parquet")]
mod parquet;
mod records;
mod text;

pub use records::{Record, records};

#[cfg(test)]
mod tests;

/// Settings of reading documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Field or column of a record's text.
    pub field: String,
    /// Longest record in bytes.
    pub record_limit: usize,
    /// Size of a block of a JSON Lines file in bytes.
    pub block: u64,
}

/// The field `text`, records of up to 1 GiB, and blocks of 8 MiB.
impl Default for Options {
    fn default() -> Self {
        Options { field: "text".into(), record_limit: 1 << 30, block: 8 << 20 }
    }
}

/// Part of a file that is read independently of other parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// The whole file.
    Whole,
    /// Lines that start within a range of bytes.
    Lines(Range<u64>),
    /// A row group of a Parquet file.
    RowGroup(usize),
}

/// Position within a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of records read.
    pub record: u64,
    /// Number of bytes read of the next record's text.
    pub byte: u64,
}

/// A document, or a part of at most 256 KiB of a longer one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where the part starts.
    pub at: Cursor,
    /// The text, which is not empty.
    pub text: String,
    /// Whether the document ends with this part.
    pub is_last: bool,
}

impl Part {
    /// Returns whether the document starts with this part.
    pub fn is_first(&self) -> bool {
        self.at.byte == 0
    }

    /// Returns where the next part starts.
    pub fn next(&self) -> Cursor {
        match self.is_last {
            true => Cursor { record: self.at.record + 1, byte: 0 },
            false => Cursor { byte: self.at.byte + self.text.len() as u64, ..self.at },
        }
    }
}

/// A file of documents that is ready to be read.
///
/// ```
/// use fsdp_corpus::documents::{Cursor, Options, Source};
/// use fsdp_corpus::format::{CorpusFile, Format};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("corpus.jsonl");
/// std::fs::write(&path, "{\"text\": \"one\"}\n{\"text\": \"two\"}\n")?;
/// let file = CorpusFile { format: Format::of_file(&path)?, path };
/// let source = Source::open(&file, &Options::default())?;
/// let mut texts = Vec::new();
/// for block in source.blocks() {
///     for part in source.documents(&block, Cursor::default())? {
///         texts.push(part?.text);
///     }
/// }
/// assert_eq!(texts, ["one", "two"]);
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    format: Format,
    options: Options,
    size: u64,
    /// Row groups of a Parquet file: their sizes in bytes.
    groups: Vec<u64>,
}

impl Source {
    /// Opens a file, and reads its first record or its footer.
    ///
    /// # Errors
    /// The file can't be read, is damaged at the start, or has no field of this name.
    pub fn open(file: &CorpusFile, options: &Options) -> Result<Self> {
        let path = &file.path;
        let size = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
        let groups = match file.format {
            #[cfg(feature = "parquet")]
            Format::Parquet => parquet::row_groups(path, &options.field)?,
            #[cfg(not(feature = "parquet"))]
            Format::Parquet => bail!(
                "{} is a Parquet file, but this program was built without Parquet: build it with the feature `parquet`",
                path.display()
            ),
            Format::Tokens => bail!("{} holds token ids, but texts were expected", path.display()),
            Format::Text(_) | Format::JsonLines(_) | Format::Json(_) => Vec::new(),
        };
        let source = Source { path: path.clone(), format: file.format, options: options.clone(), size, groups };
        // The first record tells whether there is a field, and the first part of a text whether it is text.
        if file.format != Format::Parquet
            && let Some(first) = source.documents(&source.block_at(0), Cursor::default())?.next()
        {
            first?;
        }
        Ok(source)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> u64 {
        match self.format {
            Format::JsonLines(Compression::None) => self.size.div_ceil(self.options.block.max(1)),
            Format::Parquet => self.groups.len() as u64,
            _ => 1,
        }
    }

    /// Returns a block, whose index is below the number of blocks.
    pub fn block_at(&self, index: u64) -> Block {
        match self.format {
            Format::JsonLines(Compression::None) => {
                let size = self.options.block.max(1);
                Block::Lines(index * size..self.size.min((index + 1) * size))
            }
            Format::Parquet => Block::RowGroup(index as usize),
            _ => Block::Whole,
        }
    }

    /// Returns all blocks in the order of the file.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        (0..self.num_blocks()).map(|index| self.block_at(index))
    }

    /// Returns the number of bytes that a block has in the file.
    pub fn block_size(&self, block: &Block) -> u64 {
        match block {
            Block::Whole => self.size,
            Block::Lines(range) => range.end - range.start,
            Block::RowGroup(index) => self.groups.get(*index).copied().unwrap_or(0),
        }
    }

    /// Reads the documents of a block from a position on.
    ///
    /// # Errors
    /// The file can't be read, or is damaged. Later damage is an error of the iterator, which then ends.
    pub fn documents(&self, block: &Block, from: Cursor) -> Result<Documents> {
        let kind = match (self.format, block) {
            (Format::Text(compression), _) => Kind::Text(text::TextReader::open(&self.path, compression, from)?),
            (Format::JsonLines(compression), block) => {
                let range = match block {
                    Block::Lines(range) => range.clone(),
                    _ => 0..u64::MAX,
                };
                Kind::Records(Box::new(lines::Lines::open(&self.path, compression, range, &self.options)?))
            }
            (Format::Json(compression), _) => {
                Kind::Records(Box::new(json::Objects::open(&self.path, compression, &self.options)?))
            }
            #[cfg(feature = "parquet")]
            (Format::Parquet, Block::RowGroup(index)) => {
                Kind::Records(Box::new(parquet::Rows::open(&self.path, *index, &self.options)?))
            }
            _ => bail!("{} has no block {block:?}", self.path.display()),
        };
        let mut documents = Documents { kind, next: from, text: String::new(), start: 0, skipped: 0, is_over: false };
        if let Kind::Records(records) = &mut documents.kind {
            records.skip(from.record)?;
        }
        Ok(documents)
    }
}

/// Records of a block.
trait Records: Send {
    /// Reads the text of the next record. A text is `Some(None)` if it is null.
    fn next(&mut self) -> Result<Option<Option<String>>>;

    /// Leaves records out.
    fn skip(&mut self, records: u64) -> Result<()>;

    /// Describes the record read last, for messages.
    fn place(&self) -> String;
}

enum Kind {
    Text(text::TextReader),
    Records(Box<dyn Records>),
}

/// Documents of a block, in parts. Null and empty texts are skipped. Ends after an error.
pub struct Documents {
    kind: Kind,
    next: Cursor,
    /// Text of the record `next`.
    text: String,
    /// First byte of `text` that was not given yet.
    start: usize,
    skipped: u64,
    is_over: bool,
}

impl Documents {
    /// Returns the number of records skipped so far because their text is null or empty.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    fn read(&mut self) -> Result<Option<Part>> {
        let records = match &mut self.kind {
            Kind::Text(reader) => return reader.next(),
            Kind::Records(records) => records,
        };
        while self.text.is_empty() {
            match records.next()? {
                None => return Ok(None),
                Some(Some(text)) if !text.is_empty() => {
                    let start = usize::try_from(self.next.byte)?;
                    ensure!(
                        start < text.len() && text.is_char_boundary(start),
                        "{}: the text has no character at byte {start}, where reading was to continue: the file has \
                         changed",
                        records.place()
                    );
                    (self.text, self.start) = (text, start);
                }
                Some(_) => {
                    self.skipped += 1;
                    self.next = Cursor { record: self.next.record + 1, byte: 0 };
                }
            }
        }
        let rest = &self.text[self.start..];
        let cut = text::cut(rest);
        let is_last = cut == rest.len();
        let text = match self.start == 0 && is_last {
            true => std::mem::take(&mut self.text),
            false => rest[..cut].to_owned(),
        };
        let part = Part { at: self.next, text, is_last };
        self.next = part.next();
        self.start += cut;
        if is_last {
            self.text = String::new();
        }
        Ok(Some(part))
    }
}

impl Iterator for Documents {
    type Item = Result<Part>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let part = self.read().transpose();
        self.is_over = !matches!(part, Some(Ok(_)));
        part
    }
}

/// Opens a file and decompresses it.
fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead + Send>> {
    let cannot = || format!("cannot read {}", path.display());
    let file = BufReader::with_capacity(128 << 10, File::open(path).with_context(cannot)?);
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(BufReader::with_capacity(128 << 10, MultiGzDecoder::new(file))),
        Compression::Zstd => {
            let decoder = zstd::Decoder::with_buffer(file).with_context(cannot)?;
            Box::new(BufReader::with_capacity(128 << 10, decoder))
        }
    })
}

/// Opens a file at an offset of its decompressed bytes.
fn open_at(path: &Path, compression: Compression, offset: u64) -> Result<Box<dyn BufRead + Send>> {
    let cannot = || format!("cannot read {}", path.display());
    if compression == Compression::None {
        let mut file = File::open(path).with_context(cannot)?;
        file.seek(SeekFrom::Start(offset)).with_context(cannot)?;
        return Ok(Box::new(BufReader::with_capacity(128 << 10, file)));
    }
    let mut input = open(path, compression)?;
    let skipped = io::copy(&mut input.by_ref().take(offset), &mut io::sink());
    let skipped = skipped.map_err(|error| unreadable(path, compression, error))?;
    ensure!(skipped == offset, "{} has {skipped} bytes, but reading was to continue at {offset}", path.display());
    Ok(input)
}

/// Makes the error for a file that can't be read or decompressed.
fn unreadable(path: &Path, compression: Compression, error: io::Error) -> anyhow::Error {
    let advice = match (compression, error.kind()) {
        (Compression::None, _) => "",
        (_, io::ErrorKind::UnexpectedEof) => ": its compressed data is cut off. Download it again",
        _ if error.to_string().contains("too much memory") => {
            ": it was compressed with a window above 128 MiB. Compress it again without `zstd --long`"
        }
        _ => ": its compressed data is damaged. Download it again",
    };
    anyhow::Error::new(error).context(format!("cannot read {}{advice}", path.display()))
}
