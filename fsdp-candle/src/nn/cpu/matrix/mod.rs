//! Matrices with strides over slices of floats, and their product.

#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
mod bf16_product;
#[cfg(not(all(target_arch = "x86_64", feature = "avx512")))]
mod bf16_product {
    pub(super) fn available() -> Option<super::Product> {
        None
    }

    #[cfg(test)]
    pub(super) fn all() -> Vec<(&'static str, super::Product)> {
        Vec::new()
    }
}

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result};
use gemm::Parallelism;
use half::bf16;

use super::{dense, floats, threads, widened};

/// Multiply-adds that count as one element of elementwise work.
const ELEMENTS_PER_THREAD: usize = 256;
/// Rows of an f32 product that are computed at once. `gemm` copies an operand's part for all of them.
const ROWS: usize = 4096;
/// Values of a bf16 operand that are widened at once. In f32 they take 1 MiB, for which caches have room.
const WIDENED: usize = 1 << 18;

/// Computes `dst = lhs * rhs`, or `dst += lhs * rhs` if the flag is set, on a number of threads. The shapes must agree.
type Product = fn(MatMut<'_>, bool, Mat<'_>, Mat<'_>, usize);

/// The rows of a tensor, for products: its values in row-major order.
pub(in crate::nn) struct Operand<'a> {
    values: Values<'a>,
    rows: usize,
    cols: usize,
}

enum Values<'a> {
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
}

impl<'a> Operand<'a> {
    /// Reads f32, f16 or bf16 values.
    pub(in crate::nn) fn of(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let values = match storage {
            CpuStorage::BF16(values) => Values::Bf16(dense(values, layout)?),
            _ => Values::F32(floats(storage, layout)?),
        };
        let (&cols, outer) = layout.dims().split_last().unwrap_or((&1, &[]));
        Ok(Operand { values, rows: outer.iter().product(), cols })
    }

    pub(in crate::nn) fn mat(&self) -> Mat<'_> {
        let data = match &self.values {
            Values::F32(values) => Data::F32(values),
            Values::Bf16(values) => Data::Bf16(values),
        };
        Mat::checked(data, self.rows, self.cols, self.cols, 1)
    }
}

/// Values of a matrix.
#[derive(Clone, Copy)]
enum Data<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Data<'_> {
    fn len(self) -> usize {
        match self {
            Data::F32(values) => values.len(),
            Data::Bf16(values) => values.len(),
        }
    }
}

/// A matrix to read.
#[derive(Clone, Copy)]
pub(in crate::nn) struct Mat<'a> {
    data: Data<'a>,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    may_round: bool,
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
        Self::checked(Data::F32(data), rows, cols, row_stride, col_stride)
    }

    fn checked(data: Data<'a>, rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        assert!(span(rows, cols, row_stride, col_stride) <= data.len(), "a matrix reaches beyond its data");
        Self { data, rows, cols, row_stride, col_stride, may_round: matches!(data, Data::Bf16(_)) }
    }

    /// Lets products round the values to this dtype, if it is bf16. They do on processors that multiply bf16 faster.
    pub(in crate::nn) fn as_dtype(self, dtype: DType) -> Self {
        Self { may_round: dtype == DType::BF16, ..self }
    }

    /// Returns the number of rows.
    pub(in crate::nn) fn rows(self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub(in crate::nn) fn cols(self) -> usize {
        self.cols
    }

    pub(in crate::nn) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

impl Mat<'_> {
    /// Returns the values in f32, with the same strides.
    fn widened(&self) -> Cow<'_, [f32]> {
        match self.data {
            Data::F32(values) => Cow::Borrowed(values),
            Data::Bf16(values) => {
                Cow::Owned(widened(&values[..span(self.rows, self.cols, self.row_stride, self.col_stride)]))
            }
        }
    }

    /// Returns the values of the matrix, or of its transpose, in row-major order, and whether it is the transpose. More
    /// values may follow.
    pub(in crate::nn) fn dense(&self) -> (Cow<'_, [f32]>, bool) {
        let values = self.widened();
        match (self.row_stride, self.col_stride) {
            (stride, 1) if stride == self.cols => (values, false),
            (1, stride) if stride == self.rows => (values, true),
            (of_row, of_col) => {
                let rows = (0..self.rows).flat_map(|row| (0..self.cols).map(move |col| row * of_row + col * of_col));
                (rows.map(|at| values[at]).collect(), false)
            }
        }
    }

    /// Returns the part with these rows and columns.
    fn part(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let start = rows.start * self.row_stride + cols.start * self.col_stride;
        let data = match self.data {
            _ if rows.is_empty() || cols.is_empty() => Data::F32(&[]),
            Data::F32(values) => Data::F32(&values[start..]),
            Data::Bf16(values) => Data::Bf16(&values[start..]),
        };
        Mat { data, rows: rows.len(), cols: cols.len(), ..self }
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

    /// Returns the part with these rows and columns.
    fn part(&mut self, rows: Range<usize>, cols: Range<usize>) -> MatMut<'_> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "a part of a matrix lies beyond it");
        let data = self.data.wrapping_add(rows.start * self.row_stride + cols.start);
        MatMut { data, rows: rows.len(), cols: cols.len(), borrow: PhantomData, ..*self }
    }

    /// Returns the rows.
    pub(in crate::nn) fn rows(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let &mut Self { data, rows, cols, row_stride, .. } = self;
        assert!(rows < 2 || cols <= row_stride, "rows of a matrix overlap");
        let rows = if cols == 0 { 0 } else { rows };
        // SAFETY: the matrix lies within its data, which it borrows, and its rows do not overlap.
        (0..rows).map(move |row| unsafe { std::slice::from_raw_parts_mut(data.add(row * row_stride), cols) })
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
    multiply(dst, accumulate, lhs, rhs, threads);
}

