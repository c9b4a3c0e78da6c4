//! Number formats.

use clap::ValueEnum;
use serde::Serialize;

/// A floating point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Precision {
    /// 4 bytes
    F32,
    /// 2 bytes
    Bf16,
}

impl Precision {
    /// Bytes of an element.
    pub(super) fn bytes(self) -> f64 {
        match self {
            Precision::F32 => 4.,
            Precision::Bf16 => 2.,
        }
    }
}
