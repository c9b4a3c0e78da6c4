//! The driver's functions by their C names. They convert pointers to numbers, and call [`machine`](crate::machine).

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

use crate::{
    machine::{current, machine, set_current},
    memory::{Copy, Direction},
    status::{CuResult, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_READY, Refusal, SUCCESS},
    streams::{status, synchronize},
};

/// Writes a value for the caller.
///
/// `to` is null or valid for a write.
unsafe fn put<T>(to: *mut T, value: T) -> CuResult {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: ensured by the caller.
    unsafe { to.write(value) };
    SUCCESS
}

/// [`put`] of the value of a result.
///
/// See [`put`].
unsafe fn answer<T, F: From<T>>(to: *mut F, value: Result<T, Refusal>) -> CuResult {
    match value {
        // SAFETY: ensured by the caller.
        Ok(value) => unsafe { put(to, value.into()) },
        Err(refusal) => status::<()>(Err(refusal)),
    }
}

const NO_DEVICE: CuResult = 100;

fn devices() -> usize {
    machine().lock().settings.devices
}

fn exists(device: c_int) -> bool {
    usize::try_from(device).is_ok_and(|device| device < devices())
}

/// Returns an attribute, with an H100's value where it matters.
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
    let driver = machine().lock().settings.driver as c_int;
    // SAFETY: as documented by CUDA.
    unsafe { put(version, driver) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { put(count, devices() as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> CuResult {
    if !exists(ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: as documented by CUDA.
    unsafe { put(device, ordinal) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) -> CuResult {
    if !exists(device) {
        return INVALID_DEVICE;
    }
    let capability = machine().lock().settings.capability as c_int;
    let value_of = match which {
        75 => capability / 10,
        76 => capability % 10,
        which => attribute(which),
    };
    // SAFETY: as documented by CUDA.
    unsafe { put(value, value_of) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> CuResult {
    let mut bytes = *b"gpu double     0";
    bytes[15] = b'0'.wrapping_add(device as u8);
    // SAFETY: as documented by CUDA: a `CUuuid` is 16 bytes.
    unsafe { if exists(device) { put(uuid, bytes) } else { INVALID_DEVICE } }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> CuResult {
    if !exists(device) {
        return INVALID_DEVICE;
    }
    let total = machine().lock().accounts[device as usize].total();
    // SAFETY: as documented by CUDA.
    unsafe { put(bytes, total as usize) }
}

/// Start of the context handles, which are numbers by device.
const CONTEXT_HANDLES: usize = 0xc700_0000;

fn context_handle(device: usize) -> *mut c_void {
    (CONTEXT_HANDLES + device) as *mut c_void
}

fn context_device(context: *mut c_void) -> Option<usize> {
    (context as usize).checked_sub(CONTEXT_HANDLES).filter(|device| *device < machine().lock().settings.devices)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> CuResult {
    let devices = machine().lock().settings.devices;
    match usize::try_from(device) {
        // SAFETY: as documented by CUDA.
        Ok(device) if device < devices => unsafe { put(context, context_handle(device)) },
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
    let device = context_device(context);
    if device.is_none() && !context.is_null() {
        return INVALID_CONTEXT;
    }
    set_current(device);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { put(context, current().map_or(std::ptr::null_mut(), context_handle)) }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> CuResult {
    status(machine().synchronize_context("cuCtxSynchronize"))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CuResult {
    // SAFETY: as documented by CUDA: either may be null.
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

const NON_BLOCKING: c_uint = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, flags: c_uint) -> CuResult {
    // SAFETY: as documented by CUDA: a handle is as large as a pointer.
    unsafe { answer(stream, machine().create_stream(flags & NON_BLOCKING != 0)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut usize, flags: c_uint, _priority: c_int) -> CuResult {
    // SAFETY: as documented by CUDA: a handle is as large as a pointer.
    unsafe { cuStreamCreate(stream, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> CuResult {
    status(machine().destroy_stream(stream as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> CuResult {
    synchronize(stream, "cuStreamSynchronize")
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: u64, _flags: c_uint) -> CuResult {
    status(machine().wait_event(stream as usize, event))
}

/// Starts to capture a stream into a graph. The double can't capture: what is enqueued runs, and a capture ends with the
/// process. Programs that refuse to work under a capture need no more.
#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, _mode: c_uint) -> CuResult {
    let mut core = machine().lock();
    let known = core.resolve(stream as usize);
    status(known.map(|place| core.streams.get_mut(place).is_captured = true))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, capturing: *mut c_int) -> CuResult {
    let mut core = machine().lock();
    let known = core.resolve(stream as usize).map(|place| c_int::from(core.streams.get(place).is_captured));
    drop(core);
    // SAFETY: as documented by CUDA.
    unsafe { answer(capturing, known) }
}

/// Exchanges a thread's mode of captures, of which the double has none but the relaxed one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { put(mode, 2) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> CuResult {
    // SAFETY: as documented by CUDA: a handle is as large as a pointer.
    unsafe { answer(event, machine().create_event()) }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> CuResult {
    status(machine().destroy_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: *mut c_void) -> CuResult {
    status(machine().record(event, stream as usize))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> CuResult {
    status(machine().query_event(event).and_then(|ready| ready.then_some(()).ok_or(Refusal::Status(NOT_READY))))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> CuResult {
    status(machine().synchronize_event(event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, len: usize) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { answer(at, machine().allocate(len, None, "cuMemAlloc")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(at: *mut u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { answer(at, machine().allocate(len, Some(stream as usize), "cuMemAllocAsync")) }
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
    // SAFETY: as documented by CUDA.
    unsafe { put(free, account.free() as usize).max(put(total, account.total() as usize)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(at: *mut u64, len: usize, _flags: c_uint) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { answer(at, machine().allocate_pinned(len, "cuMemHostAlloc")) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(at: u64) -> CuResult {
    status(machine().free_unused(at, "cuMemFreeHost"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(at: u64, len: usize, _flags: c_uint) -> CuResult {
    status(machine().register(at, len, "cuMemHostRegister"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(at: u64) -> CuResult {
    status(machine().unregister(at, "cuMemHostUnregister"))
}

/// Start of the pool handles, which are numbers by device.
const POOL_HANDLES: usize = 0xb700_0000;

// `CUmemPool_attribute`.
const REUSE: std::ops::RangeInclusive<c_int> = 1..=3;
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_CURRENT: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED_CURRENT: c_int = 7;
const USED_HIGH: c_int = 8;

fn pool_device(pool: usize) -> Option<usize> {
    pool.checked_sub(POOL_HANDLES).filter(|device| *device < machine().lock().settings.devices)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) -> CuResult {
    match usize::try_from(device).ok().and_then(|device| pool_device(POOL_HANDLES + device)) {
        // SAFETY: as documented by CUDA: a handle is as large as a pointer.
        Some(device) => unsafe { put(pool, POOL_HANDLES + device) },
        None => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: usize, keep: usize) -> CuResult {
    let Some(device) = pool_device(pool) else { return INVALID_VALUE };
    machine().lock().accounts[device].trim(keep as u64);
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> CuResult {
    let Some(device) = pool_device(pool) else { return INVALID_VALUE };
    let core = machine().lock();
    let account = &core.accounts[device];
    let bytes = match attribute {
        // SAFETY: as documented by CUDA: these are an `int`.
        attribute if REUSE.contains(&attribute) => return unsafe { put(value.cast::<c_int>(), 1) },
        RELEASE_THRESHOLD => account.threshold,
        RESERVED_CURRENT => account.reserved.current,
        RESERVED_HIGH => account.reserved.high,
        USED_CURRENT => account.used.current,
        USED_HIGH => account.used.high,
        _ => return INVALID_VALUE,
    };
    // SAFETY: as documented by CUDA: these are a `cuuint64_t`.
    unsafe { put(value.cast::<u64>(), bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const c_void) -> CuResult {
    let Some(device) = pool_device(pool).filter(|_| !value.is_null()) else { return INVALID_VALUE };
    if REUSE.contains(&attribute) {
        return SUCCESS;
    }
    // SAFETY: as documented by CUDA: the others are a `cuuint64_t`.
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

/// Host memory that is named is memory: to read it from, and the caller's to write it to.
unsafe fn copy((to, from, len): (u64, u64, usize), direction: Direction, stream: *mut c_void, by: &str) -> CuResult {
    // SAFETY: ensured by the caller.
    status(unsafe { machine().copy(Copy { to, from, len, direction }, stream as usize, by) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { copy((to, from as u64, len), Direction::HostToDevice, stream, "cuMemcpyHtoDAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { copy((to as u64, from, len), Direction::DeviceToHost, stream, "cuMemcpyDtoHAsync") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) -> CuResult {
    // SAFETY: as documented by CUDA.
    unsafe { copy((to, from, len), Direction::DeviceToDevice, stream, "cuMemcpyDtoDAsync") }
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
    // SAFETY: as documented by CUDA.
    unsafe { copy((to, from, len), Direction::DeviceToDevice, stream, "cuMemcpyPeerAsync") }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(at: u64, value: c_uchar, count: usize, stream: *mut c_void) -> CuResult {
    status(machine().fill(at, value, count, stream as usize, "cuMemsetD8Async"))
}

fn text(result: CuResult) -> Option<&'static CStr> {
    Some(match result {
        0 => c"no error",
        1 => c"invalid argument",
        2 => c"out of memory",
        3 => c"initialization error",
        100 => c"no CUDA-capable device is detected",
        101 => c"invalid device ordinal",
        200 => c"device kernel image is invalid",
        209 => c"no kernel image is available for execution on the device",
        201 => c"invalid device context",
        218 => c"a PTX JIT compilation failed",
        222 => c"the provided PTX was compiled with an unsupported toolchain.",
        301 => c"file not found",
        400 => c"invalid resource handle",
        500 => c"named symbol not found",
        600 => c"device not ready",
        700 => c"an illegal memory access was encountered",
        712 => c"part or all of the memory is already mapped",
        713 => c"the memory is not mapped",
        719 => c"unspecified launch failure",
        801 => c"operation not supported",
        _ => return None,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CuResult, text: *mut *const c_char) -> CuResult {
    // SAFETY: as documented by CUDA: `text` is a place for a pointer.
    unsafe { self::text(error).map_or(INVALID_VALUE, |words| put(text, words.as_ptr())) }
}
