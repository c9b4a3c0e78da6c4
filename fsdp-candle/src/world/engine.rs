//! What moves a device's memory between ranks.

use candle_core::Device;
use fsdp_core::{ProcessGroup, RankEnv};

use crate::error::Result;

/// Names the engine: `nccl` or `host`.
#[cfg(feature = "cuda")]
const VARIABLE: &str = "FSDP_DEVICE_BACKEND";

/// The group of all ranks, which also moves the memory of their devices. Collective where they are no host.
#[cfg(feature = "cuda")]
pub(super) fn group_on(device: &Device, group: ProcessGroup, env: &RankEnv) -> Result<ProcessGroup> {
    if device.is_cpu() {
        return Ok(group);
    }
    let stream = crate::kernels::compute_stream(device)?;
    let engine = engine(&stream, &group, env)?;
    Ok(group.on_device(engine)?)
}

/// No device but the host.
#[cfg(not(feature = "cuda"))]
pub(super) fn group_on(_: &Device, group: ProcessGroup, _: &RankEnv) -> Result<ProcessGroup> {
    Ok(group)
}

/// The engine of the device that computes on `stream`: NCCL, unless the build lacks it, two ranks share a device, or
/// the environment asks for the host. What one rank can't use none does.
#[cfg(feature = "cuda")]
fn engine(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    group: &ProcessGroup,
    env: &RankEnv,
) -> Result<Box<dyn fsdp_core::process_group::DeviceEngine>> {
    use fsdp_core::process_group::ThroughHost;

    let wanted = std::env::var(VARIABLE).ok();
    let is_alone = env.local_world_size <= crate::kernels::device_count()?;
    let _nccl =
        group.all_reduce_scalar(u32::from(wants_nccl(wanted.as_deref(), is_alone)?), fsdp_core::ReduceOp::Min)?;
    // NCCL's engine is chosen here.
    Ok(Box::new(ThroughHost::new(stream)?))
}

/// Whether this rank wants NCCL. `is_alone`: no two ranks of this host share a device.
#[cfg(feature = "cuda")]
fn wants_nccl(wanted: Option<&str>, is_alone: bool) -> Result<bool> {
    let has_nccl = cfg!(feature = "nccl");
    let refuse = |why: &str| Err(crate::error::Error::Device(format!("{VARIABLE}={}: {why}", wanted.unwrap_or(""))));
    match wanted {
        None => Ok(has_nccl && is_alone),
        Some("host") => Ok(false),
        Some("nccl") if !has_nccl => refuse("this build has no NCCL: build it with `--features nccl`, or choose host"),
        Some("nccl") if !is_alone => refuse("ranks of this host share a device, which NCCL refuses: choose host"),
        Some("nccl") => Ok(true),
        Some(_) => refuse("choose nccl or host"),
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_for_ranks_with_a_device_each() {
        let has_nccl = cfg!(feature = "nccl");
        assert_eq!(wants_nccl(None, true).unwrap(), has_nccl);
        assert!(!wants_nccl(None, false).unwrap() && !wants_nccl(Some("host"), true).unwrap());
        assert_eq!(wants_nccl(Some("nccl"), true).is_ok(), has_nccl);
        assert!(wants_nccl(Some("nccl"), false).is_err() && wants_nccl(Some("gloo"), true).is_err());
    }
}
