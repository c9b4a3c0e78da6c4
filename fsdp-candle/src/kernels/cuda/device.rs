//! The CUDA devices of this process: one compute stream for each device, shared by all users, and its compiled kernels.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use candle_core::backend::BackendDevice;
use candle_core::{CudaDevice, Device, DeviceLocation, Tensor, bail};
use cudarc::driver::{CudaContext, CudaStream, DriverError, LaunchConfig, PushKernelArg};
use fsdp_core::device::cuda::{CudaMemory, CudaView, DeviceMemory, failed, ready};
use fsdp_core::{Buffer, DType, DeviceId, View};
use parking_lot::Mutex;

use super::super::slice::{Slice, SliceMut, ViewMut};
use super::attention_backend::wants_cudnn;
use super::compiler::{Kernel, Library};
use super::cublas_lt::CublasLt;
#[cfg(feature = "cudnn")]
use super::cudnn::Cudnn;
use super::host_copies::Staging;
use crate::error::{Error, Result};

/// The devices by number. Kernels live as long as the process.
static DEVICES: Mutex<BTreeMap<usize, &'static CudaKernels>> = Mutex::new(BTreeMap::new());

/// CUDA's handle of the per-thread default stream.
const PER_THREAD_STREAM: usize = 2;

/// Returns the kernels of a device that has been used.
pub(in crate::kernels) fn of_ordinal(ordinal: usize) -> Option<&'static CudaKernels> {
    DEVICES.lock().get(&ordinal).copied()
}

/// Returns the kernels of Candle's device. The first call compiles them. Fails if the device computes on another stream
/// than before, or on the per-thread default stream, or when the device refuses.
pub(in crate::kernels) fn of_candle(device: &CudaDevice) -> Result<&'static CudaKernels> {
    let DeviceLocation::Cuda { gpu_id: ordinal } = device.location() else {
        return Err(Error::Device("Candle's CUDA device has no CUDA location".into()));
    };
    let mut devices = DEVICES.lock();
    let stream = device.cuda_stream();
    if let Some(known) = devices.get(&ordinal) {
        if known.stream.cu_stream() == stream.cu_stream() {
            return Ok(known);
        }
        return Err(Error::Device(format!(
            "CUDA device {ordinal} was created twice in this process, with two streams. Create it with \
             fsdp_candle::cuda_device({ordinal}), which returns the same device each time"
        )));
    }
    if stream.cu_stream() as usize == PER_THREAD_STREAM {
        return Err(Error::Device(format!(
            "Candle's Device::new_cuda({ordinal}) computes on another stream in each thread. Create the device \
             with fsdp_candle::cuda_device({ordinal})"
        )));
    }
    ready(stream.context())?;
    let known: &'static CudaKernels = Box::leak(Box::new(CudaKernels::new(device.clone(), stream)?));
    devices.insert(ordinal, known);
    Ok(known)
}

/// Returns the kernels of a buffer's device.
pub(super) fn of_buffer(buffer: &Buffer) -> Result<&'static CudaKernels> {
    let device = buffer.device();
    let known = if let DeviceId::Cuda(ordinal) = device { of_ordinal(ordinal) } else { None };
    known.ok_or_else(|| Error::Device(format!("a buffer is on {device}, which has not been used yet")))
}

