//! What moves a device's memory between ranks.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::Device;
#[cfg(feature = "cuda")]
use cudarc::driver::CudaStream;
use fsdp_core::ProcessGroup;
#[cfg(feature = "cuda")]
use fsdp_core::{
    ReduceOp,
    process_group::{DeviceEngine, ThroughHost},
};

use crate::error::Result;

/// Names the engine: `nccl` or `host`.
#[cfg(feature = "cuda")]
const VARIABLE: &str = "FSDP_DEVICE_BACKEND";

#[cfg(feature = "cuda")]
const NO_NCCL: &str = "this build has no NCCL: build it with `--features nccl`, or choose host";

/// The group of all ranks, which also moves the memory of their devices. Collective where they are no host.
#[cfg(feature = "cuda")]
pub(super) fn group_on(device: &Device, group: ProcessGroup) -> Result<ProcessGroup> {
    if device.is_cpu() {
        return Ok(group);
    }
    let stream = crate::kernels::compute_stream(device)?;
    let engine = engine(&stream, &group)?;
    Ok(group.on_device(engine)?)
}

/// No device but the host.
#[cfg(not(feature = "cuda"))]
pub(super) fn group_on(_: &Device, group: ProcessGroup) -> Result<ProcessGroup> {
    Ok(group)
}

/// The engine of the device that computes on `stream`: NCCL, unless the build lacks it, two ranks share a device, or
/// the environment asks for the host. What one rank can't use none does.
#[cfg(feature = "cuda")]
fn engine(stream: &Arc<CudaStream>, group: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    let wanted = std::env::var(VARIABLE).ok();
    let several = group.size() > 1;
    let by_nccl = u32::from(wants_nccl(wanted.as_deref(), several && shared(stream, group)?)? && several);
    if group.all_reduce_scalar(by_nccl, ReduceOp::Min)? == 1 {
        return nccl(stream, group);
    }
    Ok(Box::new(ThroughHost::new(stream)?))
}

/// Whether two ranks share a device.
#[cfg(feature = "nccl")]
fn shared(stream: &Arc<CudaStream>, group: &ProcessGroup) -> Result<bool> {
    Ok(fsdp_core::process_group::share_a_device(group, stream)?)
}

/// Without NCCL it does not matter.
#[cfg(all(feature = "cuda", not(feature = "nccl")))]
fn shared(_: &Arc<CudaStream>, _: &ProcessGroup) -> Result<bool> {
    Ok(false)
}

#[cfg(feature = "nccl")]
fn nccl(stream: &Arc<CudaStream>, group: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    Ok(Box::new(fsdp_core::process_group::Nccl::new(group, stream)?))
}

/// Not reached: no rank of such a build wants it.
#[cfg(all(feature = "cuda", not(feature = "nccl")))]
fn nccl(_: &Arc<CudaStream>, _: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    Err(crate::error::Error::Device(NO_NCCL.into()))
}

/// Whether this rank wants NCCL. `shares`: two ranks have one device.
#[cfg(feature = "cuda")]
fn wants_nccl(wanted: Option<&str>, shares: bool) -> Result<bool> {
    let has_nccl = cfg!(feature = "nccl");
    let refuse = |why: &str| Err(crate::error::Error::Device(format!("{VARIABLE}={}: {why}", wanted.unwrap_or(""))));
    match wanted {
        None => Ok(has_nccl && !shares),
        Some("host") => Ok(false),
        Some("nccl") if !has_nccl => refuse(NO_NCCL),
        Some("nccl") if shares => refuse("ranks of this host share a device, which NCCL refuses: choose host"),
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
        assert_eq!(wants_nccl(None, false).unwrap(), has_nccl);
        assert!(!wants_nccl(None, true).unwrap() && !wants_nccl(Some("host"), false).unwrap());
        assert_eq!(wants_nccl(Some("nccl"), false).is_ok(), has_nccl);
        assert!(wants_nccl(Some("nccl"), true).is_err() && wants_nccl(Some("gloo"), false).is_err());
    }
}
