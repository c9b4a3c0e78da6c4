//! What NCCL answers, as errors.

use std::ffi::CStr;

use cudarc::nccl::sys::{self, ncclResult_t};

use crate::{DeviceId, Error};

/// The text of a C function.
///
/// # Safety
/// It is null, or ends in a zero.
unsafe fn text(of: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    let text = (!of.is_null()).then(|| unsafe { CStr::from_ptr(of) }.to_string_lossy().trim().to_string())?;
    (!text.is_empty()).then_some(text)
}

/// The error of a call that was refused. `communicator` may be null.
pub(super) fn refused(device: DeviceId, what: &str, status: ncclResult_t, communicator: sys::ncclComm_t) -> Error {
    // SAFETY: NCCL's texts are strings of its own that stay.
    let meaning = unsafe { text(sys::ncclGetErrorString(status)) }.unwrap_or_else(|| format!("{status:?}"));
    // SAFETY: as above; the communicator is alive or null.
    let last = unsafe { text(sys::ncclGetLastError(communicator)) };
    let last = last.map(|last| format!(" ({last})")).unwrap_or_default();
    device_error(device, what, format!("NCCL says: {meaning}{last}. {}", way_out(status)))
}

/// An error of the device with a cause in words.
pub(super) fn device_error(device: DeviceId, what: &str, cause: String) -> Error {
    Error::Device { device, what: what.into(), cause }
}

fn way_out(status: ncclResult_t) -> &'static str {
    match status {
        ncclResult_t::ncclInvalidUsage => {
            "Each rank needs a device of its own: see CUDA_VISIBLE_DEVICES and LOCAL_RANK. NCCL_DEBUG=WARN says more"
        }
        ncclResult_t::ncclSystemError => {
            "The network or the shared memory of the host failed it: NCCL_DEBUG=INFO says which, NCCL_SOCKET_IFNAME \
             chooses another network, and containers may need more shared memory (--shm-size)"
        }
        ncclResult_t::ncclRemoteError => "A peer or the way to it is gone: the output of the other ranks says more",
        _ => "NCCL_DEBUG=INFO says more",
    }
}