/// Returns the kernels of the device that elements are on.
pub(super) fn of_slice(slice: &Slice<'_>) -> candle_core::Result<&'static CudaKernels> {
    let View::Cuda(view) = slice.view() else { bail!("the elements are not in memory of a CUDA device") };
    match of_ordinal(view.stream().context().ordinal()) {
        Some(kernels) => Ok(kernels),
        None => bail!("the elements are in memory of a device that has not been used yet"),
    }
}

/// Returns Candle's device of this number, the same one each time.
pub(crate) fn candle_device(ordinal: usize) -> Result<Device> {
    // Two threads would create two devices, of which the second is refused.
    static CREATING: Mutex<()> = Mutex::new(());
    let _creating = CREATING.lock();
    if let Some(known) = of_ordinal(ordinal) {
        return Ok(Device::Cuda(known.device.clone()));
    }
    let device = CudaDevice::new_with_stream(ordinal)?;
    Ok(Device::Cuda(of_candle(&device)?.device.clone()))
}

/// Returns the version of cuDNN, if it computes attention on a device.
#[cfg(feature = "cudnn")]
pub(crate) fn cudnn_version(device: &Device) -> candle_core::Result<Option<String>> {
    Ok(of_candle(device.as_cuda_device()?)?.cudnn()?.map(Cudnn::version))
}

#[cfg(not(feature = "cudnn"))]
pub(crate) fn cudnn_version(_: &Device) -> candle_core::Result<Option<String>> {
    Ok(None)
}

/// Returns the compute stream of a device.
pub(crate) fn compute_stream(device: &Device) -> Result<Arc<CudaStream>> {
    Ok(of_candle(device.as_cuda_device()?)?.stream.clone())
}

/// Allocates memory of a device with unspecified values.
pub(crate) fn uninit(device: &Device, dtype: DType, len: usize) -> candle_core::Result<Buffer> {
    of_candle(device.as_cuda_device()?)?.uninit(dtype, len)
}

/// Returns a vector of ones, which later calls share. Products with it are sums.
pub(crate) fn ones(device: &Device, dtype: candle_core::DType, len: usize) -> candle_core::Result<Tensor> {
    let mut known = of_candle(device.as_cuda_device()?)?.ones.lock();
    if let Some(ones) = known.iter().find(|ones| ones.dtype() == dtype && ones.elem_count() >= len) {
        return ones.narrow(0, 0, len);
    }
    let ones = Tensor::ones(len, dtype, device)?;
    known.retain(|shorter| shorter.dtype() != dtype);
    known.push(ones.clone());
    Ok(ones)
}

/// Returns the number of CUDA devices that this process sees.
pub(crate) fn device_count() -> Result<usize> {
    let count = CudaContext::device_count();
    let count = count.map_err(|error| Error::Device(format!("CUDA cannot list its devices: {error}")))?;
    Ok(count.max(0) as usize)
}

/// Number of partial results of a reduction: one for each block.
pub(super) const MAX_PARTIALS: usize = 512;

/// One over the share of a device's memory from which its free memory is queried. A query is a call of the driver.
const QUERY_SHARE: u128 = 16;

/// A CUDA device and its compute stream. All kernels run in that stream's order.
pub(in crate::kernels) struct CudaKernels {
    pub(super) device: CudaDevice,
    pub(super) stream: Arc<CudaStream>,
    library: Library,
    /// Partial results of a reduction, locked from its first kernel's launch to its last one's.
    pub(super) partials: Mutex<CudaMemory>,
    copies: OnceLock<Copies>,
    pub(super) staging: Staging,
    /// A vector of ones for each dtype that was asked for.
    ones: Mutex<Vec<Tensor>>,
    cublas_lt: OnceLock<CublasLt>,
    #[cfg(feature = "cudnn")]
    cudnn: OnceLock<Option<Cudnn>>,
}

/// A device's streams for copies to the device and to the host.
pub(super) struct Copies {
    pub(super) up: Arc<CudaStream>,
    pub(super) down: Arc<CudaStream>,
    /// For casts of shards, which all-gathers wait for and computations do not.
    pub(super) casts: Arc<CudaStream>,
}

impl CudaKernels {
    pub(super) fn new(device: CudaDevice, stream: Arc<CudaStream>) -> Result<Self> {
        wants_cudnn()?;
        let library = Library::new(&stream)?;
        let partials = Mutex::new(CudaMemory::uninit(&stream, DType::F64, MAX_PARTIALS)?);
        Ok(CudaKernels {
            device,
            stream,
            library,
            partials,
            copies: OnceLock::new(),
            staging: Staging::default(),
            ones: Mutex::default(),
            cublas_lt: OnceLock::new(),
            #[cfg(feature = "cudnn")]
            cudnn: OnceLock::new(),
        })
    }

    /// Returns the streams for copies. The first call creates them.
    pub(super) fn copies(&self) -> candle_core::Result<&Copies> {
        if self.copies.get().is_none() {
            let new = || {
                let stream = self.stream.context().new_stream();
                stream.map_err(|error| Error::Core(failed(&self.stream, "making a stream for copies", &error)))
            };
            // If two threads race, the first one's streams are kept.
            let _ = self.copies.set(Copies { up: new()?, down: new()?, casts: new()? });
        }
        match self.copies.get() {
            Some(copies) => Ok(copies),
            None => bail!("the streams for copies are missing"),
        }
    }

    /// Returns cuBLASLt. The first call starts it.
    pub(super) fn cublas_lt(&self) -> candle_core::Result<&CublasLt> {
        if self.cublas_lt.get().is_none() {
            // If two threads race, the first one's is kept.
            let _ = self.cublas_lt.set(CublasLt::new(self)?);
        }
        match self.cublas_lt.get() {
            Some(started) => Ok(started),
            None => bail!("cuBLASLt is missing"),
        }
    }

    /// Returns cuDNN, if it can be used. The first call starts it.
    #[cfg(feature = "cudnn")]
    pub(super) fn cudnn(&self) -> candle_core::Result<Option<&Cudnn>> {
        if self.cudnn.get().is_none() {
            // If two threads race, the first one's is kept.
            let _ = self.cudnn.set(Cudnn::new(self)?);
        }
        Ok(self.cudnn.get().and_then(Option::as_ref))
    }

    /// Returns the memory of elements on this device to read.
    pub(super) fn view<'a>(&self, slice: Slice<'a>) -> candle_core::Result<CudaView<'a>> {
        match slice.view() {
            View::Cuda(view) if view.stream().cu_stream() == self.stream.cu_stream() => Ok(view),
            _ => bail!("the elements are not in memory of {}", fsdp_core::device::cuda::id(&self.stream)),
        }
    }

    /// Returns the memory of elements on this device to write.
    pub(super) fn view_mut<'a>(&self, slice: SliceMut<'a>) -> candle_core::Result<CudaView<'a>> {
        match slice.into_view() {
            ViewMut::Cuda(view) if view.stream().cu_stream() == self.stream.cu_stream() => Ok(view),
            _ => bail!("the elements are not in memory of {}", fsdp_core::device::cuda::id(&self.stream)),
        }
    }

    /// Runs a kernel on the compute stream.
    ///
    /// # Safety
    /// The arguments are the kernel's, by type and order. The kernel accesses only elements of views whose addresses it
    /// gets.
    pub(super) unsafe fn launch<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        config: LaunchConfig,
        args: &[Arg],
    ) -> candle_core::Result<()> {
        // SAFETY: ensured by the caller. Memory is freed in the order of the compute stream.
        unsafe { self.launch_on(&self.stream, kernel, config, args) }
    }

    /// Runs a kernel on another stream.
    ///
    /// # Safety
    /// As [`CudaKernels::launch`]. The caller keeps the memory until the stream has run it.
    pub(super) unsafe fn launch_on<'a>(
        &self,
        stream: &CudaStream,
        kernel: impl Into<Kernel<'a>>,
        config: LaunchConfig,
        args: &[Arg],
    ) -> candle_core::Result<()> {
        let kernel = kernel.into();
        let refused = |what: &str, error: DriverError| {
            Error::Core(failed(stream, &format!("{what} kernel {}", kernel.name), &error))
        };
        let function = self.library.function(kernel).map_err(|error| refused("finding", error))?;
        let mut builder = stream.launch_builder(&function);
        for arg in args {
            match arg {
                Arg::Long(value) => builder.arg(value),
                Arg::Word(value) => builder.arg(value),
                Arg::Double(value) => builder.arg(value),
                Arg::Float(value) => builder.arg(value),
            };
        }
        // SAFETY: ensured by the caller.
        let launched = unsafe { builder.launch(config) };
        launched.map_err(|error| refused("launching", error))?;
        Ok(())
    }

    /// Returns the free and the total bytes, if `wanted` may exceed them.
    pub(super) fn query_memory(&self, wanted: u128) -> candle_core::Result<Option<[u64; 2]>> {
        let refused = |what: &str, error: DriverError| Error::Core(failed(&self.stream, what, &error));
        let total = self.stream.context().total_mem().map_err(|error| refused("asking for its memory", error))?;
        if wanted < total as u128 / QUERY_SHARE {
            return Ok(None);
        }
        let query = || -> candle_core::Result<[u64; 2]> {
            let memory = DeviceMemory::of(&self.stream).map_err(Error::from)?;
            Ok([memory.free, memory.total])
        };
        let [free, total] = query()?;
        if wanted <= u128::from(free) {
            return Ok(Some([free, total]));
        }
        // The device may not yet have reached the operations on the stream that free memory.
        self.stream.synchronize().map_err(|error| refused("waiting for the device", error))?;
        query().map(Some)
    }

    /// Allocates memory with unspecified values, for a kernel to write.
    pub(super) fn uninit(&self, dtype: DType, len: usize) -> candle_core::Result<Buffer> {
        Ok(CudaMemory::uninit(&self.stream, dtype, len).map(Buffer::Cuda).map_err(Error::from)?)
    }
}

