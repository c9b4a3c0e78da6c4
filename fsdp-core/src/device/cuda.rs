//! Memory of CUDA devices.
//!
//! # Order
//! Every piece of memory belongs to the stream that its device computes on, the *compute stream*: it is allocated and
//! freed there. cudarc's own tracking by events is off ([`ready`]), because it does not see who writes and costs two
//! events an allocation. In its place stand three rules:
//! - Memory that nobody holds (in a pool, or freed) is free for what comes next on the compute stream.
//! - What uses memory on another stream first lets that stream wait for the compute stream.
//! - It keeps the memory until the compute stream has been told to wait for it
//!   ([`Fence`](crate::process_group::Fence)).
//!
//! What a copy brings that the compute stream does not wait for says so in its view: who reads it waits by itself
//! ([`CudaView::order`]).
//!
//! So no memory waits for the device to be given back, and how much is in use follows from the order of calls alone.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result, sys};

use crate::{DType, Error, Result, Scalar, device_id::DeviceId};

/// Elements on a CUDA device, freed on the stream that they belong to.
#[derive(Debug)]
pub struct CudaMemory {
    bytes: CudaSlice<u8>,
    dtype: DType,
}

/// Bytes on a CUDA device, to be read by what is ordered after the compute stream, and after [`CudaView::order`].
#[derive(Clone, Copy, Debug)]
pub struct CudaView<'a> {
    address: sys::CUdeviceptr,
    bytes: usize,
    stream: &'a Arc<CudaStream>,
    /// The copy that brings them, where the compute stream does not wait for it.
    arrival: Option<Arrival<'a>>,
}

/// The end of a copy to the device.
#[derive(Clone, Copy, Debug)]
struct Arrival<'a> {
    end: &'a CudaEvent,
    stream: &'a Arc<CudaStream>,
}

