//! Compiles the files of kernels by NVRTC while the program runs, and loads them.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

use candle_core::cuda_backend::kernels as candle_kernels;
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
use cudarc::driver::{self, CudaContext, CudaFunction, CudaModule, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;
use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys::{self, nvrtcProgram};
use fsdp_core::device::cuda::failed;

use super::flash_attention::{FEWEST_CAPABILITY, shared_bytes};
use super::preloading::kernel_names;
use crate::error::{Error, Result};

/// A kernel: its module, and its name, which no other module has.
#[derive(Clone, Copy)]
pub(super) struct Kernel<'a> {
    pub(super) module: Module,
    pub(super) name: &'a str,
}

impl<'a> From<&'a str> for Kernel<'a> {
    fn from(name: &'a str) -> Self {
        Module::Kernels.kernel(name)
    }
}

impl<'a> From<&'a String> for Kernel<'a> {
    fn from(name: &'a String) -> Self {
        Module::Kernels.kernel(name)
    }
}

/// A file of kernels, which is compiled and loaded as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) enum Module {
    Kernels,
    Dropout,
    Norms,
    Rotary,
    Activations,
    Embedding,
    Experts,
    Float8,
    Losses,
    Attention,
    FlashBf16Of64,
    FlashBf16Of128,
    FlashF16Of64,
    FlashF16Of128,
}

impl Module {
    /// Names and texts of the files, in the order of the variants.
    const SOURCES: [(&str, &str); 14] = [
        ("kernels.cu", include_str!("kernels.cu")),
        ("dropout.cu", include_str!("dropout.cu")),
        ("norms.cu", include_str!("norms.cu")),
        ("rotary.cu", include_str!("rotary.cu")),
        ("activations.cu", include_str!("activations.cu")),
        ("embedding.cu", include_str!("embedding.cu")),
        ("experts.cu", include_str!("experts.cu")),
        ("float8.cu", include_str!("float8.cu")),
        ("losses.cu", include_str!("losses.cu")),
        ("attention.cu", include_str!("attention.cu")),
        ("flash_bf16_64.cu", include_str!("flash_bf16_64.cu")),
        ("flash_bf16_128.cu", include_str!("flash_bf16_128.cu")),
        ("flash_f16_64.cu", include_str!("flash_f16_64.cu")),
        ("flash_f16_128.cu", include_str!("flash_f16_128.cu")),
    ];

    /// Returns a kernel of this file.
    pub(super) fn kernel(self, name: &str) -> Kernel<'_> {
        Kernel { module: self, name }
    }
}

/// The files that kernels include.
const HEADERS: [(&str, &str); 9] = [
    ("flash_attention.cuh", include_str!("flash_attention.cuh")),
    ("float8.cuh", include_str!("float8.cuh")),
    ("logistic.cuh", include_str!("logistic.cuh")),
    ("prelude.cuh", include_str!("prelude.cuh")),
    ("packs.cuh", include_str!("packs.cuh")),
    ("philox.cuh", include_str!("philox.cuh")),
    ("sums.cuh", include_str!("sums.cuh")),
    ("tensor_cores.cuh", include_str!("tensor_cores.cuh")),
    ("visible_keys.cuh", include_str!("visible_keys.cuh")),
];

/// The kernels of a device.
pub(super) struct Library {
    /// The files, in the order of [`Module`].
    modules: Vec<Arc<CudaModule>>,
    functions: HashMap<String, CudaFunction>,
    has_tensor_cores: bool,
}

impl Library {
    /// Compiles all files for the stream's device, and loads every kernel. Fails if the driver can't load Candle's
    /// kernels either.
    pub(super) fn new(stream: &CudaStream) -> Result<Self> {
        let context = stream.context();
        let refused = |what: &str, why: &dyn Display| Error::Core(failed(stream, what, why));
        let (major, minor) =
            context.compute_capability().map_err(|error| refused("asking for its capability", &error))?;
        let device = major * 10 + minor;
        // One of Candle's modules. nvcc compiled all of them alike.
        let ptx = candle_kernels::FILL.ptx();
        if let Err(error) = context.load_module(ptx.into()) {
            return Err(refused("loading Candle's kernels", &why_not(&error, ptx, device)));
        }
        let what = format!("compiling kernels for sm_{device}");
        let supported = supported().map_err(|error| refused(&what, &error))?;
        let target = Target::of(device, &supported)
            .ok_or_else(|| refused(&what, &"NVRTC supports only newer devices. Use an older CUDA toolkit"))?;
        // Own threads: rayon's could steal a task that needs the lock of the caller.
        let compiled = thread::scope(|scope| {
            let started = Module::SOURCES.map(|(name, text)| (name, scope.spawn(move || compile(name, text, target))));
            let ended = started.into_iter().map(|(name, thread)| {
                let compiled = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                compiled.map_err(|why| refused(&format!("compiling {name} for {}", target.option()), &why))
            });
            ended.collect::<Result<Vec<_>>>()
        })?;
        let has_tensor_cores = major >= FEWEST_CAPABILITY;
        let mut library = Library { modules: vec![], functions: HashMap::new(), has_tensor_cores };
        let loaded = compiled.into_iter().try_for_each(|image| library.add(context, image));
        loaded.map_err(|error| refused("loading kernels", &error)).map(|()| library)
    }

