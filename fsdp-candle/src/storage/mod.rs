//! The memory of tensors: converted to and from buffers, swapped, read and written in place, and pooled.
//!
//! Candle's storages and the buffers of collectives are the same memory, so conversions do not copy. All views of a
//! tensor share its storage. A storage that is swapped into a parameter before backward is therefore seen by the graph
//! that forward recorded, as with PyTorch's `untyped_storage().resize_()` under FSDP2.

mod pool;

use std::ops::Range;

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Storage, Tensor, Var, bail};
use fsdp_core::{Allocator, Buffer, DType as CoreDType, DeviceId, Readable, View, Writable};

use crate::error::Error;
use crate::kernels::{self, Kernels, Slice, SliceMut};

pub(crate) use pool::{Pool, PooledBuffer};

/// Converts a buffer to a storage.
pub(crate) fn to_storage(buffer: Buffer) -> Result<Storage> {
    kernels::of_buffer(&buffer)?.storage(buffer)
}

/// Converts a storage to a buffer. `None` for a freed storage and for dtypes that collectives do not move.
pub(crate) fn to_buffer(storage: Storage) -> Result<Option<Buffer>> {
    Ok(kernels::of_device(&storage.device())?.buffer(storage))
}

/// Converts a buffer to a tensor on a device.
pub(crate) fn to_tensor(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Tensor> {
    of_storage(buffer, shape, false)?.to_device(device)
}

/// Converts a buffer to a variable on a device.
pub(crate) fn to_var(buffer: Buffer, shape: &[usize], device: &Device) -> Result<Var> {
    Var::from_tensor(&of_storage(buffer, shape, true)?.to_device(device)?)
}

/// Converts a tensor to another dtype. Also works for tensors without elements, such as the shards of some ranks:
/// Candle launches a CUDA kernel without threads for them, which CUDA refuses.
pub(crate) fn to_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype || tensor.elem_count() > 0 {
        return tensor.to_dtype(dtype);
    }
    let nothing = kernels::of_device(tensor.device())?.zeros(to_core_dtype(dtype)?, 0).map_err(Error::from)?;
    to_tensor(nothing, tensor.dims(), tensor.device())
}

/// Adds two tensors of one shape, dtype and device, outside of the graph. Candle's sum takes several times as long on CUDA
/// devices, and for half floats on CPUs.
pub(crate) fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (x, y) = (x.detach(), y.detach());
    let is_float = to_core_dtype(x.dtype()).is_ok_and(CoreDType::is_float);
    if x.device().is_metal() || x.elem_count() == 0 || !is_float {
        return x + y;
    }
    let (x, y) = (x.contiguous()?, y.contiguous()?);
    let sum = with_slice(&x, |kernels, x| with_slice(&y, |_, y| kernels.sum(x, y)))?;
    to_tensor(sum, x.dims(), x.device())
}

fn of_storage(buffer: Buffer, shape: &[usize], is_variable: bool) -> Result<Tensor> {
    let len = buffer.len();
    if shape.iter().product::<usize>() != len {
        bail!("{len} elements do not fill a tensor of shape {shape:?}")
    }
    Ok(Tensor::from_storage(to_storage(buffer)?, shape, BackpropOp::none(), is_variable))
}

/// Converts Candle's dtype to fsdp-core's.
pub(crate) fn to_core_dtype(dtype: DType) -> Result<CoreDType> {
    Ok(match dtype {
        DType::U8 => CoreDType::U8,
        DType::U32 => CoreDType::U32,
        DType::I64 => CoreDType::I64,
        DType::BF16 => CoreDType::BF16,
        DType::F16 => CoreDType::F16,
        DType::F32 => CoreDType::F32,
        DType::F64 => CoreDType::F64,
        other => bail!("tensors of {other:?} cannot be sharded; use U8, U32, I64, BF16, F16, F32, F64"),
    })
}

/// Replaces the storage of `tensor` and all of its views. Returns the old storage.
pub(crate) fn swap(tensor: &Tensor, storage: Storage) -> Result<Storage> {
    kernels::in_place(tensor, |at, _| at.replace(storage))
}

