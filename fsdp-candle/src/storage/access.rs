//! Reading and writing a tensor's memory in place.

use candle_core::{Layout, Result, Tensor, bail};
use fsdp_core::{Buffer, DeviceId, Readable, View, Writable};

use super::convert::to_core_dtype;
use crate::kernels::{self, Kernels, Slice, SliceMut};

/// Calls `f` with a contiguous tensor's elements, locked against writers meanwhile, and its device's kernels.
pub(crate) fn with_slice<R>(tensor: &Tensor, f: impl FnOnce(&dyn Kernels, Slice<'_>) -> Result<R>) -> Result<R> {
    let kernels = kernels::of_device(tensor.device())?;
    let (storage, layout) = tensor.storage_and_layout();
    f(kernels, kernels.slice(&storage, offsets(layout)?)?)
}

/// [`with_slice`], to write to: locked against everybody else.
pub(crate) fn with_slice_mut<R>(tensor: &Tensor, f: impl FnOnce(&dyn Kernels, SliceMut<'_>) -> Result<R>) -> Result<R> {
    let kernels = kernels::of_device(tensor.device())?;
    kernels::in_place(tensor, |storage, layout| f(kernels, kernels.slice_mut(storage, offsets(layout)?)?))
}

fn offsets(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("the tensor is not contiguous"),
    }
}

/// Whether two tensors lie in one storage, which can't be written and read at once.
pub(crate) fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    // One lock at a time: a second one of the same storage may wait for the first.
    let address = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0);
    address(a) == address(b)
}

/// A contiguous tensor that a collective or a checkpoint reads in place, its storage locked against writers meanwhile.
pub(crate) struct TensorMemory(pub(crate) Tensor);

impl Readable for TensorMemory {
    fn dtype(&self) -> fsdp_core::DType {
        to_core_dtype(self.0.dtype()).unwrap_or(fsdp_core::DType::F32)
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
    fn dtype(&self) -> fsdp_core::DType {
        Readable::dtype(self)
    }

    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn write(&self, f: &mut dyn FnMut(&mut [u8])) -> std::result::Result<(), String> {
        with_slice_mut(&self.0, |kernels, slice| kernels.write(slice, f)).map_err(|error| error.to_string())
    }
}

/// Copies a tensor's elements, row-major, into `buffer`, which has its dtype and length.
pub(crate) fn copy_out(tensor: &Tensor, buffer: &mut Buffer) -> Result<()> {
    let tensor = tensor.contiguous()?;
    if to_core_dtype(tensor.dtype())? != buffer.dtype() || tensor.elem_count() != buffer.len() {
        bail!(
            "a gradient of {:?} {:?} for a buffer of {} {}",
            tensor.dtype(),
            tensor.shape(),
            buffer.dtype(),
            buffer.len()
        )
    }
    with_slice(&tensor, |kernels, slice| kernels.copy(slice, buffer.into()))
}

/// Copies some of a contiguous tensor's elements into `buffer`.
pub(crate) fn copy_range_out(tensor: &Tensor, elements: std::ops::Range<usize>, buffer: &mut Buffer) -> Result<()> {
    with_slice(tensor, |kernels, slice| kernels.copy(slice.range(elements)?, buffer.into()))
}

/// A tensor's elements, row-major.
pub(crate) fn copied(tensor: &Tensor) -> crate::error::Result<Buffer> {
    let dtype = to_core_dtype(tensor.dtype())?;
    let mut buffer = kernels::of_device(tensor.device())?.zeros(dtype, tensor.elem_count())?;
    copy_out(tensor, &mut buffer)?;
    Ok(buffer)
}

/// Copies `buffer` into a contiguous tensor of its dtype and length.
pub(crate) fn copy_in(buffer: &Buffer, tensor: &Tensor) -> Result<()> {
    with_slice_mut(tensor, |kernels, slice| kernels.copy(buffer.into(), slice))
}

/// A tensor's elements in host memory, row-major. Waits for a device.
pub(crate) fn to_host(tensor: &Tensor) -> crate::error::Result<Buffer> {
    let mut buffer = Buffer::try_zeros(to_core_dtype(tensor.dtype())?, tensor.elem_count())?;
    let mut copy = |bytes: &[u8]| buffer.bytes_mut().copy_from_slice(bytes);
    with_slice(&tensor.contiguous()?, |kernels, slice| kernels.read(slice, &mut copy))?;
    Ok(buffer)
}

/// What `f` leaves of each tensor in an element of F64. Those of one device are read together, so that the host waits
/// for it once.
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
        let mut all = kernels.zeros(fsdp_core::DType::F64, together.len())?;
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

/// Copies a contiguous tensor's elements into another of its dtype and length, wherever they are.
pub(crate) fn copy_tensor(from: &Tensor, to: &Tensor) -> Result<()> {
    if !from.device().same_device(to.device()) {
        return copy_tensor(&from.to_device(to.device())?, to);
    }
    if share_memory(from, to) {
        return copy_tensor(&from.copy()?, to);
    }
    with_slice_mut(to, |kernels, to| with_slice(from, |_, from| kernels.copy(from, to)))
}
