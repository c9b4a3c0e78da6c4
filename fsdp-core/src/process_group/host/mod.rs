//! What backends over the host's memory share: packing lists of buffers, reading and giving them back, and kernels.

pub(crate) mod memory;
pub(crate) mod packing;
pub(crate) mod reduce;
