//! Products of values rounded to bf16, with sums in f32, by instructions that multiply pairs of bf16.
//!
//! The pairs are neighbours along the summed dimension. Both operands are therefore packed as pairs, one in a u32. Tiles
//! and blocks are those of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008. The
//! instructions take subnormal numbers as zeros.
//!
//! An element's terms are added in the same order at any number of threads.

mod amx;
mod avx512;
mod pack;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::LazyLock;

use raw_cpuid::CpuId;
use rayon::prelude::*;

use super::{Mat, MatMut, Product, Shared, span};
use amx::Amx;
use avx512::Avx512;

/// Columns of a tile.
const COLS: usize = 2 * LANES;
/// f32 values, or pairs, of a register.
const LANES: usize = 16;
/// Rows and columns of the blocks that a product goes through, which take at most 252 KiB and 1.5 MiB. The rows are
/// rounded down to whole tiles.
const BLOCK_ROWS: usize = 168;
const BLOCK_COLS: usize = 32 * COLS;
/// Blocks of rows that are packed at once. More would pack the columns less often.
const PACKED_BLOCKS: usize = 8;

/// The instructions that compute tiles.
trait Kernel {
    /// Rows of a tile.
    const ROWS: usize;
    /// Pairs that a tile adds before it writes its sums. Fewer would write the sums more often.
    const PAIRS: usize;
    /// The number of pairs is rounded up to a multiple of this, with zeros.
    const STEP: usize;

    /// Returns whether the instructions can be used, and those of [`has_avx512_bf16`].
    fn is_available() -> bool;

    /// Packs the left operand in panels of `ROWS` rows with this many pairs.
    ///
    /// # Safety
    /// The kernel must be available.
    unsafe fn pack<'p>(packed: &'p mut [MaybeUninit<u32>], from: Mat<'_>, pairs: usize) -> &'p [u32];

    /// Writes the product of packed rows and a packed panel of columns to `dst`, or adds it. Both have this many pairs, and
    /// the left panels follow one another.
    ///
    /// # Safety
    /// The kernel must be available.
    unsafe fn multiply(dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize);
}

/// Returns whether this processor has the instructions that pack, and `vdpbf16ps`.
fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Returns the product of this processor, if it multiplies bf16 faster than f32.
pub(super) fn available() -> Option<Product> {
    static IS_INTEL: LazyLock<bool> =
        LazyLock::new(|| CpuId::new().get_vendor_info().is_some_and(|vendor| vendor.as_str() == "GenuineIntel"));
    if Amx::is_available() {
        return Some(multiply::<Amx>);
    }
    // Intel's `vdpbf16ps` takes four times as long as a multiply-add of f32 (measured on a Xeon of the fifth generation).
    // It multiplies twice as many values, so products in f32 take less time. On AMD's processors they take more.
    (Avx512::is_available() && !*IS_INTEL).then_some(multiply::<Avx512>)
}

/// [`Product`] by a kernel, which must be available.
fn multiply<K: Kernel>(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>, threads: usize) {
    if threads < 2 || dst.rows == 0 || dst.cols == 0 {
        return multiply_here::<K>(dst, accumulate, lhs, rhs);
    }
    let (rows, cols, row_stride) = (dst.rows, dst.cols, dst.row_stride);
    let len = span(rows, cols, row_stride, 1);
    let dst = Shared { data: dst.data, len, borrow: dst.borrow };
    let (count, tile) = if rows > cols { (rows, K::ROWS) } else { (cols, COLS) };
    let share = count.div_ceil(threads).next_multiple_of(tile);
    (0..count.div_ceil(share)).into_par_iter().for_each(|i| {
        let part = i * share..count.min((i + 1) * share);
        let (rows, cols) = if rows > cols { (part, 0..cols) } else { (0..rows, part) };
        // SAFETY: the parts have no element in common.
        let dst = unsafe { dst.mat(rows.start * row_stride + cols.start, rows.len(), cols.len(), row_stride) };
        multiply_here::<K>(dst, accumulate, lhs.part(rows, 0..lhs.cols), rhs.part(0..rhs.rows, cols));
    });
}

