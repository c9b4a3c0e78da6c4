//! Modules, kernels and launches of the driver.
//!
//! A module is a host library that the stand-in `nvcc` or NVRTC made of a CUDA source. The descriptions of its kernels
//! come from their C++ signatures: a pointer to const is memory that is read, any other pointer memory that is written.
#![allow(non_snake_case, reason = "the names of CUDA's driver")]

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{Mutex, PoisonError, atomic::Ordering},
};

mod launch;
pub(crate) mod library;
mod limits;
#[cfg(test)]
mod tests;

use self::{
    launch::Shape,
    library::{Image, Kernel},
};
use crate::status::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};

const INVALID_IMAGE: c_int = 200;
const FILE_NOT_FOUND: c_int = 301;
const NOT_FOUND: c_int = 500;

/// Modules and kernels, by the numbers that the program has for them.
#[derive(Default)]
struct Handles {
    modules: BTreeMap<usize, Image>,
    kernels: BTreeMap<usize, &'static Kernel>,
    modules_made: usize,
}

static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Handles) -> T) -> T {
    f(HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Handles::default))
}

/// What CUDA has only a number for, in words.
fn refuse(status: c_int, why: &str) -> c_int {
    eprintln!("gpu double: {why}");
    status
}

fn kernel(handle: *mut c_void) -> Result<&'static Kernel, c_int> {
    with(|handles| handles.kernels.get(&(handle as usize)).copied()).ok_or(INVALID_HANDLE)
}

fn answer(result: Result<c_int, c_int>) -> c_int {
    result.unwrap_or_else(|status| status)
}