/// Fails unless the dtypes are equal.
pub(super) fn same_dtype(wanted: DType, got: DType) -> candle_core::Result<()> {
    if wanted == got { Ok(()) } else { bail!("expected elements of {wanted}, got {got}") }
}

/// Threads of a block: `THREADS` in the source.
pub(super) const THREADS: u32 = 256;

/// Most blocks of a launch. Its threads loop over the remaining elements.
const MAX_BLOCKS: u64 = 1 << 16;

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Arg {
    /// An address or a count.
    Long(u64),
    Word(u32),
    Double(f64),
    Float(f32),
}

impl Arg {
    /// The address of an argument that is left out.
    pub(super) const NULL: Self = Arg::Long(0);
}

impl From<CudaView<'_>> for Arg {
    fn from(view: CudaView<'_>) -> Self {
        Arg::Long(view.address())
    }
}

impl From<usize> for Arg {
    fn from(count: usize) -> Self {
        Arg::Long(count as u64)
    }
}

impl From<u32> for Arg {
    fn from(word: u32) -> Self {
        Arg::Word(word)
    }
}

impl From<f64> for Arg {
    fn from(number: f64) -> Self {
        Arg::Double(number)
    }
}

/// Returns the blocks and threads for a kernel on `count` elements.
pub(super) fn elementwise(count: usize) -> LaunchConfig {
    let blocks = (count as u64).div_ceil(u64::from(THREADS)).clamp(1, MAX_BLOCKS);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// Returns the dtype of a float dtype's arithmetic.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns the suffix of a kernel's name for a float dtype.
pub(super) fn float_suffix(dtype: DType) -> candle_core::Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F64 => Ok("f64"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        other => bail!("parameters and gradients are floating point; got {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs if there are devices. The device double has eight.
    #[test]
    fn a_device_has_one_compute_stream() {
        let count = device_count().unwrap_or(0);
        let refused = |device: candle_core::Result<Device>| {
            of_candle(device.unwrap().as_cuda_device().unwrap()).err().unwrap().to_string()
        };
        if count > 0 {
            assert!(candle_device(0).unwrap().same_device(&candle_device(0).unwrap()));
            let error = refused(Device::new_cuda_with_stream(0));
            assert!(error.contains("twice") && error.contains("cuda_device(0)"), "{error}");
        }
        if count > 1 {
            let error = refused(Device::new_cuda(count - 1));
            assert!(error.contains("in each thread") && error.contains("cuda_device("), "{error}");
        }
        assert!(candle_device(count).is_err());
    }
}
