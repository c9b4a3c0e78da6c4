//! Groups that move a device's memory: an engine for the device, beside a group that moves the host's.

mod backend;
mod engine;
#[cfg(feature = "cuda")]
mod sharing;
#[cfg(feature = "cuda")]
mod through_host;

#[cfg(feature = "cuda")]
pub(super) use backend::beside;
pub use engine::DeviceEngine;
#[cfg(feature = "cuda")]
pub use sharing::ranks_sharing_devices;
#[cfg(feature = "cuda")]
pub use through_host::HostStaging;
