//! cuBLAS: products of matrices, and of a matrix and a vector. Matrices are column-major.
#![allow(non_snake_case, reason = "cuBLAS's names")]
#![allow(clippy::too_many_arguments, reason = "cuBLAS's")]

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_longlong, c_void},
    sync::{Mutex, PoisonError},
};

mod element;
#[cfg(test)]
mod tests;

use crate::streams::{self, Access, Operation, Progress, Touch};
use element::{Element, Matrix, Product, Strides, multiply};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

fn text(status: c_int) -> &'static CStr {
    match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"no such handle",
        INVALID_VALUE => c"invalid value",
        EXECUTION_FAILED => c"the operation could not be queued",
        NOT_SUPPORTED => c"not supported by the device double",
        _ => c"unknown status",
    }
}

// cudaDataType_t and cublasComputeType_t.
const R_32F: c_int = 0;
const R_64F: c_int = 1;
const R_16F: c_int = 2;
const COMPUTE_16F: c_int = 64;
const COMPUTE_32F: c_int = 68;
const COMPUTE_64F: c_int = 70;

#[derive(Clone, Copy, Default)]
struct Handle {
    stream: usize,
    math_mode: c_int,
    /// Whether `alpha` and `beta` are in device memory.
    device_scalars: bool,
}

#[derive(Default)]
struct Handles {
    live: BTreeMap<usize, Handle>,
    made: usize,
}

static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Handles) -> T) -> T {
    f(HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Handles::default))
}

