//! The kernels of the host: plain loops over slices.

mod arithmetic;
mod eight_bits;
mod float;
mod host;
mod memory;
mod norm;
mod optimizers;

pub(super) use host::Cpu;
pub(crate) use memory::host_elements;
