//! Matrix products by cuBLAS.

use std::ffi::{c_int, c_longlong, c_void};

use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{Result, bail};
use cudarc::cublas::{result, sys};
use fsdp_core::{Buffer, DType};

use super::super::slice::{Slice, SliceMut, same_length};
use super::clear;
use super::device::{CudaKernels, of_slice, same_dtype};
use crate::error::Error;

/// The places of matrices of one shape in memory, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixLayout {
    /// First element of the first matrix.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Elements from the start of a row to the start of the next.
    pub(crate) row_stride: usize,
    /// Elements from the start of a matrix to the start of the next.
    pub(crate) stride: usize,
}

impl MatrixLayout {
    /// Returns the layout of one row-major matrix.
    pub(crate) fn dense(rows: usize, cols: usize) -> Self {
        MatrixLayout { first: 0, rows, cols, row_stride: cols, stride: 0 }
    }

    /// Fails unless `count` matrices lie in a memory of `len` elements.
    fn check(&self, count: usize, len: usize) -> Result<()> {
        let end = || {
            let last_matrix = (count - 1).checked_mul(self.stride)?;
            let last_row = (self.rows - 1).checked_mul(self.row_stride)?;
            self.first.checked_add(last_matrix)?.checked_add(last_row)?.checked_add(self.cols)
        };
        let is_empty = count == 0 || self.rows == 0 || self.cols == 0;
        if is_empty || (self.row_stride >= self.cols && end().is_some_and(|end| end <= len)) {
            return Ok(());
        }
        bail!("{count} matrices of {self:?} do not fit into {len} elements")
    }
}

/// Matrices of one shape to read, as they are in memory or transposed.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(super) elements: Slice<'a>,
    pub(super) layout: MatrixLayout,
    pub(super) is_transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Returns the row-major matrix that fills the memory. Fails if the number of elements differs.
    pub(crate) fn new(elements: Slice<'a>, rows: usize, cols: usize) -> Result<Self> {
        same_length(rows * cols, elements.len())?;
        Ok(Matrix::strided(elements, MatrixLayout::dense(rows, cols)))
    }

    /// Returns matrices within the memory.
    pub(crate) fn strided(elements: Slice<'a>, layout: MatrixLayout) -> Self {
        Matrix { elements, layout, is_transposed: false }
    }

    pub(crate) fn t(self) -> Self {
        Matrix { is_transposed: !self.is_transposed, ..self }
    }

    /// Returns the rows and columns.
    pub(crate) fn dims(&self) -> (usize, usize) {
        let MatrixLayout { rows, cols, .. } = self.layout;
        if self.is_transposed { (cols, rows) } else { (rows, cols) }
    }
}

/// Computes `to += lhs rhs`, or `to = lhs rhs` unless `accumulate`. All matrices have one float dtype. The result may
/// be F32 for half floats.
pub(crate) fn add_product(to: &mut Buffer, accumulate: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
    write_product(to.into(), accumulate, lhs, rhs)
}

/// [`add_product`] to a part of a buffer.
pub(crate) fn write_product(to: SliceMut<'_>, accumulate: bool, lhs: Matrix<'_>, rhs: Matrix<'_>) -> Result<()> {
    let layout = MatrixLayout::dense(lhs.dims().0, rhs.dims().1);
    same_length(layout.rows * layout.cols, to.len())?;
    if to.len() > 0 && lhs.dims().1 == 0 && !accumulate {
        let cuda = of_slice(&lhs.elements)?;
        return clear(cuda, cuda.view_mut(to)?);
    }
    add_products(to, layout, 1, accumulate, lhs, rhs)
}

