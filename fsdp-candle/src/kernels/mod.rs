//! The kernels: this library's own computations on memory, selected by device.
//!
//! On the CPU, the layers of `nn` compute themselves. On CUDA devices they run kernels of `cuda`, which only code for
//! those devices names: `nn::cuda`, `nn::attention::cuda` and `world::engine`.
//!
//! A device is a folder beside `cpu` that implements [`Kernels`], and a case in [`of`]. Kernels take [`Slice`]s of
//! tensors' or buffers' memory, without a copy between the two. `candle_interop` is the access to a tensor's memory in
//! place.

mod candle_interop;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod eight_bits;
mod layers;
#[cfg(not(feature = "cuda"))]
mod no_cuda;
mod slice;
#[cfg(test)]
mod tests;

use std::ops::Range;

use candle_core::{Device, DeviceLocation, Storage, Tensor, bail};
use fsdp_core::{BLOCK, BlockFormat, Buffer, DType, DeviceId, Readable, View};

use crate::error::{Error, Result};

pub(crate) use candle_interop::{StorageMut, in_place};
pub(crate) use cpu::{Float, host_elements};
#[cfg(feature = "cuda")]
pub(crate) use cuda::{candle_device, device_count};
pub(crate) use eight_bits::{EightBits, STATE_BLOCK};
pub(crate) use layers::{Draw, Float8Cast, Float8Format, Normalization, Rotation};
#[cfg(not(feature = "cuda"))]
pub(crate) use no_cuda::{candle_device, device_count};
pub(crate) use slice::{Slice, SliceMut, ViewMut};

/// Returns the kernels of a device. Fails with [`Error::Device`] for a device without kernels.
fn of(device: DeviceId) -> Result<&'static dyn Kernels> {
    match device {
        DeviceId::Host => Ok(&cpu::CpuKernels),
        #[cfg(feature = "cuda")]
        DeviceId::Cuda(ordinal) => match cuda::of_ordinal(ordinal) {
            Some(kernels) => Ok(kernels),
            None => Err(Error::Device(format!("{device} has not been used yet: create a tensor on it first"))),
        },
        other => Err(no_kernels(other)),
    }
}

/// Returns the kernels of Candle's device. The first call initializes the device.
pub(crate) fn of_device(device: &Device) -> Result<&'static dyn Kernels> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return Ok(cuda::of_candle(device)?);
    }
    of(device_id(device)?)
}

/// Converts Candle's device to fsdp-core's device id.
pub(crate) fn device_id(device: &Device) -> Result<DeviceId> {
    id_of(device.location())
}

fn id_of(location: DeviceLocation) -> Result<DeviceId> {
    match location {
        DeviceLocation::Cpu => Ok(DeviceId::Host),
        DeviceLocation::Cuda { gpu_id } => Ok(DeviceId::Cuda(gpu_id)),
        DeviceLocation::Metal { gpu_id } => Err(no_kernels(format!("Metal device {gpu_id}"))),
    }
}

/// Returns the kernels of a buffer's device.
pub(crate) fn of_buffer(buffer: &Buffer) -> Result<&'static dyn Kernels> {
    of(Readable::device(buffer))
}

/// Returns the kernels of a device, or the CPU's if it has none. For values that are made before the first parameter,
/// which rejects a device without kernels.
pub(crate) fn of_device_or_cpu(device: &Device) -> &'static dyn Kernels {
    of_device(device).unwrap_or(&cpu::CpuKernels)
}

fn no_kernels(device: impl std::fmt::Display) -> Error {
    Error::Device(format!(
        "{device} has no kernels in this build of fsdp-candle. Build the ShardedVarMap and the tensors on \
         `Device::Cpu`, or on the device that `World::device` returns"
    ))
}

/// Rows of elements at equal distances.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) count: usize,
    /// Elements of a row.
    pub(crate) len: usize,
    /// Elements from the start of a row to the start of the next, in the source.
    pub(crate) from_stride: usize,
    /// Elements from the start of a row to the start of the next, in the destination.
    pub(crate) to_stride: usize,
}

