//! `cublasStatus_t`.

use std::ffi::{CStr, c_int};

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const NOT_INITIALIZED: c_int = 1;
pub(crate) const INVALID_VALUE: c_int = 7;
pub(crate) const EXECUTION_FAILED: c_int = 13;
pub(crate) const NOT_SUPPORTED: c_int = 15;

pub(crate) fn text(status: c_int) -> &'static CStr {
    match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"no such handle",
        INVALID_VALUE => c"invalid value",
        EXECUTION_FAILED => c"the operation could not be queued",
        NOT_SUPPORTED => c"not supported by the device double",
        _ => c"unknown status",
    }
}
