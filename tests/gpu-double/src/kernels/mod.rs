//! Modules, kernels and launches of the driver.
//!
//! A module is a host library that the stand-in `nvcc` or NVRTC made from a CUDA source. The descriptions of its
//! kernels come from their C++ signatures: a pointer to const is memory that is read, any other pointer memory that is
//! written. Limits are those of compute capability 9.0.
#![allow(non_snake_case, reason = "the names of CUDA's driver")]

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

mod library;
#[cfg(test)]
mod tests;

use crate::{
    bytes,
    machine::{Settings, TOOLKIT, machine},
    memory::base_of,
    report,
    status::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS},
    streams::{self, Operation, Progress},
};
pub(crate) use library::{Image, open};
use library::{Kernel, Launch};

const INVALID_IMAGE: c_int = 200;
const NO_BINARY_FOR_GPU: c_int = 209;
const INVALID_PTX: c_int = 218;
const UNSUPPORTED_PTX_VERSION: c_int = 222;
const FILE_NOT_FOUND: c_int = 301;
const NOT_FOUND: c_int = 500;

/// Modules and kernels by their handles.
#[derive(Default)]
struct Handles {
    modules: BTreeMap<usize, Image>,
    kernels: BTreeMap<usize, &'static Kernel>,
    /// Dynamic shared memory that a kernel may have, if it was asked for.
    shared: BTreeMap<usize, u32>,
    modules_made: usize,
}

static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Handles) -> T) -> T {
    f(HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Handles::default))
}

/// Prints the reason for a status.
fn refuse(status: c_int, why: &str) -> c_int {
    eprintln!("gpu double: {why}");
    status
}

/// First line of machine code, before the architecture and the text of the PTX.
pub(crate) const MACHINE_CODE: &str = "gpu-double machine code for sm_";

/// Returns the PTX of an image that this driver loads for this device. The error is a status and its reason.
fn loadable<'a>(image: &'a str, settings: &Settings) -> Result<&'a str, (c_int, String)> {
    let (driver, device) = (settings.driver, settings.capability);
    let number = |text: &str| text.trim().parse::<u64>().ok();
    if let Some((arch, ptx)) = image.strip_prefix(MACHINE_CODE).and_then(|rest| rest.split_once('\n')) {
        let arch = number(arch).filter(|arch| arch / 10 == device / 10 && *arch <= device);
        return match arch {
            None => Err((NO_BINARY_FOR_GPU, format!("machine code of another architecture than sm_{device}"))),
            Some(_) if driver / 1000 < TOOLKIT / 1000 => {
                Err((INVALID_IMAGE, format!("machine code of CUDA {TOOLKIT}, and the driver is of CUDA {driver}")))
            }
            Some(_) => Ok(ptx),
        };
    }
    if driver < TOOLKIT {
        return Err((UNSUPPORTED_PTX_VERSION, format!("PTX of CUDA {TOOLKIT}, and the driver is of CUDA {driver}")));
    }
    let target = image.lines().find_map(|line| line.strip_prefix(".target sm_")).unwrap_or_default();
    let is_older = number(target.trim_end_matches(char::is_alphabetic)).is_none_or(|arch| match arch {
        // With a suffix such as `a`, PTX is not for other architectures.
        _ if target.ends_with(char::is_alphabetic) => arch == device,
        _ => arch <= device,
    });
    if is_older { Ok(image) } else { Err((INVALID_PTX, format!("PTX for sm_{target}, and the device is sm_{device}"))) }
}

