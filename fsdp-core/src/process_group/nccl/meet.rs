//! How ranks find each other before there is a communicator: in a store, and over a group that moves the host's memory.

use std::{ffi::c_char, sync::Arc};

use cudarc::{
    driver::CudaStream,
    nccl::{result, sys},
};

use super::{
    super::{call::Call, group::ProcessGroup, parts::Op},
    failure::refused,
};
use crate::{Error, Result, device::cuda::id, store::Store};

/// The key of an id in a store of its own.
const ID: &str = "NCCL's id";

/// The id of a new communicator, which the first rank makes. It tells the others where to find that rank, so how it
/// reaches them is all that NCCL asks of a `store` for several hosts.
pub(super) fn unique_id(
    store: &dyn Store,
    host: &ProcessGroup,
    compute: &Arc<CudaStream>,
) -> Result<sys::ncclUniqueId> {
    if host.rank() == 0 {
        let refuse = |error: result::NcclError| {
            refused(id(compute), "making the id of a communicator", error.0, std::ptr::null_mut())
        };
        let unique = result::get_uniqueid().map_err(refuse)?;
        store.set(ID, &unique.internal.map(|byte| byte as u8))?;
        return Ok(unique);
    }
    let bytes = store.get(ID, host.membership().timeout)?;
    let internal = bytes.first_chunk::<128>().ok_or_else(|| Error::Internal {
        rank: host.rank(),
        what: format!("the id of a communicator came as {} bytes", bytes.len()),
    })?;
    Ok(sys::ncclUniqueId { internal: internal.map(|byte| byte as c_char) })
}

/// Waits until all ranks have made theirs of something, so that none leaves or fails while others are still at it.
pub(super) fn all_are_here(host: &ProcessGroup) -> Result<()> {
    let call = Call::new("meet", "NCCL", std::iter::empty());
    host.aside(call, |backend, collective| backend.run(collective, Op::Barrier).map(drop))
}
