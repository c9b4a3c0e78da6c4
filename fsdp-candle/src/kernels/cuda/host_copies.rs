//! Copies between host and device memory, and casts of shards. Each direction and the casts have a stream beside the
//! compute stream.
//!
//! A device buffer is used in the compute stream's order. A copy waits for the computations so far, and the buffer's
//! owner makes later computations wait for the copy ([`PendingCopy::order`]). Host memory has no stream order, so its
//! owner here ([`Source`], [`Memory`]) waits for the last copy before the memory is read, written or freed.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};
use fsdp_core::device::cuda::{CudaMemory, CudaView, failed};
use fsdp_core::{Buffer, DType, View};
use parking_lot::Mutex;

use super::super::cpu::CpuKernels;
use super::super::{Casts, HostMemory, HostSource, Kernels, PendingCopy, Slice};
use super::device::{CudaKernels, of_ordinal};
use crate::error::Error;

/// Size of a page, the unit of page-locking.
const PAGE_BYTES: usize = 4096;
/// Largest copy by way of [`Staging`]: more than a batch of tokens has.
const STAGED_BYTES: usize = 4 << 20;

fn driver<T>(stream: &CudaStream, what: &str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
    Ok(outcome.map_err(|error| Error::Core(failed(stream, what, &error)))?)
}

/// Returns a buffer's memory, which must be on the compute stream's device.
fn of_device<'a>(compute: &CudaStream, buffer: &'a Buffer) -> Result<&'a CudaMemory> {
    match buffer {
        Buffer::Cuda(memory) if memory.stream().cu_stream() == compute.cu_stream() => Ok(memory),
        other => bail!("a buffer of {} is in the memory of {}", other.dtype(), other.device()),
    }
}

/// The end of the last copy of some host memory.
#[derive(Default)]
struct LastCopy(Mutex<Option<Arc<CudaEvent>>>);

impl LastCopy {
    /// Records the end of the work on `stream` so far, which uses the memory.
    fn record(&self, stream: &CudaStream) -> Result<Arc<CudaEvent>> {
        let end = Arc::new(driver(stream, "recording an event", stream.record_event(None))?);
        *self.0.lock() = Some(end.clone());
        Ok(end)
    }

    /// Makes later work on `stream` wait until no copy uses the memory. Does not block.
    fn order(&self, stream: &CudaStream) -> Result<()> {
        let end = self.0.lock().clone();
        end.map_or(Ok(()), |end| driver(stream, "waiting for a copy", stream.wait(&end)))
    }

    /// Blocks until no copy uses the memory. A failed wait is not repeated, because the device is lost.
    fn wait(&self, stream: &CudaStream) -> Result<()> {
        let end = self.0.lock().take();
        end.map_or(Ok(()), |end| driver(stream, "waiting for a copy", end.synchronize()))
    }
}

/// A copy on a stream beside the compute stream.
struct StreamCopy {
    end: Arc<CudaEvent>,
    stream: Arc<CudaStream>,
    compute: Arc<CudaStream>,
}

impl PendingCopy for StreamCopy {
    fn order(&self) -> Result<()> {
        driver(&self.compute, "waiting for a copy", self.compute.wait(&self.end))
    }

    fn view(&self, written: &Buffer, f: &mut dyn FnMut(View<'_>)) {
        if let Buffer::Cuda(memory) = written {
            f(View::Cuda(memory.view().arriving(&self.stream, &self.end)));
        }
    }
}

/// See [`Kernels::casts`].
pub(super) fn casts(cuda: &CudaKernels, tensors: &[(Tensor, DType)]) -> Result<Casts> {
    let (compute, stream) = (&cuda.stream, &cuda.copies()?.casts);
    // Allocated on the compute stream, which the casts wait for.
    let take = |(tensor, dtype): &(Tensor, DType)| cuda.uninit(*dtype, tensor.elem_count());
    let buffers = tensors.iter().map(take).collect::<Result<Vec<_>>>()?;
    // An optimizer may still write the shards, and the buffers' previous users may still run.
    driver(stream, "waiting for the compute stream", stream.join(compute))?;
    let cast = tensors.iter().zip(&buffers).try_for_each(|((tensor, dtype), to)| {
        let to = of_device(compute, to)?.view();
        let (storage, layout) = tensor.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("a shard is not contiguous") };
        let from = cuda.slice(&storage, start..end)?;
        let View::Cuda(view) = from.view() else { bail!("a shard is not on a CUDA device") };
        cuda.cast_on(stream, (from.dtype(), view), (*dtype, to))
    });
    // Recorded even after a failure, because the casts before it run.
    let end = Arc::new(driver(stream, "recording an event", stream.record_event(None))?);
    let casting = StreamCopy { end, stream: stream.clone(), compute: compute.clone() };
    if let Err(error) = cast {
        casting.order()?;
        return Err(error);
    }
    Ok(Casts { buffers, copying: Box::new(casting) })
}

