//! Safetensors files: reading any region of a tensor by byte ranges, and writing tensors one after another.
//!
//! [`SafetensorsFile`] reads a file whose header is untrusted: neither its length nor the offsets in it are believed
//! before they are checked. [`Layout`] lays out a new file and [`write_file`] writes it. `chunked` reads tensors in
//! chunks of several files, and `sharding` is PyTorch's metadata about such chunks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use fsdp_core::layout::Region;
use fsdp_core::{DType, Readable};
use safetensors::tensor::{self, Dtype, Metadata};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::error::did_you_mean;
use crate::region::{check_request, checked_bytes, runs};
use crate::store::{CACHE_BLOCK, OPENED, ReadAt, Store, allocate, location, placeholder_in, read_runs};
use crate::{Error, Result};

pub(crate) mod chunked;
pub(crate) mod sharding;

/// First bytes of a GGUF file.
const GGUF: &[u8; 4] = b"GGUF";
/// Limit of the safetensors library.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
    /// File that holds the tensor.
    pub file: PathBuf,
}

/// An open safetensors file, with a header that was checked against the file's size.
///
/// Reads only the requested byte ranges, without a lock: threads may read concurrently.
#[derive(Debug)]
pub struct SafetensorsFile {
    file: Box<dyn ReadAt>,
    tensors: BTreeMap<String, Stored>,
    metadata: HashMap<String, String>,
}

