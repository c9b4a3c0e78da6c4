//! NVRTC: compiles CUDA sources for the host while the program runs.
//!
//! `GPU_DOUBLE_NVCC` is the folder of the stand-in `nvcc` (`nvcc` of this crate), `GPU_DOUBLE_CACHE` the folder in
//! which libraries are kept (`target/gpu-double/nvrtc`).
#![allow(non_snake_case, reason = "NVRTC's names")]

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_int, c_void},
    sync::{Mutex, PoisonError},
};

#[cfg(test)]
mod tests;

use crate::host_compiler::{self, Source};

const SUCCESS: c_int = 0;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;
const BUILTIN_OPERATION_FAILURE: c_int = 7;
const NO_NAME_EXPRESSIONS_AFTER_COMPILATION: c_int = 8;
const NO_LOWERED_NAMES_BEFORE_COMPILATION: c_int = 9;
const NAME_EXPRESSION_NOT_VALID: c_int = 10;

#[derive(Default)]
struct Program {
    source: Source,
    /// Names of kernels by their expressions, where they stay.
    lowered: BTreeMap<String, CString>,
    /// Empty before the compilation and after one that failed.
    image: CString,
    log: CString,
    compiled: bool,
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

/// # Safety
/// `at` is null or a text that ends with a zero.
unsafe fn text(at: *const c_char) -> Option<String> {
    // SAFETY: the caller promises it.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}

/// # Safety
/// `at` leads to `count` texts, or `count` is 0.
unsafe fn texts(at: *const *const c_char, count: c_int) -> Vec<String> {
    // SAFETY: the caller promises it.
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
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    // SAFETY: the caller gives texts, and `count` headers with their names.
    let source = unsafe {
        Source {
            text: text(source).unwrap_or_default(),
            name: text(name).unwrap_or_else(|| "default_program".into()),
            headers: texts(names, count).into_iter().zip(texts(headers, count)).collect(),
            ..Source::default()
        }
    };
    with(|programs| {
        programs.made += 1;
        let handle = 0x4e00_0000 + programs.made;
        programs.live.insert(handle, Program { source, ..Program::default() });
        // SAFETY: the caller gives a place for a program.
        unsafe { *program = handle as *mut c_void };
    });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int {
    // SAFETY: the caller gives the place of a program.
    let handle = unsafe { std::mem::replace(&mut *program, std::ptr::null_mut()) };
    with(|programs| programs.live.remove(&(handle as usize))).map_or(INVALID_PROGRAM, |_| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcAddNameExpression(program: *mut c_void, expression: *const c_char) -> c_int {
    // SAFETY: a text that ends with a zero.
    let expression = unsafe { text(expression) }.unwrap_or_default();
    of(program, |program| {
        if program.compiled {
            return NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
        }
        let name = format!("kernel_by_expression_{}", program.source.expressions.len());
        program.lowered.insert(expression.clone(), c_string(&name));
        // `describe` takes the address itself.
        program.source.expressions.push((expression.trim().trim_start_matches('&').into(), name));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetLoweredName(
    program: *mut c_void,
    expression: *const c_char,
    name: *mut *const c_char,
) -> c_int {
    // SAFETY: a text that ends with a zero.
    let expression = unsafe { text(expression) }.unwrap_or_default();
    of(program, |program| {
        if !program.compiled {
            return NO_LOWERED_NAMES_BEFORE_COMPILATION;
        }
        let Some(lowered) = program.lowered.get(&expression) else { return NAME_EXPRESSION_NOT_VALID };
        // SAFETY: the caller gives a place for the name. It stays until the program is destroyed.
        unsafe { *name = lowered.as_ptr() };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(program: *mut c_void, count: c_int, options: *const *const c_char) -> c_int {
    // SAFETY: the caller gives so many texts.
    let options = unsafe { texts(options, count) };
    of(program, |program| {
        program.source.options = options;
        let (status, image, log) = match host_compiler::compile(&program.source) {
            Ok(Ok(image)) => (SUCCESS, image, String::new()),
            Ok(Err(log)) => (COMPILATION, String::new(), log),
            Err(error) => (BUILTIN_OPERATION_FAILURE, String::new(), format!("the stand-in nvcc: {error}")),
        };
        program.compiled = status == SUCCESS;
        (program.image, program.log) = (c_string(&image), c_string(&log));
        status
    })
}

/// # Safety
/// `size` is a place for the number of bytes, with the zero at the end.
unsafe fn size_of_text(text: &CString, size: *mut usize) -> c_int {
    // SAFETY: the caller promises it.
    unsafe { *size = text.as_bytes_with_nul().len() };
    SUCCESS
}

/// # Safety
/// `out` has place for the text with the zero at its end.
unsafe fn copy_of_text(text: &CString, out: *mut c_char) -> c_int {
    let bytes = text.as_bytes_with_nul();
    // SAFETY: the caller promises it.
    unsafe { bytes.as_ptr().copy_to_nonoverlapping(out.cast(), bytes.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTXSize(program: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the caller gives a place for the size.
    of(program, |program| unsafe { size_of_text(&program.image, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetPTX(program: *mut c_void, out: *mut c_char) -> c_int {
    // SAFETY: the caller gives as much place as `nvrtcGetPTXSize` says.
    of(program, |program| unsafe { copy_of_text(&program.image, out) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut c_void, size: *mut usize) -> c_int {
    // SAFETY: the caller gives a place for the size.
    of(program, |program| unsafe { size_of_text(&program.log, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: *mut c_void, out: *mut c_char) -> c_int {
    // SAFETY: the caller gives as much place as `nvrtcGetProgramLogSize` says.
    of(program, |program| unsafe { copy_of_text(&program.log, out) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: the caller gives places for both numbers.
    unsafe { (*major, *minor) = (13, 0) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(result: c_int) -> *const c_char {
    let text = match result {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        BUILTIN_OPERATION_FAILURE => c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        NO_NAME_EXPRESSIONS_AFTER_COMPILATION => c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        NO_LOWERED_NAMES_BEFORE_COMPILATION => c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        NAME_EXPRESSION_NOT_VALID => c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        _ => c"NVRTC_ERROR of another kind",
    };
    text.as_ptr()
}
