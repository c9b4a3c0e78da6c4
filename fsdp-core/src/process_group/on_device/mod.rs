//! Groups that move a device's memory: an engine for the device, beside a group that moves the host's.

mod backend;
mod engine;
#[cfg(feature = "cuda")]
mod through_host;

#[cfg(feature = "cuda")]
pub(super) use backend::OnDevice;
pub use engine::DeviceEngine;
#[cfg(feature = "cuda")]
pub use through_host::ThroughHost;
