//! Products of values rounded to bf16, with sums in f32, by the instruction `vdpbf16ps` of AVX512-BF16.
//!
//! The instruction multiplies pairs that are neighbours along the summed dimension. Both operands are therefore packed
//! as pairs, one in a u32. Tiles and blocks are those of Goto and van de Geijn, "Anatomy of high-performance matrix
//! multiplication", 2008. The instruction takes subnormal numbers as zeros.
//!
//! An element's terms are added in the same order at any number of threads.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::{Data, Mat, MatMut, Shared};

/// Rows and columns of a tile. Its sums take 28 of the 32 registers.
const ROWS: usize = 14;
const COLS: usize = 2 * LANES;
/// f32 values, or pairs, of a register.
const LANES: usize = 16;
/// Pairs that a tile adds before it writes its sums. Fewer would write the sums more often.
const PAIRS: usize = 384;
/// Rows and columns of the blocks that a product goes through, which take 252 KiB and 1.5 MiB.
const BLOCK_ROWS: usize = 12 * ROWS;
const BLOCK_COLS: usize = 32 * COLS;
/// Rows that are packed at once. More would pack the columns less often.
const PACKED_ROWS: usize = 8 * BLOCK_ROWS;

/// Returns whether this processor has the instructions.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Computes `dst = lhs * rhs`, or `dst += lhs * rhs` if `accumulate`, on this many threads. The shapes must agree, and
/// the processor must have the instructions.
pub(super) fn multiply(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>, threads: usize) {
    assert!(is_available(), "the processor has no instructions for bf16");
    if threads < 2 {
        // SAFETY: the processor has the instructions.
        return unsafe { multiply_here(dst, accumulate, lhs, rhs) };
    }
    let (rows, cols, row_stride) = (dst.rows, dst.cols, dst.row_stride);
    let len = super::span(rows, cols, row_stride, 1);
    let dst = Shared { data: dst.data, len, borrow: dst.borrow };
    let (count, tile) = if rows > cols { (rows, ROWS) } else { (cols, COLS) };
    let share = count.div_ceil(threads).next_multiple_of(tile);
    (0..count.div_ceil(share)).into_par_iter().for_each(|i| {
        let part = i * share..count.min((i + 1) * share);
        let (rows, cols) = if rows > cols { (part, 0..cols) } else { (0..rows, part) };
        // SAFETY: the parts have no element in common, and the processor has the instructions.
        unsafe {
            let dst = dst.mat(rows.start * row_stride + cols.start, rows.len(), cols.len(), row_stride);
            multiply_here(dst, accumulate, lhs.part(rows, 0..lhs.cols), rhs.part(0..rhs.rows, cols));
        }
    });
}

/// [`multiply`] on this thread.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn multiply_here(dst: MatMut<'_>, accumulate: bool, lhs: Mat<'_>, rhs: Mat<'_>) {
    let MatMut { rows, cols, .. } = dst;
    let pairs = PAIRS.min(lhs.cols.div_ceil(2));
    let (mut left, mut right) = (Vec::new(), Vec::new());
    left.reserve_exact(PACKED_ROWS.min(rows.next_multiple_of(ROWS)) * pairs);
    right.reserve_exact(BLOCK_COLS.min(cols.next_multiple_of(COLS)) * pairs);
    // Without terms, one step writes zeros.
    let depths = blocks(0..lhs.cols.max(1), 2 * PAIRS).map(|depth| depth.start..depth.end.min(lhs.cols));
    for depth in depths {
        let pairs = depth.len().div_ceil(2);
        for packed_rows in blocks(0..rows, PACKED_ROWS) {
            let left = pack::<ROWS>(left.spare_capacity_mut(), lhs.part(packed_rows.clone(), depth.clone()));
            let count = packed_rows.len().div_ceil(BLOCK_ROWS);
            // Blocks of about equal size, in whole tiles.
            let block_rows = packed_rows.len().div_ceil(count).next_multiple_of(ROWS);
            for block_cols in blocks(0..cols, BLOCK_COLS) {
                let right = pack::<COLS>(right.spare_capacity_mut(), rhs.part(depth.clone(), block_cols.clone()).t());
                for block_rows in blocks(packed_rows.clone(), block_rows) {
                    let left = &left[(block_rows.start - packed_rows.start) * pairs..];
                    for (i, to_cols) in blocks(block_cols.clone(), COLS).enumerate() {
                        let right = &right[i * COLS * pairs..][..COLS * pairs];
                        for (j, to_rows) in blocks(block_rows.clone(), ROWS).enumerate() {
                            let sums = tile(&left[j * ROWS * pairs..][..ROWS * pairs], right);
                            write(&dst, to_rows, to_cols.clone(), accumulate || depth.start > 0, &sums);
                        }
                    }
                }
            }
        }
    }
}