/// Takes the storage out of `tensor` and all of its views. Every later use of them is an error.
pub(crate) fn take(tensor: &Tensor) -> Result<Storage> {
    swap(tensor, kernels::of_device(tensor.device())?.freed_storage()?)
}

/// Returns the storage of a row-major copy of a tensor.
pub(crate) fn copied_storage(tensor: &Tensor) -> Result<Storage> {
    take(&tensor.detach().force_contiguous()?)
}

/// Returns a storage without elements. A tensor made with it reports `dtype` forever, whatever is swapped in later.
pub(crate) fn empty(dtype: DType, device: &Device) -> Result<Storage> {
    match dtype {
        DType::BF16 | DType::F16 | DType::F32 | DType::F64 => zeros(to_core_dtype(dtype)?, 0, device),
        other => bail!("a parameter of {other:?} cannot be sharded; use BF16, F16, F32 or F64"),
    }
}

/// Returns the storage of a scalar 0 of F32.
pub(crate) fn scalar(device: &Device) -> Result<Storage> {
    zeros(CoreDType::F32, 1, device)
}

fn zeros(dtype: CoreDType, len: usize, device: &Device) -> Result<Storage> {
    to_storage(kernels::of_device(device)?.zeros(dtype, len).map_err(Error::from)?)
}

/// Calls `f` with a contiguous tensor's elements, locked against writers, and its device's kernels.
pub(crate) fn with_slice<R>(tensor: &Tensor, f: impl FnOnce(&dyn Kernels, Slice<'_>) -> Result<R>) -> Result<R> {
    let kernels = kernels::of_device(tensor.device())?;
    let (storage, layout) = tensor.storage_and_layout();
    f(kernels, kernels.slice(&storage, offsets(layout)?)?)
}

/// [`with_slice`] for contiguous tensors of one device.
#[cfg(feature = "cuda")]
pub(crate) fn with_slices<R>(tensors: &[Tensor], f: impl FnOnce(Vec<Slice<'_>>) -> Result<R>) -> Result<R> {
    let storages: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let slices = tensors
        .iter()
        .zip(&storages)
        .map(|(tensor, (storage, layout))| kernels::of_device(tensor.device())?.slice(storage, offsets(layout)?));
    f(slices.collect::<Result<_>>()?)
}

/// Calls `f` with a contiguous tensor's elements to write to, locked against other users.
pub(crate) fn with_slice_mut<R>(tensor: &Tensor, f: impl FnOnce(&dyn Kernels, SliceMut<'_>) -> Result<R>) -> Result<R> {
    let kernels = kernels::of_device(tensor.device())?;
    kernels::in_place(tensor, |storage, layout| f(kernels, kernels.slice_mut(storage, offsets(layout)?)?))
}

fn offsets(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("the tensor is not contiguous"),
    }
}

/// Returns whether two tensors share a storage, which cannot be written and read at once.
pub(crate) fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    // One lock at a time: locking the same storage twice may deadlock.
    let address = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0);
    address(a) == address(b)
}

/// Memory or a file that a checkpoint reads and fills.
pub(crate) trait Memory: Readable + Writable {}
impl<T: Readable + Writable> Memory for T {}

/// A contiguous tensor that a collective or a checkpoint reads or writes in place. Locks the storage meanwhile.
pub(crate) struct TensorMemory(pub(crate) Tensor);

impl Readable for TensorMemory {
    fn dtype(&self) -> CoreDType {
        to_core_dtype(self.0.dtype()).unwrap_or(CoreDType::F32)
    }

    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn device(&self) -> DeviceId {
        kernels::device_id(self.0.device()).unwrap_or(DeviceId::Host)
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) -> std::result::Result<(), String> {
        with_slice(&self.0, |kernels, slice| kernels.read(slice, f)).map_err(|error| error.to_string())
    }

