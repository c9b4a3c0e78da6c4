//! Where a program computes, as its flag `--device` says.

use clap::ValueEnum;
use serde::Serialize;

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// CUDA devices where there are some
    Auto,
    /// The CPU
    Cpu,
    /// CUDA devices
    Cuda,
}

impl From<DeviceChoice> for fsdp_candle::DeviceChoice {
    fn from(choice: DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Auto => Self::Auto,
            DeviceChoice::Cpu => Self::Cpu,
            DeviceChoice::Cuda => Self::Cuda,
        }
    }
}
