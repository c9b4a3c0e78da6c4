//! What each step measured, on its way to people: the file of `--metrics`, the curves of `--tensorboard`, and lines or
//! a bar on stderr.

use fsdp_examples::console::Console;
use fsdp_examples::metrics::{EvalRecord, MetricsFile, StepRecord};
use fsdp_examples::progress::Progress;
use fsdp_examples::tensorboard::EventFile;
use indicatif::HumanCount;

use crate::args::Args;

/// Where the measurements go. For rank 0 to have.
pub(crate) struct StepLog {
    metrics: Option<MetricsFile>,
    events: Option<EventFile>,
    progress: Progress,
}

impl StepLog {
    /// Opens the files that are asked for, of a run that has `done` steps behind it.
    ///
    /// # Errors
    /// When one can't be written.
    pub(crate) fn open(args: &Args, done: usize) -> anyhow::Result<Self> {
        Ok(StepLog {
            metrics: args.metrics.as_deref().map(|path| MetricsFile::open(path, done)).transpose()?,
            events: args.tensorboard.as_deref().map(|directory| EventFile::open(directory, done)).transpose()?,
            progress: Progress::new(done, args.steps),
        })
    }

    /// Notes a step. A file that can't be written any more is given up, with a word: the training is worth more than
    /// it.
    pub(crate) fn step(&mut self, record: &StepRecord) {
        write_or_give_up(&mut self.metrics, |metrics| metrics.write(record));
        write_or_give_up(&mut self.events, |events| events.write(record));
        self.progress.step(record);
    }

    /// Notes an evaluation, as [`StepLog::step`] does a step.
    pub(crate) fn eval(&mut self, record: &EvalRecord) {
        write_or_give_up(&mut self.metrics, |metrics| metrics.write(record));
        write_or_give_up(&mut self.events, |events| events.write_eval(record));
        let EvalRecord { step, eval_loss, eval_perplexity, eval_tokens, .. } = record;
        let tokens = HumanCount(*eval_tokens);
        let text = format!("evaluation loss {eval_loss:.4}, perplexity {eval_perplexity:.2}, over {tokens} tokens");
        self.note(*step, &text);
    }

    /// Tells people something about a step.
    pub(crate) fn note(&self, step: usize, text: &str) {
        self.progress.note(&format!("step {step}: {text}"));
    }

    /// Leaves the bar as it stands.
    pub(crate) fn finish(self) {
        self.progress.finish();
    }
}

fn write_or_give_up<T>(file: &mut Option<T>, write: impl FnOnce(&mut T) -> anyhow::Result<()>) {
    if let Some(Err(error)) = file.as_mut().map(write) {
        *file = None;
        Console::Stderr.line(format_args!("warning: {error:#}: nothing more is written there, training goes on"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_fails_is_given_up_and_not_tried_again() {
        let (mut file, mut calls) = (Some(()), 0);
        for step in 0..4 {
            write_or_give_up(&mut file, |()| {
                calls += 1;
                anyhow::ensure!(step < 1, "the disk is full");
                Ok(())
            });
        }
        assert_eq!((file, calls), (None, 2));
    }
}
