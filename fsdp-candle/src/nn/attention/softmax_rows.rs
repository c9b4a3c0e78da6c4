//! The softmax of attention scores, row by row, and its way back.

use super::super::cpu::simd::{dot, kernel, max, probability, sum};

kernel! {
    /// Turns rows of `seen` scores into probabilities; row `i` sees `seen_first + i` of them and the rest become 0.
    pub(super) fn softmax_rows(scores: &mut [f32], log_sums: &mut [f32], seen: usize, seen_first: usize, scale: f32) {
        for (i, (row, log_sum)) in scores.chunks_exact_mut(seen).zip(log_sums).enumerate() {
            let (row, unseen) = row.split_at_mut(seen_first + i);
            // The largest scaled score, whatever the sign of the scale.
            let highest = if scale >= 0.0 {
                max(row) * scale
            } else {
                row.iter().fold(f32::NEG_INFINITY, |a, x| a.max(x * scale))
            };
            let total = sum_exp_in_place(row, scale, highest);
            let inverse = 1.0 / total;
            row.iter_mut().for_each(|x| *x *= inverse);
            unseen.fill(0.0);
            *log_sum = highest + total.ln();
        }
    }

    /// Turns rows of scores into probabilities, and rows of the probabilities' gradients into the scores' gradients.
    pub(super) fn softmax_rows_back(
        p: &mut [f32],
        ds: &mut [f32],
        log_sums: &[f32],
        deltas: &[f32],
        seen: usize,
        seen_first: usize,
        scale: f32,
    ) {
        let rows = p.chunks_exact_mut(seen).zip(ds.chunks_exact_mut(seen));
        for (i, (((p, ds), &log_sum), &delta)) in rows.zip(log_sums).zip(deltas).enumerate() {
            let (p, p_unseen) = p.split_at_mut(seen_first + i);
            let (ds, ds_unseen) = ds.split_at_mut(seen_first + i);
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = probability(p.mul_add(scale, -log_sum));
                *ds = *p * (*ds - delta) * scale;
            }
            p_unseen.fill(0.0);
            ds_unseen.fill(0.0);
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
