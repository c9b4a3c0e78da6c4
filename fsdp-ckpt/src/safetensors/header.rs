//! The header: eight bytes of length, JSON, padding.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_core::DType;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::region::checked_bytes;
use crate::{Error, Result};

/// A tensor to write.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// A file to write: its header, and where each tensor goes.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The first bytes of the file, padded so that tensors start at a multiple of 8.
    pub(crate) header: Vec<u8>,
    /// Where each entry's bytes lie in the file, in the order the entries were given.
    pub(crate) ranges: Vec<Range<u64>>,
    /// The entries' positions in the order in which they lie; nothing lies between them.
    pub(crate) order: Vec<usize>,
    /// The size of the whole file.
    pub(crate) bytes: u64,
}

impl Layout {
    /// Lays out a file as the safetensors library does: the largest alignment first, then by name. Equal input gives
    /// equal bytes.
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
                TensorInfo { dtype, shape: entry.shape.clone(), data_offsets: (start, end) },
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

/// The header's JSON: the metadata first, then tensors in the order in which they lie.
struct Json<'a> {
    metadata: &'a BTreeMap<String, String>,
    tensors: &'a [(&'a str, TensorInfo)],
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

/// The safetensors library's name for a dtype.
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
    fn the_safetensors_library_reads_what_is_laid_out() {
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
