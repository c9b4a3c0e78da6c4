//! The kernels of the host: plain loops over slices.

mod adamw;
mod arithmetic;
mod eight_bits;
mod float;
mod host;
mod memory;
mod norm;

pub(super) use host::Cpu;
pub(crate) use memory::host_elements;