#[derive(Debug)]
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Offset of its first byte in the file.
    start: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::NotSafetensors`] for a header that is damaged or does not match the file's size.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::new(location(path)?.open()?)
    }

    /// Reads the header of a file.
    pub(crate) fn new(file: Box<dyn ReadAt>) -> Result<Self> {
        Self::with_header(file, None)
    }

    /// Reads the header of a file and verifies its CRC-32C, if expected, of length and padding, too.
    pub(crate) fn with_header(file: Box<dyn ReadAt>, expected: Option<u32>) -> Result<Self> {
        let bytes = file.bytes();
        let bad = |reason: String| Error::NotSafetensors {
            path: file.path().to_path_buf(),
            reason: placeholder_in(&*file).map_or(reason, |found| found.to_string()),
        };
        if bytes < 8 {
            return Err(bad(format!("it has {bytes} bytes, expected at least 8")));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        // Check before allocating.
        if length > bytes - 8 || length > MAX_HEADER {
            let mut start = [0; GGUF.len()];
            file.read_exact_at(&mut start, 0)?;
            return Err(bad(match &start == GGUF {
                true => "it is a GGUF file, which this program writes and does not read".into(),
                false => format!("its header claims {length} bytes, the file has {bytes}; is it truncated?"),
            }));
        }
        let mut header = allocate(file.path(), length)?;
        file.read_exact_at(&mut header, 8)?;
        if let Some(expected) = expected {
            let found = Checksum::of(&[&length.to_le_bytes(), &header]);
            if found != expected {
                return Err(Error::Checksum { path: file.path().to_path_buf(), tensor: None, expected, found });
            }
        }
        // Checks that tensors lie one after another, and have the bytes that their dtype and shape need.
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|error| bad(format!("its header is damaged: {error}")))?;
        let base = 8 + length;
        if base.checked_add(header.data_len() as u64) != Some(bytes) {
            return Err(bad(format!(
                "its header describes {} bytes of tensors, the file has {}",
                header.data_len(),
                bytes - base
            )));
        }
        let mut tensors = BTreeMap::new();
        for (name, info) in header.tensors() {
            if checked_bytes(&info.shape, info.dtype.bitsize().div_ceil(8)).is_none() {
                return Err(bad(format!("tensor \"{name}\" has the impossible shape {:?}", info.shape)));
            }
            let start = base + info.data_offsets.0 as u64;
            tensors.insert(name, Stored { dtype: info.dtype, shape: info.shape.clone(), start });
        }
        let metadata = header.metadata().clone().unwrap_or_default();
        Ok(SafetensorsFile { file, tensors, metadata })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// Returns the names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns whether the file has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the header's `__metadata__`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Returns a tensor's dtype and shape.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::UnsupportedDTypes`].
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        let (stored, dtype) = self.find(name)?;
        Ok(TensorInfo { dtype, shape: stored.shape.clone(), file: self.path().to_path_buf() })
    }

    /// Reads a region of a tensor into `into`, row-major. Reads only the bytes of the region.
    ///
    /// # Errors
    /// The errors of [`SafetensorsFile::info`]; [`Error::InvalidRead`] for a region outside the tensor or a buffer of
    /// another size; [`Error::Io`].
    pub fn read(&self, name: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let (stored, dtype) = self.find(name)?;
        check_request(name, &stored.shape, dtype.size(), region, into.len())?;
        if region.is_empty() {
            return Ok(());
        }
        let whole = Region::whole(&stored.shape);
        read_runs(&*self.file, stored.start, runs(&whole, region, region, dtype.size()), into, &mut |_| ())
    }

    /// Reads `part` of the region `chunk`, which this file holds, into `into`, which is the region `region` of the same
    /// tensor. The caller has checked all three. Calls `seen` with the bytes in file order; they are the chunk's bytes
    /// if `part` is the whole chunk.
    pub(crate) fn read_part(
        &self,
        name: &str,
        [chunk, region, part]: [&Region; 3],
        into: &mut [u8],
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let (stored, dtype) = self.find(name)?;
        read_runs(&*self.file, stored.start, runs(chunk, region, part, dtype.size()), into, seen)
    }

    /// Passes all bytes of a tensor to `seen`, one block at a time.
    pub(crate) fn scan(&self, name: &str, seen: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (stored, dtype) = self.find(name)?;
        let bytes = stored.shape.iter().product::<usize>() * dtype.size();
        let most = self.file.read_sizes().block;
        let mut block = vec![0; bytes.min(most)];
        let mut at = 0;
        while at < bytes {
            let block = &mut block[..(bytes - at).min(most)];
            self.file.read_exact_at(block, stored.start + at as u64)?;
            seen(block);
            at += block.len();
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Result<(&Stored, DType)> {
        let Some(stored) = self.tensors.get(name) else {
            let hint = did_you_mean(name, self.names());
            return Err(Error::MissingTensor { path: self.path().to_path_buf(), tensor: name.to_string(), hint });
        };
        let text = stored.dtype.to_string();
        match DType::ALL.into_iter().find(|dtype| dtype.name() == text) {
            Some(dtype) => Ok((stored, dtype)),
            None => {
                let (path, tensors) = (self.path().to_path_buf(), [(name.to_string(), text)].into());
                Err(Error::UnsupportedDTypes { path, tensors })
            }
        }
    }
}

/// A receiver of a tensor's bytes, in order.
pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// A written file.
pub(crate) struct WrittenFile {
    /// Size of the file.
    pub(crate) bytes: u64,
    /// CRC-32C of everything before the tensors' bytes.
    pub(crate) header_crc32c: u32,
    /// CRC-32C of each tensor's bytes.
    pub(crate) checksums: Vec<u32>,
}

/// Writes a new safetensors file and syncs it. `data` passes the bytes of the entry at an index to a sink.
pub(crate) fn write_file(
    store: &dyn Store,
    name: &str,
    entries: &[Entry],
    metadata: &BTreeMap<String, String>,
    data: &mut dyn FnMut(usize, &mut Sink<'_>) -> Result<()>,
) -> Result<WrittenFile> {
    let layout = Layout::new(entries, metadata)?;
    let mut file = store.create(name, layout.bytes)?;
    tracing::trace!(target: OPENED, path = %store.path().join(name).display());
    file.append(&layout.header)?;
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
            for piece in bytes.chunks(CACHE_BLOCK) {
                checksum.update(piece);
                file.append(piece)?;
            }
            Ok(())
        })?;
        checksums[index] = checksum.value();
        if written != expected {
            let reason = format!("it has {written} bytes, expected {expected}");
            return Err(Error::ShardMemory { tensor: entries[index].name.clone(), reason });
        }
    }
    file.finish()?;
    Ok(WrittenFile { bytes: layout.bytes, header_crc32c: Checksum::of(&[&layout.header]), checksums })
}

