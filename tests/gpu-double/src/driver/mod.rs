//! The driver's functions, by their C names. What they do stands elsewhere; here pointers become numbers.

mod context;
mod copy;
mod device;
mod error;
mod event;
mod memory;
mod pool;
mod report;
mod stream;

use crate::status::{CuResult, INVALID_VALUE, Refusal, SUCCESS};

/// Where a caller wants a value.
///
/// # Safety
/// `to` is null, or a place for a value.
unsafe fn put<T>(to: *mut T, value: T) -> CuResult {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// [`put`] of what came out of a call.
///
/// # Safety
/// As of [`put`].
unsafe fn answer<T, F: From<T>>(to: *mut F, value: Result<T, Refusal>) -> CuResult {
    match value {
        // SAFETY: the caller's promise.
        Ok(value) => unsafe { put(to, value.into()) },
        Err(refusal) => crate::stream::status::<()>(Err(refusal)),
    }
}
