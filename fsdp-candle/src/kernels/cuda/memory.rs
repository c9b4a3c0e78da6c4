//! A device's memory: Candle's slices and the collectives' buffers are the same memory.

use std::ops::Range;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, Result, Storage, bail};
use cudarc::driver::{CudaSlice, DevicePtr, LaunchConfig, result};
use fsdp_core::device::cuda::{CudaMemory, CudaView, failed};
use fsdp_core::{Buffer, DType, View};

use super::super::doors::StorageMut;
use super::super::set::Rows;
use super::super::slice::{Slice, SliceMut, ViewMut};
use super::device::Cuda;
use super::launch::THREADS;
use crate::error::Error;

pub(super) fn storage(cuda: &Cuda, buffer: Buffer) -> Result<Storage> {
    let memory = match buffer {
        Buffer::Cuda(memory) if memory.stream().cu_stream() == cuda.stream.cu_stream() => memory,
        other => bail!("a buffer of {} is in the memory of {}", other.dtype(), other.device()),
    };
    let lost = |memory: CudaMemory| candle_core::Error::msg(format!("memory of {} has another type", memory.dtype()));
    let slice = match memory.dtype() {
        DType::U8 => CudaStorageSlice::U8(memory.into_slice().map_err(lost)?),
        DType::U32 => CudaStorageSlice::U32(memory.into_slice().map_err(lost)?),
        DType::I64 => CudaStorageSlice::I64(memory.into_slice().map_err(lost)?),
        DType::BF16 => CudaStorageSlice::BF16(memory.into_slice().map_err(lost)?),
        DType::F16 => CudaStorageSlice::F16(memory.into_slice().map_err(lost)?),
        DType::F32 => CudaStorageSlice::F32(memory.into_slice().map_err(lost)?),
        DType::F64 => CudaStorageSlice::F64(memory.into_slice().map_err(lost)?),
        other => bail!("a buffer of {other} has no Candle storage"),
    };
    Ok(Storage::Cuda(CudaStorage { slice, device: cuda.device.clone() }))
}

