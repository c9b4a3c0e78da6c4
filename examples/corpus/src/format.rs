//! Formats of files, by name and by first bytes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// First bytes that are read to recognise a file.
const START: u64 = 512;

/// Longest part of a document in bytes. Tokenizers need about 100 bytes of memory per token.
pub const PART: usize = 256 << 10;

/// Compression of a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    None,
    /// One or more gzip members.
    Gzip,
    /// One or more Zstandard frames.
    Zstd,
}

/// Format of a file of a corpus.
///
/// ```
/// use fsdp_corpus::format::{Compression, Format};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("corpus.jsonl");
/// std::fs::write(&path, "{\"text\": \"a document\"}\n")?;
/// assert_eq!(Format::of_file(&path)?, Format::JsonLines(Compression::None));
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// UTF-8 text, which is one document.
    Text(Compression),
    /// A JSON object in each line.
    JsonLines(Compression),
    /// A JSON array of objects, or JSON objects one after another.
    Json(Compression),
    /// Apache Parquet.
    Parquet,
    /// Token ids.
    Tokens,
}

/// File of text or of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Format of the file.
    pub format: Format,
}

/// Kind of a file, as its name and first bytes show.
pub(crate) enum Sniffed {
    Corpus(Format),
    /// A file that is not text, and whose name does not belong to a format.
    Binary,
    /// A file of a known format that is not read, and the way out.
    Unsupported(&'static str),
}

impl Format {
    /// Returns the format of a file. The name decides about the content, and the first bytes decide about compression.
    ///
    /// # Errors
    /// The file can't be read, is a Git LFS pointer, or has no format of a corpus.
    pub fn of_file(path: &Path) -> Result<Self> {
        match sniff(path)? {
            Sniffed::Corpus(format) => Ok(format),
            Sniffed::Binary => bail!(
                "{} is not text (UTF-8 without zero bytes) and has no known format. Expected text, .jsonl, .json, \
                 .parquet (.gz and .zst too), or token ids in a file named .bin",
                path.display()
            ),
            Sniffed::Unsupported(way_out) => bail!("{} can't be read as a corpus: {way_out}", path.display()),
        }
    }

    /// Returns whether a file of this format holds records with fields.
    pub fn has_fields(&self) -> bool {
        matches!(self, Format::JsonLines(_) | Format::Json(_) | Format::Parquet)
    }
}

/// Recognises a file by its name and first bytes.
pub(crate) fn sniff(path: &Path) -> Result<Sniffed> {
    let cannot = || format!("cannot read {}", path.display());
    let mut start = Vec::new();
    let mut file = File::open(path).with_context(cannot)?;
    file.by_ref().take(START).read_to_end(&mut start).with_context(cannot)?;
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        bail!("{} is a pointer of Git LFS, not the data: run `git lfs pull` in its repository", path.display());
    }
    if is(path, &["bin"]) {
        return Ok(Sniffed::Corpus(Format::Tokens));
    }
    if start.starts_with(b"PAR1") {
        return Ok(Sniffed::Corpus(Format::Parquet));
    }
    if is(path, &["parquet", "pq"]) {
        bail!(
            "{} is not a Parquet file: its first bytes are {}, not PAR1. Download it again",
            path.display(),
            shown(&start)
        );
    }
    if let Some(way_out) = unsupported(path, &start) {
        return Ok(Sniffed::Unsupported(way_out));
    }
    let compression = if start.starts_with(&[0x1f, 0x8b]) {
        Compression::Gzip
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || is_skippable_frame(&start) {
        Compression::Zstd
    } else {
        Compression::None
    };
    let inner = if is(path, &["gz", "zst", "zstd"]) { Path::new(path.file_stem().unwrap_or_default()) } else { path };
    if compression != Compression::None && inner == path && path.extension().is_some() && !has_known_name(path) {
        // An unknown file that happens to be compressed, such as a checkpoint.
        return Ok(Sniffed::Binary);
    }
    Ok(if is(inner, &["jsonl", "ndjson"]) {
        Sniffed::Corpus(Format::JsonLines(compression))
    } else if is(inner, &["json"]) {
        Sniffed::Corpus(Format::Json(compression))
    } else if is(inner, &["parquet", "pq"]) {
        Sniffed::Unsupported("decompress the file: Parquet is compressed inside")
    } else if let Some(way_out) = unsupported(inner, &[]) {
        Sniffed::Unsupported(way_out)
    } else if compression == Compression::None && !is_text(file, start).with_context(cannot)? {
        Sniffed::Binary
    } else {
        Sniffed::Corpus(Format::Text(compression))
    })
}

/// Returns whether a file's name says that it holds text or records.
fn has_known_name(path: &Path) -> bool {
    is(path, &["jsonl", "ndjson", "json", "txt", "text", "md"])
}

/// Returns the way out for a format that is known and not read.
fn unsupported(path: &Path, start: &[u8]) -> Option<&'static str> {
    if is(path, &["csv", "tsv"]) {
        return Some(
            "pass labelled texts with --task classify, or convert the table to Parquet, such as by \
             pandas.read_csv(...).to_parquet(...)",
        );
    }
    if is(path, &["arrow", "feather"]) || start.starts_with(b"ARROW1") {
        return Some("convert Arrow files to Parquet, such as by datasets.load_from_disk(...).to_parquet(...)");
    }
    if is(path, &["xz", "bz2", "lz4", "br", "7z", "zip", "tar", "tgz", "rar"]) {
        return Some("decompress it, or compress it as .zst or .gz");
    }
    if start.starts_with(b"\x93NUMPY") || is(path, &["npy", "npz"]) {
        return Some("write the ids without a header to a .bin file, by ids.astype('<u2').tofile(...)");
    }
    is(path, &["safetensors", "pt", "pth", "ckpt", "gguf", "onnx"])
        .then_some("it holds a model's weights; pass text, .jsonl, .json, .parquet or .bin files")
}

