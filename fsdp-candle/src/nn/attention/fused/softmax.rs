//! The softmax of attention scores, row by row, and its way back.

use std::ops::Range;

use super::options::Sight;
use crate::nn::cpu::simd::{dot, kernel, max, probability, sum};

/// A block of queries, and the stretch of keys that any of them sees.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) first_key: usize,
    /// Keys of the stretch.
    pub(super) seen: usize,
    sight: Sight,
}

impl Rows {
    pub(super) fn new(sight: Sight, first: usize, count: usize) -> Self {
        // Both ends move one way only.
        let (start, end) = (sight.of(first).start, sight.of(first + count - 1).end);
        Rows { first, count, first_key: start, seen: end - start, sight }
    }

    /// What a query of the block sees of the stretch.
    #[inline(always)]
    fn of(self, row: usize) -> Range<usize> {
        let keys = self.sight.of(self.first + row);
        keys.start - self.first_key..keys.end - self.first_key
    }
}

/// What is done to scores before the softmax.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

/// tanh by a rational function, within 4 units in the last place: Eigen's `ptanh`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn tanh(x: f32) -> f32 {
    const BOUND: f32 = 7.905_311_1;
    let x = if x < -BOUND { -BOUND } else { x };
    let x = if x > BOUND { BOUND } else { x };
    let square = x * x;
    let p = square.mul_add(-2.760_768_477_42e-16, 2.000_187_904_82e-13);
    let p = square.mul_add(p, -8.604_671_522_14e-11);
    let p = square.mul_add(p, 5.122_297_090_37e-8);
    let p = square.mul_add(p, 1.485_722_357_18e-5);
    let p = square.mul_add(p, 6.372_619_288_75e-4);
    let p = square.mul_add(p, 4.893_524_558_92e-3);
    let q = square.mul_add(1.198_258_394_67e-6, 1.185_347_056_87e-4);
    let q = square.mul_add(q, 2.268_434_632_44e-3);
    let q = square.mul_add(q, 4.893_525_185_54e-3);
    x * p / q
}

kernel! {
    /// Turns rows of scores into probabilities; those of keys that a query does not see become 0.
    pub(super) fn softmax_rows(scores: &mut [f32], log_sums: &mut [f32], rows: Rows, how: Scores) {
        for (i, (row, log_sum)) in scores.chunks_exact_mut(rows.seen).zip(log_sums).enumerate() {
            let seen = rows.of(i);
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
            let row = &mut row[seen];
            let scale = match how.softcap {
                Some(cap) => {
                    let inner = how.scale / cap;
                    row.iter_mut().for_each(|x| *x = cap * tanh(*x * inner));
                    1.0
                }
                None => how.scale,
            };
            // The largest scaled score, whatever the sign of the scale.
            let highest = if scale >= 0.0 {
                max(row) * scale
            } else {
                row.iter().fold(f32::NEG_INFINITY, |a, x| a.max(x * scale))
            };
            let total = sum_exp_in_place(row, scale, highest);
            let inverse = 1.0 / total;
            row.iter_mut().for_each(|x| *x *= inverse);
            *log_sum = highest + total.ln();
        }
    }

    /// Turns rows of scores into probabilities, and rows of the probabilities' gradients into the scores' gradients.
    pub(super) fn softmax_rows_back(
        p: &mut [f32],
        ds: &mut [f32],
        log_sums: &[f32],
        deltas: &[f32],
        rows: Rows,
        how: Scores,
    ) {
        let both = p.chunks_exact_mut(rows.seen).zip(ds.chunks_exact_mut(rows.seen));
        for (i, (((p, ds), &log_sum), &delta)) in both.zip(log_sums).zip(deltas).enumerate() {
            let seen = rows.of(i);
            for row in [&mut *p, &mut *ds] {
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
            }
            let both = p[seen.clone()].iter_mut().zip(&mut ds[seen]);
            if let Some(cap) = how.softcap {
                let inner = how.scale / cap;
                for (p, ds) in both {
                    let t = tanh(*p * inner);
                    *p = probability(t.mul_add(cap, -log_sum));
                    *ds = *p * (*ds - delta) * (1.0 - t * t) * how.scale;
                }
            } else {
                for (p, ds) in both {
                    *p = probability(p.mul_add(how.scale, -log_sum));
                    *ds = *p * (*ds - delta) * how.scale;
                }
            }
        }
    }

    pub(super) fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b, 0.0)
    }
}

/// Replaces each x by e^(scale x - shift) and returns the sum of them.
#[inline(always)]
fn sum_exp_in_place(row: &mut [f32], scale: f32, shift: f32) -> f32 {
    row.iter_mut().for_each(|x| *x = probability(x.mul_add(scale, -shift)));
    sum(row)
}
