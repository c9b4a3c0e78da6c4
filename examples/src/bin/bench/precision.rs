//! The flag `--dtype`.

use candle_core::DType;

/// A floating point dtype.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
    F16,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}
