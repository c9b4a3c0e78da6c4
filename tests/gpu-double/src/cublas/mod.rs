//! cuBLAS: products of matrices. Matrices are column-major.
#![allow(non_snake_case, reason = "cuBLAS's names")]
#![allow(clippy::too_many_arguments, reason = "cuBLAS's")]

use std::ffi::{c_int, c_longlong, c_void};

mod grouped;
mod lt;
#[cfg(test)]
mod tests;

use crate::{
    bytes,
    element::{Element, Matrix, Product, Strides, multiply},
    library_handles::LibraryHandles,
    report,
    streams::{self, Access, Operation, Progress, Touch},
};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

// cudaDataType_t and cublasComputeType_t.
const R_64F: c_int = 1;
const COMPUTE_64F: c_int = 70;

static HANDLES: LibraryHandles = LibraryHandles::from(0x4200_0000);

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes a pointer to a handle.
    unsafe { *handle = HANDLES.create() };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> c_int {
    HANDLES.destroy(handle).map_or(NOT_INITIALIZED, |()| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> c_int {
    HANDLES.set_stream(handle, stream).map_or(NOT_INITIALIZED, |()| SUCCESS)
}

/// See [`operation`].
unsafe fn product(handle: *mut c_void, call: Call) -> c_int {
    let Some(stream) = HANDLES.stream(handle) else { return NOT_INITIALIZED };
    // SAFETY: the caller's.
    match unsafe { operation(call) } {
        Err((status, why)) => {
            eprintln!("gpu double: {why}");
            status
        }
        Ok(None) => SUCCESS,
        Ok(Some(operation)) => match streams::enqueue(stream, operation) {
            0 => SUCCESS,
            _ => EXECUTION_FAILED,
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDgemmStridedBatched(
    handle: *mut c_void,
    a_transposed: c_int,
    b_transposed: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f64,
    a: *const c_void,
    lda: c_int,
    a_stride: c_longlong,
    b: *const c_void,
    ldb: c_int,
    b_stride: c_longlong,
    beta: *const f64,
    c: *mut c_void,
    ldc: c_int,
    c_stride: c_longlong,
    batch: c_int,
) -> c_int {
    let operand = |at: u64, leading, stride| Operand { at, element: R_64F, leading, stride };
    let call = Call {
        name: "cublasDgemmStridedBatched",
        transposed: [a_transposed, b_transposed],
        sizes: [m, n, k],
        alpha: alpha.cast(),
        beta: beta.cast(),
        a: operand(a as u64, lda, a_stride),
        b: operand(b as u64, ldb, b_stride),
        c: operand(c as u64, ldc, c_stride),
        batch,
        compute: COMPUTE_64F,
    };
    // SAFETY: the scalars are of the function's type.
    unsafe { product(handle, call) }
}

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
    let flops = 2 * batch as u64 * m as u64 * n as u64 * k as u64;
    report::count_many(&format!("operations of products: {of_a:?} to {of_c:?}"), flops);
    let run = move || {
        let batch = if bytes::computes() { i64::from(batch) } else { 0 };
        for which in 0..batch {
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