    fn view(&self, f: &mut dyn FnMut(View<'_>)) -> std::result::Result<(), String> {
        with_slice(&self.0, |_, slice| {
            f(slice.view());
            Ok(())
        })
        .map_err(|error| error.to_string())
    }
}

impl Writable for TensorMemory {
    fn dtype(&self) -> CoreDType {
        Readable::dtype(self)
    }

    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> std::result::Result<(), String> {
        with_slice_mut(&self.0, |kernels, slice| kernels.write(slice, f)).map_err(|error| error.to_string())
    }
}

/// Device memory that is allocated and freed by a device's kernels.
pub(crate) struct DeviceMemory(pub(crate) &'static dyn Kernels);

impl Allocator for DeviceMemory {
    fn take(&self, dtype: CoreDType, len: usize) -> fsdp_core::Result<Buffer> {
        self.0.zeros(dtype, len)
    }

    fn give(&self, buffer: Buffer) {
        drop(buffer);
    }
}

/// Copies a tensor's elements, row-major, into `buffer`, which has the same dtype and length.
pub(crate) fn copy_out(tensor: &Tensor, buffer: &mut Buffer) -> Result<()> {
    let tensor = tensor.contiguous()?;
    if to_core_dtype(tensor.dtype())? != buffer.dtype() || tensor.elem_count() != buffer.len() {
        bail!(
            "a gradient of {:?} {:?} does not fit a buffer of {} {}",
            tensor.dtype(),
            tensor.shape(),
            buffer.dtype(),
            buffer.len()
        )
    }
    with_slice(&tensor, |kernels, slice| kernels.copy(slice, buffer.into()))
}

/// Copies a range of a contiguous tensor's elements into `buffer`.
pub(crate) fn copy_range_out(tensor: &Tensor, elements: Range<usize>, buffer: &mut Buffer) -> Result<()> {
    with_slice(tensor, |kernels, slice| kernels.copy(slice.range(elements)?, buffer.into()))
}

/// Returns a tensor's elements, row-major.
pub(crate) fn copied(tensor: &Tensor) -> crate::error::Result<Buffer> {
    let dtype = to_core_dtype(tensor.dtype())?;
    let mut buffer = kernels::of_device(tensor.device())?.zeros(dtype, tensor.elem_count())?;
    copy_out(tensor, &mut buffer)?;
    Ok(buffer)
}

/// Copies `buffer` into a contiguous tensor of the same dtype and length.
pub(crate) fn copy_in(buffer: &Buffer, tensor: &Tensor) -> Result<()> {
    with_slice_mut(tensor, |kernels, slice| kernels.copy(buffer.into(), slice))
}

/// Returns a tensor's elements in host memory, row-major. Waits for a device.
pub(crate) fn to_host(tensor: &Tensor) -> crate::error::Result<Buffer> {
    let mut buffer = Buffer::try_zeros(to_core_dtype(tensor.dtype())?, tensor.elem_count())?;
    let mut copy = |bytes: &[u8]| buffer.bytes_mut().copy_from_slice(bytes);
    with_slice(&tensor.contiguous()?, |kernels, slice| kernels.read(slice, &mut copy))?;
    Ok(buffer)
}

/// Returns the F64 number that `f` writes for each tensor. Numbers of one device are read together, so the host waits
/// for the device once.
pub(crate) fn numbers_of<'a>(
    tensors: impl IntoIterator<Item = &'a Tensor>,
    f: impl Fn(&dyn Kernels, Slice<'_>, SliceMut<'_>) -> Result<()>,
) -> crate::error::Result<Vec<f64>> {
    let tensors: Vec<_> = tensors.into_iter().collect();
    let device = |tensor: &&Tensor| kernels::device_id(tensor.device());
    let devices = tensors.iter().map(device).collect::<crate::error::Result<Vec<_>>>()?;
    let mut numbers = vec![0.; tensors.len()];
    let mut rest: Vec<usize> = (0..tensors.len()).collect();
    while let Some(&first) = rest.first() {
        let together: Vec<usize>;
        (together, rest) = rest.into_iter().partition(|&at| devices[at] == devices[first]);
        let kernels = kernels::of_device(tensors[first].device())?;
        let mut all = kernels.zeros(CoreDType::F64, together.len())?;
        for (place, &at) in together.iter().enumerate() {
            let number = SliceMut::from(&mut all).range(place..place + 1)?;
            with_slice(&tensors[at].contiguous()?, |kernels, values| f(kernels, values, number))?;
        }
        let mut read: Vec<f64> = vec![];
        kernels.read((&all).into(), &mut |bytes| read = bytemuck::pod_collect_to_vec(bytes))?;
        for (at, number) in together.into_iter().zip(read) {
            numbers[at] = number;
        }
    }
    Ok(numbers)
}

/// Copies a contiguous tensor's elements into another tensor of the same dtype and length, on any device.
pub(crate) fn copy_tensor(from: &Tensor, to: &Tensor) -> Result<()> {
    if !from.device().same_device(to.device()) {
        return copy_tensor(&from.to_device(to.device())?, to);
    }
    if share_memory(from, to) {
        return copy_tensor(&from.copy()?, to);
    }
    with_slice_mut(to, |kernels, to| with_slice(from, |_, from| kernels.copy(from, to)))
}

/// Adds `more` to `sum`, of the same dtype and length.
pub(crate) fn add(sum: &mut Buffer, more: &Buffer) -> Result<()> {
    kernels::of_buffer(sum)?.add(sum.into(), more.into())
}

/// Multiplies a buffer by `factor`.
pub(crate) fn scale(buffer: &mut Buffer, factor: f64) -> Result<()> {
    kernels::of_buffer(buffer)?.scale(buffer.into(), factor)
}

/// Converts a buffer to another dtype. Gives the old buffer back to `memory`.
pub(crate) fn cast(from: Buffer, dtype: CoreDType, memory: &dyn Allocator) -> Result<Buffer> {
    if from.dtype() == dtype {
        return Ok(from);
    }
    let mut to = memory.take(dtype, from.len()).map_err(Error::from)?;
    kernels::of_buffer(&from)?.cast((&from).into(), (&mut to).into())?;
    memory.give(from);
    Ok(to)
}

/// Copies all elements of a buffer to another of the same dtype and length.
pub(crate) fn copy(from: &Buffer, to: &mut Buffer) -> Result<()> {
    kernels::of_buffer(from)?.copy(from.into(), to.into())
}

/// Makes an F32 buffer on a device, to be sent with other device memory.
pub(crate) fn from_numbers(numbers: &[f32], device: &Device) -> Result<Buffer> {
    let kernels = kernels::of_device(device)?;
    let mut buffer = kernels.zeros(CoreDType::F32, numbers.len()).map_err(Error::from)?;
    kernels.write((&mut buffer).into(), &mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(numbers)))?;
    Ok(buffer)
}

