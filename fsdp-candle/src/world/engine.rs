//! The engine that moves device memory between ranks.

use std::sync::Arc;

use candle_core::Device;
use cudarc::driver::CudaStream;
use fsdp_core::process_group::{DeviceEngine, HostStaging, ranks_nccl_refuses, ranks_sharing_devices};
use fsdp_core::{ProcessGroup, ReduceOp};

use crate::error::{Error, Result};

/// Environment variable of the engine: `nccl`, `nccl-shared` or `host`.
const VARIABLE: &str = "FSDP_DEVICE_BACKEND";

/// Value by which ranks that share a device use NCCL, each as a host of its own. It is slow, and for tests.
const SHARED: &str = "nccl-shared";

const NO_NCCL: &str = "this build has no NCCL: build it with `--features nccl`, or choose host";

/// Returns the group of all ranks, which also moves device memory. Collective.
pub(super) fn add_device(device: &Device, group: ProcessGroup) -> Result<ProcessGroup> {
    let engine = engine(device, &group)?;
    Ok(group.on_device(engine)?)
}

/// Returns the engine of a device: NCCL, unless the build lacks it, two ranks share a
/// device, or the environment chooses the host. All ranks use the same kind.
fn engine(device: &Device, group: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    let stream = &crate::kernels::cuda::compute_stream(device)?;
    let wanted = std::env::var(VARIABLE).ok();
    let several = group.size() > 1;
    // Ranks may have different environments, but not different collectives.
    let by_host = wanted.as_deref() == Some(SHARED);
    let ranks_by_host = group.all_reduce_scalar(u32::from(by_host), ReduceOp::Sum)?;
    if ranks_by_host != 0 && ranks_by_host != group.size() as u32 {
        let why = format!("{VARIABLE}={SHARED} on {ranks_by_host} of {} ranks: set it for all or none", group.size());
        return Err(Error::Device(why));
    }
    let sharing = match (several, by_host) {
        (false, _) => vec![],
        (true, false) => ranks_sharing_devices(group, stream)?,
        (true, true) => ranks_nccl_refuses(group, stream)?,
    };
    if let Some(warning) = warning(wanted.as_deref(), &sharing).filter(|_| group.rank() == 0) {
        tracing::warn!("{warning}");
    }
    let by_nccl = u32::from(wants_nccl(wanted.as_deref(), &sharing)? && several);
    if group.all_reduce_scalar(by_nccl, ReduceOp::Min)? == 1 {
        crate::kernels::cuda::preload(device)?;
        return nccl(stream, group);
    }
    Ok(Box::new(HostStaging::new(stream)?))
}

/// Returns whether the build and the environment let NCCL move memory.
pub(super) fn may_be_nccl() -> bool {
    cfg!(feature = "nccl") && std::env::var(VARIABLE).ok().as_deref() != Some("host")
}

/// Describes the ranks that share a device and this process's list of devices, which is the usual cause.
fn describe(sharing: &[Vec<usize>]) -> String {
    let ranks: Vec<String> = sharing.iter().map(|ranks| format!("{ranks:?}")).collect();
    let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(devices) => format!("CUDA_VISIBLE_DEVICES={devices:?} on this rank"),
        Err(_) => "CUDA_VISIBLE_DEVICES is not set on this rank".into(),
    };
    format!("ranks {} share a device ({visible}), and each was expected to have its own", ranks.join(" and "))
}

/// Returns a warning where ranks share a device, unless the user chose the host's engine.
fn warning(wanted: Option<&str>, sharing: &[Vec<usize>]) -> Option<String> {
    (!sharing.is_empty() && !matches!(wanted, Some("host" | SHARED))).then(|| {
        format!(
            "{}. Their memory goes through the host, which is slow. Name a device for each rank in \
             CUDA_VISIBLE_DEVICES, unset it, or start fewer ranks; {VARIABLE}=host turns this warning off",
            describe(sharing)
        )
    })
}

#[cfg(feature = "nccl")]
fn nccl(stream: &Arc<CudaStream>, group: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    Ok(Box::new(fsdp_core::process_group::Nccl::new(group, stream)?))
}

/// Unreachable: no rank of a build without NCCL wants it.
#[cfg(not(feature = "nccl"))]
fn nccl(_: &Arc<CudaStream>, _: &ProcessGroup) -> Result<Box<dyn DeviceEngine>> {
    Err(Error::Device(NO_NCCL.into()))
}

/// Returns whether this rank wants NCCL. `sharing` are the ranks that share a device.
fn wants_nccl(wanted: Option<&str>, sharing: &[Vec<usize>]) -> Result<bool> {
    let has_nccl = cfg!(feature = "nccl");
    let refuse = |why: &str| Err(Error::Device(format!("{VARIABLE}={}: {why}", wanted.unwrap_or(""))));
    match wanted {
        None => Ok(has_nccl && sharing.is_empty()),
        Some("host") => Ok(false),
        Some("nccl" | SHARED) if !has_nccl => refuse(NO_NCCL),
        Some("nccl") if !sharing.is_empty() => refuse(&format!(
            "{}, as NCCL requires. Name a device for each rank in CUDA_VISIBLE_DEVICES, or choose host",
            describe(sharing)
        )),
        Some(SHARED) if !sharing.is_empty() => refuse(&format!(
            "{}, or has another NCCL_HOSTID, by which NCCL takes it for a host. `fsdp-launch` gives each rank one. Other \
             launchers must, and ranks in threads of a process can't have one",
            describe(sharing)
        )),
        Some("nccl" | SHARED) => Ok(true),
        Some(_) => refuse("choose nccl, nccl-shared or host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_needs_a_device_for_each_rank() {
        let has_nccl = cfg!(feature = "nccl");
        let shared = [vec![0, 1, 2]];
        assert_eq!(wants_nccl(None, &[]).unwrap(), has_nccl);
        assert!(!wants_nccl(None, &shared).unwrap() && !wants_nccl(Some("host"), &[]).unwrap());
        assert_eq!(wants_nccl(Some("nccl"), &[]).is_ok(), has_nccl);
        assert!(wants_nccl(Some("gloo"), &[]).is_err());
        let error = wants_nccl(Some("nccl"), &shared).unwrap_err().to_string();
        assert!(!has_nccl || error.contains("ranks [0, 1, 2] share a device"), "{error}");
        assert_eq!(wants_nccl(Some("nccl-shared"), &[]).is_ok(), has_nccl);
        let error = wants_nccl(Some("nccl-shared"), &shared).unwrap_err().to_string();
        assert!(!has_nccl || error.contains("ranks [0, 1, 2]") && error.contains("NCCL_HOSTID"), "{error}");
    }

    #[test]
    fn a_warning_names_ranks_that_share_a_device() {
        let shared = [vec![0, 2], vec![1, 3]];
        let warning = |wanted| super::warning(wanted, &shared);
        let text = warning(None).unwrap();
        let parts = ["ranks [0, 2] and [1, 3] share a device", "CUDA_VISIBLE_DEVICES", "FSDP_DEVICE_BACKEND=host"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(warning(Some("nccl")).is_some() && warning(Some("host")).is_none());
        assert_eq!(super::warning(None, &[]), None);
    }
}
