//! Memory of CUDA devices.
//!
//! # Order
//! Memory belongs to the stream that its device computes on, the *compute stream*, and is allocated and freed there.
//! cudarc's tracking by events is off ([`ready`]), because it does not see all writers and costs two events an
//! allocation. Three rules replace it:
//! - Memory without an owner (in a pool, or freed) may be used by later work on the compute stream.
//! - Before another stream uses memory, it waits for the compute stream.
//! - The user keeps the memory until the compute stream has been told to wait for it
//!   ([`Fence`](crate::process_group::Fence)).
//!
//! If the compute stream does not wait for a copy to the device, the memory's view says so, and its readers wait
//! themselves ([`CudaView::order`]).
//!
//! Memory is therefore reused without waiting for the device, and the amount in use follows from the order of calls.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result, sys};

use crate::{DType, Error, Result, Scalar, device_id::DeviceId};

/// Elements on a CUDA device, freed on the stream that they belong to.
#[derive(Debug)]
pub struct CudaMemory {
    bytes: CudaSlice<u8>,
    dtype: DType,
    /// Bytes that the allocation has: at least its length.
    allocated: usize,
}

/// Bytes on a CUDA device, readable after the compute stream and after [`CudaView::order`].
#[derive(Clone, Copy, Debug)]
pub struct CudaView<'a> {
    address: sys::CUdeviceptr,
    bytes: usize,
    stream: &'a Arc<CudaStream>,
    /// The copy that writes the bytes, if the compute stream does not wait for it.
    arrival: Option<Arrival<'a>>,
}

/// The end of a copy to the device.
#[derive(Clone, Copy, Debug)]
struct Arrival<'a> {
    end: &'a CudaEvent,
    stream: &'a Arc<CudaStream>,
}

impl CudaMemory {
    /// Allocates `len` elements with unspecified values. Zero elements have no address.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device has not enough memory, [`Error::Device`] for other failures.
    pub fn uninit(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Result<Self> {
        let memory =
            |bytes: u128| Error::Memory { what: format!("{len} elements of {dtype} on {}", id(stream)), bytes };
        let Some(size) = len.checked_mul(dtype.size()).filter(|size| *size <= isize::MAX as usize) else {
            return Err(memory(len as u128 * dtype.size() as u128));
        };
        let take = || match size {
            0 => stream.null::<u8>(),
            // SAFETY: bytes have no invalid values, and the caller writes before reading.
            _ => unsafe { stream.alloc::<u8>(size) },
        };
        let is_full = |outcome: &Result<_, DriverError>| {
            matches!(outcome, Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)))
        };
        let mut bytes = take();
        if is_full(&bytes) {
            // The pool may hold free pieces that are too small.
            let waited = stream.synchronize().map_err(|error| failed(stream, "waiting for free memory", &error));
            waited.and_then(|()| return_unused_memory(stream))?;
            bytes = take();
        }
        match bytes {
            Ok(bytes) => Ok(CudaMemory { bytes, dtype, allocated: size }),
            outcome if is_full(&outcome) => Err(memory(size as u128)),
            Err(error) => Err(failed(stream, "allocating memory", &error)),
        }
    }

    /// Allocates `len` zeros.
    ///
    /// # Errors
    /// Errors of [`CudaMemory::uninit`].
    pub fn zeros(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Result<Self> {
        let mut memory = Self::uninit(stream, dtype, len)?;
        if len > 0 {
            stream.memset_zeros(&mut memory.bytes).map_err(|error| failed(stream, "writing zeros", &error))?;
        }
        Ok(memory)
    }

    /// Allocates `len` zeros, with further memory behind them for `room` elements in all. Engines use it for padding.
    ///
    /// # Errors
    /// Errors of [`CudaMemory::uninit`].
    pub fn zeros_with_room(stream: &Arc<CudaStream>, dtype: DType, len: usize, room: usize) -> Result<Self> {
        let CudaMemory { bytes, dtype, allocated } = Self::zeros(stream, dtype, room.max(len))?;
        // SAFETY: the address has at least this many bytes of the same stream, without another owner.
        let bytes = unsafe { stream.upgrade_device_ptr::<u8>(bytes.leak(), len * dtype.size()) };
        Ok(CudaMemory { bytes, dtype, allocated })
    }

    /// Returns the number of elements that its allocation has room for: at least its length.
    pub fn room(&self) -> usize {
        self.allocated / self.dtype.size()
    }

    /// Sets the room, which a conversion to a slice and back loses.
    ///
    /// # Safety
    /// The allocation has room for `room` elements.
    pub unsafe fn with_room(self, room: usize) -> Self {
        CudaMemory { allocated: self.bytes.len().max(room * self.dtype.size()), ..self }
    }

    /// Converts a slice without a copy.
    pub fn from_slice<T: Scalar + DeviceRepr>(slice: CudaSlice<T>) -> Self {
        let (stream, size) = (slice.stream().clone(), slice.num_bytes());
        // SAFETY: the address has `size` bytes of the same stream, without another owner.
        let bytes = unsafe { stream.upgrade_device_ptr::<u8>(slice.leak(), size) };
        CudaMemory { bytes, dtype: T::DTYPE, allocated: size }
    }

    /// Converts the memory to a slice without a copy.
    ///
    /// # Errors
    /// The memory itself, if its elements have another type.
    pub fn into_slice<T: Scalar + DeviceRepr>(self) -> Result<CudaSlice<T>, Self> {
        if self.dtype != T::DTYPE {
            return Err(self);
        }
        let (stream, len) = (self.bytes.stream().clone(), self.len());
        // SAFETY: the address has `len` elements of this type and stream, without another owner.
        Ok(unsafe { stream.upgrade_device_ptr::<T>(self.bytes.leak(), len) })
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the device.
    pub fn device(&self) -> DeviceId {
        id(self.bytes.stream())
    }

    /// Returns the device's compute stream, which the memory belongs to.
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.bytes.stream()
    }

    /// Returns a view of all bytes. The memory's owner may write through it.
    pub fn view(&self) -> CudaView<'_> {
        let stream = self.bytes.stream();
        CudaView { address: self.bytes.device_ptr(stream).0, bytes: self.bytes.len(), stream, arrival: None }
    }

    /// Copies the bytes to the host. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn to_host(&self) -> Result<Vec<u8>> {
        self.view().to_host()
    }
}

