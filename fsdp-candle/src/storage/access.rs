//! Reading and writing a tensor's memory in place.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use fsdp_core::{Buffer, Readable, Writable};
use std::sync::Mutex;

use super::convert::to_core_dtype;

/// A contiguous tensor that a collective or a checkpoint reads in place, its storage locked against writers meanwhile.
pub(crate) struct TensorMemory(pub(crate) Tensor);

impl TensorMemory {
    /// Calls `f` with all elements as bytes in native order.
    pub(crate) fn read_with(&self, f: impl FnOnce(&[u8])) -> Result<()> {
        let mut f = Some(f);
        let read = self.read(&mut |bytes| {
            if let Some(f) = f.take() {
                f(bytes);
            }
        });
        read.map_err(candle_core::Error::msg)
    }
}

impl Readable for TensorMemory {
    fn dtype(&self) -> fsdp_core::DType {
        to_core_dtype(self.0.dtype()).unwrap_or(fsdp_core::DType::F32)
    }

    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        let (storage, layout) = self.0.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { return Err("the tensor is not in host memory".into()) };
        let Some((start, end)) = layout.contiguous_offsets() else { return Err("the tensor is not contiguous".into()) };
        match storage {
            CpuStorage::U8(v) => f(&v[start..end]),
            CpuStorage::U32(v) => f(bytemuck::cast_slice(&v[start..end])),
            CpuStorage::I64(v) => f(bytemuck::cast_slice(&v[start..end])),
            CpuStorage::BF16(v) => f(bytemuck::cast_slice(&v[start..end])),
            CpuStorage::F16(v) => f(bytemuck::cast_slice(&v[start..end])),
            CpuStorage::F32(v) => f(bytemuck::cast_slice(&v[start..end])),
            CpuStorage::F64(v) => f(bytemuck::cast_slice(&v[start..end])),
            _ => return Err("the tensor's storage is elsewhere".into()),
        }
        Ok(())
    }
}

impl Writable for TensorMemory {
    fn dtype(&self) -> fsdp_core::DType {
        Readable::dtype(self)
    }

    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> std::result::Result<(), String> {
        // The operation wants a function that can be called from anywhere; it is called once, here.
        let f = Mutex::new(f);
        let write = |bytes: &mut [u8]| {
            f.lock().unwrap_or_else(|poisoned| poisoned.into_inner())(bytes);
            Ok(())
        };
        with_bytes_mut(&self.0, write).map_err(|error| error.to_string())
    }
}

struct Write<F>(Mutex<F>);

impl<F: FnMut(&mut [u8]) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("the tensor is not contiguous") };
        let mut f = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match storage {
            CpuStorage::U8(v) => f(&mut v[start..end]),
            CpuStorage::U32(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            CpuStorage::I64(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            CpuStorage::BF16(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            CpuStorage::F16(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            CpuStorage::F32(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            CpuStorage::F64(v) => f(bytemuck::cast_slice_mut(&mut v[start..end])),
            _ => bail!("the tensor's storage is elsewhere"),
        }
    }
}

/// Lets `f` write a contiguous tensor's elements as bytes in native order.
pub(crate) fn with_bytes_mut(tensor: &Tensor, f: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
    tensor.inplace_op1(&Write(Mutex::new(f)))
}

/// Copies a tensor's elements, row-major, into `buffer`, which has its dtype and length.
pub(crate) fn copy_out(tensor: &Tensor, buffer: &mut Buffer) -> Result<()> {
    let tensor = tensor.contiguous()?;
    if Readable::dtype(&TensorMemory(tensor.clone())) != buffer.dtype() || tensor.elem_count() != buffer.len() {
        bail!(
            "a gradient of {:?} {:?} for a buffer of {} {}",
            tensor.dtype(),
            tensor.shape(),
            buffer.dtype(),
            buffer.len()
        )
    }
    let bytes = buffer.bytes_mut();
    TensorMemory(tensor).read_with(|source| bytes.copy_from_slice(source))
}
