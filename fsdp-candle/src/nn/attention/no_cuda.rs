//! Attention of a build without the feature `cuda`.

use candle_core::{Device, Result, Tensor};

use super::cpu::Cpu;

/// Returns no engine of a CUDA device.
pub(super) fn engine(_: &Tensor) -> Option<Cpu> {
    None
}

/// Returns no library.
pub(super) fn library(_: &Device) -> Result<Option<String>> {
    Ok(None)
}