impl Clone for CudaMemory {
    /// # Panics
    /// If the device has not enough memory, as a vector's clone aborts on the host.
    fn clone(&self) -> Self {
        let copy = || {
            let copy = Self::uninit(self.stream(), self.dtype, self.len())?;
            self.view().copy_to(copy.view(), self.stream()).map(|()| copy)
        };
        copy().unwrap_or_else(|error: Error| panic!("{error}"))
    }
}

impl PartialEq for CudaMemory {
    /// Compares the elements on the host, for tests.
    fn eq(&self, other: &Self) -> bool {
        let same_form = (self.dtype, self.len()) == (other.dtype, other.len());
        same_form && matches!((self.to_host(), other.to_host()), (Ok(own), Ok(others)) if own == others)
    }
}

impl<'a> CudaView<'a> {
    /// Creates a view of bytes of a stream's memory.
    ///
    /// # Safety
    /// The address has `bytes` bytes of device memory for as long as the view lives.
    pub unsafe fn new(address: sys::CUdeviceptr, bytes: usize, stream: &'a Arc<CudaStream>) -> Self {
        CudaView { address, bytes, stream, arrival: None }
    }

    /// Marks the bytes as written by a copy on `stream` that ends at `end`, which the compute stream does not wait for.
    pub fn arriving(self, stream: &'a Arc<CudaStream>, end: &'a CudaEvent) -> Self {
        CudaView { arrival: Some(Arrival { end, stream }), ..self }
    }