/// Passes the bytes of `data` to the sink, and checks their number.
pub(crate) fn read_bytes(name: &str, data: &dyn Readable, expected: usize, sink: &mut Sink<'_>) -> Result<()> {
    let fail = |reason| Err(Error::ShardMemory { tensor: name.to_string(), reason });
    let (mut found, mut outcome) = (0_usize, Ok(()));
    let read = data.read_pieces(&mut |bytes| {
        found = found.saturating_add(bytes.len());
        if found <= expected && outcome.is_ok() {
            outcome = sink(bytes);
        }
    });
    match read {
        Err(reason) => fail(reason),
        Ok(()) if outcome.is_err() => outcome,
        Ok(()) if found != expected => fail(format!("its memory has {found} bytes, expected {expected}")),
        Ok(()) => Ok(()),
    }
}

/// A tensor to write.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// The layout of a file to write.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Bytes of the header, padded to a multiple of 8.
    pub(crate) header: Vec<u8>,
    /// Byte range of each entry in the file, in the order of the entries.
    pub(crate) ranges: Vec<Range<u64>>,
    /// Indices of the entries in file order, without gaps between them.
    pub(crate) order: Vec<usize>,
    /// Size of the file.
    pub(crate) bytes: u64,
}

impl Layout {
    /// Lays out a file like the safetensors library: by decreasing alignment, then by name. The same input gives the
    /// same bytes.
    pub(crate) fn new(entries: &[Entry], metadata: &BTreeMap<String, String>) -> Result<Self> {
        let too_large = || Error::Argument("the tensors are too large for one file".into());
        let mut order: Vec<(Dtype, usize)> = Vec::with_capacity(entries.len());
        for (i, entry) in entries.iter().enumerate() {
            order.push((file_dtype(entry.dtype)?, i));
        }
        order.sort_by(|a, b| (Reverse(a.0), &entries[a.1].name).cmp(&(Reverse(b.0), &entries[b.1].name)));
        let mut tensors = Vec::with_capacity(entries.len());
        let mut offsets = vec![(0, 0); entries.len()];
        let mut end = 0usize;
        for &(dtype, i) in &order {
            let entry = &entries[i];
            let start = end;
            let bytes = checked_bytes(&entry.shape, entry.dtype.size()).ok_or_else(too_large)?;
            end = start.checked_add(bytes).ok_or_else(too_large)?;
            offsets[i] = (start, end);
            tensors.push((
                entry.name.as_str(),
                tensor::TensorInfo { dtype, shape: entry.shape.clone(), data_offsets: (start, end) },
            ));
        }
        let json = serde_json::to_vec(&Json { metadata, tensors: &tensors })
            .map_err(|error| Error::Argument(format!("can't write a safetensors header: {error}")))?;
        let mut header = (json.len().next_multiple_of(8) as u64).to_le_bytes().to_vec();
        header.extend(&json);
        header.resize(8 + json.len().next_multiple_of(8), b' ');
        let base = header.len() as u64;
        let bytes = base.checked_add(end as u64).ok_or_else(too_large)?;
        let ranges = offsets.into_iter().map(|(start, end)| base + start as u64..base + end as u64).collect();
        let order = order.into_iter().map(|(_, i)| i).collect();
        Ok(Layout { header, ranges, order, bytes })
    }
}

/// JSON of the header: the metadata, then the tensors in file order.
struct Json<'a> {
    metadata: &'a BTreeMap<String, String>,
    tensors: &'a [(&'a str, tensor::TensorInfo)],
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.tensors.len() + 1))?;
        map.serialize_entry("__metadata__", self.metadata)?;
        for (name, info) in self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

/// Returns the safetensors library's dtype.
fn file_dtype(dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        DType::I64 => Dtype::I64,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        other => return Err(Error::Argument(format!("dtype {other} can't be written to a safetensors file"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_safetensors_library_reads_the_layout() {
        let entry = |name: &str, dtype, shape: &[usize]| Entry { name: name.into(), dtype, shape: shape.to_vec() };
        let entries = [entry("z", DType::U8, &[3]), entry("b", DType::F32, &[2, 2]), entry("a", DType::F32, &[])];
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let layout = Layout::new(&entries, &metadata).unwrap();
        assert_eq!(layout.header.len() % 8, 0);
        let mut file = layout.header.clone();
        file.resize(layout.bytes as usize, 7);
        let (_, read) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(read.offset_keys(), ["a", "b", "z"]);
        let base = layout.header.len() as u64;
        assert_eq!(layout.ranges, [base + 20..base + 23, base + 4..base + 20, base..base + 4]);
    }
}
