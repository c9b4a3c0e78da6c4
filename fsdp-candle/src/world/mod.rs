//! The ranks of a job: who this process is, its device, and the group of all.

mod device;
mod engine;
mod job;

pub use device::DeviceChoice;
#[cfg(feature = "cuda")]
pub use device::cuda_device;
pub use job::{World, init, init_on};
