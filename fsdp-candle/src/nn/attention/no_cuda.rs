//! Attention of a build without the feature `cuda`.

use candle_core::Tensor;

use super::cpu::Cpu;

/// Returns no engine of a CUDA device.
pub(super) fn engine(_: &Tensor) -> Option<Cpu> {
    None
}
