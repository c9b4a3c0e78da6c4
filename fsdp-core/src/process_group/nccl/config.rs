//! The configuration of a communicator.

use std::mem::offset_of;

use cudarc::nccl::sys;

/// What a valid configuration begins with.
const MAGIC: u32 = 0xcafe_beef;
/// NCCL 2.18.0, as nccl.h spells versions. A library takes the fields that this version had and chooses the rest, so
/// that this is right for every library since.
const VERSION: u32 = 21_800;
/// "Choose it": nccl.h's `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: i32 = i32::MIN;

/// That of a communicator whose calls never block: nccl.h's `NCCL_CONFIG_INITIALIZER`, and `blocking = 0`.
pub(super) fn nonblocking() -> sys::ncclConfig_t {
    // SAFETY: it is made of numbers and pointers, for which zeros are valid.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    // Up to the last field that is known to this version, and the padding behind it.
    config.size = offset_of!(sys::ncclConfig_t, splitShare) + 8;
    config.magic = MAGIC;
    config.version = VERSION;
    config.blocking = 0;
    config.cgaClusterSize = UNDEFINED;
    config.minCTAs = UNDEFINED;
    config.maxCTAs = UNDEFINED;
    config.netName = std::ptr::null();
    config.splitShare = UNDEFINED;
    config
}
