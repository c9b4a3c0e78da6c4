//! Tiles by the instruction `vdpbf16ps` of AVX512-BF16.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{COLS, Kernel, LANES, blocks, has_avx512_bf16, pack, write};
use crate::nn::cpu::matrix::{Mat, MatMut};

pub(super) struct Avx512;

/// Rows of a tile. Its sums take 28 of the 32 registers.
const ROWS: usize = 14;

impl Kernel for Avx512 {
    const ROWS: usize = ROWS;
    const PAIRS: usize = 384;
    const STEP: usize = 1;

    fn is_available() -> bool {
        has_avx512_bf16()
    }

    unsafe fn pack<'p>(packed: &'p mut [MaybeUninit<u32>], from: Mat<'_>, pairs: usize) -> &'p [u32] {
        // SAFETY: the caller ensures that the processor has the instructions.
        unsafe { pack::by_pairs::<ROWS>(packed, from, pairs) }
    }

    unsafe fn multiply(dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize) {
        // SAFETY: as above.
        unsafe { multiply(dst, accumulate, left, right, pairs) };
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply(mut dst: MatMut<'_>, accumulate: bool, left: &[u32], right: &[u32], pairs: usize) {
    let (rows, cols) = (dst.rows, dst.cols);
    for (i, rows) in blocks(0..rows, ROWS).enumerate() {
        let sums = tile(&left[i * ROWS * pairs..][..ROWS * pairs], right);
        let dst = dst.part(rows, 0..cols);
        for (row, &sums) in (0..dst.rows).zip(&sums) {
            write(&dst, row, accumulate, sums);
        }
    }
}

/// Returns the product of two packed panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn tile(left: &[u32], right: &[u32]) -> [[__m512; 2]; ROWS] {
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

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs_of(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid values.
    unsafe { std::mem::transmute(bits) }
}