    fn add(&mut self, context: &Arc<CudaContext>, image: Vec<u8>) -> std::result::Result<(), DriverError> {
        let names = kernel_names(&image);
        let module = context.load_module(Ptx::from_binary(image))?;
        for name in names {
            let function = self.prepared(module.load_function(&name)?, &name)?;
            self.functions.insert(name, function);
        }
        self.modules.push(module);
        Ok(())
    }

    /// Returns a kernel.
    pub(super) fn function(
        &self,
        Kernel { module, name }: Kernel<'_>,
    ) -> std::result::Result<CudaFunction, DriverError> {
        match self.functions.get(name) {
            Some(function) => Ok(function.clone()),
            // Its image did not show its name.
            None => self.prepared(self.modules[module as usize].load_function(name)?, name),
        }
    }

    /// Lets launches of a kernel have the shared memory that they ask for.
    fn prepared(&self, function: CudaFunction, name: &str) -> std::result::Result<CudaFunction, DriverError> {
        let bytes = shared_bytes(name);
        if self.has_tensor_cores && bytes > 0 {
            function.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)?;
        }
        Ok(function)
    }
}

/// The code that NVRTC generates from a file. Architectures are numbers such as 90 for `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Machine code for the device's own architecture. Drivers of the same or a newer major version load it.
    Binary(c_int),
    /// PTX for an older architecture, for the driver to compile. NVRTC does not know the device's own.
    Ptx(c_int),
}

impl Target {
    /// Chooses among NVRTC's architectures. Returns `None` if all are newer than the device.
    fn of(capability: c_int, supported: &[c_int]) -> Option<Self> {
        if supported.contains(&capability) {
            return Some(Target::Binary(capability));
        }
        // Toolkits have renamed architectures between these.
        let is_older = |arch: &c_int| *arch < capability && arch % 10 == 0;
        supported.iter().copied().filter(is_older).max().map(Target::Ptx)
    }

    /// The value of the option `--gpu-architecture`.
    fn option(self) -> String {
        match self {
            Target::Binary(arch) => format!("sm_{arch}"),
            Target::Ptx(arch) => format!("compute_{arch}"),
        }
    }
}

/// Returns the architectures that NVRTC knows.
fn supported() -> std::result::Result<Vec<c_int>, NvrtcError> {
    let mut count = 0;
    // SAFETY: NVRTC writes the number of its architectures.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result()?;
    let mut archs = vec![0; count.max(0) as usize];
    // SAFETY: NVRTC writes as many numbers as it counted.
    unsafe { sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()) }.result()?;
    Ok(archs)
}

/// Compiles a file. The error is the compiler's output, or the reason why it did not run.
fn compile(name: &str, text: &str, target: Target) -> std::result::Result<Vec<u8>, String> {
    let program = Program::new(name, &with_headers(name, text))?;
    // Without fused multiply-add, so that the bits equal the CPU's. Those of sums on tensor cores don't.
    let fused = name.starts_with("flash_");
    let options = [format!("--fmad={fused}"), format!("--gpu-architecture={}", target.option())];
    // SAFETY: the program is live.
    if let Err(error) = unsafe { result::compile_program(program.handle, &options) } {
        // SAFETY: the program is live.
        let log = unsafe { result::get_program_log(program.handle) }.unwrap_or_default();
        let log = String::from_utf8_lossy(&bytes(log)).trim_end_matches('\0').trim().to_owned();
        return Err(if log.is_empty() { error.to_string() } else { log });
    }
    let image = program.image(target).map_err(|error| error.to_string())?;
    if image.is_empty() { Err("NVRTC returned no code".into()) } else { Ok(image) }
}

/// A program of NVRTC.
struct Program {
    handle: nvrtcProgram,
    /// NVRTC may read the text and the name as long as the program lives.
    _text: CString,
    _name: CString,
}

impl Program {
    fn new(name: &str, text: &str) -> std::result::Result<Self, String> {
        let [name, text] = [name, text].map(CString::new);
        let (name, text) = (name.map_err(|error| error.to_string())?, text.map_err(|error| error.to_string())?);
        let handle = result::create_program(&text, Some(&name)).map_err(|error| error.to_string())?;
        Ok(Program { handle, _text: text, _name: name })
    }

