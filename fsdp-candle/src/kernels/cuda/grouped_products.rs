//! Products of stretches of rows with a matrix each, as experts compute them.
//!
//! One call of cuBLAS computes all of them, which also fills the device where a stretch alone is too short to. cuBLAS has
//! such a call since 12.5 (<https://docs.nvidia.com/cuda/cublas/#cublasgemmgroupedbatchedex>). It is looked up while the
//! program runs, so that the program also links with an older cuBLAS.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{Result, bail};
use cudarc::cublas::sys;
use fsdp_core::{Buffer, DType};
use libloading::os::unix::Library;

use super::super::Kernels;
use super::super::slice::{Slice, SliceMut, same_length};
use super::device::{CudaKernels, of_buffer, same_dtype};
use super::product::{Matrix, Operand, Scales, kind, size, write_product};
use crate::error::Error;

/// Alignment of the matrices of a grouped product, in bytes.
const ALIGNED: u64 = 16;

/// Stretches of rows, and a matrix for each.
pub(crate) struct RowProducts<'a> {
    /// The results' rows.
    pub(crate) to: &'a mut Buffer,
    pub(crate) rows: Slice<'a>,
    /// Matrices of one shape.
    pub(crate) matrices: &'a [Matrix<'a>],
}

/// Computes `to += rows matrix` for each stretch of rows, or `to = rows matrix` unless `accumulate`. All elements have one
/// float dtype. It is one call of cuBLAS if cuBLAS has grouped products and addresses are multiples of 16, else one for
/// each stretch that has rows.
pub(crate) fn multiply_rows(
    products: &mut [RowProducts<'_>],
    stretches: &[Range<usize>],
    accumulate: bool,
) -> Result<()> {
    match grouped() {
        Some(function) if multiply_together(function, products, stretches, accumulate)? => Ok(()),
        _ => multiply_one_by_one(products, stretches, accumulate),
    }
}

/// Computes the products with a call of cuBLAS for each.
fn multiply_one_by_one(products: &mut [RowProducts<'_>], stretches: &[Range<usize>], accumulate: bool) -> Result<()> {
    for RowProducts { to, rows, matrices } in products {
        same_length(stretches.len(), matrices.len())?;
        for (stretch, matrix) in stretches.iter().zip(*matrices).filter(|(stretch, _)| !stretch.is_empty()) {
            let (terms, cols) = matrix.dims();
            let own = Matrix::new(rows.range(elements(stretch, terms))?, stretch.len(), terms)?;
            write_product(SliceMut::from(&mut **to).range(elements(stretch, cols))?, accumulate, own, *matrix)?;
        }
    }
    Ok(())
}

fn elements(stretch: &Range<usize>, width: usize) -> Range<usize> {
    stretch.start * width..stretch.end * width
}

/// `cublasGemmGroupedBatchedEx`. Arrays of matrices are in the device's memory, the others on the host.
type Grouped = unsafe extern "C" fn(
    sys::cublasHandle_t,
    *const sys::cublasOperation_t,
    *const sys::cublasOperation_t,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_void,
    *const c_void,
    sys::cudaDataType_t,
    *const c_int,
    *const c_void,
    sys::cudaDataType_t,
    *const c_int,
    *const c_void,
    *const c_void,
    sys::cudaDataType_t,
    *const c_int,
    c_int,
    *const c_int,
    sys::cublasComputeType_t,
) -> sys::cublasStatus_t;

/// Returns the function of the cuBLAS that this program has loaded, if it has one.
fn grouped() -> Option<Grouped> {
    static FOUND: OnceLock<Option<Grouped>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: cuBLAS's function has this type since it exists.
        unsafe { Library::this().get::<Grouped>(b"cublasGemmGroupedBatchedEx\0") }.ok().map(|symbol| *symbol)
    })
}

/// The products as cuBLAS takes them. It is column-major, so all matrices are transposed: `to^T = matrix^T rows^T`.
#[derive(Default)]
struct Groups {
    /// Addresses of the matrices, of the rows, and of the results.
    addresses: [Vec<u64>; 3],
    /// Distances between their rows.
    strides: [Vec<c_int>; 3],
    operations: Vec<sys::cublasOperation_t>,
    rows: Vec<c_int>,
    cols: Vec<c_int>,
    terms: Vec<c_int>,
}

