//! Layout of an archive of `torch.save`.
//!
//! A store must know the size of a file when it is created. The zip library can't tell the size in advance, so this
//! lays out the archive's bytes around the storage.

/// Prefix of all entry names.
const PREFIX: &str = "archive/";
/// Alignment of storages in PyTorch's archives.
const ALIGN: usize = 64;
/// Sizes and offsets from here on need zip64 fields.
const LARGE: u64 = 0xffff_ffff;
/// Size of a local header before the name.
const LOCAL: usize = 30;

/// An archive with a pickle and at most one storage.
pub(super) struct ArchiveLayout {
    /// Bytes before the storage, or before the directory.
    pub(super) head: Vec<u8>,
    /// Size of the storage, if there is one.
    pub(super) data: Option<u64>,
    directory: Vec<Entry>,
}

/// An entry of the directory.
struct Entry {
    name: String,
    at: u64,
    bytes: u64,
    crc: u32,
    flags: u16,
}

impl ArchiveLayout {
    pub(super) fn new(pickle: &[u8], data: Option<u64>) -> Self {
        let mut item = ArchiveLayout { head: Vec::new(), data: None, directory: Vec::new() };
        item.small("data.pkl", pickle);
        item.small("byteorder", b"little");
        item.small("version", b"3\n");
        if let Some(bytes) = data {
            item.storage("data/0", bytes);
        }
        item
    }

    /// Returns the size of the archive.
    pub(super) fn bytes(&self) -> u64 {
        self.head.len() as u64 + self.data.unwrap_or(0) + self.tail(0).len() as u64
    }

    /// Returns the bytes after the storage, whose CRC-32 is `crc`.
    pub(super) fn tail(&self, crc: u32) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(bytes) = self.data {
            // Data descriptor: the checksum was not known when the header was written.
            out.extend(*b"PK\x07\x08");
            out.extend(crc.to_le_bytes());
            for _ in 0..2 {
                if bytes < LARGE {
                    out.extend((bytes as u32).to_le_bytes());
                } else {
                    out.extend(bytes.to_le_bytes());
                }
            }
        }
        let start = self.head.len() as u64 + self.data.unwrap_or(0) + out.len() as u64;
        let before = out.len();
        for entry in &self.directory {
            let crc = if entry.flags & 8 != 0 { crc } else { entry.crc };
            out.extend(*b"PK\x01\x02");
            out.extend([version(entry.bytes), version(entry.bytes), entry.flags].map(u16::to_le_bytes).as_flattened());
            // Method "stored", and no time.
            out.extend([0; 6]);
            out.extend(crc.to_le_bytes());
            let size = entry.bytes.min(LARGE) as u32;
            out.extend([size, size].map(u32::to_le_bytes).as_flattened());
            let mut extra = Vec::<u8>::new();
            if entry.bytes >= LARGE {
                extra.extend([1u16, 16].map(u16::to_le_bytes).as_flattened());
                extra.extend([entry.bytes, entry.bytes].map(u64::to_le_bytes).as_flattened());
            }
            out.extend([entry.name.len() as u16, extra.len() as u16].map(u16::to_le_bytes).as_flattened());
            // No comment, first disk, no attributes.
            out.extend([0; 10]);
            out.extend((entry.at as u32).to_le_bytes());
            out.extend(entry.name.as_bytes());
            out.extend(extra);
        }
        let bytes = (out.len() - before) as u64;
        let count = self.directory.len() as u16;
        if start >= LARGE {
            let end = start + bytes;
            out.extend(*b"PK\x06\x06");
            out.extend(44u64.to_le_bytes());
            out.extend([45u16, 45].map(u16::to_le_bytes).as_flattened());
            out.extend([0; 8]);
            out.extend([count.into(), count.into(), bytes, start].map(u64::to_le_bytes).as_flattened());
            out.extend(*b"PK\x06\x07\0\0\0\0");
            out.extend(end.to_le_bytes());
            out.extend(1u32.to_le_bytes());
        }
        out.extend(*b"PK\x05\x06\0\0\0\0");
        out.extend([count, count].map(u16::to_le_bytes).as_flattened());
        out.extend([bytes as u32, start.min(LARGE) as u32].map(u32::to_le_bytes).as_flattened());
        out.extend([0; 2]);
        out
    }

    fn small(&mut self, name: &str, contents: &[u8]) {
        let crc = crc32fast::hash(contents);
        let bytes = contents.len() as u64;
        self.local(name, bytes, crc, 0, &[]);
        self.head.extend(contents);
    }

    fn storage(&mut self, name: &str, bytes: u64) {
        let mut extra = Vec::<u8>::new();
        if bytes >= LARGE {
            extra.extend([1u16, 16].map(u16::to_le_bytes).as_flattened());
            extra.extend([bytes, bytes].map(u64::to_le_bytes).as_flattened());
        }
        // An extra field "FB", like PyTorch's, pads to the alignment.
        let end = self.head.len() + LOCAL + PREFIX.len() + name.len() + extra.len() + 4;
        let padding = end.next_multiple_of(ALIGN) - end;
        extra.extend(*b"FB");
        extra.extend((padding as u16).to_le_bytes());
        extra.resize(extra.len() + padding, b'Z');
        self.local(name, bytes, 0, 8, &extra);
        self.data = Some(bytes);
    }

    /// Adds a local header. Bit 3 of `flags` means that a data descriptor follows the contents.
    fn local(&mut self, name: &str, bytes: u64, crc: u32, flags: u16, extra: &[u8]) {
        let name = format!("{PREFIX}{name}");
        let entry = Entry { name, at: self.head.len() as u64, bytes, crc, flags };
        let out = &mut self.head;
        out.extend(*b"PK\x03\x04");
        out.extend([version(bytes), flags].map(u16::to_le_bytes).as_flattened());
        out.extend([0; 6]);
        out.extend(crc.to_le_bytes());
        let size = bytes.min(LARGE) as u32;
        out.extend([size, size].map(u32::to_le_bytes).as_flattened());
        out.extend([entry.name.len() as u16, extra.len() as u16].map(u16::to_le_bytes).as_flattened());
        out.extend(entry.name.as_bytes());
        out.extend(extra);
        self.directory.push(entry);
    }
}

