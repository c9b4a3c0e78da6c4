//! JSON Lines: a record in each line.

use std::io::{BufRead, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::fields::text_of;
use super::records::RawRecords;
use super::{Options, Records, open, open_at, unreadable};
use crate::format::Compression;

/// Lines that start within a range of bytes. Blank lines are no records.
pub(super) struct Lines {
    path: PathBuf,
    compression: Compression,
    input: Box<dyn BufRead + Send>,
    field: String,
    limit: usize,
    /// Offset of the next line.
    next: u64,
    end: u64,
    line: Vec<u8>,
    /// Offset of `line`, and its number if the range starts at the first line.
    at: u64,
    number: Option<u64>,
}

impl Lines {
    pub(super) fn open(path: &Path, compression: Compression, range: Range<u64>, options: &Options) -> Result<Self> {
        let (mut input, mut next) = (None, 0);
        if range.start > 0 && compression == Compression::None {
            // The line that the range starts in belongs to the range before, unless it starts here.
            let mut cut = open_at(path, compression, range.start - 1)?;
            let skipped = cut.skip_until(b'\n').map_err(|error| unreadable(path, compression, error))?;
            next = range.start - 1 + skipped as u64;
            input = Some(cut);
        }
        Ok(Lines {
            path: path.to_owned(),
            compression,
            input: match input {
                Some(input) => input,
                None => open(path, compression)?,
            },
            field: options.field.clone(),
            limit: options.record_limit,
            next,
            end: range.end,
            line: Vec::new(),
            at: 0,
            number: (range.start == 0).then_some(0),
        })
    }

    /// Reads the next line that is not blank. Returns whether there is one.
    fn read(&mut self) -> Result<bool> {
        while self.next < self.end {
            self.line.clear();
            // A long line should not keep its memory.
            self.line.shrink_to(1 << 20);
            let mut limited = self.input.by_ref().take(self.limit as u64 + 1);
            let read = limited.read_until(b'\n', &mut self.line);
            let read = read.map_err(|error| unreadable(&self.path, self.compression, error))?;
            if read == 0 {
                return Ok(false);
            }
            self.at = self.next;
            self.next += read as u64;
            self.number = self.number.map(|number| number + 1);
            if read > self.limit {
                bail!(
                    "{}: the line is longer than {} bytes. Expected a JSON object in each line: split the record, or \
                     check that the file is JSON Lines",
                    self.place(),
                    self.limit
                );
            }
            if self.at == 0 && self.line.starts_with(b"\xef\xbb\xbf") {
                self.line.drain(..3);
            }
            if !self.line.iter().all(u8::is_ascii_whitespace) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl RawRecords for Lines {
    fn next_raw(&mut self) -> Result<Option<&[u8]>> {
        Ok(self.read()?.then_some(&self.line[..]))
    }
}

impl Records for Lines {
    fn next(&mut self) -> Result<Option<Option<String>>> {
        if !self.read()? {
            return Ok(None);
        }
        text_of(&self.line, &self.field).with_context(|| self.place()).map(Some)
    }

    fn skip(&mut self, records: u64) -> Result<()> {
        for skipped in 0..records {
            ensure!(
                self.read()?,
                "{} has {skipped} records where reading was to continue after {records}: the file has changed",
                self.path.display()
            );
        }
        Ok(())
    }

    fn place(&self) -> String {
        match self.number {
            Some(number) => format!("{}, line {number}", self.path.display()),
            None => format!("{}, line at byte {}", self.path.display(), self.at),
        }
    }
}
