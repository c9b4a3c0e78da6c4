//! Shared code of backends for host memory: packing of buffers, access to inputs and outputs, and reduction kernels.

pub(crate) mod memory;
pub(crate) mod packing;
pub(crate) mod reduce;
