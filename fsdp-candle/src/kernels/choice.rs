//! Which kernels a device has.

use candle_core::{Device, DeviceLocation};
use fsdp_core::{Buffer, DeviceId, Readable};

use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
use super::set::Kernels;
use crate::error::{Error, Result};

/// The kernels of a device.
///
/// # Errors
/// [`Error::Device`] for one that has none.
fn of(device: DeviceId) -> Result<&'static dyn Kernels> {
    match device {
        DeviceId::Host => Ok(&cpu::Cpu),
        #[cfg(feature = "cuda")]
        DeviceId::Cuda(ordinal) => match cuda::of_ordinal(ordinal) {
            Some(kernels) => Ok(kernels),
            None => Err(Error::Device(format!("{device} has not been used yet: no tensor was made on it"))),
        },
        other => Err(none(other)),
    }
}

/// The kernels of Candle's device, which the first call makes ready.
pub(crate) fn of_device(device: &Device) -> Result<&'static dyn Kernels> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return Ok(cuda::of_candle(device)?);
    }
    of(device_id(device)?)
}

/// Candle's device in fsdp-core's terms.
pub(crate) fn device_id(device: &Device) -> Result<DeviceId> {
    id_of(device.location())
}

fn id_of(location: DeviceLocation) -> Result<DeviceId> {
    match location {
        DeviceLocation::Cpu => Ok(DeviceId::Host),
        DeviceLocation::Cuda { gpu_id } => Ok(DeviceId::Cuda(gpu_id)),
        DeviceLocation::Metal { gpu_id } => Err(none(format!("Metal device {gpu_id}"))),
    }
}

/// The kernels of the device whose memory a buffer is.
pub(crate) fn of_buffer(buffer: &Buffer) -> Result<&'static dyn Kernels> {
    of(Readable::device(buffer))
}

/// The kernels of a device, or the host's: for what is made before the first parameter, which refuses a device without
/// kernels.
pub(crate) fn or_host(device: &Device) -> &'static dyn Kernels {
    of_device(device).unwrap_or(&cpu::Cpu)
}

fn none(device: impl std::fmt::Display) -> Error {
    Error::Device(format!(
        "{device} has no kernels in this build of fsdp-candle: build the ShardedVarMap and the tensors on \
         `Device::Cpu`, or on what `World::device` returns"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_kernels_is_named_with_the_way_out() {
        assert!(of_device(&Device::Cpu).is_ok());
        for (location, name) in [
            (DeviceLocation::Cuda { gpu_id: 99 }, "CUDA device 99"),
            (DeviceLocation::Metal { gpu_id: 0 }, "Metal device 0"),
        ] {
            let Err(Error::Device(message)) = id_of(location).and_then(of) else { panic!("{name} has kernels") };
            assert!(message.contains(name), "{message}");
            assert!(cfg!(feature = "cuda") || message.contains("Device::Cpu"), "{message}");
        }
    }
}