impl CudaMemory {
    /// `len` elements with unspecified values. Zero elements have no address.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has no room, [`Error::Device`] for any other trouble.
    pub fn uninit(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Result<Self> {
        let memory =
            |bytes: u128| Error::Memory { what: format!("{len} elements of {dtype} on {}", id(stream)), bytes };
        let Some(size) = len.checked_mul(dtype.size()).filter(|size| *size <= isize::MAX as usize) else {
            return Err(memory(len as u128 * dtype.size() as u128));
        };
        let bytes = match size {
            0 => stream.null::<u8>(),
            // SAFETY: bytes have no invalid values, and who takes the memory writes before reading.
            _ => unsafe { stream.alloc::<u8>(size) },
        };
        match bytes {
            Ok(bytes) => Ok(CudaMemory { bytes, dtype }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Err(memory(size as u128)),
            Err(error) => Err(failed(stream, "allocating memory", &error)),
        }
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// As [`CudaMemory::uninit`].
    pub fn zeros(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Result<Self> {
        let mut memory = Self::uninit(stream, dtype, len)?;
        if len > 0 {
            stream.memset_zeros(&mut memory.bytes).map_err(|error| failed(stream, "writing zeros", &error))?;
        }
        Ok(memory)
    }

    /// The memory of a slice, without a copy.
    pub fn from_slice<T: Scalar + DeviceRepr>(slice: CudaSlice<T>) -> Self {
        let (stream, size) = (slice.stream().clone(), slice.num_bytes());
        // SAFETY: the address is that of `size` bytes of the same stream, which nobody else owns any more.
        let bytes = unsafe { stream.upgrade_device_ptr::<u8>(slice.leak(), size) };
        CudaMemory { bytes, dtype: T::DTYPE }
    }

    /// The memory as a slice, without a copy.
    ///
    /// # Errors
    /// The memory itself, when its elements are of another type.
    pub fn into_slice<T: Scalar + DeviceRepr>(self) -> Result<CudaSlice<T>, Self> {
        if self.dtype != T::DTYPE {
            return Err(self);
        }
        let (stream, len) = (self.bytes.stream().clone(), self.len());
        // SAFETY: the address is that of `len` elements of this type, of the same stream, with no other owner.
        Ok(unsafe { stream.upgrade_device_ptr::<T>(self.bytes.leak(), len) })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Which device it is on.
    pub fn device(&self) -> DeviceId {
        id(self.bytes.stream())
    }

    /// The device's compute stream, which it belongs to.
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.bytes.stream()
    }

    /// All bytes, to be read, or to be written by who owns the memory.
    pub fn view(&self) -> CudaView<'_> {
        let stream = self.bytes.stream();
        CudaView { address: self.bytes.device_ptr(stream).0, bytes: self.bytes.len(), stream, arrival: None }
    }

    /// A copy of the bytes on the host. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses.
    pub fn to_host(&self) -> Result<Vec<u8>> {
        self.view().to_host()
    }
}

impl Clone for CudaMemory {
    /// # Panics
    /// When the device has no room: a vector's clone ends the process where the host has none.
    fn clone(&self) -> Self {
        let copy = || {
            let copy = Self::uninit(self.stream(), self.dtype, self.len())?;
            self.view().copy_to(copy.view(), self.stream()).map(|()| copy)
        };
        copy().unwrap_or_else(|error: Error| panic!("{error}"))
    }
}

impl PartialEq for CudaMemory {
    /// Compares the elements, which are copied to the host: for tests.
    fn eq(&self, other: &Self) -> bool {
        let same_form = (self.dtype, self.len()) == (other.dtype, other.len());
        same_form && matches!((self.to_host(), other.to_host()), (Ok(own), Ok(others)) if own == others)
    }
}

impl<'a> CudaView<'a> {
    /// Bytes that lie in memory of a stream.
    ///
    /// # Safety
    /// There are `bytes` bytes of device memory at the address, for as long as the view lives.
    pub unsafe fn new(address: sys::CUdeviceptr, bytes: usize, stream: &'a Arc<CudaStream>) -> Self {
        CudaView { address, bytes, stream, arrival: None }
    }

    /// The same bytes, which a copy on `stream` brings: they are there behind `end`, and the compute stream does not
    /// wait for it.
    pub fn arriving(self, stream: &'a Arc<CudaStream>, end: &'a CudaEvent) -> Self {
        CudaView { arrival: Some(Arrival { end, stream }), ..self }
    }

    /// The stream that brings the bytes, where it is not the compute stream.
    pub fn arrives_on(&self) -> Option<&'a Arc<CudaStream>> {
        self.arrival.map(|arrival| arrival.stream)
    }

    /// Lets a stream that has waited for the compute stream go on only when the bytes are there: what an engine does
    /// before it reads them. Does not block.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses.
    pub fn order(self, stream: &CudaStream) -> Result<()> {
        let Some(Arrival { end, .. }) = self.arrival else { return Ok(()) };
        stream.wait(end).map_err(|error| failed(stream, "waiting for a copy to the device", &error))
    }

    /// Where they are in the device's memory.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device's compute stream.
    pub fn stream(&self) -> &'a Arc<CudaStream> {
        self.stream
    }

    /// The bytes in a range, where there are such.
    pub fn range(self, range: std::ops::Range<usize>) -> Option<Self> {
        let bytes = range.end.checked_sub(range.start).filter(|_| range.end <= self.bytes)?;
        Some(CudaView { address: self.address + range.start as u64, bytes, ..self })
    }

    /// Copies the bytes to as many others of the same device, in the order of `stream`. Who calls it keeps both until
    /// the stream has done so.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses, or there are not as many others.
    pub fn copy_to(self, to: CudaView<'_>, stream: &Arc<CudaStream>) -> Result<()> {
        if self.bytes != to.bytes {
            let why = format!("{} bytes can't be copied to {}", self.bytes, to.bytes);
            return Err(failed(stream, "copying", &why));
        }
        if self.bytes == 0 {
            return Ok(());
        }
        self.order(stream)?;
        let what = |error: DriverError| failed(stream, "copying", &error);
        stream.context().bind_to_thread().map_err(what)?;
        // SAFETY: the views are of memory of this length, which stays until the stream has copied it.
        unsafe { result::memcpy_dtod_async(to.address, self.address, self.bytes, stream.cu_stream()) }.map_err(what)
    }

    /// A copy of the bytes on the host. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses.
    pub fn to_host(self) -> Result<Vec<u8>> {
        let mut host = vec![0; self.bytes];
        if self.bytes == 0 {
            return Ok(host);
        }
        self.order(self.stream)?;
        let what = |error: DriverError| failed(self.stream, "copying to the host", &error);
        self.stream.context().bind_to_thread().map_err(what)?;
        // SAFETY: both are memory of this many bytes. The host's is pageable, to which a copy has ended when its call
        // returns.
        unsafe { result::memcpy_dtoh_async(&mut host, self.address, self.stream.cu_stream()) }.map_err(what)?;
        Ok(host)
    }
}

/// A device's number, by a stream of it.
pub fn id(stream: &CudaStream) -> DeviceId {
    DeviceId::Cuda(stream.context().ordinal())
}

/// What a device said when it failed at something.
pub fn failed(stream: &CudaStream, what: &str, cause: &dyn std::fmt::Display) -> Error {
    Error::Device { device: id(stream), what: what.to_string(), cause: cause.to_string() }
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that can be allocated: unused memory, and freed memory that the driver's pool keeps.
    pub free: u64,
    /// All bytes of the device.
    pub total: u64,
}

impl DeviceMemory {
    /// The memory of the stream's device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device refuses.
    pub fn of(stream: &CudaStream) -> Result<Self> {
        let what = |error: DriverError| failed(stream, "asking for free memory", &error);
        let (free, total) = stream.context().mem_get_info().map_err(what)?;
        let pool_holds = |attribute| -> Result<u64> {
            let mut bytes = 0u64;
            // SAFETY: the attribute is a u64, and the pool that of a device that there is.
            unsafe {
                let pool = result::device::get_default_mem_pool(stream.context().cu_device()).map_err(what)?;
                result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()).map_err(what)?;
            }
            Ok(bytes)
        };
        let reserved = pool_holds(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = pool_holds(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok(DeviceMemory { free: free as u64 + reserved.saturating_sub(used), total: total as u64 })
    }
}

/// Makes a device ready, before anything is allocated on it: switches cudarc's tracking by events off (see the module's
/// documentation), and lets the driver's pool keep what is freed rather than give it back whenever somebody waits for
/// the device.
///
/// # Errors
/// [`Error::Device`] when the device refuses.
pub fn ready(context: &Arc<CudaContext>) -> Result<()> {
    // SAFETY: memory is used on other streams by the rules of this module.
    unsafe { context.disable_event_tracking() };
    let what = |error: DriverError| Error::Device {
        device: DeviceId::Cuda(context.ordinal()),
        what: "setting how much freed memory the driver keeps".into(),
        cause: error.to_string(),
    };
    context.bind_to_thread().map_err(what)?;
    let mut all = u64::MAX;
    // SAFETY: the attribute is a u64, and the pool that of a device that there is.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device()).map_err(what)?;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast()).map_err(what)
    }
}
