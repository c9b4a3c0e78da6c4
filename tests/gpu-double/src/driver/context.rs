//! Contexts: a device's primary one, for each thread that asks for it.

use std::ffi::{c_int, c_uint, c_void};

use super::put;
use crate::{
    context::{current, set_current},
    machine::machine,
    status::{CuResult, INVALID_CONTEXT, INVALID_DEVICE, SUCCESS},
    stream::status,
};

/// Handles are numbers from here on, by device.
const HANDLES: usize = 0xc700_0000;

pub(super) fn handle(device: usize) -> *mut c_void {
    (HANDLES + device) as *mut c_void
}

fn device_of(context: *mut c_void) -> Option<usize> {
    (context as usize).checked_sub(HANDLES).filter(|device| *device < machine().lock().settings.devices)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> CuResult {
    let devices = machine().lock().settings.devices;
    match usize::try_from(device) {
        // SAFETY: as CUDA documents it.
        Ok(device) if device < devices => unsafe { put(context, handle(device)) },
        _ => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> CuResult {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(_context: *mut c_void) -> CuResult {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> CuResult {
    let device = device_of(context);
    if device.is_none() && !context.is_null() {
        return INVALID_CONTEXT;
    }
    set_current(device);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { put(context, current().map_or(std::ptr::null_mut(), handle)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> CuResult {
    // SAFETY: as CUDA documents it.
    current().map_or(INVALID_CONTEXT, |current| unsafe { put(device, current as c_int) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> CuResult {
    status(machine().synchronize_context("cuCtxSynchronize"))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetFlags(_flags: c_uint) -> CuResult {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CuResult {
    // SAFETY: as CUDA documents it: either may be null.
    unsafe {
        if !least.is_null() {
            put(least, 0);
        }
        if !greatest.is_null() {
            put(greatest, -5);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: *mut c_void, _flags: c_uint) -> CuResult {
    if device_of(peer).is_some() { SUCCESS } else { INVALID_CONTEXT }
}