/// Reads a buffer of F32.
pub(crate) fn to_numbers(buffer: &Buffer) -> Result<Vec<f32>> {
    let mut numbers = vec![];
    let mut take = |bytes: &[u8]| numbers = bytemuck::pod_collect_to_vec(bytes);
    kernels::of_buffer(buffer)?.read(buffer.into(), &mut take)?;
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsdp_core::Buffer;

    #[test]
    fn views_see_the_new_storage() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let view = tensor.t().unwrap();
        let new = to_storage(vec![0f32, 1., 2., 3., 4., 5.].into()).unwrap();
        let old = swap(&tensor, new).unwrap();
        assert_eq!(to_buffer(old).unwrap(), Some(Buffer::from(vec![0f32; 6])));
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[0., 3.], [1., 4.], [2., 5.]]);
    }

    #[test]
    fn every_use_of_a_freed_tensor_is_an_error() {
        let bad = Tensor::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
        let good = bad.copy().unwrap();
        take(&bad).unwrap();
        let ids = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        for result in [
            good.matmul(&bad),
            &good + &bad,
            bad.exp(),
            bad.sum_all(),
            bad.to_dtype(DType::F64),
            bad.contiguous().and_then(|t| t.affine(2., 0.)),
            bad.t().and_then(|t| t.contiguous()),
            bad.index_select(&ids, 0),
            Tensor::cat(&[&bad, &good], 0),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("F4") || error.contains("dtype"), "{error}");
        }
    }
}