impl Rows {
    /// Fails unless all rows fit into both slices, which must have one dtype. Returns the bytes of an element.
    fn check(&self, from: &Slice<'_>, to: &SliceMut<'_>) -> candle_core::Result<usize> {
        let (dtype, wanted) = (from.dtype(), to.dtype());
        if dtype != wanted {
            bail!("elements of {dtype} can't be copied to {wanted}")
        }
        let Rows { count, len, from_stride, to_stride } = *self;
        if count == 0 || len == 0 {
            return Ok(dtype.size());
        }
        let end = |stride: usize| (count - 1).checked_mul(stride).and_then(|last| last.checked_add(len));
        let fits = |stride, room| end(stride).is_some_and(|end| end <= room);
        if !fits(from_stride, from.len()) || !fits(to_stride, to.len()) || (count > 1 && to_stride < len) {
            bail!("{count} rows of {len} elements do not fit into {} and {}", from.len(), to.len())
        }
        Ok(dtype.size())
    }
}

/// Fails unless the bytes are the blocks of the values.
fn check_blocks(format: BlockFormat, blocks: &Slice<'_>, values: &SliceMut<'_>) -> candle_core::Result<()> {
    let (bytes, len) = (blocks.len(), values.len());
    if blocks.dtype() != DType::U8 || !len.is_multiple_of(BLOCK) || format.bytes(len) != bytes {
        bail!("{bytes} elements of {} are not the {} blocks of {len} values", blocks.dtype(), format.name())
    }
    Ok(())
}

/// The kernels of a device. Each call selects the dtype once, and then loops over elements. Memory of another device,
/// and dtypes or lengths that do not fit together, are errors.
pub(crate) trait Kernels: Send + Sync {
    /// Allocates zeroed memory.
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer>;

    /// Allocates zeroed memory, on a device with further memory behind it for `room` elements in all.
    fn zeros_with_room(&self, dtype: DType, len: usize, _room: usize) -> fsdp_core::Result<Buffer> {
        self.zeros(dtype, len)
    }

    /// Converts a buffer to a tensor's storage, without a copy.
    fn storage(&self, buffer: Buffer) -> candle_core::Result<Storage>;

    /// Converts a tensor's storage to a buffer, without a copy. Returns `None` for freed storage, and for dtypes that
    /// collectives do not move.
    fn buffer(&self, storage: Storage) -> Option<Buffer>;

    /// Returns the storage of a sharded parameter that is not gathered. No operation accepts it, so that every use is
    /// an error instead of a read of freed memory.
    fn freed_storage(&self) -> candle_core::Result<Storage>;

    /// Returns elements of a tensor's storage to read.
    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> candle_core::Result<Slice<'a>>;

    /// Returns elements of a tensor's storage to write.
    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> candle_core::Result<SliceMut<'a>>;

    /// Calls `f` once with the elements as bytes in host memory, in native order. Blocks until the device has computed
    /// them.
    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> candle_core::Result<()>;

    /// Calls `f` once with bytes in host memory, in native order. `f` must write all of them; they become the elements.
    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> candle_core::Result<()>;

    /// Copies rows of elements of any dtype.
    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> candle_core::Result<()>;

    /// Copies all elements.
    fn copy(&self, from: Slice<'_>, to: SliceMut<'_>) -> candle_core::Result<()> {
        let (len, room) = (from.len(), to.len());
        if len != room {
            bail!("{len} elements can't be copied to {room}")
        }
        self.copy_rows(from, to, Rows { count: 1, len, from_stride: len, to_stride: len })
    }

    /// Computes `sum += more` in one dtype, rounded to it.
    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> candle_core::Result<()>;

    /// Returns `x + y` of one dtype, rounded to it.
    fn sum(&self, x: Slice<'_>, y: Slice<'_>) -> candle_core::Result<Buffer>;