    /// Returns the machine code, or the PTX with a final zero, of a compiled program.
    fn image(&self, target: Target) -> std::result::Result<Vec<u8>, NvrtcError> {
        if let Target::Ptx(_) = target {
            // SAFETY: the program is live.
            return Ok(bytes(unsafe { result::get_ptx(self.handle) }?));
        }
        let mut size = 0;
        // SAFETY: the program is live, and NVRTC writes a size.
        unsafe { sys::nvrtcGetCUBINSize(self.handle, &mut size) }.result()?;
        let mut image: Vec<c_char> = vec![0; size];
        // SAFETY: the image has the size that NVRTC returned.
        unsafe { sys::nvrtcGetCUBIN(self.handle, image.as_mut_ptr()) }.result()?;
        Ok(bytes(image))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is live, and no one uses it any more.
        let _ = unsafe { result::destroy_program(self.handle) };
    }
}

fn bytes(chars: Vec<c_char>) -> Vec<u8> {
    chars.into_iter().map(|char| char as u8).collect()
}

/// Says why the driver does not load Candle's kernels on a device of this compute capability.
fn why_not(error: &DriverError, ptx: &str, device: c_int) -> String {
    let line = |name: &str| ptx.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if error.0 == CUDA_ERROR_UNSUPPORTED_PTX_VERSION {
        let (version, mut driver) = (line(".version ").unwrap_or("of a newer version"), 0);
        // SAFETY: the driver writes a number such as 12040 for 12.4.
        let of_cuda = match unsafe { driver::sys::cuDriverGetVersion(&mut driver) }.result() {
            Ok(()) => format!("CUDA {}.{}", driver / 1000, driver % 1000 / 10),
            Err(error) => format!("an unknown CUDA ({error})"),
        };
        return format!(
            "the CUDA toolkit of the build is newer than the driver: the kernels are PTX {version}, which the driver of \
             {of_cuda} can't compile. Update the driver, or build with a toolkit of {of_cuda} or older"
        );
    }
    match line(".target sm_").filter(|target| !is_loaded(target, device)) {
        Some(target) => {
            // Without a suffix, this loads on all newer devices.
            let older = if device > 80 { ", or 80 if nvcc does not know it" } else { "" };
            format!(
                "they are built for sm_{target}, which the device, sm_{device}, does not run. Build again with \
                 CUDA_COMPUTE_CAP={device}{older}"
            )
        }
        None => error.to_string(),
    }
}

/// Returns whether a device loads PTX for a target such as `80`, `90a` (this architecture only) or `100f` (its family).
/// Candle's build adds `a` or `f` from 90 on.
fn is_loaded(target: &str, device: c_int) -> bool {
    let arch = target.trim_end_matches(char::is_alphabetic);
    let Ok(number) = arch.parse::<c_int>() else { return true };
    match &target[arch.len()..] {
        "a" => number == device,
        "f" => number <= device && number / 10 == device / 10,
        _ => number <= device,
    }
}

/// Replaces the lines of a file that include headers by the headers.
fn with_headers(file: &str, text: &str) -> String {
    let mut whole = String::new();
    for (number, line) in text.lines().enumerate() {
        match HEADERS.iter().find(|(name, _)| line == format!("#include \"{name}\"")) {
            Some((name, header)) => {
                whole += &format!("#line 1 \"{name}\"\n{header}\n#line {} \"{file}\"\n", number + 2);
            }
            None => whole.extend([line, "\n"]),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiles_for_the_devices_architecture_or_the_newest_before_it() {
        let known = [75, 80, 86, 90, 100];
        assert_eq!(Target::of(90, &known), Some(Target::Binary(90)));
        assert_eq!(Target::of(89, &known), Some(Target::Ptx(80)));
        assert_eq!(Target::of(121, &known), Some(Target::Ptx(100)));
        assert_eq!(Target::of(70, &known), None);
        assert_eq!([Target::Binary(90), Target::Ptx(80)].map(Target::option), ["sm_90", "compute_80"]);
    }

    #[test]
    fn devices_load_ptx_of_older_ones_unless_it_has_a_suffix() {
        let loads = |target| [80, 89, 90, 100, 103].map(|device| is_loaded(target, device));
        assert_eq!(loads("80"), [true; 5]);
        assert_eq!(loads("90"), [false, false, true, true, true]);
        assert_eq!(loads("90a"), [false, false, true, false, false]);
        assert_eq!(loads("100f"), [false, false, false, true, true]);
    }
}
