//! The CUDA devices of this process: one compute stream for each, whoever uses it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::{CudaDevice, Device, DeviceLocation};
use cudarc::driver::{CudaContext, CudaStream};
use fsdp_core::device::cuda::ready;
use fsdp_core::{Buffer, DeviceId};

use super::device::Cuda;
use crate::error::{Error, Result};

/// By number. Kernels live as long as the process.
static DEVICES: Mutex<BTreeMap<usize, &'static Cuda>> = Mutex::new(BTreeMap::new());

/// What CUDA calls the stream that each thread has for itself.
const PER_THREAD: usize = 2;

/// The kernels of a device that has been used.
pub(in crate::kernels) fn of_ordinal(ordinal: usize) -> Option<&'static Cuda> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).copied()
}

/// The kernels of Candle's device. The first call compiles them.
///
/// # Errors
/// When it computes on another stream than the device did so far, or on one of each thread's own; when the device
/// refuses.
pub(in crate::kernels) fn of_candle(device: &CudaDevice) -> Result<&'static Cuda> {
    let DeviceLocation::Cuda { gpu_id: ordinal } = device.location() else {
        return Err(Error::Device("Candle's CUDA device is on no CUDA device".into()));
    };
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = device.cuda_stream();
    if let Some(known) = devices.get(&ordinal) {
        if known.stream.cu_stream() == stream.cu_stream() {
            return Ok(known);
        }
        return Err(Error::Device(format!(
            "CUDA device {ordinal} is there twice in this process, with two streams: make it once, by \
             fsdp_candle::cuda_device({ordinal}), which gives the same one each time"
        )));
    }
    if stream.cu_stream() as usize == PER_THREAD {
        return Err(Error::Device(format!(
            "Candle's Device::new_cuda({ordinal}) computes on another stream in each thread: make the device by \
             fsdp_candle::cuda_device({ordinal})"
        )));
    }
    ready(stream.context())?;
    let known: &'static Cuda = Box::leak(Box::new(Cuda::new(device.clone(), stream)?));
    devices.insert(ordinal, known);
    Ok(known)
}

/// The device whose memory a buffer is.
pub(super) fn of_buffer(buffer: &Buffer) -> Result<&'static Cuda> {
    let device = buffer.device();
    let known = if let DeviceId::Cuda(ordinal) = device { of_ordinal(ordinal) } else { None };
    known.ok_or_else(|| Error::Device(format!("a buffer of {device} is in memory that no CUDA device computes on yet")))
}

/// Candle's device of this number, which is the same one each time.
pub(crate) fn candle_device(ordinal: usize) -> Result<Device> {
    if let Some(known) = of_ordinal(ordinal) {
        return Ok(Device::Cuda(known.device.clone()));
    }
    let device = CudaDevice::new_with_stream(ordinal)?;
    Ok(Device::Cuda(of_candle(&device)?.device.clone()))
}

/// The stream that a device computes on.
pub(crate) fn compute_stream(device: &Device) -> Result<Arc<CudaStream>> {
    Ok(of_candle(device.as_cuda_device()?)?.stream.clone())
}

/// How many CUDA devices this process sees.
pub(crate) fn device_count() -> Result<usize> {
    let count = CudaContext::device_count();
    let count = count.map_err(|error| Error::Device(format!("CUDA can't say which devices there are: {error}")))?;
    Ok(count.max(0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there are devices: the double has eight.
    #[test]
    fn a_device_computes_on_one_stream() {
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