/// Returns `lhs * rhs`, row-major.
pub(in crate::nn) fn product_of(lhs: Mat<'_>, rhs: Mat<'_>) -> Vec<f32> {
    let (rows, cols) = (lhs.rows, rhs.cols);
    let mut values = Vec::with_capacity(rows * cols);
    let dst = MatMut { data: values.as_mut_ptr(), rows, cols, row_stride: cols, borrow: PhantomData };
    product(dst, false, lhs, rhs);
    // SAFETY: the capacity suffices, and the product has written all elements without reading them.
    unsafe { values.set_len(rows * cols) };
    values
}

/// [`product`] on the calling thread.
pub(in crate::nn) fn product_here(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>) {
    multiply(dst, accumulate, lhs, rhs, 1);
}

fn multiply(mut dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>, threads: usize) {
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
    if lhs.may_round
        && rhs.may_round
        && let Some(product) = bf16_product::available()
    {
        return product(dst, accumulate, lhs, rhs, threads);
    }
    let left = lhs.widened();
    let lhs = Mat { data: Data::F32(&left), ..lhs };
    if matches!(rhs.data, Data::F32(_)) {
        return multiply_floats(dst, accumulate, lhs, rhs, threads);
    }
    // In parts that are adjacent in memory. As a whole in f32, a weight would take twice its memory.
    let is_by_rows = rhs.row_stride >= rhs.col_stride;
    let (len, stride) = if is_by_rows { (rhs.rows, rhs.row_stride) } else { (rhs.cols, rhs.col_stride) };
    // Whole tiles of the kernels.
    let step = (WIDENED / stride.max(1)).max(64) / 64 * 64;
    for start in (0..len.max(1)).step_by(step) {
        let part = start..len.min(start + step);
        let (rows, cols) = if is_by_rows { (part, 0..rhs.cols) } else { (0..rhs.rows, part) };
        let some = rhs.part(rows.clone(), cols.clone());
        let right = some.widened();
        let some = Mat { data: Data::F32(&right), ..some };
        let lhs = lhs.part(0..lhs.rows, rows.clone());
        multiply_floats(dst.part(0..lhs.rows, cols), accumulate || rows.start > 0, lhs, some, threads);
    }
}

