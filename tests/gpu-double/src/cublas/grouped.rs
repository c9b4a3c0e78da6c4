//! Grouped products: products of different sizes in one call, whose matrices are listed in device memory.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};

use crate::machine::machine;
use crate::streams::{self, Access, Operation, Progress, Touch};

use super::{
    Call, EXECUTION_FAILED, HANDLES, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, Operand, SUCCESS, operation,
};
use crate::element::Element;

const NAME: &str = "cublasGemmGroupedBatchedEx";
/// cuBLAS advises this alignment of all matrices, and requires it for most.
const ALIGNMENT: u64 = 16;

/// The arguments for one kind of matrix.
#[derive(Clone, Copy)]
struct Matrices {
    /// Addresses, in device memory.
    addresses: *const u64,
    element: c_int,
    leading: *const c_int,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGemmGroupedBatchedEx(
    handle: *mut c_void,
    a_transposed: *const c_int,
    b_transposed: *const c_int,
    m: *const c_int,
    n: *const c_int,
    k: *const c_int,
    alpha: *const c_void,
    a: *const u64,
    a_type: c_int,
    lda: *const c_int,
    b: *const u64,
    b_type: c_int,
    ldb: *const c_int,
    beta: *const c_void,
    c: *const u64,
    c_type: c_int,
    ldc: *const c_int,
    groups: c_int,
    group_sizes: *const c_int,
    compute: c_int,
) -> c_int {
    let stream = HANDLES.stream(handle);
    let Some(stream) = stream else { return NOT_INITIALIZED };
    let matrices = [(a, a_type, lda), (b, b_type, ldb), (c, c_type, ldc)]
        .map(|(addresses, element, leading)| Matrices { addresses, element, leading });
    // The addresses are there once the stream has come here. The host learns nothing by it.
    match streams::run_queued(stream, NAME) {
        0 => {}
        _ => return EXECUTION_FAILED,
    }
    // SAFETY: the caller passes a number for each group, and an address for each product.
    let found = unsafe {
        together([a_transposed, b_transposed], [m, n, k], [alpha, beta], matrices, groups, group_sizes, compute)
    };
    match found {
        Err((status, why)) => {
            eprintln!("gpu double: {why}");
            status
        }
        Ok(mut operation) => {
            // Products may share an allocation, of which the call is one use.
            let mut written = BTreeSet::new();
            let core = machine().lock();
            let mut is_new = |at: u64| written.insert(core.allocations.base(at));
            operation.touches.retain(|touch| touch.access == Access::Read || is_new(touch.at));
            drop(core);
            match streams::enqueue(stream, operation) {
                0 => SUCCESS,
                _ => EXECUTION_FAILED,
            }
        }
    }
}

/// Returns one operation of all products, or cuBLAS's status and the reason.
///
/// The arrays have a number for each group, and an address for each product.
unsafe fn together(
    transposed: [*const c_int; 2],
    sizes: [*const c_int; 3],
    scalars: [*const c_void; 2],
    matrices: [Matrices; 3],
    groups: c_int,
    group_sizes: *const c_int,
    compute: c_int,
) -> Result<Operation, (c_int, String)> {
    use Element::{BF16, F16, F32, F64};
    let elements = matrices.map(|of| Element::of(of.element));
    let scale = match (elements, compute) {
        ([Some(BF16), Some(BF16), Some(BF16)] | [Some(F16), Some(F16), Some(F16)], 68) => 4,
        ([Some(F32), Some(F32), Some(F32)], 68 | 69 | 77) => 4,
        ([Some(F64), Some(F64), Some(F64)], 70 | 71) => 8,
        _ => return Err((NOT_SUPPORTED, format!("{NAME}: {elements:?} with cublasComputeType_t {compute}"))),
    };
    let (mut touches, mut runs, mut next) = (vec![], vec![], 0);
    touches.extend(matrices.map(|of| Touch { at: of.addresses as u64, access: Access::Read }));
    for group in 0..usize::try_from(groups).unwrap_or(0) {
        // SAFETY: ensured by the caller.
        let count = unsafe { group_sizes.add(group).read() };
        for _ in 0..count {
            // SAFETY: ensured by the caller.
            let call = unsafe {
                let operand = |of: Matrices| Operand {
                    at: of.addresses.add(next).read(),
                    element: of.element,
                    leading: of.leading.add(group).read(),
                    stride: 0,
                };
                let [a, b, c] = matrices.map(operand);
                Call {
                    name: NAME,
                    transposed: transposed.map(|of| of.add(group).read()),
                    sizes: sizes.map(|of| of.add(group).read()),
                    alpha: scalars[0].byte_add(scale * group),
                    beta: scalars[1].byte_add(scale * group),
                    a,
                    b,
                    c,
                    batch: 1,
                    compute,
                }
            };
            next += 1;
            let places = [call.a.at, call.b.at, call.c.at];
            if places.iter().any(|at| at % ALIGNMENT != 0) {
                return Err((INVALID_VALUE, format!("{NAME}: addresses {places:x?} are not multiples of {ALIGNMENT}")));
            }
            // SAFETY: the scalars are of the type that `compute` says.
            if let Some(one) = unsafe { operation(call) }? {
                touches.extend(one.touches);
                runs.push(one.run);
            }
        }
    }
    let run = move || {
        runs.iter_mut().for_each(|run| {
            run();
        });
        Progress::Done
    };
    Ok(Operation { name: NAME.into(), touches, run: Box::new(run) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplies 2 x 3 by 3 x 1, and 1 x 2 by 2 x 2, of floats.
    fn run(element: c_int, compute: c_int, shift: u64) -> Result<[[f32; 2]; 2], c_int> {
        #[repr(align(16))]
        struct Aligned([f32; 8]);
        let a = [Aligned([1., 2., 3., 4., 5., 6., 0., 0.]), Aligned([1., 2., 0., 0., 0., 0., 0., 0.])];
        let b = [Aligned([1., 10., 100., 0., 0., 0., 0., 0.]), Aligned([3., 4., 5., 6., 0., 0., 0., 0.])];
        let mut c = [Aligned([1.; 8]), Aligned([2.; 8])];
        let addresses = [
            [&a[0], &a[1]].map(|at| at.0.as_ptr() as u64 + shift),
            [&b[0], &b[1]].map(|at| at.0.as_ptr() as u64),
            [c[0].0.as_mut_ptr() as u64, c[1].0.as_mut_ptr() as u64],
        ];
        let leading = [[2, 1], [3, 2], [2, 1]];
        let matrices = std::array::from_fn(|i| Matrices {
            addresses: addresses[i].as_ptr(),
            element,
            leading: leading[i].as_ptr(),
        });
        let sizes = [[2, 1], [1, 2], [3, 2]];
        let (alphas, betas) = ([1f32, 1.], [0f32, 1.]);
        // SAFETY: two groups of one product each, whose matrices have these sizes.
        let found = unsafe {
            let scalars = [alphas.as_ptr().cast(), betas.as_ptr().cast()];
            together(
                [[0, 0].as_ptr(); 2],
                sizes.each_ref().map(|of| of.as_ptr()),
                scalars,
                matrices,
                2,
                [1, 1].as_ptr(),
                compute,
            )
        };
        let mut work = found.map_err(|(status, _)| status)?;
        assert_eq!(work.touches.len(), 3 + 2 * 3);
        assert_eq!((work.run)(), Progress::Done);
        Ok([[c[0].0[0], c[0].0[1]], [c[1].0[0], c[1].0[1]]])
    }

    #[test]
    fn products_of_two_sizes_match_plain_sums() {
        assert_eq!(run(0, 68, 0), Ok([[531., 642.], [2. + 11., 2. + 17.]]));
    }

    #[test]
    fn calls_that_cublas_refuses_are_refused() {
        assert_eq!(run(0, 70, 0), Err(NOT_SUPPORTED));
        assert_eq!(run(28, 68, 0), Err(NOT_SUPPORTED));
        assert_eq!(run(0, 68, 4), Err(INVALID_VALUE));
    }
}