/// A CPU tensor as the source of copies.
struct Source {
    cuda: &'static CudaKernels,
    stream: Arc<CudaStream>,
    tensor: Tensor,
    elements: Range<usize>,
    last: LastCopy,
    /// Addresses of the locked pages within its memory.
    locked: Option<Range<usize>>,
}

/// Returns the pages that lie wholly within a range of addresses. Boundary pages may belong to another buffer.
fn pages_within(addresses: &Range<usize>) -> Option<Range<usize>> {
    let start = addresses.start.checked_next_multiple_of(PAGE_BYTES)?;
    let end = addresses.end - addresses.end % PAGE_BYTES;
    (start < end).then_some(start..end)
}

/// Splits a range of addresses at the borders of the locked pages. CUDA refuses a copy across a border.
fn parts(addresses: Range<usize>, locked: Option<&Range<usize>>) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = addresses;
    let (first, last) = locked.map_or((start, start), |locked| (locked.start, locked.end));
    [start..first, first..last, last..end].into_iter().filter(|part| !part.is_empty())
}

/// See [`Kernels::host_source`].
pub(super) fn source(cuda: &CudaKernels, tensor: &Tensor, page_locked: bool) -> Result<Box<dyn HostSource>> {
    let Some(cuda) = of_ordinal(cuda.stream.context().ordinal()) else { bail!("the device is not ready") };
    let Some((start, end)) = tensor.layout().contiguous_offsets() else { bail!("the tensor is not contiguous") };
    let mut source = Source {
        cuda,
        stream: cuda.copies()?.up.clone(),
        tensor: tensor.clone(),
        elements: start..end,
        last: LastCopy::default(),
        locked: None,
    };
    if page_locked {
        source.locked = source.read(|bytes| {
            let Some(pages) = pages_within(&addresses(bytes)) else { return Ok(None) };
            let context = cuda.stream.context();
            driver(&cuda.stream, "using the device", context.bind_to_thread())?;
            // SAFETY: the pages lie in the tensor's memory, which outlives the registration.
            let locked = unsafe { sys::cuMemHostRegister_v2(pages.start as *mut c_void, pages.len(), 0) }.result();
            driver(&cuda.stream, "page-locking a shard's memory", locked)?;
            Ok(Some(pages))
        })?;
    }
    Ok(Box::new(source))
}

fn addresses(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}

impl Source {
    fn read<T>(&self, f: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        let (storage, _) = self.tensor.storage_and_layout();
        match CpuKernels.slice(&storage, self.elements.clone())?.view() {
            View::Host(bytes) => f(bytes),
            _ => bail!("the tensor is not in host memory"),
        }
    }
}

impl HostSource for Source {
    fn upload(&self, to: &Buffer, via: Option<&Buffer>) -> Result<Box<dyn PendingCopy>> {
        let (compute, stream) = (&self.cuda.stream, &self.stream);
        let (to, via) = (of_device(compute, to)?, via.map(|via| of_device(compute, via)).transpose()?);
        let first = via.unwrap_or(to).view();
        // The buffers' previous users may still run on the compute stream.
        driver(stream, "waiting for the compute stream", stream.join(compute))?;
        let copied = self.read(|bytes| {
            let whole = addresses(bytes);
            if whole.len() != first.bytes() {
                bail!("{} bytes of the host can't be copied to {}", whole.len(), first.bytes())
            }
            parts(whole.clone(), self.locked.as_ref()).try_for_each(|part| {
                let at = part.start - whole.start;
                let to = first.address() + at as u64;
                // SAFETY: both have this many bytes. Locked memory exists until the copy has ended, which `last`
                // ensures. Pageable memory is read before the call returns.
                let copy = unsafe { result::memcpy_htod_async(to, &bytes[at..at + part.len()], stream.cu_stream()) };
                driver(stream, "copying to the device", copy)
            })
        });
        let cast = copied.and_then(|()| match via {
            Some(via) => self.cuda.cast_on(stream, (via.dtype(), via.view()), (to.dtype(), to.view())),
            None => Ok(()),
        });
        // Recorded even after a failure, because the copies before it run.
        let end = self.last.record(stream)?;
        let copying = StreamCopy { end, stream: stream.clone(), compute: compute.clone() };
        if let Err(error) = cast {
            copying.order()?;
            return Err(error);
        }
        Ok(Box::new(copying))
    }

