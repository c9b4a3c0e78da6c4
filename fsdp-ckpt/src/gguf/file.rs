//! The bytes of a GGUF file.
//!
//! Candle's `gguf_file::write` takes all quantized tensors at once. This writer computes the header from names, shapes
//! and types alone, and then appends one block after another.

use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::quantized::GgmlDType;

use crate::error::io_error;
use crate::gguf::metadata::Value;
use crate::region::checked_bytes;
use crate::store::{LocalStaging, Staging, remove_stale, require_local, split};
use crate::{Error, Result};

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Offsets of tensors are multiples of this.
const ALIGNMENT: u64 = 32;
/// llama.cpp's longest tensor name.
const MOST_NAME: usize = 63;

/// A tensor in the header.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// Shape, row-major.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: GgmlDType,
}

/// Everything before the tensors, with padding.
pub(super) struct Header {
    bytes: Vec<u8>,
    /// Size of the file.
    total: u64,
}

impl Header {
    pub(super) fn new(metadata: &[(String, Value)], tensors: &[TensorInfo]) -> Result<Self> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            text(&mut bytes, key);
            write_value(&mut bytes, value);
        }
        let mut offset = 0u64;
        for tensor in tensors {
            let too_large = || Error::Argument(format!("tensor \"{}\" is too large for a GGUF file", tensor.name));
            if tensor.name.len() > MOST_NAME {
                return Err(too_large());
            }
            text(&mut bytes, &tensor.name);
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                bytes.extend((*size as u64).to_le_bytes());
            }
            bytes.extend(type_id(tensor.dtype).to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            let elements = checked_bytes(&tensor.shape, 1).ok_or_else(too_large)? / tensor.dtype.block_size();
            let size = (elements as u64).checked_mul(tensor.dtype.type_size() as u64).ok_or_else(too_large)?;
            offset = offset.checked_add(size.next_multiple_of(ALIGNMENT)).ok_or_else(too_large)?;
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
        let total = bytes.len() as u64 + offset;
        Ok(Header { bytes, total })
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Numbers of the types of values.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

fn write_value(bytes: &mut Vec<u8>, value: &Value) {
    let array = |bytes: &mut Vec<u8>, kind: u32, length: usize| {
        bytes.extend(ARRAY.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((length as u64).to_le_bytes());
    };
    match value {
        Value::U32(value) => bytes.extend([U32.to_le_bytes(), value.to_le_bytes()].concat()),
        Value::F32(value) => bytes.extend([F32.to_le_bytes(), value.to_le_bytes()].concat()),
        Value::Bool(value) => {
            bytes.extend(BOOL.to_le_bytes());
            bytes.push(u8::from(*value));
        }
        Value::Text(value) => {
            bytes.extend(TEXT.to_le_bytes());
            text(bytes, value);
        }
        Value::Texts(values) => {
            array(bytes, TEXT, values.len());
            values.iter().for_each(|value| text(bytes, value));
        }
        Value::I32s(values) => {
            array(bytes, I32, values.len());
            values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
        Value::F32s(values) => {
            array(bytes, F32, values.len());
            values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
        Value::Bools(values) => {
            array(bytes, BOOL, values.len());
            bytes.extend(values.iter().map(|value| u8::from(*value)));
        }
    }
}

/// Returns the number of a type. Candle's own function is private.
fn type_id(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    }
}

/// A file in progress. Dropping it before [`GgufFile::finish`] removes it.
pub(super) struct GgufFile {
    staging: LocalStaging,
    out: BufWriter<std::fs::File>,
    written: u64,
    total: u64,
}

/// Creates the file `dst` under a temporary name, and writes the header.
pub(super) fn create(dst: &Path, header: &Header) -> Result<GgufFile> {
    let dst = require_local(dst, "a GGUF file")?;
    if dst.symlink_metadata().is_ok() {
        return Err(Error::AlreadyExists { path: dst.to_path_buf() });
    }
    remove_stale(&split(dst)?.0);
    let staging = LocalStaging::create_file(dst)?;
    let handle = staging.file().try_clone().map_err(io_error("open", dst))?;
    let mut file =
        GgufFile { staging, out: BufWriter::with_capacity(1 << 20, handle), written: 0, total: header.total };
    file.append(&header.bytes)?;
    Ok(file)
}

impl GgufFile {
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes).map_err(io_error("write", self.staging.path()))
    }

    /// Appends zeros up to the offset of the next tensor.
    pub(super) fn pad(&mut self) -> Result<()> {
        let zeros = self.written.next_multiple_of(ALIGNMENT) - self.written;
        self.append(&vec![0; zeros as usize])
    }

    /// Waits until the file is durable, gives it its name, and returns its size.
    pub(super) fn finish(mut self) -> Result<u64> {
        if self.written != self.total {
            let reason = format!("{} bytes were written, expected {}", self.written, self.total);
            return Err(Error::ShardMemory { tensor: self.staging.name(), reason });
        }
        self.out.flush().map_err(io_error("write", self.staging.path()))?;
        self.staging.rename(false)?;
        Ok(self.total)
    }
}
