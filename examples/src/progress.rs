//! Progress of a run on stderr: a bar on a terminal, plain lines elsewhere.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use indicatif::{FormattedDuration, HumanCount, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use crate::{
    console::Console,
    metrics::{Rewards, StepRecord},
};

const TEMPLATE: &str = "step {pos}/{len} [{wide_bar:.cyan/blue}] {msg}  ETA {eta}";

/// Progress display of a run. Plain lines appear for the first step, the last step, and every 5 % of the run.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    steps: usize,
    time_s: f64,
}

impl Progress {
    /// Shows the steps `done + 1` to `total`. Only one rank should have it, because lines of several would mix.
    pub fn new(done: usize, total: usize) -> Self {
        let bar = io::stderr().is_terminal().then(|| bar(ProgressDrawTarget::stderr(), done, total));
        Progress { bar, total, steps: 0, time_s: 0.0 }
    }

    /// Shows a finished step.
    pub fn step(&mut self, record: &StepRecord) {
        self.steps += 1;
        self.time_s += record.step_time_s;
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}  {} tokens/s", loss(record), tokens_per_s(record)));
            bar.set_position(record.step as u64);
        } else if self.steps == 1 || is_line_due(record.step, self.total) {
            Console::Stderr.line(self.line(record));
        }
    }

    /// Prints a line, above the bar if there is one.
    pub fn note(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| Console::Stderr.line(line)),
            None => Console::Stderr.line(line),
        }
    }

    fn line(&self, record: &StepRecord) -> String {
        let left = self.total.saturating_sub(record.step) as f64 * self.time_s / self.steps.max(1) as f64;
        let left = Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX).as_secs();
        format!(
            "step {:>width$}/{}  {}  grad norm {:.4}  lr {:.3e}  {} tokens/s  ETA {}",
            record.step,
            self.total,
            loss(record),
            record.grad_norm,
            record.lr,
            tokens_per_s(record),
            FormattedDuration(Duration::from_secs(left)),
            width = self.total.to_string().len(),
        )
    }
}

/// Leaves the bar on the terminal, so that later messages are printed below it.
impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

fn bar(target: ProgressDrawTarget, done: usize, total: usize) -> ProgressBar {
    // A test checks the template.
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(total as u64), target)
        .with_style(style.progress_chars("=> "))
        .with_finish(ProgressFinish::Abandon);
    bar.set_position(done as u64);
    // The ETA counts only the steps of this process.
    bar.reset_eta();
    bar.tick();
    bar
}

fn is_line_due(step: usize, total: usize) -> bool {
    step == total || step.is_multiple_of((total / 20).max(1))
}

/// Formats the loss, and the rewards of preference tuning.
fn loss(record: &StepRecord) -> String {
    let rewards = record.rewards.map_or_else(String::new, |Rewards { accuracies, margins, .. }| {
        format!("  reward accuracy {accuracies:.2}  margin {margins:.4}")
    });
    format!("loss {:.4}{rewards}", record.loss)
}

fn tokens_per_s(record: &StepRecord) -> HumanCount {
    HumanCount(record.tokens_per_s as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: usize) -> StepRecord {
        StepRecord {
            step,
            loss: 5.545_177,
            grad_norm: 1.25,
            lr: 1e-3,
            step_time_s: 2.0,
            tokens_per_s: 12_345.6,
            peak_mem_bytes: 0,
            shard_bytes: 0,
            rewards: None,
            experts: None,
            data: None,
        }
    }

    #[test]
    fn lines_appear_every_twentieth_and_at_the_end() {
        let due = |total: usize| (1..=total).filter(|&step| is_line_due(step, total)).collect::<Vec<_>>();
        assert_eq!(due(3), [1, 2, 3]);
        assert_eq!(due(150).len(), 22);
        assert_eq!(due(150)[..2], [7, 14]);
        assert_eq!(due(150).last(), Some(&150));
        assert_eq!(due(400), (1..=20).map(|n| n * 20).collect::<Vec<_>>());
    }

    #[test]
    fn lines_hold_loss_speed_and_eta() {
        let mut progress = Progress { bar: Some(ProgressBar::hidden()), total: 150, steps: 0, time_s: 0.0 };
        progress.step(&record(1));
        progress.step(&StepRecord { step_time_s: 1.0, ..record(2) });
        assert_eq!(
            progress.line(&record(2)),
            "step   2/150  loss 5.5452  grad norm 1.2500  lr 1.000e-3  12,345 tokens/s  ETA 00:03:42"
        );
    }

    #[test]
    fn rewards_follow_the_loss() {
        let rewards = Some(Rewards { chosen: 1., rejected: 0.5, accuracies: 0.75, margins: 0.5 });
        assert_eq!(loss(&StepRecord { rewards, ..record(1) }), "loss 5.5452  reward accuracy 0.75  margin 0.5000");
    }

    #[test]
    fn nan_is_printed() {
        let mut progress = Progress { bar: Some(ProgressBar::hidden()), total: 5, steps: 0, time_s: 0.0 };
        progress.step(&StepRecord { loss: f64::NAN, step_time_s: f64::INFINITY, tokens_per_s: f64::NAN, ..record(1) });
        assert!(progress.line(&StepRecord { loss: f64::NAN, ..record(9) }).contains("loss NaN"));
        assert!(progress.line(&record(1)).contains("ETA"));
    }

    #[test]
    fn bar_follows_the_steps() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
        let bar = bar(ProgressDrawTarget::hidden(), 10, 20);
        assert_eq!((bar.position(), bar.length()), (10, Some(20)));
        let mut progress = Progress { bar: Some(bar.clone()), total: 20, steps: 0, time_s: 0.0 };
        progress.step(&record(11));
        assert_eq!((bar.position(), bar.message().as_str()), (11, "loss 5.5452  12,345 tokens/s"));
        drop(progress);
        assert!(bar.is_finished());
        assert_eq!(bar.position(), 11);
    }
}