    fn settle(&self) -> Result<()> {
        self.last.wait(&self.stream)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let settled = self.settle();
        let unlocked = match &self.locked {
            // SAFETY: `source` locked the pages, and no copy reads them any more. The tensor is dropped later.
            Some(pages) => unsafe { sys::cuMemHostUnregister(pages.start as *mut c_void) }.result(),
            None => Ok(()),
        };
        if let Err(error) = settled.and(driver(&self.stream, "unlocking a shard's memory", unlocked)) {
            tracing::warn!(%error, "failed to free host memory");
        }
    }
}

/// Host memory as the destination of copies, and as their source on the way back.
struct Memory {
    compute: Arc<CudaStream>,
    down: Arc<CudaStream>,
    up: Arc<CudaStream>,
    dtype: DType,
    bytes: HostBytes,
    last: LastCopy,
}

enum HostBytes {
    Locked(PageLocked),
    Pageable(Buffer),
}

/// See [`Kernels::host_memory`].
pub(super) fn memory(cuda: &CudaKernels, dtype: DType, len: usize, page_locked: bool) -> Result<Box<dyn HostMemory>> {
    let streams = cuda.copies()?;
    let size = len.saturating_mul(dtype.size());
    let bytes = if page_locked && len > 0 {
        let what = || format!("{len} elements of {dtype}, page-locked on the host");
        let none = || Error::Core(fsdp_core::Error::Memory { what: what(), bytes: size as u128 });
        HostBytes::Locked(PageLocked::new(&cuda.stream, size)?.ok_or_else(none)?)
    } else {
        HostBytes::Pageable(Buffer::try_zeros(dtype, len).map_err(Error::from)?)
    };
    Ok(Box::new(Memory {
        compute: cuda.stream.clone(),
        down: streams.down.clone(),
        up: streams.up.clone(),
        dtype,
        bytes,
        last: LastCopy::default(),
    }))
}

impl HostBytes {
    fn bytes(&self) -> &[u8] {
        match self {
            HostBytes::Locked(memory) => memory.bytes(),
            HostBytes::Pageable(buffer) => buffer.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostBytes::Locked(memory) => memory.bytes_mut(),
            HostBytes::Pageable(buffer) => buffer.bytes_mut(),
        }
    }
}

impl HostMemory for Memory {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.bytes.bytes().len() / self.dtype.size()
    }

    fn download(&mut self, from: Slice<'_>) -> Result<Box<dyn PendingCopy>> {
        let (compute, stream) = (&self.compute, &self.down);
        let View::Cuda(from) = from.view() else { bail!("the elements are not on a CUDA device") };
        // A copy that reads the memory may still run.
        self.last.order(stream)?;
        let to = self.bytes.bytes_mut();
        if from.bytes() != to.len() {
            bail!("{} bytes of a device can't be copied to {} of the host", from.bytes(), to.len())
        }
        driver(stream, "waiting for the compute stream", stream.join(compute))?;
        let copied = match to.is_empty() {
            true => Ok(()),
            // SAFETY: both have this many bytes, and exist until the copy has ended: the caller keeps `from`, and
            // `last` guards `to`. Pageable memory is written when the call returns.
            false => unsafe { result::memcpy_dtoh_async(to, from.address(), stream.cu_stream()) },
        };
        driver(stream, "copying to the host", copied)?;
        let end = self.last.record(stream)?;
        Ok(Box::new(StreamCopy { end, stream: stream.clone(), compute: compute.clone() }))
    }

    fn upload(&mut self, to: &Buffer) -> Result<Box<dyn PendingCopy>> {
        let (compute, stream) = (&self.compute, &self.up);
        let to = of_device(compute, to)?.view();
        let from = self.bytes.bytes();
        if to.bytes() != from.len() {
            bail!("{} bytes of the host can't be copied to {} of a device", from.len(), to.bytes())
        }
        // The buffer's previous users may still run on the compute stream, and the copy to the host on another.
        driver(stream, "waiting for the compute stream", stream.join(compute))?;
        self.last.order(stream)?;
        let copied = match from.is_empty() {
            true => Ok(()),
            // SAFETY: both have this many bytes, and exist until the copy has ended: the caller keeps `to`, and `last`
            // guards `from`. Pageable memory is read when the call returns.
            false => unsafe { result::memcpy_htod_async(to.address(), from, stream.cu_stream()) },
        };
        driver(stream, "copying to the device", copied)?;
        let end = self.last.record(stream)?;
        Ok(Box::new(StreamCopy { end, stream: stream.clone(), compute: compute.clone() }))
    }

    fn values(&self) -> Result<Slice<'_>> {
        self.last.wait(&self.down)?;
        Ok(Slice::new(self.dtype, View::Host(self.bytes.bytes())))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // No copy may use the memory when it is freed.
        if let Err(error) = self.last.wait(&self.down) {
            tracing::warn!(%error, "failed to wait for a copy to the host");
        }
    }
}

