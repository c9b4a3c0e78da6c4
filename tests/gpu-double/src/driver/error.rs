//! What results are called.

use std::ffi::{CStr, c_char};

use super::put;
use crate::status::{CuResult, INVALID_VALUE};

fn words(result: CuResult) -> Option<(&'static CStr, &'static CStr)> {
    Some(match result {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        200 => (c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        218 => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        301 => (c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
        400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        712 => (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the memory is already mapped"),
        713 => (c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the memory is not mapped"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        _ => return None,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CuResult, name: *mut *const c_char) -> CuResult {
    // SAFETY: as CUDA documents it: `name` is a place for a pointer.
    unsafe { words(error).map_or(INVALID_VALUE, |words| put(name, words.0.as_ptr())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CuResult, text: *mut *const c_char) -> CuResult {
    // SAFETY: as CUDA documents it: `text` is a place for a pointer.
    unsafe { words(error).map_or(INVALID_VALUE, |words| put(text, words.1.as_ptr())) }
}
