//! Devices: what there is, and what it claims to be.

use std::ffi::{c_char, c_int, c_uint};

use super::put;
use crate::{
    machine::machine,
    status::{CuResult, INVALID_DEVICE, INVALID_VALUE, SUCCESS},
};

const NO_DEVICE: CuResult = 100;
/// Which CUDA the driver is for.
const VERSION: c_int = 13000;

fn devices() -> usize {
    machine().lock().settings.devices
}

fn exists(device: c_int) -> bool {
    usize::try_from(device).is_ok_and(|device| device < devices())
}

/// An attribute, as an H100 has it where it matters.
fn attribute(attribute: c_int) -> c_int {
    match attribute {
        1..=3 => 1024,           // threads of a block, and its first two dimensions
        4 => 64,                 // a block's third dimension
        5 => c_int::MAX,         // a grid's first dimension
        6 | 7 => 65535,          // and its others
        8 => 48 << 10,           // shared memory of a block
        9 => 64 << 10,           // constant memory
        10 => 32,                // threads of a warp
        11 => c_int::MAX,        // pitch
        12 | 82 => 64 << 10,     // registers of a block, and of a multiprocessor
        13 => 1_980_000,         // clock, kHz
        14 => 512,               // alignment of textures
        16 => 132,               // multiprocessors
        36 => 2_619_000,         // clock of memory, kHz
        37 => 5120,              // bits of its bus
        38 => 50 << 20,          // L2
        39 => 2048,              // threads of a multiprocessor
        40 => 3,                 // copy engines
        75 => 9,                 // compute capability
        81 => 228 << 10,         // shared memory of a multiprocessor
        97 => 227 << 10,         // and of a block that asks for more
        106 => 32,               // blocks of a multiprocessor
        111 => 1 << 10,          // shared memory that the system keeps
        15 | 19 | 31 | 41 => 1,  // overlap, mapped host memory, concurrent kernels, one address space
        78 | 79 | 80 | 90 => 1,  // priorities, caches, preemption
        91 | 95 | 99 | 115 => 1, // registered host memory (91, 99), cooperative launches, memory pools
        _ => 0,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> CuResult {
    if devices() == 0 { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { put(version, VERSION) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { put(count, devices() as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> CuResult {
    if !exists(ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: as CUDA documents it.
    unsafe { put(device, ordinal) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) -> CuResult {
    if !exists(device) {
        return INVALID_DEVICE;
    }
    // SAFETY: as CUDA documents it.
    unsafe { put(value, attribute(which)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> CuResult {
    const NAME: &[u8] = b"GPU double";
    if !exists(device) {
        return INVALID_DEVICE;
    }
    let Ok(room @ 1..) = usize::try_from(len) else { return INVALID_VALUE };
    for (place, byte) in NAME.iter().take(room - 1).chain(&[0]).enumerate() {
        // SAFETY: as CUDA documents it: there is room for `len` bytes.
        unsafe { name.add(place).write(*byte as c_char) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> CuResult {
    let mut bytes = *b"gpu double     0";
    bytes[15] = b'0'.wrapping_add(device as u8);
    // SAFETY: as CUDA documents it: a `CUuuid` is 16 bytes.
    unsafe { if exists(device) { put(uuid, bytes) } else { INVALID_DEVICE } }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> CuResult {
    // SAFETY: as CUDA documents it.
    unsafe { cuDeviceGetUuid(uuid, device) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> CuResult {
    if !exists(device) {
        return INVALID_DEVICE;
    }
    let total = machine().lock().accounts[device as usize].total();
    // SAFETY: as CUDA documents it.
    unsafe { put(bytes, total as usize) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> CuResult {
    if !exists(device) || !exists(peer) {
        return INVALID_DEVICE;
    }
    // SAFETY: as CUDA documents it.
    unsafe { put(can, (device != peer).into()) }
}