/// Page-locked host memory, which the driver allocated.
struct PageLocked {
    stream: Arc<CudaStream>,
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: nothing else holds the memory.
unsafe impl Send for PageLocked {}

impl PageLocked {
    /// Returns `None` if the host has no memory for it.
    fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Option<Self>> {
        driver(stream, "using the device", stream.context().bind_to_thread())?;
        // SAFETY: any bits are valid bytes.
        let address = match unsafe { result::malloc_host(len, 0) } {
            Ok(address) => NonNull::new(address.cast::<u8>()),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => None,
            Err(error) => return driver(stream, "allocating page-locked memory", Err(error)),
        };
        Ok(address.map(|address| PageLocked { stream: stream.clone(), address, len }))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: this value owns the bytes, which the driver allocated and aligned to a page.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

/// The owner waits for copies that use the memory.
impl Drop for PageLocked {
    fn drop(&mut self) {
        // SAFETY: the driver allocated it, and it is freed once.
        let freed = unsafe { result::free_host(self.address.as_ptr().cast()) };
        if let Err(error) = driver(&self.stream, "freeing page-locked memory", freed) {
            tracing::warn!(%error, "failed to free host memory");
        }
    }
}

/// Page-locked memory for small copies to the device, such as those of a step's tokens. A copy from pageable memory may
/// wait for the device. The memory is reused when its last copy has ended, and lives as long as the process.
#[derive(Default)]
pub(super) struct Staging(Mutex<Vec<(PageLocked, Arc<CudaEvent>)>>);

impl Staging {
    /// Copies the bytes that `f` writes to memory on the compute stream. Returns `false` without a copy if there are too
    /// many bytes, or no page-locked memory.
    pub(super) fn write(
        &self,
        stream: &Arc<CudaStream>,
        to: CudaView<'_>,
        f: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let bytes = to.bytes();
        if bytes > STAGED_BYTES {
            return Ok(false);
        }
        let known = {
            let mut all = self.0.lock();
            let free = |(memory, last): &(PageLocked, Arc<CudaEvent>)| memory.len >= bytes && last.is_complete();
            let smallest = (0..all.len()).filter(|&at| free(&all[at])).min_by_key(|&at| all[at].0.len);
            smallest.map(|at| all.swap_remove(at).0)
        };
        let known = match known {
            Some(memory) => Some(memory),
            None => PageLocked::new(stream, bytes.next_power_of_two().max(PAGE_BYTES))?,
        };
        let Some(mut memory) = known else { return Ok(false) };
        f(&mut memory.bytes_mut()[..bytes]);
        // SAFETY: both have this many bytes. The memory is kept, and not written again until the copy has ended.
        let copy = unsafe { result::memcpy_htod_async(to.address(), &memory.bytes()[..bytes], stream.cu_stream()) };
        driver(stream, "copying to the device", copy)?;
        let end = driver(stream, "recording an event", stream.record_event(None))?;
        self.0.lock().push((memory, Arc::new(end)));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use half::bf16;

    use super::super::device::{candle_device, device_count, of_candle};
    use super::*;

    #[test]
    fn copies_elements_to_the_device_and_back() {
        if !device_count().is_ok_and(|count| count > 0) {
            return;
        }
        let device = candle_device(0).unwrap();
        let cuda = of_candle(device.as_cuda_device().unwrap()).unwrap();
        let bytes = |slice: Slice<'_>| {
            let mut all = vec![];
            let kernels: &dyn Kernels = if matches!(slice.view(), View::Host(_)) { &CpuKernels } else { cuda };
            kernels.read(slice, &mut |bytes| all.extend_from_slice(bytes)).unwrap();
            all
        };
        for (page_locked, len) in [(true, 0), (true, 3), (true, 5000), (false, 0), (false, 5000)] {
            let values: Vec<f32> = (0..len).map(|i| i as f32 / 7.).collect();
            let tensor = Tensor::from_vec(values.clone(), len, &Device::Cpu).unwrap();
            let source = cuda.host_source(&tensor, page_locked).unwrap().unwrap();
            let mut memory = cuda.host_memory(DType::F32, len, page_locked).unwrap().unwrap();
            for _ in 0..2 {
                let (to, via) = (cuda.zeros(DType::BF16, len).unwrap(), cuda.zeros(DType::F32, len).unwrap());
                source.upload(&to, Some(&via)).unwrap().order().unwrap();
                let rounded: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
                assert_eq!(bytes((&to).into()), bytemuck::cast_slice::<_, u8>(&rounded));
                let down = memory.download((&via).into()).unwrap();
                assert_eq!(bytes(memory.values().unwrap()), bytemuck::cast_slice::<_, u8>(&values));
                down.order().unwrap();
                let back = cuda.zeros(DType::F32, len).unwrap();
                memory.upload(&back).unwrap().order().unwrap();
                assert_eq!(bytes((&back).into()), bytemuck::cast_slice::<_, u8>(&values));
                let more = cuda.zeros(DType::F32, len + 1).unwrap();
                assert!(source.upload(&more, None).is_err() && memory.upload(&more).is_err());
                assert!(memory.download((&more).into()).is_err());
            }
            source.settle().unwrap();
        }
    }

    #[test]
    fn successive_small_copies_do_not_overwrite_each_other() {
        if !device_count().is_ok_and(|count| count > 0) {
            return;
        }
        let device = candle_device(0).unwrap();
        let cuda = of_candle(device.as_cuda_device().unwrap()).unwrap();
        let all: Vec<Vec<u32>> = (0..6u32).map(|copy| (0..3000 / (1 + copy)).map(|i| i * 7 + copy).collect()).collect();
        let uploaded: Vec<Tensor> = all
            .iter()
            .map(|values| crate::upload(&Tensor::new(values.as_slice(), &Device::Cpu).unwrap(), &device).unwrap())
            .collect();
        for (values, tensor) in all.iter().zip(&uploaded) {
            assert_eq!(&tensor.to_vec1::<u32>().unwrap(), values);
        }
        // All copies have ended, so none of these needs more memory.
        let blocks = || cuda.staging.0.lock().len();
        let before = blocks();
        for values in &all {
            let tensor = crate::upload(&Tensor::new(values.as_slice(), &Device::Cpu).unwrap(), &device).unwrap();
            assert_eq!(&tensor.to_vec1::<u32>().unwrap(), values);
        }
        assert_eq!(blocks(), before);
        // More than staging takes.
        let large = Tensor::arange(0u32, (STAGED_BYTES / 4 + 1) as u32, &Device::Cpu).unwrap();
        let back = crate::upload(&large, &device).unwrap().to_device(&Device::Cpu).unwrap();
        assert_eq!(back.to_vec1::<u32>().unwrap(), large.to_vec1::<u32>().unwrap());
        let nothing = crate::upload(&Tensor::zeros((2, 0), candle_core::DType::F32, &Device::Cpu).unwrap(), &device);
        assert_eq!(nothing.unwrap().dims(), [2, 0]);
    }

    #[test]
    fn locks_only_pages_within_the_range() {
        assert_eq!(pages_within(&(4096..8192)), Some(4096..8192));
        assert_eq!(pages_within(&(4095..12289)), Some(4096..12288));
        assert_eq!(pages_within(&(4097..12287)), None);
        assert_eq!(pages_within(&(5000..5000)), None);
        assert_eq!(pages_within(&(usize::MAX - 10..usize::MAX)), None);
    }

    #[test]
    fn splits_copies_at_the_borders_of_locked_pages() {
        let of = |addresses: Range<usize>| {
            let locked = pages_within(&addresses);
            parts(addresses, locked.as_ref()).map(|part| (part.start, part.end)).collect::<Vec<_>>()
        };
        assert_eq!(of(4095..12289), [(4095, 4096), (4096, 12288), (12288, 12289)]);
        assert_eq!(of(4096..8200), [(4096, 8192), (8192, 8200)]);
        assert_eq!(of(4096..8192), [(4096, 8192)]);
        assert_eq!(of(4097..8200), [(4097, 8200)]);
        assert!(of(4097..4097).is_empty());
    }
}
