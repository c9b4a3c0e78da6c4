//! Copies of an operand's parts, as pairs of bf16 in the order in which a kernel reads them.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use super::{LANES, blocks, first};
use crate::nn::cpu::matrix::{Data, Mat};

/// Pairs of a few rows: a line for each row, or for each pair.
type Lines = [__m512i; LANES];

/// Packs a matrix in panels of `WIDTH` rows. A panel has the first pair of each row, then the second of each, up to this
/// number of pairs. Returns the packed panels.
///
/// Missing rows of the last panel become any values. Missing pairs, and the second value of an odd number of columns,
/// become zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn by_pairs<'p, const WIDTH: usize>(
    packed: &'p mut [MaybeUninit<u32>],
    from: Mat<'_>,
    pairs: usize,
) -> &'p [u32] {
    // SAFETY: the function stores all pairs.
    unsafe {
        pack::<WIDTH>(packed, from, pairs, |panel, at, some, lines, is_by_rows| {
            let lines = if is_by_rows { transposed(lines) } else { lines };
            for (pair, line) in some.zip(lines) {
                store(&mut panel[pair * WIDTH + at..][..LANES.min(WIDTH - at)], line);
            }
        })
    }
}

/// [`by_pairs`] in another order: a panel has the first 16 pairs of the first row, those of the second, and so on. Then it
/// has the next 16 pairs of each row. `WIDTH` and `pairs` must be multiples of 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn by_rows<'p, const WIDTH: usize>(
    packed: &'p mut [MaybeUninit<u32>],
    from: Mat<'_>,
    pairs: usize,
) -> &'p [u32] {
    const { assert!(WIDTH.is_multiple_of(LANES)) };
    assert!(pairs.is_multiple_of(LANES));
    // SAFETY: the function stores all pairs.
    unsafe {
        pack::<WIDTH>(packed, from, pairs, |panel, at, some, lines, is_by_rows| {
            let lines = if is_by_rows { lines } else { transposed(lines) };
            for (to, line) in panel[some.start * WIDTH + at * LANES..].chunks_exact_mut(LANES).zip(lines) {
                store(to, line);
            }
        })
    }
}

/// Packs a matrix. `put(panel, at, pairs, lines, is_by_rows)` stores these pairs of the panel's rows `at..at + 16`. A line
/// has the pairs of one row if `is_by_rows`, else one pair of each row.
///
/// # Safety
/// `put` must store all of these pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack<'p, const WIDTH: usize>(
    packed: &'p mut [MaybeUninit<u32>],
    from: Mat<'_>,
    pairs: usize,
    put: impl Fn(&mut [MaybeUninit<u32>], usize, Range<usize>, Lines, bool),
) -> &'p [u32] {
    let packed = &mut packed[..from.rows.next_multiple_of(WIDTH) * pairs];
    if from.col_stride == 1 {
        for (i, rows) in blocks(0..from.rows, WIDTH).enumerate() {
            let panel = &mut packed[i * WIDTH * pairs..][..WIDTH * pairs];
            for at in (0..WIDTH).step_by(LANES) {
                for some in blocks(0..pairs, LANES) {
                    let lines = from.lines_of_rows(rows.start + at, some.clone());
                    put(panel, at, some, lines, true);
                }
            }
        }
    } else {
        // All rows of a few pairs, and then of the next ones. Rows may be adjacent, and a column far from the next: all
        // columns of a few rows could take more lines of a cache set than it has.
        for some in blocks(0..pairs, LANES) {
            for (i, rows) in blocks(0..from.rows, WIDTH).enumerate() {
                let panel = &mut packed[i * WIDTH * pairs..][..WIDTH * pairs];
                for pair in some.clone() {
                    for next in [2 * (pair + LANES), 2 * (pair + LANES) + 1] {
                        from.prefetch(rows.start, next);
                    }
                }
                for at in (0..WIDTH).step_by(LANES) {
                    let rows = rows.end.min(rows.start + at)..rows.end.min(rows.start + at + LANES);
                    put(panel, at, some.clone(), from.lines_of_pairs(rows, some.clone()), false);
                }
            }
        }
    }
    // SAFETY: each of the panels' pairs was stored.
    unsafe { &*(std::ptr::from_ref::<[MaybeUninit<u32>]>(packed) as *const [u32]) }
}

impl Mat<'_> {
    /// Returns up to 16 pairs of each of 16 rows. The columns are adjacent. Instead of missing rows, returns the last one.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn lines_of_rows(&self, start: usize, pairs: Range<usize>) -> Lines {
        let cols = 2 * pairs.start..self.cols.min(2 * pairs.end);
        let mut lines = [_mm512_setzero_si512(); LANES];
        for (i, line) in lines.iter_mut().enumerate() {
            let row = (start + i).min(self.rows - 1);
            self.prefetch(row + LANES, cols.start);
            let start = row * self.row_stride + cols.start;
            *line = match self.data {
                Data::F32(values) => {
                    let (low, high) = values[start..][..cols.len()].split_at(cols.len().min(LANES));
                    bits_of(_mm512_cvtne2ps_pbh(load(high), load(low)))
                }
                Data::Bf16(values) => load_halves(&values[start..][..cols.len()]),
            };
        }
        lines
    }

    /// Returns up to 16 pairs of up to 16 rows, a line for each pair.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn lines_of_pairs(&self, rows: Range<usize>, pairs: Range<usize>) -> Lines {
        let pairs = pairs.start..pairs.end.min(self.cols.div_ceil(2));
        let mut lines = [_mm512_setzero_si512(); LANES];
        match self.data {
            Data::F32(values) if self.row_stride == 1 => {
                let column = |col: usize| load(&values[col * self.col_stride..][rows.clone()]);
                for (line, col) in lines.iter_mut().zip(pairs.map(|pair| 2 * pair)) {
                    let second = if col + 1 < self.cols { column(col + 1) } else { _mm512_setzero_ps() };
                    let halves = bits_of(_mm512_cvtne2ps_pbh(second, column(col)));
                    *line = _mm512_permutexvar_epi16(alternating(LANES), halves);
                }
            }
            Data::Bf16(values) if self.row_stride == 1 => {
                let column = |col: usize| load_halves(&values[col * self.col_stride..][rows.clone()]);
                for (line, col) in lines.iter_mut().zip(pairs.map(|pair| 2 * pair)) {
                    let second = if col + 1 < self.cols { column(col + 1) } else { _mm512_setzero_si512() };
                    *line = _mm512_permutex2var_epi16(column(col), alternating(2 * LANES), second);
                }
            }
            _ => {
                for (line, col) in lines.iter_mut().zip(pairs.map(|pair| 2 * pair)) {
                    let mut values = [[bf16::ZERO; 2]; LANES];
                    for (pair, row) in values.iter_mut().zip(rows.clone()) {
                        let second = if col + 1 < self.cols { self.at(row, col + 1) } else { bf16::ZERO };
                        *pair = [self.at(row, col), second];
                    }
                    *line = load_halves(values.as_flattened());
                }
            }
        }
        lines
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

/// Loads up to 32 values. The other lanes become 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_halves(values: &[bf16]) -> __m512i {
    let mask = ((1u64 << values.len().min(2 * LANES)) - 1) as __mmask32;
    // SAFETY: the mask selects values of the slice.
    unsafe { _mm512_maskz_loadu_epi16(mask, values.as_ptr().cast()) }
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
fn transposed(rows: Lines) -> Lines {
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
