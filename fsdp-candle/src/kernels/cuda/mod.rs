//! The kernels of CUDA devices: CUDA C that is compiled when a device is first used.
//!
//! - NVRTC compiles the `.cu` files for the device at hand. A build therefore needs no list of GPU generations.
//! - All computation on a device runs on one stream, whichever thread calls (`device`). Candle's own `Device::new_cuda`
//!   has a stream for each thread, so the work of a group's thread and of the user's thread would have no order.
//! - Memory is reused without waiting for the device, so the amount in use follows from the order of calls
//!   ([`fsdp_core::device::cuda`]).
//! - Numbers for the host, such as norms, stay on the device until all of them are computed, and are read at once.
//!   Clipping thus waits for the device once, not once for each parameter.

mod activations;
mod attention;
mod attention_backend;
mod compiler;
mod cublas_lt;
#[cfg(feature = "cudnn")]
mod cudnn;
mod device;
mod dropout;
mod embedding;
mod experts;
mod flash_attention;
mod float8;
mod grouped_products;
mod host_copies;
mod losses;
mod norms;
mod preloading;
mod product;
mod rotary;

use std::ops::Range;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaStorage, Result, Storage, Tensor, bail};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, LaunchConfig, result};
use fsdp_core::device::cuda::{CudaMemory, CudaView, failed};
use fsdp_core::{BlockFormat, Buffer, DType, Element, View};

use super::slice::{ViewMut, each_dtype, no_values, same_length};
use super::{
    AdamUpdate, Casts, EightBits, HostMemory, HostSource, Kernels, NormType, Rows, STATE_BLOCK, SgdUpdate, Slice,
    SliceMut, StorageMut, check_blocks,
};
use crate::error::Error;
use compiler::Kernel;
use device::{Arg, CudaKernels, MAX_PARTIALS, THREADS, elementwise, float_suffix, same_dtype};

pub(crate) use activations::{activate, activate_back, swiglu, swiglu_back, swiglu_halves, swiglu_halves_back};
pub(crate) use attention::{ScoreBlock, Visibility};
pub(crate) use device::{candle_device, compute_stream, cudnn_version, device_count, ones, uninit, wide};
pub(super) use device::{of_candle, of_ordinal};
pub(crate) use dropout::drop_elements;
pub(crate) use embedding::add_rows;
pub(crate) use experts::{SortedRoutes, largest_of_rows, stretches};
pub(crate) use flash_attention::{FlashAttention, Heads};
pub(crate) use float8::add_float8_product;
pub(crate) use grouped_products::{RowProducts, multiply_rows};
pub(crate) use losses::{LossOptions, logits_back, losses, rescale_powers, row_statistics};
pub(crate) use norms::{normalize, normalize_back};
pub(crate) use preloading::preload;
pub(crate) use product::{Matrix, MatrixLayout, add_product, add_products, write_product};
pub(crate) use rotary::rotate;

/// Bytes of the longest loads and stores of a thread.
const WORD: usize = 16;

/// Elements of a thread in a loop over packs: `PACK` in the source.
const PACK: usize = 8;

/// Elements per block of threads.
const ELEMENTS_PER_BLOCK: usize = 4096;

/// The kind of reduction, by its number in the source (`SQUARES` and so on), and the power.
#[derive(Clone, Copy)]
struct Reduction(u32, f64);

const NON_FINITE: Reduction = Reduction(4, 0.);

impl From<NormType> for Reduction {
    fn from(norm: NormType) -> Self {
        match norm {
            NormType::Two => Reduction(0, 0.),
            NormType::P(1.) => Reduction(1, 0.),
            NormType::Infinity => Reduction(2, 0.),
            NormType::P(p) => Reduction(3, p),
        }
    }
}

impl Kernels for CudaKernels {
    fn zeros(&self, dtype: DType, len: usize) -> fsdp_core::Result<Buffer> {
        CudaMemory::zeros(&self.stream, dtype, len).map(Buffer::Cuda)
    }

    fn zeros_with_room(&self, dtype: DType, len: usize, room: usize) -> fsdp_core::Result<Buffer> {
        CudaMemory::zeros_with_room(&self.stream, dtype, len, room).map(Buffer::Cuda)
    }

