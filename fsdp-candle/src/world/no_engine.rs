//! The engine of a build without the feature `cuda`: ranks compute on the host only.

use candle_core::Device;
use fsdp_core::ProcessGroup;

use crate::error::Result;

/// Returns the group of all ranks.
pub(super) fn add_device(_: &Device, group: ProcessGroup) -> Result<ProcessGroup> {
    Ok(group)
}

/// Returns whether the build and the environment let NCCL move memory.
pub(super) fn may_be_nccl() -> bool {
    false
}