fn load(module: *mut *mut c_void, image: &str) -> c_int {
    match library::open(image) {
        Err(why) => refuse(INVALID_IMAGE, &why),
        Ok(image) => with(|handles| {
            handles.modules_made += 1;
            let handle = 0x4d00_0000 + handles.modules_made;
            handles.modules.insert(handle, image);
            // SAFETY: the caller gives a place for a module.
            unsafe { *module = handle as *mut c_void };
            SUCCESS
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    // SAFETY: an image is a text that ends with a zero.
    let image = unsafe { CStr::from_ptr(image.cast()) };
    image.to_str().map_or(INVALID_IMAGE, |image| load(module, image))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_int,
    _values: *mut *mut c_void,
) -> c_int {
    // SAFETY: the same image, with options for a compiler of PTX.
    unsafe { cuModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoad(module: *mut *mut c_void, path: *const c_char) -> c_int {
    // SAFETY: a path that ends with a zero.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
    match std::fs::read_to_string(path.as_ref()) {
        Err(error) => refuse(FILE_NOT_FOUND, &format!("the module {path}: {error}")),
        Ok(image) => load(module, &image),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: *mut c_void) -> c_int {
    with(|handles| handles.modules.remove(&(module as usize))).map_or(INVALID_HANDLE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(out: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> c_int {
    let Some(image) = with(|handles| handles.modules.get(&(module as usize)).cloned()) else { return INVALID_HANDLE };
    // SAFETY: a name that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let kernels = match image {
        Image::Missing(why) => return refuse(NOT_FOUND, &format!("there is no kernel {name}: {why}")),
        Image::Kernels(kernels) => kernels,
    };
    let Some(kernel) = kernels.get(name.as_ref()).copied() else {
        return refuse(NOT_FOUND, &format!("the module has no kernel {name}: it is no `extern \"C\" __global__ void`"));
    };
    let handle = std::ptr::from_ref(kernel) as usize;
    with(|handles| handles.kernels.insert(handle, kernel));
    // SAFETY: the caller gives a place for a function.
    unsafe { *out = handle as *mut c_void };
    SUCCESS
}

// CUfunction_attribute.
const MAX_THREADS_PER_BLOCK: c_int = 0;
const CONST_SIZE_BYTES: c_int = 2;
const LOCAL_SIZE_BYTES: c_int = 3;
const NUM_REGS: c_int = 4;
const PTX_VERSION: c_int = 5;
const BINARY_VERSION: c_int = 6;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
const PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: *mut c_void) -> c_int {
    answer(kernel(function).map(|kernel| {
        let known = match attribute {
            MAX_THREADS_PER_BLOCK => limits::THREADS as c_int,
            CONST_SIZE_BYTES | LOCAL_SIZE_BYTES => 0,
            NUM_REGS => 32,
            PTX_VERSION | BINARY_VERSION => 90,
            MAX_DYNAMIC_SHARED_SIZE_BYTES => kernel.most_shared.load(Ordering::Relaxed) as c_int,
            PREFERRED_SHARED_MEMORY_CARVEOUT => -1,
            _ => return refuse(NOT_SUPPORTED, &format!("attribute {attribute} of kernels is not known here")),
        };
        // SAFETY: the caller gives a place for the value.
        unsafe { *value = known };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int) -> c_int {
    answer(kernel(function).map(|kernel| match attribute {
        MAX_DYNAMIC_SHARED_SIZE_BYTES => match u32::try_from(value) {
            Ok(bytes) if bytes <= limits::MOST_SHARED_BYTES => {
                kernel.most_shared.store(bytes, Ordering::Relaxed);
                SUCCESS
            }
            _ => INVALID_VALUE,
        },
        PREFERRED_SHARED_MEMORY_CARVEOUT => SUCCESS,
        _ => INVALID_VALUE,
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetCacheConfig(function: *mut c_void, _config: c_int) -> c_int {
    answer(kernel(function).map(|_| SUCCESS))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: *mut c_void,
    threads: c_int,
    shared: usize,
) -> c_int {
    // SAFETY: the caller gives a place for the number.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    function: *mut c_void,
    threads: c_int,
    shared: usize,
    _flags: c_uint,
) -> c_int {
    answer(kernel(function).map(|_| {
        if threads < 1 || threads as u32 > limits::THREADS {
            return INVALID_VALUE;
        }
        let shared = u32::try_from(shared).unwrap_or(u32::MAX / 2);
        // SAFETY: the caller gives a place for the number.
        unsafe { *blocks = limits::blocks_at_once(threads as u32, shared) as c_int };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyAvailableDynamicSMemPerBlock(
    bytes: *mut usize,
    function: *mut c_void,
    blocks: c_int,
    threads: c_int,
) -> c_int {
    answer(kernel(function).map(|_| {
        if blocks < 1 || threads < 1 || limits::blocks_at_once(threads as u32, 0) < blocks as u32 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller gives a place for the number.
        unsafe { *bytes = limits::shared_for(blocks as u32) as usize };
        SUCCESS
    }))
}

/// Bytes of dynamic shared memory for a block of so many threads.
type SharedBytes = Option<extern "C" fn(c_int) -> usize>;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxPotentialBlockSize(
    grid: *mut c_int,
    block: *mut c_int,
    function: *mut c_void,
    shared_for: SharedBytes,
    shared: usize,
    limit: c_int,
) -> c_int {
    // SAFETY: the caller gives places for both numbers.
    unsafe { cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_for, shared, limit, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    grid: *mut c_int,
    block: *mut c_int,
    function: *mut c_void,
    shared_for: SharedBytes,
    shared: usize,
    limit: c_int,
    _flags: c_uint,
) -> c_int {
    answer(kernel(function).map(|_| {
        let most = if limit > 0 { limits::THREADS.min(limit as u32) } else { limits::THREADS };
        let at_once = |threads: u32| {
            let shared = shared_for.map_or(shared, |bytes| bytes(threads as c_int));
            limits::blocks_at_once(threads, u32::try_from(shared).unwrap_or(u32::MAX / 2))
        };
        // The largest of the blocks with which most threads run at once.
        let candidates = (32..=most).step_by(32).chain([most]);
        let best = candidates.max_by_key(|threads| at_once(*threads) * threads).unwrap_or(most);
        // SAFETY: the caller gives places for both numbers.
        unsafe {
            *block = best as c_int;
            *grid = (at_once(best) * limits::MULTIPROCESSORS) as c_int;
        }
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "CUDA's")]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> c_int {
    if !extra.is_null() {
        return refuse(NOT_SUPPORTED, "a launch with `extra`: parameters are taken from `kernelParams` only");
    }
    let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
    answer(kernel(function).map(|kernel| {
        // SAFETY: the caller gives the kernel's parameters.
        unsafe { launch::launch(kernel, shape, stream, parameters) }.unwrap_or_else(|why| refuse(INVALID_VALUE, &why))
    }))
}

/// The same: there is no barrier of the whole grid in the headers of this double.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "CUDA's")]
unsafe extern "C" fn cuLaunchCooperativeKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
) -> c_int {
    let none = std::ptr::null_mut();
    // SAFETY: the caller gives the kernel's parameters.
    unsafe {
        cuLaunchKernel(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            parameters,
            none,
        )
    }
}
