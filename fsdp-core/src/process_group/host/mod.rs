//! What backends over the host's memory share: packing lists of buffers, reading and giving them back, and kernels.

pub(crate) mod buffers;
pub(crate) mod copy;
mod element;
pub(crate) mod packing;
pub(crate) mod reduce;