/// Splits a range into blocks of `size`.
fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Packs a matrix in panels of `WIDTH` rows, each with the pairs of its columns one after the other. Missing rows of the
/// last panel become any values, and the missing second value of an odd number of columns a zero. Returns the packed
/// panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pack<'p, const WIDTH: usize>(packed: &'p mut [MaybeUninit<u32>], from: Mat<'_>) -> &'p [u32] {
    let packed = &mut packed[..from.rows.next_multiple_of(WIDTH) * from.cols.div_ceil(2)];
    match from.data {
        _ if from.col_stride == 1 => pack_rows::<WIDTH>(packed, from),
        Data::F32(values) if from.row_stride == 1 => {
            let column = |col: usize, rows| load(&values[col * from.col_stride..][rows]);
            pack_columns::<WIDTH>(packed, from, |col, rows| {
                let second = if col + 1 < from.cols { column(col + 1, rows.clone()) } else { _mm512_setzero_ps() };
                let halves = bits_of(_mm512_cvtne2ps_pbh(second, column(col, rows)));
                _mm512_permutexvar_epi16(alternating(LANES), halves)
            });
        }
        Data::Bf16(values) if from.row_stride == 1 => {
            let column = |col: usize, rows| load_halves(&values[col * from.col_stride..][rows]);
            pack_columns::<WIDTH>(packed, from, |col, rows| {
                let second = if col + 1 < from.cols { column(col + 1, rows.clone()) } else { _mm512_setzero_si512() };
                _mm512_permutex2var_epi16(column(col, rows), alternating(2 * LANES), second)
            });
        }
        _ => pack_columns::<WIDTH>(packed, from, |col, rows| {
            let mut pairs = [[bf16::ZERO; 2]; LANES];
            for (pair, row) in pairs.iter_mut().zip(rows) {
                let second = if col + 1 < from.cols { from.at(row, col + 1) } else { bf16::ZERO };
                *pair = [from.at(row, col), second];
            }
            load_halves(pairs.as_flattened())
        }),
    }
    // SAFETY: each of the panels' pairs was stored.
    unsafe { &*(std::ptr::from_ref::<[MaybeUninit<u32>]>(packed) as *const [u32]) }
}

/// Packs a matrix whose columns are adjacent.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pack_rows<const WIDTH: usize>(packed: &mut [MaybeUninit<u32>], from: Mat<'_>) {
    let pairs = from.cols.div_ceil(2);
    for (i, rows) in blocks(0..from.rows, WIDTH).enumerate() {
        let panel = &mut packed[i * WIDTH * pairs..][..WIDTH * pairs];
        for at in (0..WIDTH).step_by(LANES) {
            let width = LANES.min(WIDTH - at);
            for cols in blocks(0..from.cols, 2 * LANES) {
                let mut lines = [_mm512_setzero_si512(); LANES];
                for (i, line) in lines.iter_mut().enumerate() {
                    let row = (rows.start + at + i).min(from.rows - 1);
                    *line = from.along_row(row, cols.clone());
                    from.prefetch(row + LANES, cols.start);
                }
                let columns = transposed(lines);
                for (i, &pairs) in columns.iter().enumerate() {
                    if 2 * i < cols.len() {
                        store(&mut panel[(cols.start / 2 + i) * WIDTH + at..][..width], pairs);
                    }
                }
            }
        }
    }
}

/// Packs a matrix by a function that returns the pairs of a column and the next one, of up to 16 rows.
///
/// Goes through all rows of a few columns, and then of the next ones. Rows may be adjacent, and a column far from the
/// next: all columns of a few rows could take more lines of a cache set than it has.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pack_columns<const WIDTH: usize>(
    packed: &mut [MaybeUninit<u32>],
    from: Mat<'_>,
    pairs_of: impl Fn(usize, Range<usize>) -> __m512i,
) {
    let pairs = from.cols.div_ceil(2);
    for some in blocks(0..pairs, LANES) {
        for (i, rows) in blocks(0..from.rows, WIDTH).enumerate() {
            let panel = &mut packed[i * WIDTH * pairs..][..WIDTH * pairs];
            for pair in some.clone() {
                for next in [2 * (pair + LANES), 2 * (pair + LANES) + 1] {
                    from.prefetch(rows.start, next);
                }
                for at in (0..WIDTH).step_by(LANES) {
                    let width = LANES.min(WIDTH - at);
                    let rows = rows.end.min(rows.start + at)..rows.end.min(rows.start + at + width);
                    store(&mut panel[pair * WIDTH + at..][..width], pairs_of(2 * pair, rows));
                }
            }
        }
    }
}

