//! Writing tensors one after another.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fsdp_core::Readable;

use super::written_back::WrittenBack;
use super::{CACHED, Entry, Layout};
use crate::error::io_error;
use crate::{Error, Result};

/// Writes a new safetensors file, which must not exist. `data` gives each entry's memory by position. Returns the size of the file and the CRC-32C of
/// each entry's bytes, once everything is on disk.
pub(crate) fn write_file<'a>(
    path: &Path,
    entries: &[Entry],
    metadata: &BTreeMap<String, String>,
    data: impl Fn(usize) -> &'a dyn Readable,
) -> Result<(u64, Vec<u32>)> {
    let layout = Layout::new(entries, metadata)?;
    let mut file = WrittenBack::create(path, layout.bytes).map_err(io_error("create", path))?;
    file.append(&layout.header).map_err(io_error("write", path))?;
    let mut checksums = vec![0; entries.len()];
    for &index in &layout.order {
        let range = &layout.ranges[index];
        read_bytes(&entries[index].name, data(index), (range.end - range.start) as usize, &mut |bytes| {
            for piece in bytes.chunks(CACHED) {
                checksums[index] = crc32c::crc32c_append(checksums[index], piece);
                file.append(piece).map_err(io_error("write", path))?;
            }
            Ok(())
        })?;
    }
    file.finish().map_err(io_error("write", path))?;
    Ok((layout.bytes, checksums))
}

/// `write_all_at` with an error that names the file.
pub(crate) fn write_all_at(file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<()> {
    file.write_all_at(bytes, at).map_err(io_error("write", path))
}

/// Calls `f` with the bytes of `data`, which must be `expected` many.
pub(crate) fn read_bytes(
    name: &str,
    data: &dyn Readable,
    expected: usize,
    f: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let fail = |reason| Err(Error::Unreadable { tensor: name.to_string(), reason });
    let mut outcome = None;
    let read = data.read(&mut |bytes| {
        outcome = Some(if bytes.len() == expected {
            f(bytes)
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
