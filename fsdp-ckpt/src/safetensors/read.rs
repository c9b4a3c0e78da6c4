//! Reading boxes of tensors.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use fsdp_core::DType;
use fsdp_core::layout::Region;
use safetensors::tensor::{Dtype, Metadata};

use crate::checksum::Checksum;
use crate::error::did_you_mean;
use crate::region::{check_request, checked_bytes, runs};
use crate::scattered::read_runs;
use crate::store::{ReadAt, open_file, room};
use crate::{Error, Result, TensorInfo};

/// The safetensors library's own limit on a header.
const MAX_HEADER: u64 = 100_000_000;

/// A safetensors file that is open, with a header that has been checked against the file's size.
///
/// Reads go to the byte ranges that are asked for and take no lock: several threads may read at once.
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
    /// Where its bytes start in the file.
    start: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::NotSafetensors`] when the header is damaged or does not match the file's size.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(open_file(path)?)
    }

    /// Reads the header of a file.
    pub(crate) fn new(file: Box<dyn ReadAt>) -> Result<Self> {
        Self::with_header(file, None)
    }

    /// Reads the header of a file, which must have this CRC-32C, its length and padding included.
    pub(crate) fn with_header(file: Box<dyn ReadAt>, expected: Option<u32>) -> Result<Self> {
        let bytes = file.bytes();
        let bad = |reason: String| Error::NotSafetensors { path: file.path().to_path_buf(), reason };
        if bytes < 8 {
            return Err(bad(format!("it has {bytes} bytes, a header has at least 8")));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        // Both bounds come before the allocation.
        if length > bytes - 8 || length > MAX_HEADER {
            return Err(bad(format!("its header claims {length} bytes, the file has {bytes}")));
        }
        let mut header = room(file.path(), length)?;
        file.read_exact_at(&mut header, 8)?;
        if let Some(expected) = expected {
            let mut checksum = Checksum::new();
            checksum.update(&length.to_le_bytes());
            checksum.update(&header);
            let found = checksum.value();
            if found != expected {
                return Err(Error::Header { path: file.path().to_path_buf(), expected, found });
            }
        }
        // This checks that tensors lie one after another, that none overlap, and that each has the bytes its dtype and
        // shape need.
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

    /// The file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The header's `__metadata__`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// A tensor's dtype and shape.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::DType`] for one that [`DType`] has not.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        let (stored, dtype) = self.find(name)?;
        Ok(TensorInfo { dtype, shape: stored.shape.clone(), file: self.path().to_path_buf() })
    }

    /// Reads a box of a tensor into `into`, row-major. Only the bytes of the box are read.
    ///
    /// # Errors
    /// As [`SafetensorsFile::info`]; [`Error::Request`] when the tensor has no such box or `into` not its size in
    /// bytes; [`Error::Io`].
    pub fn read(&self, name: &str, region: &Region, into: &mut [u8]) -> Result<()> {
        let (stored, dtype) = self.find(name)?;
        check_request(name, &stored.shape, dtype.size(), region, into.len())?;
        if region.is_empty() {
            return Ok(());
        }
        let whole = Region::whole(&stored.shape);
        read_runs(&*self.file, stored.start, runs(&whole, region, region, dtype.size()), into, &mut |_| ())
    }

    /// Reads `part` of the box `chunk`, which is what this file holds of a tensor, to its place in `into`, which is the
    /// box `region` of the same tensor. All three are checked by the caller. `seen` gets what is read, in the file's
    /// order: the chunk's bytes, where `part` is all of it.
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

    /// Passes all bytes of a tensor to `seen`, a block at a time.
    pub(crate) fn scan(&self, name: &str, seen: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (stored, dtype) = self.find(name)?;
        let bytes = stored.shape.iter().product::<usize>() * dtype.size();
        let most = self.file.grain().block;
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
            None => Err(Error::DType { path: self.path().to_path_buf(), tensor: name.to_string(), dtype: text }),
        }
    }
}
