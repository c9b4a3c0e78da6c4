//! Copies between host and device memory. Each direction has a stream beside the compute stream.
//!
//! A device buffer is used in the compute stream's order. A copy waits for the computations so far, and the buffer's
//! owner makes later computations wait for the copy ([`PendingCopy::order`]). Host memory has no stream order, so its
//! owner here ([`Source`], [`Sink`]) waits for the last copy before the memory is read, written or freed.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};
use fsdp_core::device::cuda::{CudaMemory, failed};
use fsdp_core::{Buffer, DType, View};
use parking_lot::Mutex;

use super::super::cpu::CpuKernels;
use super::super::{HostSink, HostSource, Kernels, PendingCopy, Slice};
use super::device::{CudaKernels, of_ordinal};
use crate::error::Error;

/// Size of a page, the unit of page-locking.
const PAGE_BYTES: usize = 4096;

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

/// Host memory as the destination of copies.
struct Sink {
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    dtype: DType,
    memory: SinkMemory,
    last: LastCopy,
}

enum SinkMemory {
    /// Bytes that the driver allocated.
    Locked(NonNull<u8>, usize),
    Pageable(Buffer),
}

// SAFETY: nothing else holds the memory.
unsafe impl Send for SinkMemory {}

/// See [`Kernels::host_sink`].
pub(super) fn sink(cuda: &CudaKernels, dtype: DType, len: usize, page_locked: bool) -> Result<Box<dyn HostSink>> {
    let streams = cuda.copies()?;
    let memory = |what: String, bytes| Error::Core(fsdp_core::Error::Memory { what, bytes });
    let bytes = len.saturating_mul(dtype.size());
    let memory = if page_locked && len > 0 {
        driver(&cuda.stream, "using the device", cuda.stream.context().bind_to_thread())?;
        // SAFETY: any bits are a valid element of every dtype, and are written before they are read.
        let address = match unsafe { result::malloc_host(bytes, 0) } {
            Ok(address) => NonNull::new(address.cast::<u8>()),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => None,
            Err(error) => return driver(&cuda.stream, "allocating page-locked memory", Err(error)),
        };
        let none = || memory(format!("{len} elements of {dtype}, page-locked on the host"), bytes as u128);
        SinkMemory::Locked(address.ok_or_else(none)?, bytes)
    } else {
        SinkMemory::Pageable(Buffer::try_zeros(dtype, len).map_err(Error::from)?)
    };
    Ok(Box::new(Sink {
        compute: cuda.stream.clone(),
        stream: streams.down.clone(),
        dtype,
        memory,
        last: LastCopy::default(),
    }))
}

impl SinkMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: this value owns the bytes, which the driver allocated and aligned to a page.
            SinkMemory::Locked(address, bytes) => unsafe { std::slice::from_raw_parts(address.as_ptr(), *bytes) },
            SinkMemory::Pageable(buffer) => buffer.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: as above.
            SinkMemory::Locked(address, bytes) => unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), *bytes) },
            SinkMemory::Pageable(buffer) => buffer.bytes_mut(),
        }
    }
}

impl HostSink for Sink {
    fn download(&mut self, from: &Buffer) -> Result<Box<dyn PendingCopy>> {
        let (compute, stream) = (&self.compute, &self.stream);
        let from = of_device(compute, from)?.view();
        let to = self.memory.bytes_mut();
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

    fn values(&self) -> Result<Slice<'_>> {
        self.last.wait(&self.stream)?;
        Ok(Slice::new(self.dtype, View::Host(self.memory.bytes())))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let settled = self.last.wait(&self.stream);
        let freed = match &self.memory {
            // SAFETY: the driver allocated it, and no copy writes to it any more.
            SinkMemory::Locked(address, _) => unsafe { result::free_host(address.as_ptr().cast()) },
            SinkMemory::Pageable(_) => Ok(()),
        };
        if let Err(error) = settled.and(driver(&self.stream, "freeing page-locked memory", freed)) {
            tracing::warn!(%error, "failed to free host memory");
        }
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
            let mut sink = cuda.host_sink(DType::F32, len, page_locked).unwrap().unwrap();
            for _ in 0..2 {
                let (to, via) = (cuda.zeros(DType::BF16, len).unwrap(), cuda.zeros(DType::F32, len).unwrap());
                source.upload(&to, Some(&via)).unwrap().order().unwrap();
                let rounded: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
                assert_eq!(bytes((&to).into()), bytemuck::cast_slice::<_, u8>(&rounded));
                let down = sink.download(&via).unwrap();
                assert_eq!(bytes(sink.values().unwrap()), bytemuck::cast_slice::<_, u8>(&values));
                down.order().unwrap();
                let fewer = cuda.zeros(DType::F32, len + 1).unwrap();
                assert!(source.upload(&fewer, None).is_err() && sink.download(&fewer).is_err());
            }
            source.settle().unwrap();
        }
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
