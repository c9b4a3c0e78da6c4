//! A matrix product, as cuBLAS is asked for it: matrices lie column after column.

use std::ffi::c_void;

use crate::{
    cublas::{
        element::{Element, Matrix, Product, Strides, multiply},
        status::{INVALID_VALUE, NOT_SUPPORTED},
    },
    operation::{Access, Operation, Progress, Touch},
};

/// An operand: where it begins, its type, the distance of columns, and of matrices of a batch, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) at: u64,
    pub(crate) element: i32,
    pub(crate) leading: i32,
    pub(crate) stride: i64,
}

/// What a call asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// `cublasOperation_t` of the first two operands.
    pub(crate) transposed: [i32; 2],
    /// Rows of the result, its columns, and what is summed over.
    pub(crate) sizes: [i32; 3],
    pub(crate) alpha: *const c_void,
    pub(crate) beta: *const c_void,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) c: Operand,
    pub(crate) batch: i32,
    /// A `cublasComputeType_t`.
    pub(crate) compute: i32,
}

/// The type in which `alpha` and `beta` are given, if the types go together.
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

/// The work of a call, or nothing if the result is empty. The error is cuBLAS's status, and why.
///
/// # Safety
/// `alpha` and `beta` lead to values of the type that `compute` says.
pub(crate) unsafe fn operation(call: Call) -> Result<Option<Operation>, (i32, String)> {
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
            // SAFETY: the stream has its turn, and the program said that matrices of these sizes lie there.
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
