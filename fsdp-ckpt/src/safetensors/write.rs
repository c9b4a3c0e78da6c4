//! Writing tensors one after another.

use std::collections::BTreeMap;

use fsdp_core::Readable;

use crate::checksum::Checksum;
use crate::safetensors::header::{Entry, Layout};
use crate::scattered::CACHED;
use crate::store::Store;
use crate::{Error, Result};

/// Takes a tensor's bytes, a piece at a time and in order.
pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// A file that is on disk.
pub(crate) struct WrittenFile {
    /// Its size.
    pub(crate) bytes: u64,
    /// The CRC-32C of what comes before the entries' bytes.
    pub(crate) header_crc32c: u32,
    /// The CRC-32C of each entry's bytes.
    pub(crate) checksums: Vec<u32>,
}

/// Writes a new safetensors file, which must not exist. `data` passes the bytes of an entry, which it is asked for by
/// position, to a sink. Returns once everything is on disk.
pub(crate) fn write_file(
    store: &dyn Store,
    name: &str,
    entries: &[Entry],
    metadata: &BTreeMap<String, String>,
    data: &mut dyn FnMut(usize, &mut Sink<'_>) -> Result<()>,
) -> Result<WrittenFile> {
    let layout = Layout::new(entries, metadata)?;
    let mut file = store.create(name, layout.bytes)?;
    file.append(&layout.header)?;
    let mut header = Checksum::new();
    header.update(&layout.header);
    let mut checksums = vec![0; entries.len()];
    for &index in &layout.order {
        let expected = layout.ranges[index].end - layout.ranges[index].start;
        let mut written = 0;
        let mut checksum = Checksum::new();
        data(index, &mut |bytes| {
            written += bytes.len() as u64;
            if written > expected {
                return Ok(());
            }
            for piece in bytes.chunks(CACHED) {
                checksum.update(piece);
                file.append(piece)?;
            }
            Ok(())
        })?;
        checksums[index] = checksum.value();
        if written != expected {
            let reason = format!("it gave {written} bytes, {expected} are expected");
            return Err(Error::Unreadable { tensor: entries[index].name.clone(), reason });
        }
    }
    file.finish()?;
    Ok(WrittenFile { bytes: layout.bytes, header_crc32c: header.value(), checksums })
}

/// Passes the bytes of `data`, which must be `expected` many, on in one piece.
pub(crate) fn read_bytes(name: &str, data: &dyn Readable, expected: usize, sink: &mut Sink<'_>) -> Result<()> {
    let fail = |reason| Err(Error::Unreadable { tensor: name.to_string(), reason });
    let mut outcome = None;
    let read = data.read(&mut |bytes| {
        outcome = Some(if bytes.len() == expected {
            sink(bytes)
        } else {
            fail(format!("its memory has {} bytes, {expected} are expected", bytes.len()))
        });
    });
    match (read, outcome) {
        (Err(reason), _) => fail(reason),
        (Ok(()), Some(outcome)) => outcome,
        (Ok(()), None) => fail("it gave no bytes".to_string()),
    }
}
