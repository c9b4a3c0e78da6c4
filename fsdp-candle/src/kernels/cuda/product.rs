//! Gradients of weights that accumulate in a buffer: matrix products by cuBLAS.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{Result, bail};
use cudarc::cublas::{result, sys};
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut, same_length};
use super::clear;
use super::device::{CudaKernels, of_slice, same_dtype};
use crate::error::Error;

/// A matrix to read, row-major or transposed.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    elements: Slice<'a>,
    rows: usize,
    cols: usize,
    is_transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Returns the row-major matrix that fills the memory. Fails if the number of elements differs.
    pub(crate) fn new(elements: Slice<'a>, rows: usize, cols: usize) -> Result<Self> {
        same_length(rows * cols, elements.len())?;
        Ok(Matrix { elements, rows, cols, is_transposed: false })
    }

    pub(crate) fn t(self) -> Self {
        Matrix { rows: self.cols, cols: self.rows, is_transposed: !self.is_transposed, ..self }
    }
}

/// Computes `to += lhs rhs`, or `to = lhs rhs` unless `accumulate`. All matrices have one float dtype. The result may
/// be F32 for half floats.
pub(crate) fn add_product(to: &mut Buffer, accumulate: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
    write_product(to.into(), accumulate, lhs, rhs)
}

/// [`add_product`] to a part of a buffer.
pub(crate) fn write_product(to: SliceMut<'_>, accumulate: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
    let dtype = lhs.elements.dtype();
    let is_widened = to.dtype() == DType::F32 && matches!(dtype, DType::BF16 | DType::F16);
    if !is_widened {
        same_dtype(dtype, to.dtype())?;
    }
    same_dtype(dtype, rhs.elements.dtype())?;
    same_length(lhs.cols, rhs.rows)?;
    same_length(lhs.rows * rhs.cols, to.len())?;
    if to.len() == 0 {
        return Ok(());
    }
    let cuda = of_slice(&lhs.elements)?;
    if lhs.cols == 0 {
        return if accumulate { Ok(()) } else { clear(cuda, cuda.view_mut(to)?) };
    }
    let (single, double) = ((1f32, f32::from(accumulate)), (1f64, f64::from(accumulate)));
    let reals = |kind, compute| (kind, compute, (&raw const single.0).cast::<c_void>(), (&raw const single.1).cast());
    let (kind, compute, alpha, beta) = match dtype {
        DType::F32 if gemm_reduced_precision_f32() => {
            reals(sys::cudaDataType_t::CUDA_R_32F, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32)
        }
        DType::F32 => reals(sys::cudaDataType_t::CUDA_R_32F, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F),
        DType::BF16 => reals(sys::cudaDataType_t::CUDA_R_16BF, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F),
        DType::F16 => reals(sys::cudaDataType_t::CUDA_R_16F, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F),
        DType::F64 => (
            sys::cudaDataType_t::CUDA_R_64F,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            (&raw const double.0).cast(),
            (&raw const double.1).cast(),
        ),
        other => bail!("matrix products need a float dtype, found {other}"),
    };
    let (m, n, k) = (size(lhs.rows)?, size(rhs.cols)?, size(lhs.cols)?);
    let ((left, ld_left, op_left), (right, ld_right, op_right)) = (operand(cuda, lhs)?, operand(cuda, rhs)?);
    let result = cuda.view_mut(to)?.address();
    let result_kind = if is_widened { sys::cudaDataType_t::CUDA_R_32F } else { kind };
    let failed = |cause: &dyn std::fmt::Display| {
        Error::Core(fsdp_core::device::cuda::failed(&cuda.stream, "a matrix product", cause))
    };
    cuda.stream.context().bind_to_thread().map_err(|error| failed(&error))?;
    let blas = cuda.device.cublas_handle();
    // cuBLAS is column-major, so all matrices are transposed: `to^T = rhs^T lhs^T`.
    // SAFETY: the matrices are on this device, have the dtypes of the call, and fill their memory: their lengths were compared.
    let done = unsafe {
        result::gemm_ex(
            *blas.handle(),
            op_right,
            op_left,
            n,
            m,
            k,
            alpha,
            right as *const c_void,
            kind,
            ld_right,
            left as *const c_void,
            kind,
            ld_left,
            beta,
            result as *mut c_void,
            result_kind,
            n,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    Ok(done.map_err(|error| failed(&error))?)
}

fn size(count: usize) -> Result<c_int> {
    match c_int::try_from(count) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix with {count} rows or columns exceeds the limit of cuBLAS"),
    }
}

/// Returns the address, the leading dimension, and the operation for cuBLAS.
fn operand(cuda: &CudaKernels, matrix: Matrix<'_>) -> Result<(u64, c_int, sys::cublasOperation_t)> {
    let address = cuda.view(matrix.elements)?.address();
    Ok(match matrix.is_transposed {
        false => (address, size(matrix.cols)?, sys::cublasOperation_t::CUBLAS_OP_N),
        true => (address, size(matrix.rows)?, sys::cublasOperation_t::CUBLAS_OP_T),
    })
}