    /// Computes `values *= factor`, in f64 for f64, else in f32.
    fn scale(&self, values: SliceMut<'_>, factor: f64) -> candle_core::Result<()>;

    /// Converts values to another dtype, rounded to the nearest.
    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> candle_core::Result<()>;

    /// Writes the sum of the magnitudes' powers, or the largest magnitude, to one element of F64. [`NormType::root`]
    /// turns it into a norm.
    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> candle_core::Result<()>;

    /// Writes the number of infinite and NaN values to one element of F64.
    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> candle_core::Result<()>;

    /// Computes `values = kept values + taken more` for any two float dtypes, rounded to the dtype of `values`. The
    /// arithmetic is f64 for f64, else f32.
    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> candle_core::Result<()>;

    /// Runs one step of Adam or AdamW. `moments` are the running means of gradients and of their squares. All slices
    /// have one dtype.
    fn adam(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 2],
    ) -> candle_core::Result<()>;

    /// Runs one step of SGD. `buffer` is the momentum buffer, if there is momentum. All slices have one dtype.
    fn sgd(
        &self,
        update: &SgdUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        buffer: Option<SliceMut<'_>>,
    ) -> candle_core::Result<()>;

    /// Runs one step of AdamW with moments in 8 bits, for parameters of F32, BF16 or F16. `moments` are the codes and
    /// scales of the gradients' running mean ([`EightBits::Signed`]), then those of the root of the squares' running
    /// mean ([`EightBits::Unsigned`]). A scale is for a block of [`STATE_BLOCK`] elements. The arithmetic is f32.
    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        moments: [SliceMut<'_>; 4],
    ) -> candle_core::Result<()>;

    /// Encodes f32 values as a U8 code for each value, and an F32 scale for each `block` of values. A block with a
    /// value that is not finite becomes NaN as a whole.
    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> candle_core::Result<()>;

    /// Decodes the output of [`Kernels::quantise`] to any float dtype.
    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> candle_core::Result<()>;

    /// Decodes blocks of U8 to any float dtype. The arithmetic is f32.
    fn decode_blocks(&self, format: BlockFormat, blocks: Slice<'_>, values: SliceMut<'_>) -> candle_core::Result<()>;

    /// Returns the free and the total bytes of this device, if `wanted` may exceed them. The CPU's memory is not queried.
    fn free_memory(&self, _wanted: u128) -> candle_core::Result<Option<[u64; 2]>> {
        Ok(None)
    }

    /// Starts casts of contiguous tensors to buffers of these dtypes, beside computations. The caller keeps tensors and
    /// buffers until the device waits for the casts ([`PendingCopy::order`]). Returns `None` if this device is the CPU.
    fn casts(&self, _tensors: &[(Tensor, DType)]) -> candle_core::Result<Option<Casts>> {
        Ok(None)
    }

    /// Prepares a contiguous CPU tensor for repeated copies to this device. Returns `None` if this device is the CPU.
    fn host_source(&self, _tensor: &Tensor, _page_locked: bool) -> candle_core::Result<Option<Box<dyn HostSource>>> {
        Ok(None)
    }

    /// Allocates host memory for repeated copies of `len` elements from this device. Returns `None` if this device is
    /// the CPU.
    fn host_memory(
        &self,
        _dtype: DType,
        _len: usize,
        _page_locked: bool,
    ) -> candle_core::Result<Option<Box<dyn HostMemory>>> {
        Ok(None)
    }
}

/// A CPU tensor that is copied to a device repeatedly. It keeps the tensor's memory alive until the last copy has read
/// it.
pub(crate) trait HostSource: Send + Sync {
    /// Starts a copy of all elements to `to` on the device. Does not block if the memory is page-locked. If `to` has
    /// another dtype, the elements are cast by way of `via`, which has the tensor's dtype. The caller keeps both
    /// buffers until the device waits for the copy ([`PendingCopy::order`]).
    fn upload(&self, to: &Buffer, via: Option<&Buffer>) -> candle_core::Result<Box<dyn PendingCopy>>;

    /// Blocks until all started copies have read the tensor. Then it may be written.
    fn settle(&self) -> candle_core::Result<()>;
}

/// Host memory to which a device's memory is copied repeatedly.
pub(crate) trait HostMemory: Send {
    fn dtype(&self) -> DType;

