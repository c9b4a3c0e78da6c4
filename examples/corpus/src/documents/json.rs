//! JSON files: an array of objects, or objects one after another.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::fields::text_of;
use super::records::RawRecords;
use super::{Options, Records, open, unreadable};
use crate::format::{Compression, shown};

/// Objects of a JSON file. Only one of them is in memory.
pub(super) struct Objects {
    path: PathBuf,
    compression: Compression,
    input: Box<dyn BufRead + Send>,
    field: String,
    limit: usize,
    object: Vec<u8>,
    number: u64,
    is_array: bool,
    is_over: bool,
}

impl Objects {
    pub(super) fn open(path: &Path, compression: Compression, options: &Options) -> Result<Self> {
        let mut objects = Objects {
            path: path.to_owned(),
            compression,
            input: open(path, compression)?,
            field: options.field.clone(),
            limit: options.record_limit,
            object: Vec::new(),
            number: 0,
            is_array: false,
            is_over: false,
        };
        let is_marked = objects.fill()?.starts_with(b"\xef\xbb\xbf");
        objects.input.consume(if is_marked { 3 } else { 0 });
        objects.is_array = objects.peek()? == Some(b'[');
        if objects.is_array {
            objects.input.consume(1);
        }
        Ok(objects)
    }

    fn fill(&mut self) -> Result<&[u8]> {
        self.input.fill_buf().map_err(|error| unreadable(&self.path, self.compression, error))
    }

    /// Returns the next byte that is not white space.
    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            let bytes = self.fill()?;
            if bytes.is_empty() {
                return Ok(None);
            }
            let spaces = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let found = bytes.get(spaces).copied();
            self.input.consume(spaces);
            if found.is_some() {
                return Ok(found);
            }
        }
    }

    /// Reads the bytes of the next object. Returns whether there is one.
    fn read(&mut self) -> Result<bool> {
        if self.is_over {
            return Ok(false);
        }
        let mut next = self.peek()?;
        let is_after_comma = self.is_array && self.number > 0 && next == Some(b',');
        if is_after_comma {
            self.input.consume(1);
            next = self.peek()?;
        } else if self.is_array && self.number > 0 && next.is_some_and(|next| next != b']') {
            bail!("after {}: expected `,` or `]`, found {}", self.place(), self.rest());
        }
        self.number += 1;
        match next {
            Some(b'{') => {}
            None if !self.is_array => {
                self.is_over = true;
                return Ok(false);
            }
            None => bail!("{}: the array does not end. The file seems to be cut off", self.place()),
            Some(b']') if self.is_array && !is_after_comma => {
                self.input.consume(1);
                if self.peek()?.is_some() {
                    let rest = self.rest();
                    bail!("{}: expected the end of the file after the array, found {rest}", self.path.display());
                }
                self.is_over = true;
                return Ok(false);
            }
            Some(_) => bail!("{}: expected a JSON object, found {}", self.place(), self.rest()),
        }
        self.read_object()?;
        Ok(true)
    }

    /// Reads an object up to its last brace.
    fn read_object(&mut self) -> Result<()> {
        self.object.clear();
        self.object.shrink_to(1 << 20);
        let (mut depth, mut is_string, mut is_escaped) = (0_u32, false, false);
        loop {
            let (path, number, limit) = (&self.path, self.number, self.limit);
            let bytes = self.input.fill_buf().map_err(|error| unreadable(&self.path, self.compression, error))?;
            ensure!(
                !bytes.is_empty(),
                "{}, object {number}: the object does not end. The file seems to be cut off",
                path.display()
            );
            let mut end = None;
            for (index, &byte) in bytes.iter().enumerate() {
                if is_string {
                    match byte {
                        _ if is_escaped => is_escaped = false,
                        b'\\' => is_escaped = true,
                        b'"' => is_string = false,
                        _ => {}
                    }
                    continue;
                }
                match byte {
                    b'"' => is_string = true,
                    b'{' | b'[' => depth = depth.saturating_add(1),
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => continue,
                }
                if depth == 0 {
                    end = Some(index + 1);
                    break;
                }
            }
            let used = end.unwrap_or(bytes.len());
            ensure!(
                self.object.len() + used <= limit,
                "{}, object {number}: the object is longer than {limit} bytes. Expected an array of smaller objects: \
                 split the record",
                path.display()
            );
            self.object.extend_from_slice(&bytes[..used]);
            self.input.consume(used);
            if end.is_some() {
                return Ok(());
            }
        }
    }

    /// Returns the next bytes for a message.
    fn rest(&mut self) -> String {
        shown(self.input.fill_buf().unwrap_or_default())
    }
}

impl RawRecords for Objects {
    fn next_raw(&mut self) -> Result<Option<&[u8]>> {
        Ok(self.read()?.then_some(&self.object[..]))
    }
}

impl Records for Objects {
    fn next(&mut self) -> Result<Option<Option<String>>> {
        if !self.read()? {
            return Ok(None);
        }
        text_of(&self.object, &self.field).with_context(|| self.place()).map(Some)
    }

    fn skip(&mut self, records: u64) -> Result<()> {
        for skipped in 0..records {
            ensure!(
                self.read()?,
                "{} has {skipped} objects where reading was to continue after {records}: the file has changed",
                self.path.display()
            );
        }
        Ok(())
    }

    fn place(&self) -> String {
        format!("{}, object {}", self.path.display(), self.number)
    }
}