/// Returns the zip version that a reader needs.
fn version(bytes: u64) -> u16 {
    if bytes < LARGE { 20 } else { 45 }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::path::Path;

    use crate::Result;
    use crate::store::ReadAt;
    use crate::torch::archive::Archive;

    /// A file whose large storage is not in memory.
    #[derive(Debug)]
    struct Sparse {
        head: Vec<u8>,
        data: u64,
        tail: Vec<u8>,
    }

    impl ReadAt for Sparse {
        fn path(&self) -> &Path {
            Path::new("sparse")
        }

        fn bytes(&self) -> u64 {
            self.head.len() as u64 + self.data + self.tail.len() as u64
        }

        fn read_exact_at(&self, into: &mut [u8], at: u64) -> Result<()> {
            let tail = self.head.len() as u64 + self.data;
            for (i, byte) in (at..).zip(into) {
                *byte = match (self.head.get(i as usize), i.checked_sub(tail)) {
                    (Some(byte), _) => *byte,
                    (None, Some(i)) => self.tail[i as usize],
                    (None, None) => 7,
                };
            }
            Ok(())
        }
    }

    #[test]
    fn reads_layouts_of_any_size() {
        for bytes in [0, 1, 4096, LARGE - 1, LARGE, LARGE + 1, 1 << 40] {
            let item = ArchiveLayout::new(b"\x80\x02N.", Some(bytes));
            assert_eq!(item.head.len() % ALIGN, 0);
            let (total, start) = (item.bytes(), item.head.len() as u64);
            let tail = item.tail(0x1234_5678);
            let file = Sparse { head: item.head, data: bytes, tail };
            assert_eq!(file.bytes(), total);
            let mut archive = Archive::open(&file, None, 0, total).unwrap();
            assert_eq!(archive.pickle().unwrap(), b"\x80\x02N.");
            let storage = archive.storage("0").unwrap();
            assert_eq!((storage.start, storage.bytes, storage.crc32), (start, bytes, 0x1234_5678));
            assert!(archive.storage("1").unwrap_err().to_string().contains("no storage \"1\""));
        }
    }
}
