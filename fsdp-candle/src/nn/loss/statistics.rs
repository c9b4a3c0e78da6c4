//! What a loss needs to know of each row of logits: where the vocabulary is cut, two small collectives bring the parts
//! together.

use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::Result;
use fsdp_core::process_group::{Signature, Subject};
use fsdp_core::{ProcessGroup, ReduceOp};

use super::super::cpu::parallel::map_rows;
use super::super::cpu::simd::{kernel, max, sum, sum_exp};
use super::options::Rows;
use crate::collectives::reduced_values;

/// Numbers of a row: the largest logit, the sum of `e^(logit - largest)`, the target's logit, the sum of the logits.
const NUMBERS: usize = 4;

/// The numbers of each row; zeros of those that are ignored.
pub(super) struct Statistics(Vec<f32>);

impl Statistics {
    pub(super) fn new(rows: usize) -> Self {
        Statistics(vec![0.; NUMBERS * rows])
    }

    /// Looks at the logits of as many rows as there are targets, which begin with row `first`.
    pub(super) fn look(&mut self, first: usize, logits: &[f32], targets: &[Option<u32>], rows: &Rows) {
        let own = &mut self.0[NUMBERS * first..][..NUMBERS * targets.len()];
        let (columns, smooths) = (rows.columns, rows.smoothing > 0.);
        map_rows(own, NUMBERS, columns, |first, own| {
            look(own, &logits[first * columns..], &targets[first..], columns, smooths);
        });
        for (row, (numbers, target)) in own.chunks_exact_mut(NUMBERS).zip(targets).enumerate() {
            if let Some(column) = target.and_then(|target| rows.column(target)) {
                numbers[2] = logits[row * columns + column];
            }
        }
    }

    /// The sum of the rows' losses, and each row's `log sum exp`, of all classes.
    pub(super) fn losses(mut self, rows: &Rows) -> Result<(f64, Vec<f32>)> {
        if let Some(ranks) = &rows.ranks {
            self.join(rows, ranks)?;
        }
        let (mut hits, mut spread) = (0f64, 0f64);
        let numbers = self.0.chunks_exact(NUMBERS).zip(&rows.targets);
        let log_sums = numbers.map(|(numbers, target)| {
            if target.is_none() {
                return 0.;
            }
            let log_sum = numbers[0] + numbers[1].ln();
            hits += f64::from(log_sum - numbers[2]);
            spread += f64::from(log_sum - numbers[3] / rows.classes as f32);
            log_sum
        });
        let log_sums = log_sums.collect();
        let total = if rows.smoothing > 0. { (1. - rows.smoothing) * hits + rows.smoothing * spread } else { hits };
        Ok((total, log_sums))
    }

    /// Puts the parts of all ranks together: the largest of the largest, and the sums of the rest.
    fn join(&mut self, rows: &Rows, ranks: &ProcessGroup) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let ranks = ranks.signed(signature(rows));
        let own: Vec<f32> = self.0.chunks_exact(NUMBERS).map(|numbers| numbers[0]).collect();
        let largest = reduced_values(own, ReduceOp::Max, &ranks)?;
        let sums = if rows.smoothing > 0. { NUMBERS - 1 } else { NUMBERS - 2 };
        let mut terms = Vec::with_capacity(sums * largest.len());
        for (numbers, largest) in self.0.chunks_exact(NUMBERS).zip(&largest) {
            let of_part = if numbers[1] == 0. { 0. } else { numbers[1] * (numbers[0] - largest).exp() };
            terms.push(of_part);
            terms.extend_from_slice(&numbers[2..=sums]);
        }
        let terms = reduced_values(terms, ReduceOp::Sum, &ranks)?;
        for ((numbers, largest), terms) in self.0.chunks_exact_mut(NUMBERS).zip(largest).zip(terms.chunks_exact(sums)) {
            numbers[0] = largest;
            numbers[1..=sums].copy_from_slice(terms);
        }
        Ok(())
    }
}

/// What ranks must agree about: how the vocabulary is cut, and the targets.
pub(super) fn signature(rows: &Rows) -> Signature {
    let mut hash = DefaultHasher::new();
    rows.targets.hash(&mut hash);
    let subject = Subject::new(format!("cross_entropy over {} columns on each rank", rows.columns), []);
    Signature::new(&subject, [])
        .with_how(format!(", with targets of hash {:016x}", hash.finish()))
        .with_advice("Ranks that hold parts of one vocabulary must get the same batch, and parts of one size")
}

kernel! {
    /// All numbers but the target's logit.
    fn look(numbers: &mut [f32], logits: &[f32], targets: &[Option<u32>], columns: usize, smooths: bool) {
        let rows = numbers.chunks_exact_mut(NUMBERS).zip(logits.chunks_exact(columns));
        for ((numbers, row), target) in rows.zip(targets) {
            if target.is_some() {
                let largest = max(row);
                numbers[0] = largest;
                // A part of a vocabulary may be masked as a whole.
                let masked = largest == f32::NEG_INFINITY && row.iter().all(|x| *x == f32::NEG_INFINITY);
                numbers[1] = if masked { 0. } else { sum_exp(row, 1.0, largest) };
                if smooths {
                    numbers[3] = sum(row);
                }
            }
        }
    }
}
