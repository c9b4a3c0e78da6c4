//! Statuses of calls, and the message of a thread's last failed call.

use std::{
    cell::RefCell,
    ffi::{CStr, c_int},
};

pub(super) const SUCCESS: c_int = 0;
pub(super) const NOT_INITIALIZED: c_int = 1001;
pub(super) const BAD_PARAM: c_int = 2000;
pub(super) const NULL_POINTER: c_int = 2002;
pub(super) const NOT_FINALIZED: c_int = 2004;
pub(super) const BAD_TYPE: c_int = 2010;
pub(super) const NOT_SUPPORTED: c_int = 3000;
pub(super) const EXECUTION_FAILED: c_int = 5000;

/// A refused call: a `cudnnStatus_t` and the reason.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: c_int,
    pub(super) why: String,
}

pub(super) type Result<T> = std::result::Result<T, Refusal>;

/// Returns the refusal of an argument.
pub(super) fn bad(why: impl Into<String>) -> Refusal {
    Refusal { status: BAD_PARAM, why: why.into() }
}

/// Returns the refusal of a graph that no engine computes on a GPU of capability 9.0.
pub(super) fn unsupported(why: impl Into<String>) -> Refusal {
    Refusal { status: NOT_SUPPORTED, why: why.into() }
}

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Prints a refusal, and keeps its reason for [`take_last`].
pub(super) fn tell(call: &str, refusal: &Refusal) {
    eprintln!("gpu double: {call}: {}", refusal.why);
    LAST.with_borrow_mut(|last| last.clone_from(&refusal.why));
}

/// Returns the status of a call. See [`tell`].
pub(super) fn status(call: &str, result: Result<()>) -> c_int {
    let Err(refusal) = result else { return SUCCESS };
    tell(call, &refusal);
    refusal.status
}

/// Returns the reason of this thread's last failure, and forgets it, as cuDNN does.
pub(super) fn take_last() -> String {
    LAST.take()
}

/// Returns a status's name.
pub(super) fn name(status: c_int) -> &'static CStr {
    match status {
        SUCCESS => c"CUDNN_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUDNN_STATUS_NOT_INITIALIZED",
        BAD_PARAM => c"CUDNN_STATUS_BAD_PARAM",
        NULL_POINTER => c"CUDNN_STATUS_BAD_PARAM_NULL_POINTER",
        NOT_FINALIZED => c"CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED",
        BAD_TYPE => c"CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE",
        NOT_SUPPORTED => c"CUDNN_STATUS_NOT_SUPPORTED",
        EXECUTION_FAILED => c"CUDNN_STATUS_EXECUTION_FAILED",
        _ => c"a status that the device double never returns",
    }
}