/// Returns indices that take a value from the start and one from `second` in turn.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn alternating(second: usize) -> __m512i {
    let pairs: [u32; LANES] = std::array::from_fn(|i| (i | (second + i) << 16) as u32);
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(pairs.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bits_of(halves: __m512bh) -> __m512i {
    // SAFETY: both types are 64 bytes without invalid values.
    unsafe { std::mem::transmute(halves) }
}

impl Mat<'_> {
    /// Returns up to 32 values of a row as bf16. The columns are adjacent.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn along_row(&self, row: usize, cols: Range<usize>) -> __m512i {
        let start = row * self.row_stride + cols.start;
        match self.data {
            Data::F32(values) => {
                let (low, high) = values[start..][..cols.len()].split_at(cols.len().min(LANES));
                bits_of(_mm512_cvtne2ps_pbh(load(high), load(low)))
            }
            Data::Bf16(values) => load_halves(&values[start..][..cols.len()]),
        }
    }

    /// Starts to load 32 values that are adjacent in memory, from this one on. Packing reads a few lines of the cache from
    /// each of many rows, which the processor does not foresee.
    #[inline]
    fn prefetch(&self, row: usize, col: usize) {
        let index = row * self.row_stride + col * self.col_stride;
        let (start, lines) = match self.data {
            Data::F32(values) => (values.as_ptr().wrapping_add(index).cast::<i8>(), 2),
            Data::Bf16(values) => (values.as_ptr().wrapping_add(index).cast::<i8>(), 1),
        };
        for line in 0..lines {
            // SAFETY: a prefetch is a hint, for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(64 * line)) };
        }
    }

    /// Returns a value as bf16.
    fn at(&self, row: usize, col: usize) -> bf16 {
        let index = row * self.row_stride + col * self.col_stride;
        match self.data {
            Data::F32(values) => bf16::from_f32(values[index]),
            Data::Bf16(values) => values[index],
        }
    }
}

/// Loads up to 32 values. The other lanes become 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_halves(values: &[bf16]) -> __m512i {
    let mask = ((1u64 << values.len().min(2 * LANES)) - 1) as __mmask32;
    // SAFETY: the mask selects values of the slice.
    unsafe { _mm512_maskz_loadu_epi16(mask, values.as_ptr().cast()) }
}

/// Returns the mask of the first `count` lanes.
fn first(count: usize) -> __mmask16 {
    ((1u32 << count.min(LANES)) - 1) as __mmask16
}

/// Loads up to 16 values. The other lanes become 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32]) -> __m512 {
    // SAFETY: the mask selects values of the slice.
    unsafe { _mm512_maskz_loadu_ps(first(values.len()), values.as_ptr()) }
}

/// Writes the first pairs, of which there are as many as `to` has places, at most 16.
#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [MaybeUninit<u32>], pairs: __m512i) {
    // SAFETY: the mask selects places of the slice.
    unsafe { _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), first(to.len()), pairs) }
}

/// Returns the columns of 16 rows of 16 pairs.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut twos = rows;
    for i in (0..LANES).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // A quarter of `fours[4 * g + c]` has column c of its four columns, of the rows 4 g to 4 g + 3.
    let mut fours = twos;
    for i in (0..LANES).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    let mut columns = fours;
    for c in 0..4 {
        // Quarters 0 and 2 of two rows, or quarters 1 and 3.
        let even = |a, b| _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let odd = |a, b| _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        let [a, b, d, e] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
        columns[c] = even(even(a, b), even(d, e));
        columns[4 + c] = even(odd(a, b), odd(d, e));
        columns[8 + c] = odd(even(a, b), even(d, e));
        columns[12 + c] = odd(odd(a, b), odd(d, e));
    }
    columns
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs_of(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid values.
    unsafe { std::mem::transmute(bits) }
}

/// The sums of a tile.
type Sums = [[__m512; 2]; ROWS];

/// Returns the product of two packed panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn tile(left: &[u32], right: &[u32]) -> Sums {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    for (left, right) in left.as_chunks::<ROWS>().0.iter().zip(right.as_chunks::<COLS>().0) {
        let (low, high) = right.split_at(LANES);
        // SAFETY: each half has 16 pairs.
        let (low, high) =
            unsafe { (_mm512_loadu_si512(low.as_ptr().cast()), _mm512_loadu_si512(high.as_ptr().cast())) };
        for (sums, &pair) in sums.iter_mut().zip(left) {
            let pair = pairs_of(_mm512_set1_epi32(pair as i32));
            sums[0] = _mm512_dpbf16_ps(sums[0], pair, pairs_of(low));
            sums[1] = _mm512_dpbf16_ps(sums[1], pair, pairs_of(high));
        }
    }
    sums
}

/// Writes the sums to a tile of `dst`, or adds them.
#[inline]
#[target_feature(enable = "avx512f")]
fn write(dst: &MatMut<'_>, rows: Range<usize>, cols: Range<usize>, accumulate: bool, sums: &Sums) {
    assert!(rows.end <= dst.rows && cols.end <= dst.cols && rows.len() <= ROWS && cols.len() <= COLS);
    for (row, sums) in rows.zip(sums) {
        for (half, &sum) in sums.iter().enumerate() {
            let mask = first(cols.len().saturating_sub(half * LANES));
            // SAFETY: the mask selects elements of the matrix, which was checked against its data and is borrowed
            // exclusively. If it selects none, the pointer may be past the data, and nothing is accessed.
            unsafe {
                let to = dst.data.wrapping_add(row * dst.row_stride + cols.start + half * LANES);
                let sum = if accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum) } else { sum };
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}
