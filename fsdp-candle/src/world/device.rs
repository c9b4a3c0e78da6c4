//! Which device a rank computes on.

use candle_core::Device;
use fsdp_core::RankEnv;

use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::kernels;

/// What a job computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA devices where this build and the machine have some, else the host.
    Auto,
    /// The host.
    #[default]
    Cpu,
    /// CUDA devices. A rank takes the one that its `LOCAL_RANK` counts; ranks in excess share them.
    Cuda,
}

/// The CUDA device of this number, which is the same one each time: Candle's, on one stream for all threads.
///
/// # Errors
/// When there is no such device, or Candle's has been made otherwise before.
#[cfg(feature = "cuda")]
pub fn cuda_device(ordinal: usize) -> Result<Device> {
    kernels::candle_device(ordinal)
}

impl DeviceChoice {
    /// The device of this rank.
    pub(super) fn device(self, env: &RankEnv) -> Result<Device> {
        match (self, self.count()) {
            (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Ok(0) | Err(_)) => Ok(Device::Cpu),
            (DeviceChoice::Cuda, Ok(0)) => Err(Error::Device(format!(
                "rank {} was to compute on a CUDA device, and this process sees none: look at nvidia-smi and \
                 CUDA_VISIBLE_DEVICES, or choose the CPU",
                env.rank
            ))),
            (DeviceChoice::Cuda, Err(error)) => Err(error),
            (_, Ok(count)) => numbered(env.local_rank % count),
        }
    }

    /// How many CUDA devices there are, if that matters.
    #[cfg(feature = "cuda")]
    fn count(self) -> Result<usize> {
        if self == DeviceChoice::Cpu { Ok(0) } else { kernels::device_count() }
    }

    #[cfg(not(feature = "cuda"))]
    fn count(self) -> Result<usize> {
        match self {
            DeviceChoice::Cuda => Err(Error::Device(
                "this build has no CUDA: build it with `--features cuda`, or with `--features nccl` for several GPUs, \
                 or choose the CPU"
                    .into(),
            )),
            _ => Ok(0),
        }
    }
}

#[cfg(feature = "cuda")]
fn numbered(ordinal: usize) -> Result<Device> {
    cuda_device(ordinal)
}

#[cfg(not(feature = "cuda"))]
fn numbered(_: usize) -> Result<Device> {
    Ok(Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_always_there() {
        let env = RankEnv::single();
        assert!(DeviceChoice::default().device(&env).unwrap().is_cpu());
        if cfg!(not(feature = "cuda")) {
            assert!(DeviceChoice::Auto.device(&env).unwrap().is_cpu());
            let error = DeviceChoice::Cuda.device(&env).unwrap_err().to_string();
            assert!(error.contains("--features cuda"), "{error}");
        }
    }
}