    fn storage(&self, buffer: Buffer) -> Result<Storage> {
        let memory = match buffer {
            Buffer::Cuda(memory) if memory.stream().cu_stream() == self.stream.cu_stream() => memory,
            other => bail!("a buffer of {} is in the memory of {}", other.dtype(), other.device()),
        };
        let lost = |memory: CudaMemory| {
            candle_core::Error::msg(format!("device memory of {} has another type", memory.dtype()))
        };
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
        Ok(Storage::Cuda(CudaStorage { slice, device: self.device.clone() }))
    }

    fn buffer(&self, storage: Storage) -> Option<Buffer> {
        let Storage::Cuda(storage) = storage else { return None };
        let slice = storage.slice;
        each_dtype!(slice, CudaStorageSlice(slice) => Some(Buffer::Cuda(CudaMemory::from_slice(slice))), _ => None)
    }

    fn freed_storage(&self) -> Result<Storage> {
        let freed = self.stream.null::<u8>();
        let freed = freed.map_err(|error| Error::Core(failed(&self.stream, "freeing a parameter's memory", &error)))?;
        Ok(Storage::Cuda(CudaStorage { slice: CudaStorageSlice::F4(freed), device: self.device.clone() }))
    }

    fn slice<'a>(&self, storage: &'a Storage, elements: Range<usize>) -> Result<Slice<'a>> {
        let Storage::Cuda(storage) = storage else { bail!("the tensor is not in memory of a CUDA device") };
        let (dtype, view) = view(storage)?;
        Slice::new(dtype, View::Cuda(view)).range(elements)
    }

    fn slice_mut<'a>(&self, storage: StorageMut<'a>, elements: Range<usize>) -> Result<SliceMut<'a>> {
        let StorageMut::Cuda(storage) = storage else { bail!("the tensor is not in memory of a CUDA device") };
        let (dtype, view) = view(storage)?;
        SliceMut::new(dtype, ViewMut::Cuda(view)).range(elements)
    }

    fn read(&self, from: Slice<'_>, f: &mut dyn FnMut(&[u8])) -> Result<()> {
        f(&self.view(from)?.to_host().map_err(Error::from)?);
        Ok(())
    }

    fn write(&self, to: SliceMut<'_>, f: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let to = self.view_mut(to)?;
        let failed = |error| Error::Core(failed(&self.stream, "copying to the device", &error));
        self.stream.context().bind_to_thread().map_err(failed)?;
        if to.bytes() == 0 {
            // Also a slice of no bytes has the alignment of every dtype: the caller may cast it.
            f(bytemuck::cast_slice_mut::<u64, u8>(&mut []));
            return Ok(());
        }
        if self.staging.write(&self.stream, to, f)? {
            return Ok(());
        }
        let bytes = Buffer::try_zeros(DType::U8, to.bytes()).map_err(Error::from)?;
        let Ok(mut bytes) = bytes.into_vec::<u8>() else { bail!("a buffer of U8 has another type") };
        f(&mut bytes);
        // SAFETY: both are memory of this many bytes. The host memory is pageable, so it is read before the call
        // returns.
        unsafe { result::memcpy_htod_async(to.address(), &bytes, self.stream.cu_stream()) }.map_err(failed)?;
        Ok(())
    }

    fn copy_rows(&self, from: Slice<'_>, to: SliceMut<'_>, rows: Rows) -> Result<()> {
        let size = rows.check(&from, &to)?;
        let Rows { count, len, from_stride, to_stride } = rows;
        let (from, to) = (self.view(from)?, self.view_mut(to)?);
        if count == 0 || len == 0 {
            return Ok(());
        }
        if count == 1 || (from_stride == len && to_stride == len) {
            let (Some(from), Some(to)) = (from.range(0..count * len * size), to.range(0..count * len * size)) else {
                bail!("rows reach beyond their memory")
            };
            return Ok(from.copy_to(to, &self.stream).map_err(Error::from)?);
        }
        // Rows of whole and aligned words are copied by words.
        let addresses = [from.address() as usize, to.address() as usize];
        let bytes = [len, from_stride, to_stride].map(|elements| elements * size);
        let by_words = addresses.into_iter().chain(bytes).all(|at| at.is_multiple_of(WORD));
        let unit = if by_words { WORD } else { size };
        let [len, from_stride, to_stride] = bytes.map(|bytes| bytes / unit);
        // Short rows share a block.
        let width = (len as u64).next_power_of_two().min(u64::from(THREADS)) as u32;
        let together = THREADS / width;
        let across = (len as u64).div_ceil(u64::from(width)).min(1 << 16) as u32;
        let down = (count as u64).div_ceil(u64::from(together)).min(1 << 15) as u32;
        let config = LaunchConfig { grid_dim: (across, down, 1), block_dim: (width, together, 1), shared_mem_bytes: 0 };
        let args = [from.into(), to.into(), count.into(), len.into(), from_stride.into(), to_stride.into()];
        // SAFETY: the kernel's arguments; `check` ensured that all rows fit into both slices.
        unsafe { self.launch(&format!("copy_rows_{unit}"), config, &args) }
    }

    fn add(&self, sum: SliceMut<'_>, more: Slice<'_>) -> Result<()> {
        let (len, kernel) = (sum.len(), format!("add_{}", float_suffix(sum.dtype())?));
        same_dtype(sum.dtype(), more.dtype())?;
        same_length(len, more.len())?;
        let (sum, more) = (self.view_mut(sum)?, self.view(more)?);
        // SAFETY: the kernel's arguments, of one dtype and length.
        unsafe { self.run_packs(&kernel, len, &[sum.into(), more.into(), len.into()]) }
    }

    fn sum(&self, x: Slice<'_>, y: Slice<'_>) -> Result<Buffer> {
        activations::sum(x, y)
    }

    fn scale(&self, values: SliceMut<'_>, factor: f64) -> Result<()> {
        let (len, kernel) = (values.len(), format!("scale_{}", float_suffix(values.dtype())?));
        let values = self.view_mut(values)?;
        // SAFETY: the kernel's arguments.
        unsafe { self.run_packs(&kernel, len, &[values.into(), len.into(), factor.into()]) }
    }

    fn cast(&self, from: Slice<'_>, to: SliceMut<'_>) -> Result<()> {
        let (from_dtype, to_dtype) = (from.dtype(), to.dtype());
        let (from, to) = (self.view(from)?, self.view_mut(to)?);
        self.cast_on(&self.stream, (from_dtype, from), (to_dtype, to))
    }

    fn powers(&self, values: Slice<'_>, norm: NormType, sum: SliceMut<'_>) -> Result<()> {
        let float = float_suffix(values.dtype())?;
        self.reduce(float, values, norm.into(), sum)
    }

    fn count_non_finite(&self, values: Slice<'_>, count: SliceMut<'_>) -> Result<()> {
        match float_suffix(values.dtype()) {
            Ok(float) => self.reduce(float, values, NON_FINITE, count),
            // Integers are finite.
            Err(_) => clear(self, self.view_mut(count)?),
        }
    }

    fn mix(&self, values: SliceMut<'_>, kept: f64, more: Slice<'_>, taken: f64) -> Result<()> {
        let (len, kernel) =
            (values.len(), format!("mix_{}_{}", float_suffix(values.dtype())?, float_suffix(more.dtype())?));
        same_length(len, more.len())?;
        let (values, more) = (self.view_mut(values)?, self.view(more)?);
        let args = [values.into(), more.into(), len.into(), kept.into(), taken.into()];
        // SAFETY: the kernel's arguments, of the dtypes in its name and of one length.
        unsafe { self.run_packs(&kernel, len, &args) }
    }

    fn adam(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        [means, squares]: [SliceMut<'_>; 2],
    ) -> Result<()> {
        let (len, dtype) = (param.len(), param.dtype());
        let kernel = format!("adam_{}", float_suffix(dtype)?);
        for (other, its_len) in
            [(grad.dtype(), grad.len()), (means.dtype(), means.len()), (squares.dtype(), squares.len())]
        {
            same_length(len, its_len)?;
            same_dtype(dtype, other)?;
        }
        let (param, grad) = (self.view_mut(param)?, self.view(grad)?);
        let (means, squares) = (self.view_mut(means)?, self.view_mut(squares)?);
        let mut args = vec![param.into(), grad.into(), means.into(), squares.into(), len.into()];
        args.extend([update.factor, update.l2].into_iter().chain(numbers(update)).map(Arg::from));
        // SAFETY: the kernel's arguments, of one dtype and length.
        unsafe { self.run_packs(&kernel, len, &args) }
    }

    fn sgd(
        &self,
        update: &SgdUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        buffer: Option<SliceMut<'_>>,
    ) -> Result<()> {
        let (len, dtype) = (param.len(), param.dtype());
        let float = float_suffix(dtype)?;
        let buffers = buffer.as_ref().map(|buffer| (buffer.dtype(), buffer.len()));
        for (other, its_len) in [Some((grad.dtype(), grad.len())), buffers].into_iter().flatten() {
            same_length(len, its_len)?;
            same_dtype(dtype, other)?;
        }
        let (param, grad) = (self.view_mut(param)?, self.view(grad)?);
        let buffer = buffer.map(|buffer| self.view_mut(buffer)).transpose()?;
        let SgdUpdate { factor, l2, kept, taken, nesterov, lr } = *update;
        let Some(buffer) = buffer else {
            let args = [param.into(), grad.into(), len.into(), factor.into(), l2.into(), lr.into()];
            // SAFETY: the kernel's arguments, of one dtype and length.
            return unsafe { self.run_packs(&format!("sgd_{float}"), len, &args) };
        };
        let mut args = vec![param.into(), grad.into(), buffer.into(), len.into(), u32::from(nesterov.is_some()).into()];
        args.extend([factor, l2, kept, taken, nesterov.unwrap_or(0.), lr].map(Arg::from));
        // SAFETY: the kernel's arguments, of one dtype and length.
        unsafe { self.run_packs(&format!("momentum_{float}"), len, &args) }
    }

    fn adam_8bit(
        &self,
        update: &AdamUpdate,
        param: SliceMut<'_>,
        grad: Slice<'_>,
        [codes1, scales1, codes2, scales2]: [SliceMut<'_>; 4],
    ) -> Result<()> {
        let (len, dtype) = (param.len(), param.dtype());
        if dtype == DType::F64 {
            bail!("moments in 8 bits are for parameters of F32, BF16 and F16; got {dtype}")
        }
        let kernel = format!("adam_8bit_{}", float_suffix(dtype)?);
        same_dtype(dtype, grad.dtype())?;
        same_length(len, grad.len())?;
        let blocks = len.div_ceil(STATE_BLOCK);
        for (codes, scales) in [(&codes1, &scales1), (&codes2, &scales2)] {
            same_dtype(DType::U8, codes.dtype())?;
            same_length(len, codes.len())?;
            same_dtype(DType::F32, scales.dtype())?;
            same_length(blocks, scales.len())?;
        }
        let (param, grad) = (self.view_mut(param)?, self.view(grad)?);
        let moments = [codes1, scales1, codes2, scales2].map(|part| self.view_mut(part));
        let [codes1, scales1, codes2, scales2] = moments;
        let mut args = vec![
            param.into(),
            grad.into(),
            codes1?.into(),
            scales1?.into(),
            codes2?.into(),
            scales2?.into(),
            len.into(),
        ];
        if len == 0 {
            return Ok(());
        }
        args.extend(std::iter::once(update.factor).chain(numbers(update)).map(Arg::from));
        let Ok(grid) = u32::try_from(blocks) else { bail!("{blocks} blocks are more than one launch takes") };
        let config =
            LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (STATE_BLOCK as u32, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel's arguments; there is a code for each element, and a scale for each block of threads.
        unsafe { self.launch(&kernel, config, &args) }
    }

    fn quantise(
        &self,
        bits: EightBits,
        block: usize,
        values: Slice<'_>,
        codes: SliceMut<'_>,
        scales: SliceMut<'_>,
    ) -> Result<()> {
        let (len, block) = (values.len(), block.max(1).min(values.len().max(1)));
        same_dtype(DType::F32, values.dtype())?;
        same_dtype(DType::U8, codes.dtype())?;
        same_dtype(DType::F32, scales.dtype())?;
        same_length(len, codes.len())?;
        let blocks = len.div_ceil(block);
        same_length(blocks, scales.len())?;
        let (values, codes, scales) = (self.view(values)?, self.view_mut(codes)?, self.view_mut(scales)?);
        if len == 0 {
            return Ok(());
        }
        clear(self, scales)?;
        let together = block.div_ceil(ELEMENTS_PER_BLOCK);
        let threads = (block.div_ceil(32) * 32).min(THREADS as usize) as u32;
        let grid = u32::try_from(blocks * together).unwrap_or(u32::MAX).min(i32::MAX as u32);
        if grid as usize != blocks * together {
            bail!("{blocks} blocks of {block} elements are more than one launch takes");
        }
        let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        let args = [values.into(), scales.into(), len.into(), block.into(), together.into()];
        // SAFETY: the kernel's arguments; a scale holds the bits of a float.
        unsafe { self.launch("largest", config, &args)? };
        // As on the CPU.
        let (kernel, most, of_zeros, least) = match bits {
            EightBits::E4M3 => ("quantise_e4m3", 448., 1., f32::MIN_POSITIVE),
            EightBits::Signed => ("quantise_signed", 1., 0., 0.),
            EightBits::Unsigned => ("quantise_unsigned", 1., 0., 0.),
        };
        let args = [scales.into(), blocks.into(), Arg::Float(most), Arg::Float(of_zeros), Arg::Float(least)];
        // SAFETY: the kernel's arguments.
        unsafe { self.run_elementwise("scales_of", blocks, &args)? };
        let args = [values.into(), scales.into(), codes.into(), len.into(), block.into()];
        // SAFETY: the kernel's arguments; there is a code for each value and a scale for each block.
        unsafe { self.run_elementwise(kernel, len, &args) }
    }

    fn dequantise(
        &self,
        bits: EightBits,
        block: usize,
        codes: Slice<'_>,
        scales: Slice<'_>,
        values: SliceMut<'_>,
    ) -> Result<()> {
        let (len, block) = (values.len(), block.max(1));
        let bits = match bits {
            EightBits::E4M3 => "e4m3",
            EightBits::Signed => "signed",
            EightBits::Unsigned => "unsigned",
        };
        let kernel = format!("dequantise_{bits}_{}", float_suffix(values.dtype())?);
        same_dtype(DType::U8, codes.dtype())?;
        same_dtype(DType::F32, scales.dtype())?;
        same_length(len, codes.len())?;
        same_length(len.div_ceil(block), scales.len())?;
        let (codes, scales, values) = (self.view(codes)?, self.view(scales)?, self.view_mut(values)?);
        let args = [codes.into(), scales.into(), values.into(), len.into(), block.into()];
        // SAFETY: the kernel's arguments, of the dtype in its name; there is a code for each value and a scale for each
        // block.
        unsafe { self.run_elementwise(&kernel, len, &args) }
    }

    fn decode_blocks(&self, format: BlockFormat, blocks: Slice<'_>, values: SliceMut<'_>) -> Result<()> {
        check_blocks(format, &blocks, &values)?;
        let kernel = format!("decode_{}_{}", format.name(), float_suffix(values.dtype())?);
        let pairs = values.len() / 2;
        let (blocks, values) = (self.view(blocks)?, self.view_mut(values)?);
        // SAFETY: the kernel's arguments, of the dtype in its name; each pair of values has its block.
        unsafe { self.run_elementwise(&kernel, pairs, &[blocks.into(), values.into(), pairs.into()]) }
    }

    fn free_memory(&self, wanted: u128) -> Result<Option<[u64; 2]>> {
        self.query_memory(wanted)
    }

    fn casts(&self, tensors: &[(Tensor, DType)]) -> Result<Option<Casts>> {
        host_copies::casts(self, tensors).map(Some)
    }

    fn host_source(&self, tensor: &Tensor, page_locked: bool) -> Result<Option<Box<dyn HostSource>>> {
        host_copies::source(self, tensor, page_locked).map(Some)
    }

    fn host_memory(&self, dtype: DType, len: usize, page_locked: bool) -> Result<Option<Box<dyn HostMemory>>> {
        host_copies::memory(self, dtype, len, page_locked).map(Some)
    }
}

impl CudaKernels {
    /// Runs a kernel with a thread for each element.
    ///
    /// # Safety
    /// See [`CudaKernels::launch`].
    unsafe fn run_elementwise<'a>(&self, kernel: impl Into<Kernel<'a>>, len: usize, args: &[Arg]) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: ensured by the caller.
        unsafe { self.launch(kernel, elementwise(len), args) }
    }

    /// Runs a kernel with a thread for each pack of elements.
    ///
    /// # Safety
    /// See [`CudaKernels::launch`].
    unsafe fn run_packs(&self, kernel: &str, len: usize, args: &[Arg]) -> Result<()> {
        // SAFETY: ensured by the caller.
        unsafe { self.run_elementwise(kernel, len.div_ceil(PACK), args) }
    }

    /// Casts on a stream.
    pub(super) fn cast_on(
        &self,
        stream: &CudaStream,
        (from_dtype, from): (DType, CudaView<'_>),
        (to_dtype, to): (DType, CudaView<'_>),
    ) -> Result<()> {
        let kernel = format!("cast_{}_{}", float_suffix(from_dtype)?, float_suffix(to_dtype)?);
        let len = to.bytes() / to_dtype.size();
        same_length(from.bytes() / from_dtype.size(), len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the kernel's arguments, of the dtypes in its name and of one length.
        unsafe {
            self.launch_on(stream, &kernel, elementwise(len.div_ceil(PACK)), &[from.into(), to.into(), len.into()])
        }
    }

    fn reduce(&self, float: &str, values: Slice<'_>, Reduction(of, p): Reduction, sum: SliceMut<'_>) -> Result<()> {
        same_dtype(DType::F64, sum.dtype())?;
        same_length(1, sum.len())?;
        let len = values.len();
        let (values, sum) = (self.view(values)?, self.view_mut(sum)?);
        if len == 0 {
            return clear(self, sum);
        }
        let blocks = len.div_ceil(ELEMENTS_PER_BLOCK).min(MAX_PARTIALS);
        let config =
            |blocks| LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let partials = self.partials.lock();
        let to = partials.view();
        let args = [values.into(), len.into(), of.into(), p.into(), to.into()];
        // SAFETY: the kernel's arguments; the buffer holds a partial result for each block.
        unsafe { self.launch(&format!("powers_{float}"), config(blocks as u32), &args)? };
        // SAFETY: as above. The partial results are locked, so no other reduction overwrites them between the two
        // kernels.
        unsafe { self.launch("total", config(1), &[to.into(), blocks.into(), of.into(), sum.into()]) }
    }
}

/// Returns a slice's dtype and bytes. Only the stream's order ensures when they may be read or written.
fn all_bytes<T: Element>(slice: &CudaSlice<T>) -> (DType, CudaView<'_>) {
    // SAFETY: the slice has this many bytes at its address while it is borrowed.
    let bytes = unsafe { CudaView::new(slice.device_ptr(slice.stream()).0, slice.num_bytes(), slice.stream()) };
    (T::DTYPE, bytes)
}

/// Returns the dtype and the bytes of a storage.
fn view(storage: &CudaStorage) -> Result<(DType, CudaView<'_>)> {
    each_dtype!(&storage.slice, CudaStorageSlice(slice) => Ok(all_bytes(slice)), _ => no_values())
}

/// Writes zeros, whose bits are zero in every dtype.
pub(super) fn clear(cuda: &CudaKernels, to: CudaView<'_>) -> Result<()> {
    if to.bytes() == 0 {
        return Ok(());
    }
    let failed = |error| Error::Core(failed(&cuda.stream, "writing zeros", &error));
    cuda.stream.context().bind_to_thread().map_err(failed)?;
    // SAFETY: the view has this many bytes, which the caller may write.
    unsafe { result::memset_d8_async(to.address(), 0, to.bytes(), cuda.stream.cu_stream()) }.map_err(failed)?;
    Ok(())
}

/// Returns the numbers that follow `factor` and `l2` in the arguments of Adam's kernels. The 8-bit kernels take no `l2`.
fn numbers(update: &AdamUpdate) -> [f64; 8] {
    let AdamUpdate { decay, beta1, beta2, step_size, root_bias_correction2, eps, .. } = *update;
    [decay, beta1, 1. - beta1, beta2, 1. - beta2, step_size, root_bias_correction2, eps]
}
