//! Matrices with strides over slices of floats, and their product.

use std::marker::PhantomData;

use gemm::Parallelism;

use super::threads;

/// Multiply-adds that count as one element of elementwise work.
const ELEMENTS_PER_THREAD: usize = 256;

/// A matrix to read.
#[derive(Clone, Copy)]
pub(in crate::nn) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// Returns the row-major matrix that fills `data`.
    pub(in crate::nn) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols, 1)
    }

    pub(in crate::nn) fn strided(
        data: &'a [f32],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Self {
        assert!(span(rows, cols, row_stride, col_stride) <= data.len(), "a matrix reaches beyond its data");
        Self { data, rows, cols, row_stride, col_stride }
    }

    pub(in crate::nn) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// A matrix to write. The elements of a row are adjacent.
pub(in crate::nn) struct MatMut<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> MatMut<'a> {
    /// Returns the row-major matrix that fills `data`.
    pub(in crate::nn) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    pub(in crate::nn) fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(span(rows, cols, row_stride, 1) <= data.len(), "a matrix reaches beyond its data");
        assert!(rows < 2 || cols <= row_stride, "rows of a matrix overlap");
        Self { data: data.as_mut_ptr(), rows, cols, row_stride, borrow: PhantomData }
    }
}

/// A buffer that several threads write, each to its own rows and columns.
pub(in crate::nn) struct Shared<'a> {
    data: *mut f32,
    len: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer is only used through `mat` and `slice`, whose callers ensure that no two threads access the same
// element.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(in crate::nn) fn new(data: &'a mut [f32]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), borrow: PhantomData }
    }

    /// Returns the matrix that starts at `offset`.
    ///
    /// # Safety
    /// While the result exists, nothing else may read or write its elements.
    pub(in crate::nn) unsafe fn mat(&self, offset: usize, rows: usize, cols: usize, row_stride: usize) -> MatMut<'a> {
        assert!(offset + span(rows, cols, row_stride, 1) <= self.len, "a matrix reaches beyond its data");
        // SAFETY: the offset lies within the buffer.
        let data = unsafe { self.data.add(offset) };
        MatMut { data, rows, cols, row_stride, borrow: PhantomData }
    }

    /// Returns the elements `offset..offset + len`.
    ///
    /// # Safety
    /// While the result exists, nothing else may read or write its elements.
    #[allow(clippy::mut_from_ref)]
    pub(in crate::nn) unsafe fn slice(&self, offset: usize, len: usize) -> &mut [f32] {
        assert!(offset + len <= self.len, "a slice reaches beyond its data");
        // SAFETY: the slice lies within the buffer, which is borrowed while `self` exists. The caller ensures exclusive
        // access.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(offset), len) }
    }
}

/// Returns the number of elements from a matrix's first to its last, inclusive.
fn span(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 }
}

/// Computes `dst = lhs * rhs`, or `dst += lhs * rhs` if `accumulate`. Large products use all of rayon's threads.
pub(in crate::nn) fn product(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>) {
    let threads = threads(lhs.rows * rhs.cols * lhs.cols / ELEMENTS_PER_THREAD);
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    multiply(dst, accumulate, lhs, rhs, parallelism);
}

/// [`product`] on the calling thread.
pub(in crate::nn) fn product_here(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>) {
    multiply(dst, accumulate, lhs, rhs, Parallelism::None);
}

fn multiply(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>, parallelism: Parallelism) {
    assert!(
        dst.rows == lhs.rows && dst.cols == rhs.cols && lhs.cols == rhs.rows,
        "matrix product of {}x{} and {}x{} into {}x{}",
        lhs.rows,
        lhs.cols,
        rhs.rows,
        rhs.cols,
        dst.rows,
        dst.cols
    );
    // SAFETY: the shapes agree, and each matrix was checked against its data when it was built. `dst` is exclusive, so
    // it overlaps neither operand.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            lhs.cols,
            dst.data,
            1,
            dst.row_stride as isize,
            accumulate,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}