/// Returns whether a file whose first bytes were read starts with UTF-8 without zero bytes, as far as its first part.
fn is_text(file: File, mut start: Vec<u8>) -> io::Result<bool> {
    if start.contains(&0) {
        return Ok(false);
    }
    let part = PART as u64;
    file.take(part - START).read_to_end(&mut start)?;
    let is_valid = match str::from_utf8(&start) {
        Ok(_) => true,
        // The last character may be cut.
        Err(error) => error.error_len().is_none() && start.len() as u64 == part,
    };
    Ok(is_valid && !start.contains(&0))
}

/// Returns whether bytes begin with a skippable frame of Zstandard, as pzstd writes them.
fn is_skippable_frame(start: &[u8]) -> bool {
    matches!(start, [low, 0x2a, 0x4d, 0x18, ..] if low & 0xf0 == 0x50)
}

/// Returns whether a path has one of these extensions, in any case.
pub(crate) fn is(path: &Path, extensions: &[&str]) -> bool {
    path.extension()
        .and_then(OsStr::to_str)
        .is_some_and(|found| extensions.iter().any(|extension| found.eq_ignore_ascii_case(extension)))
}

/// Formats bytes of a damaged file for a message.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(24)];
    if cut.is_empty() { "missing".into() } else { format!("`{}`", cut.escape_ascii()) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn sniffed(name: &str, content: &[u8]) -> Result<Format> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        Format::of_file(&path)
    }

    #[test]
    fn names_and_first_bytes_tell_formats() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(b"{}").unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = zstd::encode_all(&b"{}"[..], 1).unwrap();
        for (name, content, expected) in [
            ("a.txt", &b"text"[..], Format::Text(Compression::None)),
            ("a", b"text", Format::Text(Compression::None)),
            ("a.rs", b"text", Format::Text(Compression::None)),
            ("a.JSONL", b"{}", Format::JsonLines(Compression::None)),
            ("a.ndjson.gz", &gzip, Format::JsonLines(Compression::Gzip)),
            ("a.jsonl", &gzip, Format::JsonLines(Compression::Gzip)),
            ("a.jsonl.gz", b"{}", Format::JsonLines(Compression::None)),
            ("a.json.zst", &zstd, Format::Json(Compression::Zstd)),
            ("a.txt.zst", &zstd, Format::Text(Compression::Zstd)),
            ("a.gz", &gzip, Format::Text(Compression::Gzip)),
            ("a.txt", b"PAR1...PAR1", Format::Parquet),
            ("a.bin", b"", Format::Tokens),
        ] {
            assert_eq!(sniffed(name, content).unwrap(), expected, "{name}");
        }
    }

    #[test]
    fn other_files_are_refused_with_a_way_out() {
        for (name, content, expected) in [
            ("a.parquet", &b"<html>"[..], "its first bytes are `<html>`, not PAR1"),
            ("a.csv", b"text\nx", "to_parquet"),
            ("a.csv.gz", b"text\nx", "to_parquet"),
            ("a.jsonl.xz", b"", "compress it as .zst"),
            ("a.txt", b"a\0b", "is not text"),
            ("a.txt", b"\xff\xfe", "is not text"),
            ("a.txt", &[&[b'a'; 9000][..], b"\xff\xfe"].concat(), "is not text"),
            ("a.png", b"\x1f\x8b", "is not text"),
            ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ] {
            let message = format!("{:#}", sniffed(name, content).unwrap_err());
            assert!(message.contains(expected) && message.contains(name), "{message}");
        }
    }
}
