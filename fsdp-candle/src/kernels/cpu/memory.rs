//! The host's memory: Candle's vectors and the collectives' buffers are the same vectors.

use std::any::Any;
use std::ops::Range;

use bytemuck::Pod;
use candle_core::{CpuStorage, Result, Storage, bail};
use fsdp_core::{Buffer, DType, Element, View};

use super::super::doors::StorageMut;
use super::super::set::Rows;
use super::super::slice::{Slice, SliceMut, ViewMut};

pub(super) fn storage(buffer: Buffer) -> Result<Storage> {
    Ok(Storage::Cpu(match buffer {
        Buffer::U8(v) => CpuStorage::U8(v),
        Buffer::U32(v) => CpuStorage::U32(v),
        Buffer::I64(v) => CpuStorage::I64(v),
        Buffer::BF16(v) => CpuStorage::BF16(v),
        Buffer::F16(v) => CpuStorage::F16(v),
        Buffer::F32(v) => CpuStorage::F32(v),
        Buffer::F64(v) => CpuStorage::F64(v),
        other => bail!("a buffer of {} has no Candle storage", other.dtype()),
    }))
}

pub(super) fn buffer(storage: Storage) -> Option<Buffer> {
    let Storage::Cpu(storage) = storage else { return None };
    match storage {
        CpuStorage::U8(v) => Some(Buffer::U8(v)),
        CpuStorage::U32(v) => Some(Buffer::U32(v)),
        CpuStorage::I64(v) => Some(Buffer::I64(v)),
        CpuStorage::BF16(v) => Some(Buffer::BF16(v)),
        CpuStorage::F16(v) => Some(Buffer::F16(v)),
        CpuStorage::F32(v) => Some(Buffer::F32(v)),
        CpuStorage::F64(v) => Some(Buffer::F64(v)),
        _ => None,
    }
}

pub(super) fn freed_storage() -> Storage {
    Storage::Cpu(CpuStorage::F4(vec![]))
}

/// Binds the vector in a storage and its dtype, whatever it is.
macro_rules! each {
    ($storage:expr, ($v:ident, $dtype:ident) => $body:expr) => {
        match $storage {
            CpuStorage::U8($v) => each!(@ U8, $dtype, $body),
            CpuStorage::U32($v) => each!(@ U32, $dtype, $body),
            CpuStorage::I64($v) => each!(@ I64, $dtype, $body),
            CpuStorage::BF16($v) => each!(@ BF16, $dtype, $body),
            CpuStorage::F16($v) => each!(@ F16, $dtype, $body),
            CpuStorage::F32($v) => each!(@ F32, $dtype, $body),
            CpuStorage::F64($v) => each!(@ F64, $dtype, $body),
            _ => bail!("the tensor's storage is elsewhere"),
        }
    };
    (@ $variant:ident, $dtype:ident, $body:expr) => {{
        let $dtype = DType::$variant;
        $body
    }};
}

pub(super) fn slice(storage: &Storage, elements: Range<usize>) -> Result<Slice<'_>> {
    let Storage::Cpu(storage) = storage else { bail!("the tensor is not in host memory") };
    each!(storage, (v, dtype) => Slice::new(dtype, View::Host(bytemuck::cast_slice(v))).range(elements))
}

pub(super) fn slice_mut(storage: StorageMut<'_>, elements: Range<usize>) -> Result<SliceMut<'_>> {
    let StorageMut::Cpu(storage) = storage else { bail!("the tensor is not in host memory") };
    each!(storage, (v, dtype) => SliceMut::new(dtype, ViewMut::Host(bytemuck::cast_slice_mut(v))).range(elements))
}

pub(super) fn bytes(slice: Slice<'_>) -> Result<&[u8]> {
    match slice.view() {
        View::Host(bytes) => Ok(bytes),
        _ => bail!("the elements are not in host memory"),
    }
}

pub(super) fn bytes_mut(slice: SliceMut<'_>) -> Result<&mut [u8]> {
    match slice.into_view() {
        ViewMut::Host(bytes) => Ok(bytes),
        #[cfg(feature = "cuda")]
        ViewMut::Cuda(_) => bail!("the elements are not in host memory"),
    }
}

/// The elements of a slice of their type.
pub(super) fn elements<T: Element + Pod>(slice: Slice<'_>) -> Result<&[T]> {
    let dtype = slice.dtype();
    match bytemuck::try_cast_slice(bytes(slice)?) {
        Ok(elements) if dtype == T::DTYPE => Ok(elements),
        _ => bail!("expected elements of {}, got {dtype}", T::DTYPE),
    }
}

/// [`elements`], to write to.
pub(super) fn elements_mut<T: Element + Pod>(slice: SliceMut<'_>) -> Result<&mut [T]> {
    let dtype = slice.dtype();
    match bytemuck::try_cast_slice_mut(bytes_mut(slice)?) {
        Ok(elements) if dtype == T::DTYPE => Ok(elements),
        _ => bail!("expected elements of {}, got {dtype}", T::DTYPE),
    }
}

/// Leaves a number in one element.
pub(super) fn put(element: SliceMut<'_>, number: f64) -> Result<()> {
    match elements_mut::<f64>(element)? {
        [element] => *element = number,
        elements => bail!("one number does not go with {} elements", elements.len()),
    }
    Ok(())
}

/// An error unless there are as many of one as of the other.
pub(super) fn same_length(a: usize, b: usize) -> Result<()> {
    if a == b { Ok(()) } else { bail!("{a} elements do not go with {b}") }
}

/// The elements of a buffer for layers that compute on the host, if they are of this type and there.
pub(crate) fn host_elements<T: 'static>(buffer: &mut Buffer) -> Option<&mut [T]> {
    let elements: &mut dyn Any = match buffer {
        Buffer::BF16(v) => v,
        Buffer::F16(v) => v,
        Buffer::F32(v) => v,
        Buffer::F64(v) => v,
        _ => return None,
    };
    elements.downcast_mut::<Vec<T>>().map(Vec::as_mut_slice)
}

pub(super) fn copy_rows(from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
    let size = rows.check(&from, &to)?;
    let Rows { count, len, from_stride, to_stride } = rows;
    if count == 0 || len == 0 {
        return Ok(());
    }
    let (from, to) = (bytes(from)?, bytes_mut(to)?);
    for row in 0..count {
        let (read, written) = (row * from_stride * size, row * to_stride * size);
        to[written..written + len * size].copy_from_slice(&from[read..read + len * size]);
    }
    Ok(())
}