/// [`multiply`] for f32.
fn multiply_floats(mut dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>, threads: usize) {
    if dst.rows > ROWS {
        for start in (0..dst.rows).step_by(ROWS) {
            let rows = start..dst.rows.min(start + ROWS);
            let lhs = lhs.part(rows.clone(), 0..lhs.cols);
            multiply_floats(dst.part(rows, 0..dst.cols), accumulate, lhs, rhs, threads);
        }
        return;
    }
    let (Data::F32(left), Data::F32(right)) = (lhs.data, rhs.data) else { unreachable!("operands are f32") };
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
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
            left.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            right.as_ptr(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns values between -1 and 1.
    fn values(count: usize, seed: u64) -> Vec<f32> {
        let next = |state: &mut u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            Some((*state >> 40) as f32 / (1 << 23) as f32 - 1.)
        };
        std::iter::successors(Some(seed), |state| Some(*state)).scan(seed, |state, _| next(state)).take(count).collect()
    }

    /// A matrix whose rows are adjacent, whose columns are, or neither.
    struct Case {
        values: Vec<f32>,
        halves: Vec<bf16>,
        strides: [usize; 2],
        rows: usize,
        cols: usize,
    }

    impl Case {
        fn all(rows: usize, cols: usize, seed: u64) -> [Self; 3] {
            [[cols + 3, 1], [1, rows + 3], [2 * cols + 1, 2]].map(|strides| {
                let values = values(span(rows, cols, strides[0], strides[1]), seed);
                let halves = values.iter().map(|&x| bf16::from_f32(x)).collect();
                Case { values, halves, strides, rows, cols }
            })
        }

        fn mat(&self, is_f32: bool) -> Mat<'_> {
            let data = if is_f32 { Data::F32(&self.values) } else { Data::Bf16(&self.halves) };
            Mat::checked(data, self.rows, self.cols, self.strides[0], self.strides[1]).as_dtype(DType::BF16)
        }

        fn at(&self, row: usize, col: usize) -> f64 {
            self.halves[row * self.strides[0] + col * self.strides[1]].to_f64()
        }
    }

    /// Compares `dst += lhs * rhs`, or `dst = lhs * rhs`, with f64, for each of the products. The flag of a product says
    /// whether it rounds f32.
    fn check(products: &[(Product, bool)], lhs: &Case, rhs: &Case) {
        let (rows, cols, depth) = (lhs.rows, rhs.cols, lhs.cols);
        let stride = cols + 3;
        let start = values(rows * stride, 3);
        let exact = |row, col| (0..depth).map(|k| lhs.at(row, k) * rhs.at(k, col)).sum::<f64>();
        let exact: Vec<f64> = (0..rows * cols).map(|i| exact(i / cols, i % cols)).collect();
        let flags = [(true, false), (true, true), (false, false), (false, true)];
        for (&(product, rounds), (is_f32, accumulate)) in products.iter().flat_map(|p| flags.map(|flags| (p, flags))) {
            let [found, of_threads] = [1, 3].map(|threads| {
                let mut found = start.clone();
                let dst = MatMut::strided(&mut found, rows, cols, stride);
                product(dst, accumulate, lhs.mat(is_f32), rhs.mat(is_f32), threads);
                found
            });
            assert_eq!(found, of_threads);
            let of_term = if is_f32 && !rounds { 0.01 } else { 1e-6 };
            for (i, (&found, &start)) in found.iter().zip(&start).enumerate() {
                let (row, col) = (i / stride, i % stride);
                if col >= cols {
                    assert_eq!(found, start, "between the rows");
                    continue;
                }
                let exact = exact[row * cols + col] + if accumulate { f64::from(start) } else { 0. };
                let error = (f64::from(found) - exact).abs();
                assert!(
                    error <= of_term * (1. + depth as f64),
                    "{rows}x{cols}x{depth}, {:?} and {:?}, {row}, {col}: {found} and {exact}",
                    lhs.strides,
                    rhs.strides
                );
            }
        }
    }

    // Tiles, blocks and depths that are full and not, and operands that are widened in parts. Runs each kernel that the
    // processor has. `scripts/check-amx` reads the printed names.
    #[test]
    fn products_of_bf16_are_those_of_rounded_values() {
        let sizes = [
            (1, 1, 1),
            (14, 32, 2),
            (13, 33, 5),
            (16, 15, 64),
            (170, 40, 385),
            (3, 1030, 31),
            (29, 70, 770),
            (40, 30, 513),
            (1350, 6, 3),
            (5000, 6, 3),
            (5, 4, 0),
            (1, 5000, 150),
            (2, 150, 5000),
        ];
        // Without instructions for bf16, products do not round f32.
        let mut products = vec![(multiply as Product, bf16_product::available().is_some())];
        for (name, product) in bf16_product::all() {
            println!("products by {name}");
            products.push((product, true));
        }
        for (rows, cols, depth) in sizes {
            for lhs in &Case::all(rows, depth, 1) {
                for rhs in &Case::all(depth, cols, 2) {
                    check(&products, lhs, rhs);
                }
            }
        }
    }
}