impl Groups {
    /// Adds one product for each stretch that has rows.
    fn add(&mut self, cuda: &CudaKernels, products: &mut RowProducts<'_>, stretches: &[Range<usize>]) -> Result<()> {
        let RowProducts { to, rows, matrices } = products;
        same_length(stretches.len(), matrices.len())?;
        same_dtype(to.dtype(), rows.dtype())?;
        for (stretch, matrix) in stretches.iter().zip(*matrices).filter(|(stretch, _)| !stretch.is_empty()) {
            let (terms, cols) = matrix.dims();
            same_dtype(to.dtype(), matrix.elements.dtype())?;
            let operand = Operand::of(cuda, *matrix, 1)?;
            let from = cuda.view(rows.range(elements(stretch, terms))?)?;
            let result = cuda.view_mut(SliceMut::from(&mut **to).range(elements(stretch, cols))?)?;
            let strides = [operand.row_stride, size(terms)?, size(cols)?];
            for (i, address) in [operand.address, from.address(), result.address()].into_iter().enumerate() {
                self.addresses[i].push(address);
                self.strides[i].push(strides[i]);
            }
            self.operations.push(operand.operation);
            self.rows.push(size(stretch.len())?);
            self.cols.push(size(cols)?);
            self.terms.push(size(terms)?);
        }
        Ok(())
    }

    /// Returns whether cuBLAS takes them.
    fn are_aligned(&self) -> bool {
        let has_elements = self.cols.iter().chain(&self.terms).all(|&size| size > 0);
        has_elements && self.addresses.iter().flatten().all(|address| address.is_multiple_of(ALIGNED))
    }
}

/// Computes the products with one call of cuBLAS. Returns `false` without a call if cuBLAS does not take them.
fn multiply_together(
    function: Grouped,
    products: &mut [RowProducts<'_>],
    stretches: &[Range<usize>],
    accumulate: bool,
) -> Result<bool> {
    let Some(first) = products.first() else { return Ok(true) };
    let (cuda, dtype) = (of_buffer(first.to)?, first.to.dtype());
    let mut groups = Groups::default();
    for of in products {
        same_dtype(dtype, of.to.dtype())?;
        groups.add(cuda, of, stretches)?;
    }
    let count = groups.rows.len();
    if count == 0 || !groups.are_aligned() {
        return Ok(count == 0);
    }
    let mut pointers = cuda.uninit(DType::I64, 3 * count)?;
    cuda.write(SliceMut::from(&mut pointers), &mut |bytes| {
        bytes.copy_from_slice(bytemuck::cast_slice(&groups.addresses.concat()));
    })?;
    let first = cuda.view((&pointers).into())?.address();
    let at = |i: usize| (first + (i * count * size_of::<u64>()) as u64) as *const c_void;
    let scales = Scales::of(dtype, accumulate);
    let (ones, zeros) = (vec![1; count], vec![sys::cublasOperation_t::CUBLAS_OP_N; count]);
    let [alphas, betas] = scales.repeated(count);
    let failed = |cause: &dyn std::fmt::Display| {
        Error::Core(fsdp_core::device::cuda::failed(&cuda.stream, "the products of experts", cause))
    };
    let Ok(groups_count) = c_int::try_from(count) else { bail!("{count} products exceed the limit of cuBLAS") };
    cuda.stream.context().bind_to_thread().map_err(|error| failed(&error))?;
    let (blas, kind) = (cuda.device.cublas_handle(), kind(dtype)?);
    // SAFETY: each array has a number for each product. The matrices are on this device, have this dtype, and lie within
    // their memory. The copy of their addresses is before the call in the stream's order, and the addresses' memory is
    // freed after it in that order.
    let status = unsafe {
        function(
            *blas.handle(),
            groups.operations.as_ptr(),
            zeros.as_ptr(),
            groups.cols.as_ptr(),
            groups.rows.as_ptr(),
            groups.terms.as_ptr(),
            alphas.as_ptr().cast(),
            at(0),
            kind,
            groups.strides[0].as_ptr(),
            at(1),
            kind,
            groups.strides[1].as_ptr(),
            betas.as_ptr().cast(),
            at(2),
            kind,
            groups.strides[2].as_ptr(),
            groups_count,
            ones.as_ptr(),
            scales.compute,
        )
    };
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(false),
        status => status.result().map(|()| true).map_err(|error| failed(&error).into()),
    }
}