pub(super) fn buffer(storage: Storage) -> Option<Buffer> {
    let Storage::Cuda(storage) = storage else { return None };
    let memory = match storage.slice {
        CudaStorageSlice::U8(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::U32(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::I64(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::BF16(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::F16(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::F32(slice) => CudaMemory::from_slice(slice),
        CudaStorageSlice::F64(slice) => CudaMemory::from_slice(slice),
        _ => return None,
    };
    Some(Buffer::Cuda(memory))
}

pub(super) fn freed_storage(cuda: &Cuda) -> Result<Storage> {
    let nothing = cuda.stream.null::<u8>();
    let nothing = nothing.map_err(|error| Error::Core(failed(&cuda.stream, "taking memory away", &error)))?;
    Ok(Storage::Cuda(CudaStorage { slice: CudaStorageSlice::F4(nothing), device: cuda.device.clone() }))
}

/// A slice's bytes. Nobody but the stream's own order tells when they may be read or written.
fn all<T>(slice: &CudaSlice<T>) -> CudaView<'_> {
    // SAFETY: the slice has so many bytes at its address, for as long as it is borrowed.
    unsafe { CudaView::new(slice.device_ptr(slice.stream()).0, slice.num_bytes(), slice.stream()) }
}

/// The bytes in a storage, and their dtype.
fn view(storage: &CudaStorage) -> Result<(DType, CudaView<'_>)> {
    Ok(match &storage.slice {
        CudaStorageSlice::U8(slice) => (DType::U8, all(slice)),
        CudaStorageSlice::U32(slice) => (DType::U32, all(slice)),
        CudaStorageSlice::I64(slice) => (DType::I64, all(slice)),
        CudaStorageSlice::BF16(slice) => (DType::BF16, all(slice)),
        CudaStorageSlice::F16(slice) => (DType::F16, all(slice)),
        CudaStorageSlice::F32(slice) => (DType::F32, all(slice)),
        CudaStorageSlice::F64(slice) => (DType::F64, all(slice)),
        _ => bail!("the tensor's storage is elsewhere"),
    })
}

pub(super) fn slice(storage: &Storage, elements: Range<usize>) -> Result<Slice<'_>> {
    let Storage::Cuda(storage) = storage else { bail!("the tensor is not in memory of a CUDA device") };
    let (dtype, view) = view(storage)?;
    Slice::new(dtype, View::Cuda(view)).range(elements)
}

pub(super) fn slice_mut(storage: StorageMut<'_>, elements: Range<usize>) -> Result<SliceMut<'_>> {
    let StorageMut::Cuda(storage) = storage else { bail!("the tensor is not in memory of a CUDA device") };
    let (dtype, view) = view(storage)?;
    SliceMut::new(dtype, ViewMut::Cuda(view)).range(elements)
}

pub(super) fn read(cuda: &Cuda, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
    f(&cuda.view(from)?.to_host().map_err(Error::from)?);
    Ok(())
}

pub(super) fn write(cuda: &Cuda, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
    let to = cuda.view_mut(to)?;
    let len = to.bytes();
    let bytes = Buffer::try_zeros(DType::U8, len).map_err(Error::from)?;
    let Ok(mut bytes) = bytes.into_vec::<u8>() else { bail!("bytes of the host are no bytes") };
    f(&mut bytes);
    if len == 0 {
        return Ok(());
    }
    let what = |error| Error::Core(failed(&cuda.stream, "copying to the device", &error));
    cuda.stream.context().bind_to_thread().map_err(what)?;
    // SAFETY: both are memory of this many bytes. Those of the host, which are pageable, are read before the call
    // returns.
    unsafe { result::memcpy_htod_async(to.address(), &bytes, cuda.stream.cu_stream()) }.map_err(what)?;
    Ok(())
}

/// Writes zeros, which are all bits zero in every dtype.
pub(super) fn clear(cuda: &Cuda, to: CudaView<'_>) -> Result<()> {
    if to.bytes() == 0 {
        return Ok(());
    }
    let what = |error| Error::Core(failed(&cuda.stream, "writing zeros", &error));
    cuda.stream.context().bind_to_thread().map_err(what)?;
    // SAFETY: the view is of so many bytes, which the caller may write.
    unsafe { result::memset_d8_async(to.address(), 0, to.bytes(), cuda.stream.cu_stream()) }.map_err(what)?;
    Ok(())
}

pub(super) fn copy_rows(cuda: &Cuda, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
    let size = rows.check(&from, &to)?;
    let Rows { count, len, from_stride, to_stride } = rows;
    let (from, to) = (cuda.view(from)?, cuda.view_mut(to)?);
    if count == 0 || len == 0 {
        return Ok(());
    }
    if count == 1 || (from_stride == len && to_stride == len) {
        let (Some(from), Some(to)) = (from.range(0..count * len * size), to.range(0..count * len * size)) else {
            bail!("rows reach beyond their memory")
        };
        return Ok(from.copy_to(to, &cuda.stream).map_err(Error::from)?);
    }
    // Short rows share a block.
    let width = (len as u64).next_power_of_two().min(u64::from(THREADS)) as u32;
    let together = THREADS / width;
    let across = (len as u64).div_ceil(u64::from(width)).min(1 << 16) as u32;
    let down = (count as u64).div_ceil(u64::from(together)).min(1 << 15) as u32;
    let config = LaunchConfig { grid_dim: (across, down, 1), block_dim: (width, together, 1), shared_mem_bytes: 0 };
    let args = [from.into(), to.into(), count.into(), len.into(), from_stride.into(), to_stride.into()];
    // SAFETY: the kernel's arguments; all rows fit into both, as was checked.
    unsafe { cuda.launch(&format!("copy_rows_{size}"), config, &args) }
}
