//! The memory of one rank, in which a redistribution packs what leaves and unpacks what arrives.

use std::ops::Range;

use crate::{Allocator, Buffer, DType, Heap, Result, View};

/// Rows of elements at even distances, each to be copied from one memory to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How many there are.
    pub count: usize,
    /// Elements of a row.
    pub len: usize,
    /// Where the first begins, where they are read.
    pub from: usize,
    /// The same where they are written.
    pub to: usize,
    /// Elements from the beginning of a row to that of the next, where they are read.
    pub from_stride: usize,
    /// The same where they are written.
    pub to_stride: usize,
}

/// Memory of one device, and what copies elements within it: what a [`super::Redistribution`] needs of a rank. [`Heap`]
/// is the host's.
pub trait LocalMemory: Allocator {
    /// A buffer of zeros.
    ///
    /// # Errors
    /// When there is no memory for it.
    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Copies rows of elements of `to`'s type.
    ///
    /// # Errors
    /// When the memory is another device's, or rows reach beyond it.
    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> Result<()>;
}

impl LocalMemory for Heap {
    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Buffer::try_zeros(dtype, len)
    }

    #[allow(clippy::infallible_destructuring_match, reason = "there may be memory of devices")]
    fn copy_rows(&self, from: View<'_>, to: &mut Buffer, rows: &[Rows]) -> Result<()> {
        let size = to.dtype().size();
        let from = match from {
            View::Host(bytes) => bytes,
            #[cfg(feature = "cuda")]
            View::Cuda(view) => {
                let cause = "the host's memory does not copy it: take the memory of its device";
                return Err(crate::device::cuda::failed(view.stream(), "copying elements of a DTensor", &cause));
            }
        };
        let to = to.bytes_mut();
        for rows in rows {
            for row in 0..rows.count {
                let (read, written) = (rows.from + row * rows.from_stride, rows.to + row * rows.to_stride);
                to[written * size..(written + rows.len) * size]
                    .copy_from_slice(&from[read * size..(read + rows.len) * size]);
            }
        }
        Ok(())
    }
}

/// The rows that copy `runs` of elements one after the other, from the element `at` on.
pub(super) fn packing(runs: &[Range<usize>], mut at: usize) -> Vec<Rows> {
    let mut all: Vec<Rows> = Vec::new();
    for run in runs {
        let len = run.len();
        match all.last_mut() {
            Some(rows) if rows.len == len && rows.goes_on_at(run.start) => {
                rows.from_stride = (run.start - rows.from) / rows.count;
                rows.count += 1;
            }
            _ => all.push(Rows { count: 1, len, from: run.start, to: at, from_stride: len, to_stride: len }),
        }
        at += len;
    }
    all
}

/// The rows that copy elements, one after the other from the element `at` on, to where `runs` are.
pub(super) fn unpacking(runs: &[Range<usize>], at: usize) -> Vec<Rows> {
    packing(runs, at).into_iter().map(Rows::reversed).collect()
}

impl Rows {
    /// Whether a row that is read there is at the distance of the others.
    fn goes_on_at(&self, from: usize) -> bool {
        self.count == 1 || from == self.from + self.count * self.from_stride
    }

    fn reversed(self) -> Self {
        let Rows { count, len, from, to, from_stride, to_stride } = self;
        Rows { count, len, from: to, to: from, from_stride: to_stride, to_stride: from_stride }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what this is about")]
mod tests {
    use super::*;

    #[test]
    fn runs_at_even_distances_are_rows() {
        let rows = |count, len, from, to, from_stride| Rows { count, len, from, to, from_stride, to_stride: len };
        assert_eq!(packing(&[0..2, 5..7, 10..12], 3), [rows(3, 2, 0, 3, 5)]);
        assert_eq!(packing(&[0..2, 5..7, 11..13], 0), [rows(2, 2, 0, 0, 5), rows(1, 2, 11, 4, 2)]);
        assert_eq!(packing(&[1..4, 6..7], 0), [rows(1, 3, 1, 0, 3), rows(1, 1, 6, 3, 1)]);
        assert_eq!(packing(&[], 7), []);
    }
}
