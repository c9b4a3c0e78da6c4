//! The types of matrices, and their products.

use float8::{F8E4M3, F8E5M2};
use gemm::Parallelism;
use half::{bf16, f16};

/// The strides of a matrix: `element(i, j)` is at index `i * rows + j * cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strides {
    pub(crate) rows: isize,
    pub(crate) cols: isize,
}

/// A product `c = alpha * a * b + beta * c` of matrices of these sizes: `m` by `k`, `k` by `n`, `m` by `n`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
}

/// A supported `cudaDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F64,
    F16,
    BF16,
    E4M3,
    E5M2,
}

impl Element {
    pub(crate) fn of(cuda: i32) -> Option<Self> {
        match cuda {
            0 => Some(Self::F32),
            1 => Some(Self::F64),
            2 => Some(Self::F16),
            14 => Some(Self::BF16),
            28 => Some(Self::E4M3),
            29 => Some(Self::E5M2),
            _ => None,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 | Self::E5M2 => 1,
        }
    }

    /// `at` points to a value of this type.
    pub(crate) unsafe fn read(self, at: *const u8) -> f64 {
        // SAFETY: ensured by the caller.
        unsafe {
            match self {
                Self::F64 => at.cast::<f64>().read_unaligned(),
                Self::F32 => f64::from(at.cast::<f32>().read_unaligned()),
                Self::F16 => at.cast::<f16>().read_unaligned().to_f64(),
                Self::BF16 => at.cast::<bf16>().read_unaligned().to_f64(),
                Self::E4M3 => F8E4M3::from_bits(at.read()).to_f64(),
                Self::E5M2 => F8E5M2::from_bits(at.read()).to_f64(),
            }
        }
    }

    /// Writes a value, rounded once; 8-bit floats are rounded to f32 before.
    ///
    /// `at` is valid for a write of this type.
    pub(crate) unsafe fn write(self, at: *mut u8, value: f64) {
        // SAFETY: ensured by the caller.
        unsafe {
            match self {
                Self::F64 => at.cast::<f64>().write_unaligned(value),
                Self::F32 => at.cast::<f32>().write_unaligned(value as f32),
                Self::F16 => at.cast::<f16>().write_unaligned(f16::from_f64(value)),
                Self::BF16 => at.cast::<bf16>().write_unaligned(bf16::from_f64(value)),
                Self::E4M3 => at.write(F8E4M3::from_f32(value as f32).to_bits()),
                Self::E5M2 => at.write(F8E5M2::from_f32(value as f32).to_bits()),
            }
        }
    }

    /// Returns a copy of a matrix as floats, row-major.
    ///
    /// `at` points to a matrix of this type with these strides.
    unsafe fn floats(self, at: *const u8, rows: usize, cols: usize, strides: Strides) -> Vec<f32> {
        let mut floats = Vec::with_capacity(rows * cols);
        for row in 0..rows as isize {
            for col in 0..cols as isize {
                let place = (row * strides.rows + col * strides.cols) * self.bytes() as isize;
                // SAFETY: the place is the matrix's.
                floats.push(unsafe { self.read(at.offset(place)) } as f32);
            }
        }
        floats
    }
}

/// A matrix of device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) at: u64,
    pub(crate) element: Element,
    pub(crate) strides: Strides,
}

/// Multiplies matrices. Doubles are multiplied and summed as doubles, all other types as floats. The result is rounded
/// once. If `beta` is 0, `c` is not read.
///
/// The matrices have the product's sizes, and no other thread uses them.
pub(crate) unsafe fn multiply(product: Product, a: Matrix, b: Matrix, c: Matrix) {
    let all = [a.element, b.element, c.element];
    // SAFETY: ensured by the caller, and the types are looked at first.
    unsafe {
        if all == [Element::F64; 3] {
            direct::<f64>(product, a, b, c, product.alpha, product.beta);
        } else if all == [Element::F32; 3] {
            direct::<f32>(product, a, b, c, product.alpha as f32, product.beta as f32);
        } else {
            through_floats(product, a, b, c);
        }
    }
}

/// As for [`multiply`], and all elements are of type `T`.
unsafe fn direct<T: 'static + Copy + PartialEq + Default>(
    product: Product,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    alpha: T,
    beta: T,
) {
    // SAFETY: ensured by the caller. The library takes its factors the other way round: its `alpha` is of the result.
    unsafe {
        gemm::gemm(
            product.m,
            product.n,
            product.k,
            c.at as *mut T,
            c.strides.cols,
            c.strides.rows,
            beta != T::default(),
            a.at as *const T,
            a.strides.cols,
            a.strides.rows,
            b.at as *const T,
            b.strides.cols,
            b.strides.rows,
            beta,
            alpha,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// See [`multiply`].
unsafe fn through_floats(product: Product, a: Matrix, b: Matrix, c: Matrix) {
    let Product { m, n, k, beta, .. } = product;
    // SAFETY: ensured by the caller.
    let (left, right, mut sums) = unsafe {
        let sums = match beta {
            0.0 => vec![0.0; m * n],
            _ => c.element.floats(c.at as *const u8, m, n, c.strides),
        };
        let left = a.element.floats(a.at as *const u8, m, k, a.strides);
        (left, b.element.floats(b.at as *const u8, k, n, b.strides), sums)
    };
    let floats = |at: *const f32, cols: usize| Matrix {
        at: at as u64,
        element: Element::F32,
        strides: Strides { rows: cols as isize, cols: 1 },
    };
    let (left, right, out) = (floats(left.as_ptr(), k), floats(right.as_ptr(), n), floats(sums.as_mut_ptr(), n));
    // SAFETY: the copies have these sizes.
    unsafe { direct::<f32>(product, left, right, out, product.alpha as f32, beta as f32) };
    for (place, sum) in sums.into_iter().enumerate() {
        let (row, col) = ((place / n) as isize, (place % n) as isize);
        let offset = (row * c.strides.rows + col * c.strides.cols) * c.element.bytes() as isize;
        // SAFETY: the place is the matrix's.
        unsafe { c.element.write((c.at as *mut u8).offset(offset), f64::from(sum)) };
    }
}
