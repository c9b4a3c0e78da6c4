//! Learning rate schedules.

use std::f64::consts::PI;

/// Learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LrSchedule {
    /// Constant at the peak.
    Constant,
    /// Half a cosine wave from the peak to 0 at the end of the run.
    #[default]
    Cosine,
    /// Straight line from the peak to 0 at the end of the run.
    Linear,
}

/// Learning rate of every step: a linear warm-up to the peak, then a [`LrSchedule`].
///
/// Differs in one point from `get_*_schedule_with_warmup` of Hugging Face transformers, whose first step has the rate 0
/// and changes nothing. Here the first of w warm-up steps has 1/w of the peak, and the last the peak.
///
/// ```
/// use fsdp_train::schedule::{LrSchedule, Schedule};
///
/// let schedule = Schedule::new(LrSchedule::Linear, 1.0, 2, 6);
/// assert_eq!([1, 2, 3, 4, 5, 6].map(|step| schedule.lr(step)), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    kind: LrSchedule,
    peak_lr: f64,
    warmup_steps: usize,
    total_steps: usize,
}

impl Schedule {
    /// Creates a schedule that reaches `peak_lr` after `warmup_steps` (0 starts there). `total_steps` includes the
    /// warm-up.
    pub fn new(kind: LrSchedule, peak_lr: f64, warmup_steps: usize, total_steps: usize) -> Self {
        Schedule { kind, peak_lr, warmup_steps, total_steps }
    }

    /// Returns the learning rate of `step`, counted from 1. Steps past the end have the rate of the end.
    pub fn lr(&self, step: usize) -> f64 {
        let taken = step.saturating_sub(1);
        self.peak_lr
            * if taken < self.warmup_steps { (taken + 1) as f64 / self.warmup_steps as f64 } else { self.decay(taken) }
    }

    fn decay(&self, taken: usize) -> f64 {
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let progress = ((taken - self.warmup_steps) as f64 / length as f64).min(1.0);
        match self.kind {
            LrSchedule::Constant => 1.0,
            LrSchedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            LrSchedule::Linear => 1.0 - progress,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: LrSchedule, warmup_steps: usize, total_steps: usize) -> Schedule {
        Schedule::new(kind, 1e-3, warmup_steps, total_steps)
    }

    #[test]
    fn constant_without_warmup_is_exact() {
        let schedule = schedule(LrSchedule::Constant, 0, 20);
        assert!((1..=20).all(|step| schedule.lr(step) == 1e-3));
    }

    #[test]
    fn warmup_starts_above_zero_and_reaches_the_peak() {
        for kind in [LrSchedule::Constant, LrSchedule::Cosine, LrSchedule::Linear] {
            let schedule = schedule(kind, 10, 100);
            for step in 1..=10 {
                assert_eq!(schedule.lr(step), 1e-3 * (step as f64 / 10.0));
            }
            assert_eq!(schedule.lr(11), 1e-3, "{kind:?}");
        }
    }

    /// Values of transformers' `get_cosine_schedule_with_warmup(2, 10)` and its linear counterpart.
    #[test]
    fn decay_matches_transformers() {
        for (taken, factor) in
            [(2, 1.0), (4, 0.853_553_390_593_273_7), (6, 0.5), (8, 0.146_446_609_406_726_3), (10, 0.0)]
        {
            assert!((schedule(LrSchedule::Cosine, 2, 10).lr(taken + 1) - 1e-3 * factor).abs() < 1e-18, "{taken}");
        }
        for (taken, factor) in [(2, 1.0), (3, 0.875), (6, 0.5), (9, 0.125), (10, 0.0)] {
            assert!((schedule(LrSchedule::Linear, 2, 10).lr(taken + 1) - 1e-3 * factor).abs() < 1e-18, "{taken}");
        }
    }

    #[test]
    fn rates_stay_between_zero_and_the_peak() {
        for kind in [LrSchedule::Constant, LrSchedule::Cosine, LrSchedule::Linear] {
            for (warmup, total) in [(0, 0), (0, 1), (1, 1), (10, 5), (5, 10)] {
                for step in [0, 1, 2, 5, 6, 11, 1000, usize::MAX] {
                    let lr = schedule(kind, warmup, total).lr(step);
                    assert!((0.0..=1e-3).contains(&lr), "{kind:?} {warmup} {total} {step}: {lr}");
                }
            }
        }
    }
}
