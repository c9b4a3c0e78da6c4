//! The CUDA devices of a build without the feature `cuda`: none.

use candle_core::Device;

use crate::error::{Error, Result};

/// Returns Candle's device of a number.
pub(crate) fn candle_device(_: usize) -> Result<Device> {
    Err(no_cuda())
}

/// Returns the number of CUDA devices.
pub(crate) fn device_count() -> Result<usize> {
    Err(no_cuda())
}

fn no_cuda() -> Error {
    Error::Device(
        "this build has no CUDA: build it with `--features cuda` (`nccl` for several GPUs), or choose the CPU".into(),
    )
}
