//! NVRTC: compiles CUDA sources for the host while the program runs, once for all processes.
//!
//! `GPU_DOUBLE_NVCC` is the folder of the stand-in `nvcc` (default: `nvcc` of this crate). `GPU_DOUBLE_CACHE` is the
//! folder of compiled libraries (default: `target/gpu-double/nvrtc`).
#![allow(non_snake_case, reason = "NVRTC's names")]

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
};

use crate::kernels::MACHINE_CODE;

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;
const BUILTIN_OPERATION_FAILURE: c_int = 7;

#[derive(Default)]
struct Program {
    source: Source,
    /// PTX, empty before a compilation and after a failed one.
    image: CString,
    /// Machine code, empty unless the options name a real architecture (`sm_90`).
    machine_code: CString,
    log: CString,
}

#[derive(Default)]
struct Programs {
    live: BTreeMap<usize, Program>,
    made: usize,
}

static PROGRAMS: Mutex<Option<Programs>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Programs) -> T) -> T {
    f(PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Programs::default))
}

fn of(program: *mut c_void, f: impl FnOnce(&mut Program) -> c_int) -> c_int {
    with(|programs| programs.live.get_mut(&(program as usize)).map_or(INVALID_PROGRAM, f))
}

/// `at` is null or a string that ends with 0.
unsafe fn text(at: *const c_char) -> Option<String> {
    // SAFETY: ensured by the caller.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}

/// `at` points to `count` strings, or `count` is 0.
unsafe fn texts(at: *const *const c_char, count: c_int) -> Vec<String> {
    // SAFETY: ensured by the caller.
    (0..count.max(0) as usize).filter_map(|place| unsafe { text(*at.add(place)) }).collect()
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut c_void,
    source: *const c_char,
    name: *const c_char,
    headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    if headers != 0 {
        return INVALID_INPUT;
    }
    // SAFETY: the caller passes strings.
    let source = unsafe {
        Source {
            text: text(source).unwrap_or_default(),
            name: text(name).unwrap_or_else(|| "default_program".into()),
            ..Source::default()
        }
    };
    with(|programs| {
        programs.made += 1;
        let handle = 0x4e00_0000 + programs.made;
        programs.live.insert(handle, Program { source, ..Program::default() });
        // SAFETY: the caller passes a pointer to a program.
        unsafe { *program = handle as *mut c_void };
    });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes a pointer to a program.
    let handle = unsafe { std::mem::replace(&mut *program, std::ptr::null_mut()) };
    with(|programs| programs.live.remove(&(handle as usize))).map_or(INVALID_PROGRAM, |_| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(program: *mut c_void, count: c_int, options: *const *const c_char) -> c_int {
    // SAFETY: the caller passes `count` strings.
    let options = unsafe { texts(options, count) };
    of(program, |program| {
        program.source.options = options;
        let (status, image, log) = match compile(&program.source) {
            Ok(Ok(image)) => (SUCCESS, image, String::new()),
            Ok(Err(log)) => (COMPILATION, String::new(), log),
            Err(error) => (BUILTIN_OPERATION_FAILURE, String::new(), format!("the stand-in nvcc: {error}")),
        };
        let arch = program.source.options.iter().find_map(|option| option.strip_prefix("--gpu-architecture=sm_"));
        let machine_code = arch.filter(|_| status == SUCCESS).map(|arch| format!("{MACHINE_CODE}{arch}\n{image}"));
        program.machine_code = c_string(&machine_code.unwrap_or_default());
        (program.image, program.log) = (c_string(&image), c_string(&log));
        status
    })
}

/// `size` is valid for a write of the number of bytes, including the final 0.
unsafe fn size_of_text(text: &CString, size: *mut usize) -> c_int {
    // SAFETY: ensured by the caller.
    unsafe { *size = text.as_bytes_with_nul().len() };
    SUCCESS
}

/// `out` is valid for a write of the text and its final 0.
unsafe fn copy_of_text(text: &CString, out: *mut c_char) -> c_int {
    let bytes = text.as_bytes_with_nul();
    // SAFETY: ensured by the caller.
    unsafe { bytes.as_ptr().copy_to_nonoverlapping(out.cast(), bytes.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(program: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the caller passes a pointer to the size.
    of(program, |program| unsafe { size_of_text(&program.image, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(program: *mut c_void, out: *mut c_char) -> c_int {
    // SAFETY: the caller passes a buffer of the size that `nvrtcGetPTXSize` returned.
    of(program, |program| unsafe { copy_of_text(&program.image, out) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBINSize(program: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the caller passes a pointer to the size.
    of(program, |program| unsafe {
        *size = if program.machine_code.is_empty() { 0 } else { program.machine_code.as_bytes_with_nul().len() };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBIN(program: *mut c_void, out: *mut c_char) -> c_int {
    // SAFETY: the caller passes a buffer of the size that `nvrtcGetCUBINSize` returned.
    of(program, |program| unsafe { copy_of_text(&program.machine_code, out) })
}

/// The architectures of CUDA 13.0.
const ARCHS: [c_int; 12] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to a number.
    unsafe { *count = ARCHS.len() as c_int };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetSupportedArchs(archs: *mut c_int) -> c_int {
    // SAFETY: the caller passes as many numbers as `nvrtcGetNumSupportedArchs` returned.
    unsafe { ARCHS.as_ptr().copy_to_nonoverlapping(archs, ARCHS.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the caller passes a pointer to the size.
    of(program, |program| unsafe { size_of_text(&program.log, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: *mut c_void, out: *mut c_char) -> c_int {
    // SAFETY: the caller passes a buffer of the size that `nvrtcGetProgramLogSize` returned.
    of(program, |program| unsafe { copy_of_text(&program.log, out) })
}

/// Returns the folder of the stand-in `nvcc` and its headers.
fn nvcc() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("nvcc");
    std::env::var_os("GPU_DOUBLE_NVCC").map_or_else(beside, PathBuf::from)
}

/// Returns the folder of the compiled libraries.
fn cache() -> PathBuf {
    let in_workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/gpu-double/nvrtc");
    std::env::var_os("GPU_DOUBLE_CACHE").map_or_else(in_workspace, PathBuf::from)
}

/// A CUDA source and its compiler options.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Source {
    pub(crate) text: String,
    /// File name in the compiler's messages.
    pub(crate) name: String,
    pub(crate) options: Vec<String>,
}

/// An image for `cuModuleLoadData`, or the compiler's messages.
pub(crate) type Compiled = Result<String, String>;

/// Compiles a source with the stand-in `nvcc`, or returns the image from the cache. The error says why the compiler did
/// not start.
pub(crate) fn compile(source: &Source) -> io::Result<Compiled> {
    let nvcc = nvcc();
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    hash_files(&nvcc, &mut hasher)?;
    let folder = cache().join(format!("{:016x}", hasher.finish()));
    fs::create_dir_all(&folder)?;
    // If several processes compile the same source, the first one compiles and the others wait.
    let lock = File::create(folder.join("lock"))?;
    lock.lock()?;
    let image = folder.join("kernels.ptx");
    if let Ok(image) = fs::read_to_string(&image) {
        return Ok(Ok(image));
    }
    let file = folder.join("kernels.cu");
    fs::write(&file, format!("#line 1 \"{}\"\n{}\n", source.name, source.text))?;
    let mut command = Command::new("bash");
    command.arg(nvcc.join("nvcc")).args(["--ptx", "--strict", "-D", "__CUDACC_RTC__"]).args(&source.options);
    // The rename is atomic, so that a killed process does not leave an incomplete image.
    let new = folder.join("new.ptx");
    let output = command.arg("-o").arg(&new).arg(&file).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    fs::rename(&new, &image)?;
    fs::read_to_string(&image).map(Ok)
}

/// Hashes the compiler and its headers, whose changes invalidate cached libraries.
fn hash_files(folder: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let context = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = fs::read_dir(folder)
        .map_err(context)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            hash_files(&path, hasher)?;
        } else {
            fs::read(&path)?.hash(hasher);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Image, open};

    /// Compiles a text, and returns the status, the image and the log.
    fn compile_text(source: &str, name: &str) -> (c_int, String, String) {
        let (source, name) = (CString::new(source).unwrap(), CString::new(name).unwrap());
        let options = [c"--gpu-architecture=compute_90".as_ptr(), c"-DTHREE=3".as_ptr()];
        // SAFETY: all texts end with a zero, and the places are as large as asked for.
        unsafe {
            let mut program = std::ptr::null_mut();
            let none = std::ptr::null();
            assert_eq!(nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none), SUCCESS);
            let status = nvrtcCompileProgram(program, 2, options.as_ptr());
            let mut size = 0;
            nvrtcGetPTXSize(program, &mut size);
            let mut image = vec![0u8; size];
            nvrtcGetPTX(program, image.as_mut_ptr().cast());
            nvrtcGetProgramLogSize(program, &mut size);
            let mut log = vec![0u8; size];
            nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            assert_eq!(nvrtcDestroyProgram(&mut program), SUCCESS);
            let text = |bytes: Vec<u8>| CString::from_vec_with_nul(bytes).unwrap().into_string().unwrap();
            (status, text(image), text(log))
        }
    }

    #[test]
    fn compiles_once() {
        let source =
            "extern \"C\" __global__ void fill(int* to, int n) { if (threadIdx.x < n) to[threadIdx.x] = THREE; }";
        let (status, image, log) = compile_text(source, "fill.cu");
        assert_eq!((status, log.as_str()), (SUCCESS, ""));
        let Image::Kernels(kernels) = open(&image).unwrap() else {
            panic!("{image}");
        };
        assert_eq!(kernels.keys().collect::<Vec<_>>(), ["fill"]);
        // The second compilation uses the cache.
        assert_eq!(compile_text(source, "fill.cu").1, image);
    }

    #[test]
    fn compiler_errors_have_a_position() {
        let (status, image, log) = compile_text("\nextern \"C\" __global__ void f() { no_such(); }", "wrong.cu");
        assert_eq!((status, image.as_str()), (COMPILATION, ""));
        assert!(log.contains("wrong.cu:2:") && log.contains("no_such"), "{log}");
    }

    #[test]
    fn rejects_hidden_pointers() {
        let (status, _, log) = compile_text("extern \"C\" __global__ void f(float** all) {}", "pointers.cu");
        assert!(status == COMPILATION && log.contains("points at pointers"), "{log}");
        let source = "struct Two { float *a, *b; };\nextern \"C\" __global__ void f(Two two) {}";
        let (status, _, log) = compile_text(source, "struct.cu");
        assert!(status == COMPILATION && log.contains("GPU_DOUBLE_POINTERS"), "{log}");
    }
}
