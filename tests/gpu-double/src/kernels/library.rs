//! The host libraries that the stand-in `nvcc` compiles from CUDA sources.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_void},
    sync::{Mutex, PoisonError},
};

use crate::streams::{Access, Touch};

/// Prefix of a library's path, which replaces the PTX.
const LIBRARY: &str = "gpu-double library ";
/// Prefix of the reason for a missing library.
const MISSING: &str = "gpu-double missing ";

// `nvcc/include/engine.h` has the same layouts.

#[repr(C)]
struct RawPointers {
    parameter: u32,
    offset: u32,
    count: u32,
    access: u32,
}

#[repr(C)]
pub(crate) struct RawKernel {
    name: *const c_char,
    parameters: u32,
    pointers: u32,
    sizes: *const u32,
    pointer: *const RawPointers,
    threads: *const c_void,
}

/// The arguments of a launch.
#[repr(C)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    /// Seed of the order of blocks and threads. 0 is the numeric order.
    pub(crate) seed: u64,
    pub(crate) arguments: *mut *mut c_void,
}

type LaunchFunction = unsafe extern "C" fn(*const RawKernel, *const Launch) -> *const c_char;

/// A kernel and its C++ signature.
pub(crate) struct Kernel {
    raw: *const RawKernel,
    pub(crate) name: String,
    /// Bytes of each parameter.
    pub(crate) sizes: Vec<usize>,
    pointers: Vec<Pointers>,
    pub(crate) library: &'static Library,
}

struct Pointers {
    parameter: usize,
    offset: usize,
    count: usize,
    access: Access,
}

// SAFETY: `raw` points to constants of a library that is never unloaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A loaded library, which is never unloaded.
pub(crate) struct Library {
    launch: LaunchFunction,
    /// Locked while a kernel runs, because threads, blocks and shared memory are the library's variables.
    running: Mutex<()>,
}

/// The kernels of one library.
pub(crate) type Kernels = BTreeMap<String, &'static Kernel>;

/// The content of a module's image.
#[derive(Clone)]
pub(crate) enum Image {
    Kernels(&'static Kernels),
    /// The source could not be compiled for the host, with the reason.
    Missing(String),
}

/// Reads an image. The error says why the image is invalid.
pub(crate) fn open(image: &str) -> Result<Image, String> {
    let line = image.lines().next().unwrap_or_default();
    if let Some(reason) = line.strip_prefix(MISSING) {
        return Ok(Image::Missing(reason.into()));
    }
    let path = line.strip_prefix(LIBRARY).ok_or("a module that this double's nvcc or NVRTC did not make")?;
    static LOADED: Mutex<BTreeMap<String, &'static Kernels>> = Mutex::new(BTreeMap::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = loaded.get(path) {
        return Ok(Image::Kernels(kernels));
    }
    let kernels: &'static Kernels = Box::leak(Box::new(load(path)?));
    loaded.insert(path.into(), kernels);
    Ok(Image::Kernels(kernels))
}

fn load(path: &str) -> Result<Kernels, String> {
    let name = CString::new(path).map_err(|_| "a path with a zero byte")?;
    // SAFETY: the path ends with a zero, and the library's constructors only fill its own variables.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: `dlopen` failed, so there is a message.
        let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(format!("the library {path} of a module does not load: {}", reason.to_string_lossy()));
    }
    // SAFETY: the handle is live, and the names end with a zero.
    let [mut raw, launch] = [c"gpu_double_kernels", c"gpu_double_launch"]
        .map(|symbol| unsafe { libc::dlsym(handle, symbol.as_ptr()) })
        .map(|at| at as *const RawKernel);
    if raw.is_null() || launch.is_null() {
        return Err(format!("{path} is not a library of kernels"));
    }
    // SAFETY: the stand-in `nvcc` generated the function with this type.
    let launch = unsafe { std::mem::transmute::<*const RawKernel, LaunchFunction>(launch) };
    let library: &'static Library = Box::leak(Box::new(Library { launch, running: Mutex::new(()) }));
    let mut kernels = Kernels::new();
    // SAFETY: the array ends with a kernel without a name, and its pointers lead to arrays of the stated lengths.
    unsafe {
        while !(*raw).name.is_null() {
            let kernel = Kernel::read(raw, library);
            kernels.insert(kernel.name.clone(), Box::leak(Box::new(kernel)));
            raw = raw.add(1);
        }
    }
    Ok(kernels)
}

impl Kernel {
    /// `raw` points to a description that is never freed.
    unsafe fn read(raw: *const RawKernel, library: &'static Library) -> Self {
        // SAFETY: ensured by the caller.
        let (name, sizes, pointers) = unsafe {
            let one = &*raw;
            (
                CStr::from_ptr(one.name).to_string_lossy().into_owned(),
                std::slice::from_raw_parts(one.sizes, one.parameters as usize),
                std::slice::from_raw_parts(one.pointer, one.pointers as usize),
            )
        };
        let pointers = pointers.iter().map(|one| Pointers {
            parameter: one.parameter as usize,
            offset: one.offset as usize,
            count: one.count as usize,
            access: if one.access == 0 { Access::Read } else { Access::Write },
        });
        Self {
            raw,
            name,
            sizes: sizes.iter().map(|size| *size as usize).collect(),
            pointers: pointers.collect(),
            library,
        }
    }

    /// Returns the device memory that a launch with these parameters uses.
    pub(crate) fn touches(&self, parameters: &[Box<[u8]>]) -> Vec<Touch> {
        let mut touches = Vec::new();
        for one in &self.pointers {
            let bytes = &parameters[one.parameter][one.offset..one.offset + 8 * one.count];
            for pointer in bytes.chunks_exact(8) {
                let at = u64::from_ne_bytes(pointer.try_into().expect("eight bytes"));
                if at != 0 {
                    touches.push(Touch { at, access: one.access });
                }
            }
        }
        touches
    }

    /// Runs the kernel to its end. The error is a fault of one of its threads.
    ///
    /// `launch.arguments` points to parameters of the kernel's sizes. No other thread uses the memory of their
    /// pointers.
    pub(crate) unsafe fn run(&self, launch: &Launch) -> Result<(), String> {
        let _running = self.library.running.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the kernel belongs to the library; the rest is ensured by the caller.
        let message = unsafe { (self.library.launch)(self.raw, launch) };
        if message.is_null() {
            return Ok(());
        }
        // SAFETY: the library keeps the string until the next launch.
        Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
    }
}
