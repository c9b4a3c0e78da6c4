//! cuBLASLt: products of 8-bit floats with scales, as cuBLAS 12.9 supports them.

use std::ffi::{c_int, c_void};

use crate::{
    bytes,
    element::{Element, Matrix, Product, Strides, multiply},
    report,
    streams::{self, Access, Operation, Progress, Touch},
};

use super::{EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};

const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
/// Version 13.0.
const VERSION: usize = 130_000;
const ALIGNMENT: u64 = 16;
const OUTER_VECTORS: c_int = 3;
const HANDLE: usize = 0x4280_0000;

/// A `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy, Debug)]
struct Layout {
    element: Option<Element>,
    rows: u64,
    cols: u64,
    leading: i64,
}

/// A `cublasLtMatmulDesc_t`: the attributes that are known here.
#[derive(Clone, Copy, Debug, Default)]
struct Description {
    is_f32: bool,
    a_transposed: bool,
    b_transposed: bool,
    a_scale: u64,
    b_scale: u64,
    modes: [c_int; 2],
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtCreate(handle: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes a pointer to a handle.
    unsafe { *handle = HANDLE as *mut c_void };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtDestroy(_handle: *mut c_void) -> c_int {
    SUCCESS
}

/// Writes a pointer to a new value.
unsafe fn create<T>(to: *mut *mut c_void, value: T) -> c_int {
    // SAFETY: the caller passes a pointer to a handle.
    unsafe { *to = Box::into_raw(Box::new(value)).cast() };
    SUCCESS
}

/// Frees a value that [`create`] made.
unsafe fn destroy<T>(value: *mut c_void) -> c_int {
    // SAFETY: the caller passes a live value of this type.
    drop(unsafe { Box::from_raw(value.cast::<T>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut *mut c_void,
    kind: c_int,
    rows: u64,
    cols: u64,
    leading: i64,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { create(layout, Layout { element: Element::of(kind), rows, cols, leading }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { destroy::<Layout>(layout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(desc: *mut *mut c_void, compute: c_int, scale: c_int) -> c_int {
    let description = Description { is_f32: [compute, scale] == [COMPUTE_32F, R_32F], ..Description::default() };
    // SAFETY: the caller's.
    unsafe { create(desc, description) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescDestroy(desc: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { destroy::<Description>(desc) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    desc: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller passes a live description, and a value of this size.
    unsafe {
        let desc = &mut *desc.cast::<Description>();
        match (attribute, size) {
            (3, 4) => desc.a_transposed = value.cast::<c_int>().read() == 1,
            (4, 4) => desc.b_transposed = value.cast::<c_int>().read() == 1,
            (17, 8) => desc.a_scale = value.cast::<u64>().read(),
            (18, 8) => desc.b_scale = value.cast::<u64>().read(),
            // Fast accumulation: sums here have all bits.
            (25, 1) => {}
            (31 | 32, 4) => desc.modes[attribute as usize - 31] = value.cast::<c_int>().read(),
            _ => {
                eprintln!("gpu double: cublasLtMatmulDescSetAttribute: attribute {attribute} of {size} bytes");
                return INVALID_VALUE;
            }
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { create(preference, 0u64) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { destroy::<u64>(preference) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    _preference: *mut c_void,
    attribute: c_int,
    _value: *const c_void,
    size: usize,
) -> c_int {
    // The bytes of the workspace, and the alignments.
    if matches!((attribute, size), (1, 8) | (5..=8, 4)) { SUCCESS } else { INVALID_VALUE }
}

/// An algorithm, as cuBLASLt lays it out.
#[repr(C)]
struct Algorithm {
    data: [u64; 8],
}

#[repr(C)]
struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Marks an algorithm that was found here, with the sizes that it is for.
const MARK: u64 = 0x0f8f_8f8f;

fn mark(a: &Layout, b: &Layout) -> [u64; 8] {
    [MARK, a.rows, a.cols, b.cols, 0, 0, 0, 0]
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "cuBLASLt's")]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    desc: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    _preference: *mut c_void,
    _wanted: c_int,
    found: *mut c_void,
    count: *mut c_int,
) -> c_int {
    // SAFETY: the caller passes live descriptions, and room for a result.
    unsafe {
        let layouts = [a, b, c, d].map(|layout| *layout.cast::<Layout>());
        let known = check(&*desc.cast::<Description>(), layouts);
        if let Err(why) = &known {
            eprintln!("gpu double: cublasLtMatmul: {why}");
        }
        *count = c_int::from(known.is_ok());
        if known.is_ok() {
            let algorithm = Algorithm { data: mark(&layouts[0], &layouts[1]) };
            let result = Found { algorithm, workspace: 0, state: SUCCESS, waves: 1.0, reserved: [0; 4] };
            found.cast::<Found>().write(result);
        }
    }
    SUCCESS
}

/// Fails for products that cuBLASLt refuses on a GPU of capability 9.0.
fn check(desc: &Description, [a, b, c, d]: [Layout; 4]) -> Result<(), String> {
    use Element::{BF16, E4M3, E5M2, F16, F32};
    let elements = [a.element, b.element, c.element, d.element];
    if !matches!(
        elements,
        [Some(E4M3), Some(E4M3 | E5M2), Some(BF16 | F16 | F32), _]
            | [Some(E5M2), Some(E4M3), Some(BF16 | F16 | F32), _]
    ) || elements[2] != elements[3]
    {
        return Err(format!("operands and results of {elements:?}"));
    }
    if !desc.is_f32 || !desc.a_transposed || desc.b_transposed {
        return Err("8-bit products take A transposed, B not transposed, and sums in f32".into());
    }
    if a.rows != b.rows || d.rows != a.cols || d.cols != b.cols || (c.rows, c.cols) != (d.rows, d.cols) {
        return Err(format!("{a:?} and {b:?} do not fit {c:?} and {d:?}"));
    }
    // The dimensions that are adjacent in memory.
    if [a.rows, a.cols].iter().any(|size| *size == 0 || size % ALIGNMENT != 0) || b.cols == 0 {
        return Err(format!("{a:?}: both sizes must be multiples of {ALIGNMENT}"));
    }
    if [a, b, c, d].iter().any(|layout| layout.leading != layout.rows as i64) {
        return Err("gaps between columns are not emulated".into());
    }
    if desc.modes != [0; 2] && desc.modes != [OUTER_VECTORS; 2] {
        return Err(format!("scale modes {:?}", desc.modes));
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "cuBLASLt's")]
unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    desc: *mut c_void,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *mut c_void,
    b: *const c_void,
    b_layout: *mut c_void,
    beta: *const f32,
    c: *const c_void,
    c_layout: *mut c_void,
    d: *mut c_void,
    d_layout: *mut c_void,
    algorithm: *const Algorithm,
    workspace: *mut c_void,
    _workspace_size: usize,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes live descriptions and scalars.
    let (desc, layouts, alpha, beta, data) = unsafe {
        let layouts = [a_layout, b_layout, c_layout, d_layout].map(|layout| *layout.cast::<Layout>());
        (*desc.cast::<Description>(), layouts, *alpha, *beta, (*algorithm).data)
    };
    let [of_a, of_b, _, of_d] = layouts;
    let refused = check(&desc, layouts).err().or_else(|| {
        let is_aligned = [a as u64, b as u64, d as u64].iter().all(|at| at % ALIGNMENT == 0);
        let why = match () {
            () if data != mark(&of_a, &of_b) => "an algorithm for other sizes",
            () if !is_aligned => "addresses that are not multiples of 16",
            () if c != d.cast_const() => "a C that is not D is not emulated",
            () if desc.a_scale == 0 || desc.b_scale == 0 => "a scale is missing",
            () => return None,
        };
        Some(why.to_string())
    });
    if let Some(why) = refused {
        eprintln!("gpu double: cublasLtMatmul: {why}");
        return NOT_SUPPORTED;
    }
    let (Some(left), Some(right), Some(result)) = (of_a.element, of_b.element, of_d.element) else {
        return NOT_SUPPORTED;
    };
    let sizes = [of_a.cols as usize, of_b.cols as usize, of_a.rows as usize];
    let flops = 2 * sizes.iter().map(|size| *size as u64).product::<u64>();
    report::count_many(&format!("operations of products: {left:?} to {result:?}"), flops);
    let reads = [a as u64, b as u64, desc.a_scale, desc.b_scale];
    let mut touches: Vec<Touch> = reads.map(|at| Touch { at, access: Access::Read }).into();
    touches.extend([d as u64, workspace as u64].map(|at| Touch { at, access: Access::Write }));
    let (a, b, d) = (a as u64, b as u64, d as u64);
    let run = move || {
        if bytes::computes() {
            let [m, n, k] = sizes;
            let by_vector = desc.modes[0] == OUTER_VECTORS;
            // SAFETY: the stream has its turn, and the program allocated matrices and scales of these sizes.
            unsafe {
                let (left, right) =
                    (scaled(left, a, desc.a_scale, by_vector, m, k), scaled(right, b, desc.b_scale, by_vector, n, k));
                let floats =
                    |values: &[f32], strides| Matrix { at: values.as_ptr() as u64, element: Element::F32, strides };
                let (rows, cols) = (k as isize, 1);
                let a = floats(&left, Strides { rows, cols });
                let b = floats(&right, Strides { rows: 1, cols: k as isize });
                let d = Matrix { at: d, element: result, strides: Strides { rows: 1, cols: m as isize } };
                let product = Product { m, n, k, alpha: f64::from(alpha), beta: f64::from(beta) };
                multiply(product, a, b, d);
            }
        }
        Progress::Done
    };
    match streams::enqueue(stream, Operation { name: "cublasLtMatmul".into(), touches, run: Box::new(run) }) {
        0 => SUCCESS,
        _ => EXECUTION_FAILED,
    }
}

/// Returns vectors of codes as floats, each times its scale.
///
/// `at` points to the codes, and `scales` to the scale of all or of each vector.
unsafe fn scaled(element: Element, at: u64, scales: u64, by_vector: bool, vectors: usize, len: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(vectors * len);
    for vector in 0..vectors {
        // SAFETY: ensured by the caller.
        let scale = unsafe { (scales as *const f32).add(if by_vector { vector } else { 0 }).read() };
        for i in vector * len..(vector + 1) * len {
            // SAFETY: ensured by the caller.
            values.push(unsafe { element.read((at as *const u8).add(i)) } as f32 * scale);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_that_cublas_lt_refuses_are_refused() {
        let layout = |element, rows, cols| Layout { element: Some(element), rows, cols, leading: rows as i64 };
        let result = layout(Element::BF16, 48, 5);
        let layouts = [layout(Element::E4M3, 32, 48), layout(Element::E5M2, 32, 5), result, result];
        let desc = Description { is_f32: true, a_transposed: true, ..Description::default() };
        assert_eq!(check(&desc, layouts), Ok(()));
        assert_eq!(check(&Description { modes: [OUTER_VECTORS; 2], ..desc }, layouts), Ok(()));
        for other in [
            Description { a_transposed: false, ..desc },
            Description { b_transposed: true, ..desc },
            Description { is_f32: false, ..desc },
            Description { modes: [OUTER_VECTORS, 0], ..desc },
        ] {
            assert!(check(&other, layouts).is_err(), "{other:?}");
        }
        let [a, b, c, _] = layouts;
        for other in [
            [layout(Element::E5M2, 32, 48), b, c, c],
            [layout(Element::BF16, 32, 48), b, c, c],
            [layout(Element::E4M3, 24, 48), layout(Element::E4M3, 24, 5), c, c],
            [layout(Element::E4M3, 32, 40), b, layout(Element::BF16, 40, 5), layout(Element::BF16, 40, 5)],
            [a, layout(Element::E4M3, 48, 5), c, c],
            [a, b, c, layout(Element::F32, 48, 5)],
            [a, b, Layout { leading: 64, ..c }, Layout { leading: 64, ..c }],
        ] {
            assert!(check(&desc, other).is_err(), "{other:?}");
        }
    }
}
