//! Text files: one document, in parts.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};

use super::{Cursor, Part, open_at, unreadable};
use crate::format::{Compression, PART};

/// Returns the length of the first part of a text: all of it, or at most [`PART`] bytes that end after a newline if
/// possible.
pub(super) fn cut(text: &str) -> usize {
    if text.len() <= PART {
        return text.len();
    }
    cut_bytes(text.as_bytes())
}

/// Returns the length of the first part of a text that is longer than [`PART`].
fn cut_bytes(text: &[u8]) -> usize {
    // The start of a character, which has at most four bytes.
    let end = (PART - 3..=PART).rev().find(|&end| text[end] & 0xc0 != 0x80).unwrap_or(PART);
    text[..end].iter().rposition(|&byte| byte == b'\n').map_or(end, |newline| newline + 1)
}

/// Reads a text file in parts.
pub(super) struct TextReader {
    path: PathBuf,
    compression: Compression,
    input: Box<dyn BufRead + Send>,
    /// Bytes read, from the start of the next part on.
    buffer: Vec<u8>,
    next: Cursor,
    is_over: bool,
}

impl TextReader {
    pub(super) fn open(path: &Path, compression: Compression, from: Cursor) -> Result<Self> {
        let input = open_at(path, compression, from.byte)?;
        let is_over = from.record > 0;
        Ok(TextReader { path: path.to_owned(), compression, input, buffer: Vec::new(), next: from, is_over })
    }

    pub(super) fn next(&mut self) -> Result<Option<Part>> {
        if self.is_over {
            return Ok(None);
        }
        // One byte more tells whether the text goes on.
        let missing = (PART + 1 - self.buffer.len()) as u64;
        let read = self.input.by_ref().take(missing).read_to_end(&mut self.buffer);
        read.map_err(|error| unreadable(&self.path, self.compression, error))?;
        let is_last = self.buffer.len() <= PART;
        let cut = if is_last { self.buffer.len() } else { cut_bytes(&self.buffer) };
        let rest = self.buffer.split_off(cut);
        let bytes = std::mem::replace(&mut self.buffer, rest);
        self.is_over = is_last;
        if bytes.is_empty() {
            return Ok(None);
        }
        let at = self.next;
        let (path, byte) = (self.path.display(), at.byte);
        let text = String::from_utf8(bytes).map_err(|error| {
            let byte = byte + error.utf8_error().valid_up_to() as u64;
            anyhow!("{path} is not UTF-8 at byte {byte}: convert it to UTF-8, or remove it from the corpus")
        })?;
        if let Some(zero) = text.find('\0') {
            bail!("{path} is not text: it has a zero byte at byte {}. Remove it from the corpus", byte + zero as u64);
        }
        let part = Part { at, text, is_last };
        self.next = part.next();
        Ok(Some(part))
    }
}