/// [`multiply`] on this thread.
fn multiply_here<K: Kernel>(mut dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>) {
    assert!(K::is_available(), "the processor has no instructions for bf16");
    let MatMut { rows, cols, .. } = dst;
    let pairs_of = |depth: usize| depth.div_ceil(2).next_multiple_of(K::STEP);
    let pairs = K::PAIRS.min(pairs_of(lhs.cols));
    let most_rows = BLOCK_ROWS / K::ROWS * K::ROWS;
    let most_packed = PACKED_BLOCKS * most_rows;
    let mut left = Packed::new(most_packed.min(rows.next_multiple_of(K::ROWS)) * pairs);
    let mut right = Packed::new(BLOCK_COLS.min(cols.next_multiple_of(COLS)) * pairs);
    // Without terms, one step writes zeros.
    let depths = blocks(0..lhs.cols.max(1), 2 * K::PAIRS).map(|depth| depth.start..depth.end.min(lhs.cols));
    for depth in depths {
        let pairs = pairs_of(depth.len());
        for packed_rows in blocks(0..rows, most_packed) {
            let lhs = lhs.part(packed_rows.clone(), depth.clone());
            // SAFETY: the kernel is available.
            let left = unsafe { K::pack(left.memory(), lhs, pairs) };
            let count = packed_rows.len().div_ceil(most_rows);
            // Blocks of about equal size, in whole tiles.
            let block_rows = packed_rows.len().div_ceil(count).next_multiple_of(K::ROWS);
            for block_cols in blocks(0..cols, BLOCK_COLS) {
                let rhs = rhs.part(depth.clone(), block_cols.clone()).t();
                // SAFETY: as above.
                let right = unsafe { pack::by_pairs::<COLS>(right.memory(), rhs, pairs) };
                for block_rows in blocks(packed_rows.clone(), block_rows) {
                    let left = &left[(block_rows.start - packed_rows.start) * pairs..];
                    for (i, to_cols) in blocks(block_cols.clone(), COLS).enumerate() {
                        let right = &right[i * COLS * pairs..][..COLS * pairs];
                        let dst = dst.part(block_rows.clone(), to_cols);
                        // SAFETY: as above.
                        unsafe { K::multiply(dst, accumulate || depth.start > 0, left, right, pairs) };
                    }
                }
            }
        }
    }
}

/// Memory for packed pairs. It starts at a line of the cache, as AMX reads whole lines.
struct Packed(Box<[MaybeUninit<Line>]>);

#[repr(align(64))]
struct Line {
    _pairs: [u32; LANES],
}

impl Packed {
    fn new(pairs: usize) -> Self {
        Packed(Box::new_uninit_slice(pairs.div_ceil(LANES)))
    }

    fn memory(&mut self) -> &mut [MaybeUninit<u32>] {
        let len = self.0.len() * LANES;
        // SAFETY: a line is 16 pairs, and neither type needs to be initialized.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

/// Splits a range into blocks of `size`.
fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Returns the mask of the first `count` lanes.
fn first(count: usize) -> __mmask16 {
    ((1u32 << count.min(LANES)) - 1) as __mmask16
}

/// Writes a row of sums to a row of `dst`, or adds them. `dst` has at most 32 columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn write(dst: &MatMut<'_>, row: usize, accumulate: bool, sums: [__m512; 2]) {
    assert!(row < dst.rows && dst.cols <= COLS);
    for (half, sum) in sums.into_iter().enumerate() {
        let mask = first(dst.cols.saturating_sub(half * LANES));
        // SAFETY: the mask selects elements of the matrix, which was checked against its data and is borrowed exclusively.
        // If it selects none, the pointer may be past the data, and nothing is accessed.
        unsafe {
            let to = dst.data.wrapping_add(row * dst.row_stride + half * LANES);
            let sum = if accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum) } else { sum };
            _mm512_mask_storeu_ps(to, mask, sum);
        }
    }
}

/// Returns the products by all kernels that are available, and by an emulation of AMX, with their names.
#[cfg(test)]
pub(super) fn all() -> Vec<(&'static str, Product)> {
    /// AMX's packed panels, multiplied without its instructions.
    struct Emulated;

    impl Kernel for Emulated {
        const ROWS: usize = Amx::ROWS;
        const PAIRS: usize = Amx::PAIRS;
        const STEP: usize = Amx::STEP;

        fn is_available() -> bool {
            has_avx512_bf16()
        }

        unsafe fn pack<'p>(packed: &'p mut [MaybeUninit<u32>], from: Mat<'_>, pairs: usize) -> &'p [u32] {
            // SAFETY: packing needs only what `has_avx512_bf16` has found.
            unsafe { Amx::pack(packed, from, pairs) }
        }

        unsafe fn multiply(mut dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize) {
            let [low, high] = [|pair: u32| f32::from_bits(pair << 16), |pair: u32| f32::from_bits(pair & 0xffff_0000)];
            for (row, to) in dst.rows().enumerate() {
                let panel = &left[row / Self::ROWS * Self::ROWS * pairs..];
                for (col, to) in to.iter_mut().enumerate() {
                    let sum = (0..pairs).map(|k| {
                        let line = k / LANES * Self::ROWS + row % Self::ROWS;
                        let (left, right) = (panel[line * LANES + k % LANES], right[k * COLS + col]);
                        low(left) * low(right) + high(left) * high(right)
                    });
                    *to = sum.sum::<f32>() + if accumulate { *to } else { 0. };
                }
            }
        }
    }

    fn of<K: Kernel>(name: &'static str) -> Option<(&'static str, Product)> {
        K::is_available().then_some((name, multiply::<K>))
    }
    [of::<Avx512>("vdpbf16ps"), of::<Emulated>("emulated AMX"), of::<Amx>("tdpbf16ps")].into_iter().flatten().collect()
}
