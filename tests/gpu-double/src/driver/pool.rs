//! The default memory pool of a device.

use std::ffi::{c_int, c_void};

use super::put;
use crate::{
    machine::machine,
    status::{CuResult, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS},
};

/// Handles are numbers from here on, by device.
const HANDLES: usize = 0xb700_0000;

// `CUmemPool_attribute`.
const REUSE: std::ops::RangeInclusive<c_int> = 1..=3;
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_CURRENT: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED_CURRENT: c_int = 7;
const USED_HIGH: c_int = 8;

fn device_of(pool: usize) -> Option<usize> {
    pool.checked_sub(HANDLES).filter(|device| *device < machine().lock().settings.devices)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) -> CuResult {
    match usize::try_from(device).ok().and_then(|device| device_of(HANDLES + device)) {
        // SAFETY: as CUDA documents it: a handle is as large as a pointer.
        Some(device) => unsafe { put(pool, HANDLES + device) },
        None => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { cuDeviceGetDefaultMemPool(pool, device) }
}

/// A device has one pool.
#[unsafe(no_mangle)]
extern "C" fn cuDeviceSetMemPool(device: c_int, pool: usize) -> CuResult {
    if device_of(pool) == usize::try_from(device).ok() { SUCCESS } else { NOT_SUPPORTED }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> CuResult {
    let Some(device) = device_of(pool) else { return INVALID_VALUE };
    let core = machine().lock();
    let account = &core.accounts[device];
    let bytes = match attribute {
        // SAFETY: as CUDA documents it: these are an `int`.
        attribute if REUSE.contains(&attribute) => return unsafe { put(value.cast::<c_int>(), 1) },
        RELEASE_THRESHOLD => account.threshold,
        RESERVED_CURRENT => account.reserved.current,
        RESERVED_HIGH => account.reserved.high,
        USED_CURRENT => account.used.current,
        USED_HIGH => account.used.high,
        _ => return INVALID_VALUE,
    };
    // SAFETY: as CUDA documents it: these are a `cuuint64_t`.
    unsafe { put(value.cast::<u64>(), bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const c_void) -> CuResult {
    let Some(device) = device_of(pool).filter(|_| !value.is_null()) else { return INVALID_VALUE };
    if REUSE.contains(&attribute) {
        return SUCCESS;
    }
    // SAFETY: as CUDA documents it: the others are a `cuuint64_t`.
    let bytes = unsafe { value.cast::<u64>().read_unaligned() };
    let mut core = machine().lock();
    let account = &mut core.accounts[device];
    match (attribute, bytes) {
        (RELEASE_THRESHOLD, _) => account.threshold = bytes,
        (RESERVED_HIGH, 0) => account.reserved.high = account.reserved.current,
        (USED_HIGH, 0) => account.used.high = account.used.current,
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: usize, keep: usize) -> CuResult {
    let Some(device) = device_of(pool) else { return INVALID_VALUE };
    machine().lock().accounts[device].trim(keep as u64);
    SUCCESS
}