fn of(handle: *mut c_void, f: impl FnOnce(&mut Handle)) -> c_int {
    with(|handles| handles.live.get_mut(&(handle as usize)).map(f)).map_or(NOT_INITIALIZED, |()| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> c_int {
    with(|handles| {
        handles.made += 1;
        let made = 0x4200_0000 + handles.made;
        handles.live.insert(made, Handle::default());
        // SAFETY: the caller passes a pointer to a handle.
        unsafe { *handle = made as *mut c_void };
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> c_int {
    with(|handles| handles.live.remove(&(handle as usize))).map_or(NOT_INITIALIZED, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> c_int {
    of(handle, |handle| handle.stream = stream as usize)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetStream_v2(handle: *mut c_void, stream: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes a pointer to a stream.
    of(handle, |handle| unsafe { *stream = handle.stream as *mut c_void })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetVersion_v2(_handle: *mut c_void, version: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to the number.
    unsafe { *version = 130_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetMathMode(handle: *mut c_void, mode: c_int) -> c_int {
    of(handle, |handle| handle.math_mode = mode)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetMathMode(handle: *mut c_void, mode: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to the mode.
    of(handle, |handle| unsafe { *mode = handle.math_mode })
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetPointerMode_v2(handle: *mut c_void, mode: c_int) -> c_int {
    of(handle, |handle| handle.device_scalars = mode != 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetPointerMode_v2(handle: *mut c_void, mode: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to the mode.
    of(handle, |handle| unsafe { *mode = c_int::from(handle.device_scalars) })
}

/// The double's products need no workspace.
#[unsafe(no_mangle)]
extern "C" fn cublasSetWorkspace_v2(handle: *mut c_void, _workspace: *mut c_void, _bytes: usize) -> c_int {
    of(handle, |_| ())
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusString(status: c_int) -> *const c_char {
    text(status).as_ptr()
}

/// See [`operation`].
unsafe fn product(handle: *mut c_void, call: Call) -> c_int {
    let mut at = Handle::default();
    if of(handle, |handle| at = *handle) != SUCCESS {
        return NOT_INITIALIZED;
    }
    if at.device_scalars {
        eprintln!("gpu double: {}: `alpha` and `beta` in device memory are not known here", call.name);
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's.
    match unsafe { operation(call) } {
        Err((status, why)) => {
            eprintln!("gpu double: {why}");
            status
        }
        Ok(None) => SUCCESS,
        Ok(Some(operation)) => match streams::enqueue(at.stream as *mut c_void, operation) {
            0 => SUCCESS,
            _ => EXECUTION_FAILED,
        },
    }
}

/// A function for matrices of one type.
macro_rules! product_of_one_type {
    ($one:ident, $batch:ident, $vector:ident, $scalar:ty, $element:expr, $compute:expr) => {
        product_of_one_type!($one, $batch, $scalar, $element, $compute);

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $vector(
            handle: *mut c_void,
            transposed: c_int,
            m: c_int,
            n: c_int,
            alpha: *const $scalar,
            a: *const c_void,
            lda: c_int,
            x: *const c_void,
            x_step: c_int,
            beta: *const $scalar,
            y: *mut c_void,
            y_step: c_int,
        ) -> c_int {
            if x_step < 1 || y_step < 1 {
                eprintln!("gpu double: {}: a step of {x_step} or {y_step}", stringify!($vector));
                return NOT_SUPPORTED;
            }
            let (rows, sum) = if transposed == 0 { (m, n) } else { (n, m) };
            let operand = |at: u64, leading| Operand { at, element: $element, leading, stride: 0 };
            // A strided vector is a row of a matrix, as is the result, so both sides are transposed.
            let call = Call {
                name: stringify!($vector),
                transposed: [0, c_int::from(transposed == 0)],
                sizes: [1, rows, sum],
                alpha: alpha.cast(),
                beta: beta.cast(),
                a: operand(x as u64, x_step),
                b: operand(a as u64, lda),
                c: operand(y as u64, y_step),
                batch: 1,
                compute: $compute,
            };
            // SAFETY: the scalars are of the function's type.
            unsafe { product(handle, call) }
        }
    };
    ($one:ident, $batch:ident, $scalar:ty, $element:expr, $compute:expr) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $one(
            handle: *mut c_void,
            a_transposed: c_int,
            b_transposed: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: *const $scalar,
            a: *const c_void,
            lda: c_int,
            b: *const c_void,
            ldb: c_int,
            beta: *const $scalar,
            c: *mut c_void,
            ldc: c_int,
        ) -> c_int {
            let operand = |at: u64, leading| Operand { at, element: $element, leading, stride: 0 };
            let call = Call {
                name: stringify!($one),
                transposed: [a_transposed, b_transposed],
                sizes: [m, n, k],
                alpha: alpha.cast(),
                beta: beta.cast(),
                a: operand(a as u64, lda),
                b: operand(b as u64, ldb),
                c: operand(c as u64, ldc),
                batch: 1,
                compute: $compute,
            };
            // SAFETY: the scalars are of the function's type.
            unsafe { product(handle, call) }
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $batch(
            handle: *mut c_void,
            a_transposed: c_int,
            b_transposed: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: *const $scalar,
            a: *const c_void,
            lda: c_int,
            a_stride: c_longlong,
            b: *const c_void,
            ldb: c_int,
            b_stride: c_longlong,
            beta: *const $scalar,
            c: *mut c_void,
            ldc: c_int,
            c_stride: c_longlong,
            batch: c_int,
        ) -> c_int {
            let operand = |at: u64, leading, stride| Operand { at, element: $element, leading, stride };
            let call = Call {
                name: stringify!($batch),
                transposed: [a_transposed, b_transposed],
                sizes: [m, n, k],
                alpha: alpha.cast(),
                beta: beta.cast(),
                a: operand(a as u64, lda, a_stride),
                b: operand(b as u64, ldb, b_stride),
                c: operand(c as u64, ldc, c_stride),
                batch,
                compute: $compute,
            };
            // SAFETY: the scalars are of the function's type.
            unsafe { product(handle, call) }
        }
    };
}

product_of_one_type!(cublasSgemm_v2, cublasSgemmStridedBatched, cublasSgemv_v2, f32, R_32F, COMPUTE_32F);
product_of_one_type!(cublasDgemm_v2, cublasDgemmStridedBatched, cublasDgemv_v2, f64, R_64F, COMPUTE_64F);
product_of_one_type!(cublasHgemm, cublasHgemmStridedBatched, half::f16, R_16F, COMPUTE_16F);

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmEx(
    handle: *mut c_void,
    a_transposed: c_int,
    b_transposed: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    lda: c_int,
    b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> c_int {
    let call = Call {
        name: "cublasGemmEx",
        transposed: [a_transposed, b_transposed],
        sizes: [m, n, k],
        alpha,
        beta,
        a: Operand { at: a as u64, element: a_type, leading: lda, stride: 0 },
        b: Operand { at: b as u64, element: b_type, leading: ldb, stride: 0 },
        c: Operand { at: c as u64, element: c_type, leading: ldc, stride: 0 },
        batch: 1,
        compute,
    };
    // SAFETY: the scalars are of the type that `compute` says.
    unsafe { product(handle, call) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmStridedBatchedEx(
    handle: *mut c_void,
    a_transposed: c_int,
    b_transposed: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    lda: c_int,
    a_stride: c_longlong,
    b: *const c_void,
    b_type: c_int,
    ldb: c_int,
    b_stride: c_longlong,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    ldc: c_int,
    c_stride: c_longlong,
    batch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> c_int {
    let call = Call {
        name: "cublasGemmStridedBatchedEx",
        transposed: [a_transposed, b_transposed],
        sizes: [m, n, k],
        alpha,
        beta,
        a: Operand { at: a as u64, element: a_type, leading: lda, stride: a_stride },
        b: Operand { at: b as u64, element: b_type, leading: ldb, stride: b_stride },
        c: Operand { at: c as u64, element: c_type, leading: ldc, stride: c_stride },
        batch,
        compute,
    };
    // SAFETY: the scalars are of the type that `compute` says.
    unsafe { product(handle, call) }
}

/// An operand: its address, its type, its leading dimension, and the stride between matrices of a batch, in elements.
#[derive(Clone, Copy, Debug)]
struct Operand {
    at: u64,
    element: i32,
    leading: i32,
    stride: i64,
}

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
struct Call {
    name: &'static str,
    /// `cublasOperation_t` of the first two operands.
    transposed: [i32; 2],
    /// Rows and columns of the result, and the length of the sums.
    sizes: [i32; 3],
    alpha: *const c_void,
    beta: *const c_void,
    a: Operand,
    b: Operand,
    c: Operand,
    batch: i32,
    /// A `cublasComputeType_t`.
    compute: i32,
}

/// Returns the type of `alpha` and `beta`, if the types fit together.
fn scale(compute: i32, a: Element, b: Element, c: Element) -> Option<Element> {
    use Element::{BF16, F16, F32, F64};
    let scale = match compute {
        64 | 65 => F16,
        68 | 69 | 74 | 75 | 77 | 78 => F32,
        70 | 71 | 79 => F64,
        _ => return None,
    };
    let together = match scale {
        F64 => [a, b, c] == [F64; 3],
        F16 => [a, b, c] == [F16; 3],
        _ => a == b && matches!((a, c), (F32, F32) | (F16, F16 | F32) | (BF16, BF16 | F32)),
    };
    together.then_some(scale)
}

/// Returns the operation of a call, or `None` for an empty result. The error is cuBLAS's status and the reason.
///
/// `alpha` and `beta` point to values of the type for `compute`.
unsafe fn operation(call: Call) -> Result<Option<Operation>, (i32, String)> {
    let Call { name, sizes, batch, a, b, c, .. } = call;
    let invalid = |what: String| (INVALID_VALUE, format!("{name}: {what}"));
    let (Some(of_a), Some(of_b), Some(of_c)) = (Element::of(a.element), Element::of(b.element), Element::of(c.element))
    else {
        let types = [a.element, b.element, c.element];
        return Err((NOT_SUPPORTED, format!("{name}: matrices of the cudaDataType_t {types:?}")));
    };
    let Some(scale) = scale(call.compute, of_a, of_b, of_c) else {
        let why = format!("{name}: {of_a:?} times {of_b:?} to {of_c:?} with cublasComputeType_t {}", call.compute);
        return Err((NOT_SUPPORTED, why));
    };
    if sizes.iter().chain([&batch]).any(|size| *size < 0) {
        return Err(invalid(format!("a negative size among {sizes:?} and {batch} matrices")));
    }
    let [m, n, k] = sizes;
    let [a_transposed, b_transposed] = call.transposed.map(|operation| operation != 0);
    let a_rows = if a_transposed { k } else { m };
    let b_rows = if b_transposed { n } else { k };
    for (operand, rows, which) in [(a, a_rows, 'A'), (b, b_rows, 'B'), (c, m, 'C')] {
        if operand.leading < rows.max(1) {
            return Err(invalid(format!("{which} has {rows} rows and a leading dimension of {}", operand.leading)));
        }
    }
    if m == 0 || n == 0 || batch == 0 {
        return Ok(None);
    }
    // SAFETY: the caller promises values of this type.
    let (alpha, beta) = unsafe { (scale.read(call.alpha.cast()), scale.read(call.beta.cast())) };
    let product = Product { m: m as usize, n: n as usize, k: k as usize, alpha, beta };
    let strides = |operand: Operand, transposed: bool| match (operand.leading as isize, transposed) {
        (leading, false) => Strides { rows: 1, cols: leading },
        (leading, true) => Strides { rows: leading, cols: 1 },
    };
    let matrix = move |operand: Operand, element: Element, transposed: bool, which: i64| Matrix {
        at: operand.at.wrapping_add_signed(which * operand.stride * element.bytes() as i64),
        element,
        strides: strides(operand, transposed),
    };
    let run = move || {
        for which in 0..i64::from(batch) {
            let left = matrix(a, of_a, a_transposed, which);
            let right = matrix(b, of_b, b_transposed, which);
            // SAFETY: the stream has its turn, and the program allocated matrices of these sizes.
            unsafe { multiply(product, left, right, matrix(c, of_c, false, which)) };
        }
        Progress::Done
    };
    let mut touches = vec![Touch { at: c.at, access: Access::Write }];
    if k > 0 {
        touches.extend([a, b].map(|operand| Touch { at: operand.at, access: Access::Read }));
    }
    Ok(Some(Operation { name: name.into(), touches, run: Box::new(run) }))
}