fn load(module: *mut *mut c_void, image: &str) -> c_int {
    let fitting = loadable(image, &machine().lock().settings);
    let image = match fitting {
        Err((status, why)) => return refuse(status, &why),
        Ok(image) => image,
    };
    report::count_loaded("a module");
    if let Err(fault) = machine().may_synchronize("loading a module") {
        return streams::status::<()>(Err(fault.into()));
    }
    match open(image) {
        Err(why) => refuse(INVALID_IMAGE, &why),
        Ok(image) => with(|handles| {
            handles.modules_made += 1;
            let handle = 0x4d00_0000 + handles.modules_made;
            handles.modules.insert(handle, image);
            // SAFETY: the caller passes a pointer to a module.
            unsafe { *module = handle as *mut c_void };
            SUCCESS
        }),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    // SAFETY: an image is a string that ends with 0.
    let image = unsafe { CStr::from_ptr(image.cast()) };
    image.to_str().map_or(INVALID_IMAGE, |image| load(module, image))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoad(module: *mut *mut c_void, path: *const c_char) -> c_int {
    // SAFETY: the caller passes a string that ends with 0.
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
    // SAFETY: the caller passes a string that ends with 0.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let kernels = match image {
        Image::Missing(why) => return refuse(NOT_FOUND, &format!("kernel {name} is missing: {why}")),
        Image::Kernels(kernels) => kernels,
    };
    let Some(kernel) = kernels.get(name.as_ref()).copied() else {
        return refuse(
            NOT_FOUND,
            &format!("the module has no kernel {name}: it must be an `extern \"C\" __global__ void` function"),
        );
    };
    let handle = std::ptr::from_ref(kernel) as usize;
    // SAFETY: the caller passes a pointer to a function.
    unsafe { *out = handle as *mut c_void };
    match with(|handles| handles.kernels.insert(handle, kernel)) {
        Some(_) => SUCCESS,
        // CUDA loads a kernel when it is first used.
        None => {
            report::count_loaded(&name);
            streams::status(machine().may_synchronize("loading a kernel").map_err(Into::into))
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int) -> c_int {
    let handle = function as usize;
    if !with(|handles| handles.kernels.contains_key(&handle)) {
        return INVALID_HANDLE;
    }
    match (attribute, u32::try_from(value)) {
        (MAX_DYNAMIC_SHARED, Ok(bytes)) if bytes <= MOST_SHARED_BYTES => {
            with(|handles| handles.shared.insert(handle, bytes));
            SUCCESS
        }
        (MAX_DYNAMIC_SHARED, _) => refuse(INVALID_VALUE, &format!("{value} bytes of dynamic shared memory")),
        _ => refuse(NOT_SUPPORTED, &format!("attribute {attribute} of a kernel")),
    }
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
    let kernel = with(|handles| handles.kernels.get(&(function as usize)).copied());
    let Some(kernel) = kernel else { return INVALID_HANDLE };
    // SAFETY: the caller passes the kernel's parameters.
    match unsafe { operation(kernel, shape, parameters) } {
        Ok(operation) => streams::enqueue(stream, operation),
        Err(why) => refuse(INVALID_VALUE, &why),
    }
}

/// The dimensions of a launch.
#[derive(Clone, Copy)]
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
}

/// Returns the operation of a launch. It copies the parameters now, and runs the kernel when the stream reaches it. The
/// error names a limit that the launch exceeds.
///
/// `parameters` points to one pointer for each of the kernel's parameters, and these to values of their types.
unsafe fn operation(kernel: &'static Kernel, shape: Shape, parameters: *mut *mut c_void) -> Result<Operation, String> {
    let address = std::ptr::from_ref(kernel) as usize;
    let most_shared = with(|handles| handles.shared.get(&address).copied()).unwrap_or(SHARED_BYTES);
    if let Some(why) = refusal(shape.grid, shape.block, shape.shared_bytes, most_shared) {
        return Err(format!("a launch of kernel {} asks for {why}", kernel.name));
    }
    if parameters.is_null() && !kernel.sizes.is_empty() {
        return Err(format!("a launch of kernel {} gives none of its {} parameters", kernel.name, kernel.sizes.len()));
    }
    let copy = |(index, size): (usize, &usize)| {
        let mut bytes = vec![0; *size].into_boxed_slice();
        // SAFETY: the caller passes a value of this size.
        unsafe { (*parameters.add(index)).cast::<u8>().copy_to_nonoverlapping(bytes.as_mut_ptr(), *size) };
        bytes
    };
    let mut values: Vec<_> = kernel.sizes.iter().enumerate().map(copy).collect();
    let touches = kernel.touches(&values);
    let bytes = touches.iter().filter_map(|touch| base_of(touch.at)).map(|(_, len)| len as u64).sum();
    report::count_many(&format!("bytes of the memory that kernels use: {}", kernel.name), bytes);
    let seed = next_seed();
    let run = move || {
        if !bytes::computes() {
            return Progress::Done;
        }
        let mut arguments: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let Shape { grid, block, shared_bytes } = shape;
        let launch = Launch { grid, block, shared_bytes, seed, arguments: arguments.as_mut_ptr() };
        // SAFETY: the values have the parameters' sizes, and the stream has its turn.
        if let Err(fault) = unsafe { kernel.run(&launch) } {
            report::fault(fault);
        }
        Progress::Done
    };
    Ok(Operation { name: format!("kernel {}", kernel.name), touches, run: Box::new(run) })
}

/// Returns the seed of the order of this launch's blocks and threads. With schedule 0, they run in numeric order.
fn next_seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    match *SEED.get_or_init(|| Settings::from_env().map_or(0, |settings| settings.seed)) {
        0 => 0,
        seed => (seed << 32) + LAUNCHES.fetch_add(1, Ordering::Relaxed),
    }
}

/// Threads of a block.
const THREADS: u32 = 1024;
/// Threads of a block along each axis.
const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Blocks of a grid along each axis.
const GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Dynamic shared memory of a block in bytes, unless the kernel was given more by `cuFuncSetAttribute`.
const SHARED_BYTES: u32 = 48 << 10;
/// Most shared memory of a block in bytes.
const MOST_SHARED_BYTES: u32 = 227 << 10;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;

/// Returns the reason to refuse a launch, if any.
fn refusal(grid: [u32; 3], block: [u32; 3], shared: u32, most_shared: u32) -> Option<String> {
    let outside = |of: [u32; 3], most: [u32; 3]| of.iter().zip(most).any(|(one, most)| *one == 0 || *one > most);
    if outside(grid, GRID) {
        return Some(format!("a grid of {grid:?} blocks: each axis has at least one and at most {GRID:?}"));
    }
    if outside(block, BLOCK) || block.iter().product::<u32>() > THREADS {
        return Some(format!(
            "a block of {block:?} threads: it has at least one, and at most {BLOCK:?}, {THREADS} in all"
        ));
    }
    let is_more = shared > most_shared;
    is_more.then(|| format!("{shared} bytes of dynamic shared memory: {most_shared} are allowed"))
}
