//! Which device a measurement runs on.

use clap::{Args, ValueEnum};
use fsdp_candle::DeviceChoice;

/// Where to compute.
#[derive(Args, Clone, Copy)]
pub(crate) struct OnDevice {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = Where::Cpu)]
    device: Where,
}

#[derive(Clone, Copy, ValueEnum)]
enum Where {
    Auto,
    Cpu,
    Cuda,
}

impl OnDevice {
    pub(crate) fn choice(self) -> DeviceChoice {
        match self.device {
            Where::Auto => DeviceChoice::Auto,
            Where::Cpu => DeviceChoice::Cpu,
            Where::Cuda => DeviceChoice::Cuda,
        }
    }
}