/// Computes `to += lhs rhs`, or `to = lhs rhs` unless `accumulate`, for `count` matrices of one float dtype. The results
/// may be F32 for half floats. If the sums have no terms, nothing is written.
pub(crate) fn add_products(
    to: SliceMut<'_>,
    layout: MatrixLayout,
    count: usize,
    accumulate: bool,
    lhs: Matrix<'_>,
    rhs: Matrix<'_>,
) -> Result<()> {
    let cuda = of_slice(&lhs.elements)?;
    let (dtype, to_dtype) = (lhs.elements.dtype(), to.dtype());
    same_dtype(dtype, rhs.elements.dtype())?;
    if to_dtype != DType::F32 || !matches!(dtype, DType::BF16 | DType::F16) {
        same_dtype(dtype, to_dtype)?;
    }
    let ((rows, terms), (rhs_terms, cols)) = (lhs.dims(), rhs.dims());
    same_length(terms, rhs_terms)?;
    same_length(rows, layout.rows)?;
    same_length(cols, layout.cols)?;
    layout.check(count, to.len())?;
    if count == 0 || rows == 0 || cols == 0 || terms == 0 {
        return Ok(());
    }
    let scales = Scales::of(dtype, accumulate);
    let [alpha, beta] = scales.pointers();
    let (kind, to_kind) = (kind(dtype)?, kind(to_dtype)?);
    let (left, right) = (Operand::of(cuda, lhs, count)?, Operand::of(cuda, rhs, count)?);
    let (m, n, k, count) = (size(rows)?, size(cols)?, size(terms)?, size(count)?);
    let (to_stride, to_row_stride) = (stride(layout.stride)?, size(layout.row_stride)?);
    let result = cuda.view_mut(to)?.address() + (layout.first * to_dtype.size()) as u64;
    let failed = |cause: &dyn std::fmt::Display| {
        Error::Core(fsdp_core::device::cuda::failed(&cuda.stream, "a matrix product", cause))
    };
    cuda.stream.context().bind_to_thread().map_err(|error| failed(&error))?;
    let blas = cuda.device.cublas_handle();
    // cuBLAS is column-major, so all matrices are transposed: `to^T = rhs^T lhs^T`.
    // SAFETY: the matrices are on this device, have these dtypes, and lie within their memory: their layouts were
    // checked.
    let done = unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            right.operation,
            left.operation,
            n,
            m,
            k,
            alpha,
            right.address as *const c_void,
            kind,
            right.row_stride,
            right.stride,
            left.address as *const c_void,
            kind,
            left.row_stride,
            left.stride,
            beta,
            result as *mut c_void,
            to_kind,
            to_row_stride,
            to_stride,
            count,
            scales.compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    Ok(done.map_err(|error| failed(&error))?)
}

/// The arithmetic of products: the type in which cuBLAS sums, the factor of a product, and the factor of the values that
/// it is added to.
pub(super) struct Scales {
    pub(super) compute: sys::cublasComputeType_t,
    is_double: bool,
    single: [f32; 2],
    double: [f64; 2],
}

impl Scales {
    pub(super) fn of(dtype: DType, accumulate: bool) -> Self {
        let compute = match dtype {
            DType::F64 => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            DType::F32 if gemm_reduced_precision_f32() => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let (single, double) = ([1., f32::from(accumulate)], [1., f64::from(accumulate)]);
        Scales { compute, is_double: dtype == DType::F64, single, double }
    }

    /// Returns pointers to both factors.
    fn pointers(&self) -> [*const c_void; 2] {
        std::array::from_fn(|i| match self.is_double {
            true => (&raw const self.double[i]).cast(),
            false => (&raw const self.single[i]).cast(),
        })
    }

    /// Returns arrays of `count` copies of both factors, in memory for doubles.
    pub(super) fn repeated(&self, count: usize) -> [Vec<f64>; 2] {
        std::array::from_fn(|i| {
            let mut copies = vec![self.double[i]; count];
            if !self.is_double {
                bytemuck::cast_slice_mut(&mut copies).fill(self.single[i]);
            }
            copies
        })
    }
}

pub(super) fn kind(dtype: DType) -> Result<sys::cudaDataType_t> {
    Ok(match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        other => bail!("matrix products need a float dtype, found {other}"),
    })
}

pub(super) fn size(count: usize) -> Result<c_int> {
    match c_int::try_from(count) {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix with {count} rows or columns exceeds the limit of cuBLAS"),
    }
}

fn stride(elements: usize) -> Result<c_longlong> {
    match c_longlong::try_from(elements) {
        Ok(stride) => Ok(stride),
        Err(_) => bail!("matrices {elements} elements apart exceed the limit of cuBLAS"),
    }
}

/// Matrices as cuBLAS takes them.
pub(super) struct Operand {
    pub(super) address: u64,
    pub(super) row_stride: c_int,
    stride: c_longlong,
    pub(super) operation: sys::cublasOperation_t,
}

impl Operand {
    pub(super) fn of(cuda: &CudaKernels, matrix: Matrix<'_>, count: usize) -> Result<Self> {
        let Matrix { elements, layout, is_transposed } = matrix;
        layout.check(count, elements.len())?;
        let first = (layout.first * elements.dtype().size()) as u64;
        Ok(Operand {
            address: cuda.view(elements)?.address() + first,
            row_stride: size(layout.row_stride)?,
            stride: stride(layout.stride)?,
            operation: match is_transposed {
                false => sys::cublasOperation_t::CUBLAS_OP_N,
                true => sys::cublasOperation_t::CUBLAS_OP_T,
            },
        })
    }
}