    /// Returns the number of elements.
    fn len(&self) -> usize;

    /// Starts a copy of all elements from the device. Does not block if the memory is page-locked. The caller keeps the
    /// elements until the device waits for the copy.
    fn download(&mut self, from: Slice<'_>) -> candle_core::Result<Box<dyn PendingCopy>>;

    /// Starts a copy of the elements of the last copy back to the device. Does not block if the memory is page-locked.
    /// The caller keeps the buffer until the device waits for the copy.
    fn upload(&mut self, to: &Buffer) -> candle_core::Result<Box<dyn PendingCopy>>;

    /// Returns the elements of the last copy. Blocks until it has ended.
    fn values(&self) -> candle_core::Result<Slice<'_>>;
}

/// A copy that was started.
pub(crate) trait PendingCopy: Send + Sync {
    /// Makes the device's compute stream wait for the copy. Does not block.
    fn order(&self) -> candle_core::Result<()>;

    /// Calls `f` with a view of the memory that the copy writes, for readers that wait for the copy themselves.
    fn view(&self, written: &Buffer, f: &mut dyn FnMut(View<'_>));
}

/// Casts that were started, with their buffers.
pub(crate) struct Casts {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) copying: Box<dyn PendingCopy>,
}

/// The norm of all gradients together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum NormType {
    /// The square root of the sum of squares.
    #[default]
    Two,
    /// The `p`-th root of the sum of `p`-th powers of magnitudes, `p` > 0.
    P(f64),
    /// The largest magnitude.
    Infinity,
}

impl NormType {
    /// Fails for an order that is not positive.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            NormType::P(p) if !(p.is_finite() && p > 0.) => {
                Err(Error::Argument(format!("a norm of order {p}: the order must be a positive number")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the term of one value.
    pub(crate) fn power(self, magnitude: f64) -> f64 {
        match self {
            NormType::Two => magnitude * magnitude,
            NormType::P(1.) | NormType::Infinity => magnitude,
            NormType::P(p) => magnitude.powf(p),
        }
    }

    /// Combines two partial results.
    pub(crate) fn combine(self, a: f64, b: f64) -> f64 {
        match self {
            // f64::max would drop a NaN.
            NormType::Infinity if a.is_nan() || b.is_nan() => f64::NAN,
            NormType::Infinity => a.max(b),
            _ => a + b,
        }
    }

    /// Returns the norm for the combined powers `total`.
    pub(crate) fn root(self, total: f64) -> f64 {
        match self {
            NormType::Two => total.sqrt(),
            NormType::P(p) => total.powf(1. / p),
            NormType::Infinity => total,
        }
    }
}

/// One step of Adam or AdamW: `g = factor g`, rounded to the gradient's dtype as [`Kernels::scale`] does, `g = g + l2 p`,
/// `mean = beta1 mean + (1 - beta1) g`, `square = beta2 square + (1 - beta2) g g`, `p = decay p - step_size mean /
/// (sqrt(square) / root_bias_correction2 + eps)`. With `l2 = 0` the second is skipped. The numbers are computed in f64;
/// kernels compute in f32, or in f64 for f64.
#[derive(Clone, Copy)]
pub(crate) struct AdamUpdate {
    pub(crate) factor: f64,
    pub(crate) l2: f64,
    pub(crate) decay: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) step_size: f64,
    pub(crate) root_bias_correction2: f64,
    pub(crate) eps: f64,
}

/// One step of SGD: `g = factor g`, rounded to the gradient's dtype as [`Kernels::scale`] does, `g = g + l2 p`,
/// `buffer = kept buffer + taken g`, `p = p - lr (buffer, or g + nesterov buffer)`. With `l2 = 0` the second is skipped,
/// and without a buffer the third; then `p = p - lr g`.
#[derive(Clone, Copy)]
pub(crate) struct SgdUpdate {
    pub(crate) factor: f64,
    pub(crate) l2: f64,
    pub(crate) kept: f64,
    pub(crate) taken: f64,
    pub(crate) nesterov: Option<f64>,
    pub(crate) lr: f64,
}