    /// Returns the stream that copies the bytes, if it is not the compute stream.
    pub fn arrives_on(&self) -> Option<&'a Arc<CudaStream>> {
        self.arrival.map(|arrival| arrival.stream)
    }

    /// Makes a stream that has waited for the compute stream wait for the bytes. Engines call it before they read. Does
    /// not block.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn order(self, stream: &CudaStream) -> Result<()> {
        let Some(Arrival { end, .. }) = self.arrival else { return Ok(()) };
        stream.wait(end).map_err(|error| failed(stream, "waiting for a copy to the device", &error))
    }

    /// [`CudaView::order`] for one of several views. `waited` is the end of the copies that the stream waits for already:
    /// one event ends the copies of several views.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    #[cfg(feature = "nccl")]
    pub(crate) fn order_with(self, stream: &CudaStream, waited: &mut Option<sys::CUevent>) -> Result<()> {
        let end = self.arrival.map(|arrival| arrival.end.cu_event());
        if end.is_none() || end == *waited {
            return Ok(());
        }
        *waited = end;
        self.order(stream)
    }

    /// Returns the address in the device's memory.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the device's compute stream.
    pub fn stream(&self) -> &'a Arc<CudaStream> {
        self.stream
    }

    /// Returns the bytes in a range, or `None` if it is out of bounds.
    pub fn range(self, range: std::ops::Range<usize>) -> Option<Self> {
        let bytes = range.end.checked_sub(range.start).filter(|_| range.end <= self.bytes)?;
        Some(CudaView { address: self.address + range.start as u64, bytes, ..self })
    }

    /// Copies the bytes to another view of the same device, in the order of `stream`. The caller keeps both until the
    /// stream has copied them.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails, or the lengths differ.
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
        // SAFETY: the views have this length, and stay until the stream has copied them.
        unsafe { result::memcpy_dtod_async(to.address, self.address, self.bytes, stream.cu_stream()) }.map_err(what)
    }

    /// Copies the bytes to the host. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn to_host(self) -> Result<Vec<u8>> {
        let mut host = vec![0; self.bytes];
        if self.bytes == 0 {
            return Ok(host);
        }
        self.order(self.stream)?;
        let what = |error: DriverError| failed(self.stream, "copying to the host", &error);
        self.stream.context().bind_to_thread().map_err(what)?;
        // SAFETY: both have this length. Host memory is pageable, so the copy has ended when the call returns.
        unsafe { result::memcpy_dtoh_async(&mut host, self.address, self.stream.cu_stream()) }.map_err(what)?;
        Ok(host)
    }
}

/// Returns the device of a stream.
pub fn id(stream: &CudaStream) -> DeviceId {
    DeviceId::Cuda(stream.context().ordinal())
}

/// Returns an error of a stream's device.
pub fn failed(stream: &CudaStream, what: &str, cause: &dyn std::fmt::Display) -> Error {
    Error::Device { device: id(stream), what: what.to_string(), cause: cause.to_string() }
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that can be allocated: unused memory and free memory of the driver's pool.
    pub free: u64,
    /// All bytes of the device.
    pub total: u64,
}

impl DeviceMemory {
    /// Returns the memory of the stream's device.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn of(stream: &CudaStream) -> Result<Self> {
        let what = |error: DriverError| failed(stream, "asking for free memory", &error);
        let (free, total) = stream.context().mem_get_info().map_err(what)?;
        let pool_holds = |attribute| -> Result<u64> {
            let mut bytes = 0u64;
            // SAFETY: the attribute is a u64, and the device has this pool.
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

/// Returns the unused memory of the driver's pool to the device, for NCCL or for an allocation that no free piece of the
/// pool fits. Memory that is freed behind work of the device stays in the pool.
///
/// # Errors
/// [`Error::Device`] if the device fails.
pub(crate) fn return_unused_memory(stream: &Arc<CudaStream>) -> Result<()> {
    let what = |error: DriverError| failed(stream, "returning the pool's unused memory", &error);
    // SAFETY: the device has this pool.
    unsafe {
        let pool = result::device::get_default_mem_pool(stream.context().cu_device()).map_err(what)?;
        result::mem_pool::trim_to(pool, 0).map_err(what)
    }
}

/// Prepares a device before anything is allocated on it. Switches off cudarc's tracking by events (see the module), and
/// lets the driver's pool keep freed memory at synchronizations.
///
/// # Errors
/// [`Error::Device`] if the device fails.
pub fn ready(context: &Arc<CudaContext>) -> Result<()> {
    // SAFETY: other streams use memory by the rules of this module.
    unsafe { context.disable_event_tracking() };
    let what = |error: DriverError| Error::Device {
        device: DeviceId::Cuda(context.ordinal()),
        what: "setting how much freed memory the driver keeps".into(),
        cause: error.to_string(),
    };
    context.bind_to_thread().map_err(what)?;
    let mut all = u64::MAX;
    // SAFETY: the attribute is a u64, and the device has this pool.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device()).map_err(what)?;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast()).map_err(what)
    }
}
