//! Reading archives of `torch.save`: uncompressed zip files with a pickle and the bytes of each storage.

use std::io::{Read, Seek, SeekFrom};

use zip::{CompressionMethod, ZipArchive};

use crate::store::{ReadAt, allocate};
use crate::torch::not_torch;
use crate::{Error, Result};

/// Largest size of a pickle.
pub(super) const MAX_PICKLE: u64 = 256 << 20;
/// Bytes to read at once; more than the directory of a tensor's archive.
const BLOCK: u64 = 4096;

/// A storage's bytes in a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage {
    /// Offset in the file.
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) crc32: u32,
}

/// An archive that is part of a file.
pub(super) struct Archive<'a> {
    file: &'a dyn ReadAt,
    /// Its tensor or value, for messages.
    item: Option<&'a str>,
    zip: ZipArchive<Part<'a>>,
    start: u64,
    bytes: u64,
    /// Prefix of all entry names.
    prefix: String,
}

impl<'a> Archive<'a> {
    /// Reads the directory of the archive at `start` in the file, of `bytes` bytes. `item` is its tensor or value.
    pub(super) fn open(file: &'a dyn ReadAt, item: Option<&'a str>, start: u64, bytes: u64) -> Result<Self> {
        let path = file.path();
        let part = Part { file, start, bytes, at: 0, block: Vec::new(), block_at: 0 };
        let zip = ZipArchive::new(part)
            .map_err(|error| not_torch(path, item, format!("it is not a file of torch.save: {error}")))?;
        let prefix = zip.file_names().filter_map(|name| Some(name.ok()?.strip_suffix("data.pkl")?.to_string())).next();
        let Some(prefix) = prefix else {
            return Err(not_torch(path, item, "it is a zip file without the data.pkl of torch.save".into()));
        };
        let mut archive = Archive { file, item, zip, start, bytes, prefix };
        match archive.entry("byteorder", 16)? {
            None => {}
            Some(order) if order.trim_ascii() == b"little" => {}
            Some(order) => {
                let order = String::from_utf8_lossy(&order).into_owned();
                return Err(archive.bad(format!("its byte order is {order:?}, expected little")));
            }
        }
        Ok(archive)
    }

    /// Returns the pickle.
    pub(super) fn pickle(&mut self) -> Result<Vec<u8>> {
        match self.entry("data.pkl", MAX_PICKLE)? {
            Some(pickle) => Ok(pickle),
            None => Err(self.bad("it has no data.pkl".into())),
        }
    }

    /// Returns the place of a storage's bytes.
    pub(super) fn storage(&mut self, key: &str) -> Result<Storage> {
        match self.place(&format!("data/{key}"))? {
            Some(storage) => Ok(storage),
            None => Err(self.bad(format!("it has no storage {key:?}, which its pickle names"))),
        }
    }

    /// Returns a small entry's bytes.
    fn entry(&mut self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let Some(Storage { start, bytes, crc32 }) = self.place(name)? else { return Ok(None) };
        if bytes > most {
            return Err(Error::TooLarge { path: self.file.path().to_path_buf(), bytes, most });
        }
        let mut contents = allocate(self.file.path(), bytes)?;
        self.file.read_exact_at(&mut contents, start)?;
        if crc32fast::hash(&contents) != crc32 {
            return Err(self.bad(format!("its {name}: its checksum is wrong")));
        }
        Ok(Some(contents))
    }

    /// Returns the place of an entry's bytes.
    fn place(&mut self, name: &str) -> Result<Option<Storage>> {
        let (path, item, whole) = (self.file.path(), self.item, self.bytes);
        let bad = |reason: &str| not_torch(path, item, format!("its {name}: {reason}"));
        let Some(index) = self.zip.index_for_name(&format!("{}{name}", self.prefix)) else { return Ok(None) };
        let entry = self.zip.by_index_raw(index).map_err(|error| bad(&error.to_string()))?;
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            return Err(bad("it is compressed; torch.save does not do that"));
        }
        let (bytes, crc32) = (entry.size(), entry.crc32());
        let start = entry.data_start().filter(|start| start.checked_add(bytes).is_some_and(|end| end <= whole));
        let Some(start) = start else {
            return Err(bad(&format!("its {bytes} bytes are not within the archive; is it truncated?")));
        };
        Ok(Some(Storage { start: self.start + start, bytes, crc32 }))
    }

    fn bad(&self, reason: String) -> Error {
        not_torch(self.file.path(), self.item, reason)
    }
}

/// A seekable part of a file, read in blocks.
struct Part<'a> {
    file: &'a dyn ReadAt,
    start: u64,
    bytes: u64,
    at: u64,
    block: Vec<u8>,
    block_at: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let left = self.bytes.saturating_sub(self.at);
        let count = (into.len() as u64).min(left) as usize;
        if count == 0 {
            return Ok(0);
        }
        let read = |into: &mut [u8], at| self.file.read_exact_at(into, at).map_err(std::io::Error::other);
        if count as u64 >= BLOCK {
            read(&mut into[..count], self.start + self.at)?;
            self.at += count as u64;
            return Ok(count);
        }
        let held = self.block_at..self.block_at + self.block.len() as u64;
        if !held.contains(&self.at) {
            self.block_at = self.at / BLOCK * BLOCK;
            self.block.resize(BLOCK.min(self.bytes - self.block_at) as usize, 0);
            if let Err(error) = read(&mut self.block, self.start + self.block_at) {
                self.block.clear();
                return Err(error);
            }
        }
        let from = &self.block[(self.at - self.block_at) as usize..];
        let count = count.min(from.len());
        into[..count].copy_from_slice(&from[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Part<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.bytes.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}
