//! Shared code of backends for host memory: packing of buffers, access to inputs and outputs, reduction kernels, and
//! collectives in steps.

pub(crate) mod chunked;
pub(crate) mod memory;
pub(crate) mod packing;
pub(crate) mod reduce;
