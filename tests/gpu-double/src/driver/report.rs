//! The double's own functions, for tests. [`report`](crate::report) documents them.

use std::ffi::{CStr, c_char};

use crate::report;

#[unsafe(no_mangle)]
unsafe extern "C" fn gpu_double_mark(name: *const c_char) {
    // SAFETY: as this library documents it: a text that ends with 0.
    report::mark(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
}

#[unsafe(no_mangle)]
extern "C" fn gpu_double_peak() -> u64 {
    report::peak()
}

#[unsafe(no_mangle)]
extern "C" fn gpu_double_in_use() -> u64 {
    report::in_use()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gpu_double_count(category: *const c_char) -> u64 {
    // SAFETY: as this library documents it: a text that ends with 0.
    report::counted(&unsafe { CStr::from_ptr(category) }.to_string_lossy())
}
