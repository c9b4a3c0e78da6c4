//! Copies and fills. Those without a stream use the legacy default stream.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};

use crate::{
    copy::{Copy, Direction},
    machine::machine,
    status::CuResult,
    stream::status,
};

/// The legacy default stream.
const LEGACY: *mut c_void = std::ptr::null_mut();

/// # Safety
/// Host memory that is named is memory: to read it from, and the caller's to write it to.
unsafe fn copy(
    (to, from, len): (u64, u64, usize),
    direction: Direction,
    waits: bool,
    stream: *mut c_void,
    by: &str,
) -> CuResult {
    // SAFETY: the caller's promise.
    status(unsafe { machine().copy(Copy { to, from, len, direction, waits }, stream as usize, by) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from as u64, len), Direction::HostToDevice, true, LEGACY, "cuMemcpyHtoD") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from as u64, len), Direction::HostToDevice, false, stream, "cuMemcpyHtoDAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to as u64, from, len), Direction::DeviceToHost, true, LEGACY, "cuMemcpyDtoH") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to as u64, from, len), Direction::DeviceToHost, false, stream, "cuMemcpyDtoHAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from, len), Direction::DeviceToDevice, false, LEGACY, "cuMemcpyDtoD") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from, len), Direction::DeviceToDevice, false, stream, "cuMemcpyDtoDAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_context: *mut c_void,
    from: u64,
    _from_context: *mut c_void,
    len: usize,
    stream: *mut c_void,
) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from, len), Direction::DeviceToDevice, false, stream, "cuMemcpyPeerAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: *mut c_void) -> CuResult {
    let direction = machine().lock().direction(to, from);
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from, len), direction, false, stream, "cuMemcpyAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy(to: u64, from: u64, len: usize) -> CuResult {
    let direction = machine().lock().direction(to, from);
    // SAFETY: as CUDA documents it.
    unsafe { copy((to, from, len), direction, direction != Direction::DeviceToDevice, LEGACY, "cuMemcpy") }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8_v2(at: u64, value: c_uchar, count: usize) -> CuResult {
    status(machine().fill(at, vec![value], count, LEGACY as usize, "cuMemsetD8"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(at: u64, value: c_uchar, count: usize, stream: *mut c_void) -> CuResult {
    status(machine().fill(at, vec![value], count, stream as usize, "cuMemsetD8Async"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD16Async(at: u64, value: c_ushort, count: usize, stream: *mut c_void) -> CuResult {
    status(machine().fill(at, value.to_ne_bytes().into(), count, stream as usize, "cuMemsetD16Async"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: *mut c_void) -> CuResult {
    status(machine().fill(at, value.to_ne_bytes().into(), count, stream as usize, "cuMemsetD32Async"))
}
