//! Memory: of the device and pinned memory of the host, and what an address is.

use std::ffi::{c_int, c_uint, c_void};

use super::{
    answer::{answer, put},
    context::handle,
};
use crate::{
    allocation::Kind,
    context::current,
    machine::machine,
    status::{CuResult, INVALID_CONTEXT, INVALID_VALUE, SUCCESS},
    stream::status,
};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, len: usize) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(at, machine().allocate(len, None, "cuMemAlloc")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(at: *mut u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(at, machine().allocate(len, Some(stream as usize), "cuMemAllocAsync")) }
}

/// A device has one pool, the default one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocFromPoolAsync(at: *mut u64, len: usize, _pool: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(at, machine().allocate(len, Some(stream as usize), "cuMemAllocFromPoolAsync")) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(at: u64) -> CuResult {
    status(machine().free(at, None, "cuMemFree"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(at: u64, stream: *mut c_void) -> CuResult {
    status(machine().free(at, Some(stream as usize), "cuMemFreeAsync"))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CuResult {
    let Some(device) = current() else { return INVALID_CONTEXT };
    let core = machine().lock();
    let account = &core.accounts[device];
    // SAFETY: as CUDA documents it.
    unsafe { put(free, account.free() as usize).max(put(total, account.total() as usize)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(at: *mut u64, len: usize, _flags: c_uint) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(at, machine().allocate_pinned(len, "cuMemHostAlloc")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(at: *mut u64, len: usize) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { answer(at, machine().allocate_pinned(len, "cuMemAllocHost")) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(at: u64) -> CuResult {
    status(machine().free_pinned(at, "cuMemFreeHost"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(at: u64, len: usize, _flags: c_uint) -> CuResult {
    status(machine().register(at, len, "cuMemHostRegister"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(at: u64) -> CuResult {
    status(machine().unregister(at, "cuMemHostUnregister"))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(at: *mut u64, host: u64, _flags: c_uint) -> CuResult {
    let pinned = machine().lock().pinned(host).is_some();
    // SAFETY: as CUDA documents it.
    if pinned { unsafe { put(at, host) } } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, at: u64) -> CuResult {
    let Some((found, bytes)) = crate::memory::base_of(at) else { return INVALID_VALUE };
    // SAFETY: as CUDA documents it: either may be null.
    unsafe {
        if !base.is_null() {
            put(base, found);
        }
        if !len.is_null() {
            put(len, bytes);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, at: u64) -> CuResult {
    let core = machine().lock();
    let Some(found) = core.allocations.find(at) else { return INVALID_VALUE };
    let device = match found.kind {
        Kind::Device(device) | Kind::Pool { device, .. } => device,
        Kind::Pinned | Kind::Registered => current().unwrap_or(0),
    };
    // SAFETY: as CUDA documents it: `data` is a place for a value of the attribute's type.
    unsafe {
        match attribute {
            1 => put(data.cast(), handle(device)),
            2 => put(data.cast(), if found.is_pinned() { 1_u32 } else { 2 }),
            3 => put(data.cast(), at),
            4 if found.is_pinned() => put(data.cast(), at),
            8 => put(data.cast(), 0_u8),
            9 => put(data.cast(), device as c_int),
            11 => put(data.cast(), found.base),
            12 => put(data.cast(), found.len),
            13 => put(data.cast(), 1_u8),
            _ => INVALID_VALUE,
        }
    }
}

/// Attributes that an address does not have are 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *const c_int,
    data: *const *mut c_void,
    at: u64,
) -> CuResult {
    for place in 0..count as usize {
        // SAFETY: as CUDA documents it: both have `count` elements, and each of `data` is a place for its attribute.
        let (attribute, data) = unsafe { (*attributes.add(place), *data.add(place)) };
        let len = match attribute {
            1 | 3 | 4 | 11 | 12 => 8,
            2 | 9 => 4,
            _ => 1,
        };
        // SAFETY: as above.
        unsafe {
            if cuPointerGetAttribute(data, attribute, at) != SUCCESS {
                data.cast::<u8>().write_bytes(0, len);
            }
        }
    }
    SUCCESS
}
