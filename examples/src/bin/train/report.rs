//! What each step measured, on its way to people: the file of `--metrics`, the curves of `--tensorboard`, and lines or
//! a bar on stderr.
//! Numbers that are infinite or not a number: found before they get into the weights, a checkpoint or an export.
//! A step whose numbers are infinite or not a number, told so that a person knows what to do.

use std::fmt::Write;

use candle_core::backprop::GradStore;
use fsdp_candle::{Error, NonFinite, ShardedOptimizer, ShardedVarMap, ValuesOf, World, check_finite};
use fsdp_examples::console::Console;
use fsdp_examples::metrics::{EvalRecord, MetricsFile, StepRecord};
use fsdp_examples::progress::Progress;
use fsdp_examples::tensorboard::EventFile;
use indicatif::HumanCount;

use crate::args::Args;
use crate::checkpoint::Checkpoints;

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

/// What helps against numbers that grow beyond all bounds.
pub(crate) const ADVICE: &str = "Lower --lr, raise --warmup-steps, or look at the data of that step";

/// What of these is not finite, told on every rank. Collective.
pub(crate) fn find_non_finite(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> anyhow::Result<Option<NonFinite>> {
    match check_finite(vars, of) {
        Ok(()) => Ok(None),
        Err(Error::NonFinite(found)) => Ok(Some(found)),
        Err(error) => Err(error.into()),
    }
}

/// What helps when nothing has been learnt yet.
const ADVICE_BEFORE_STEPS: &str = "No step has been taken yet, so it is no matter of --lr: the model's weights are too \
                                   large for its dtype, or the data is to blame";

/// What helps against numbers that are too large for f16 alone.
const ADVICE_F16: &str = "f16 ends at 65504: pass --param-dtype bf16, which has the range of f32. ";

/// A step that is not taken, because its loss or the norm of its gradients is not finite.
pub(crate) struct NonFiniteStep<'a> {
    pub(crate) step: usize,
    /// The mean over all ranks.
    pub(crate) loss: f64,
    /// This rank's.
    pub(crate) own_loss: f64,
    pub(crate) norm: f64,
    pub(crate) grads: &'a GradStore,
    /// Of a run in f16.
    pub(crate) loss_scale: Option<f64>,
}

impl NonFiniteStep<'_> {
    /// What is wrong, where, since when, and what to do, in the same words on every rank. Collective.
    pub(crate) fn explain(
        &self,
        world: &World,
        vars: &ShardedVarMap,
        optim: &dyn ShardedOptimizer,
        checkpoints: &mut Checkpoints<'_>,
    ) -> anyhow::Result<String> {
        let NonFiniteStep { step, loss, own_loss, norm, grads, loss_scale } = *self;
        let is_bad = world.group().gather_values(vec![u8::from(!own_loss.is_finite())])?;
        let ranks: Vec<String> =
            (0..is_bad.len()).filter(|&rank| is_bad[rank] > 0).map(|rank| rank.to_string()).collect();

        let at_scale = loss_scale.map_or(String::new(), |scale| format!(" at a loss scale of {scale}"));
        let mut text = format!("step {step} was not taken: ");
        if ranks.is_empty() {
            let found = find_non_finite(vars, &[ValuesOf::Gradients(grads)])?;
            let found = found.map_or_else(|| "each value is finite".into(), |found| found.to_string());
            write!(text, "the loss is {loss}, and the gradients' norm is {norm}{at_scale}: {found}")?;
        } else {
            let on =
                if ranks.len() == world.size() { "every rank".into() } else { format!("rank {}", ranks.join(", ")) };
            write!(text, "the loss is {loss} (on {on}), and the gradients' norm is {norm}{at_scale}")?;
        }
        match find_non_finite(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
            Some(found) => {
                let since = checkpoints.finite_after();
                write!(text, ". Before that, the weights had become so in a step after step {since}: {found}")?;
            }
            None => write!(text, ". The weights are those of step {} and finite", step - 1)?,
        }
        let advice = if step == 1 { ADVICE_BEFORE_STEPS } else { ADVICE };
        let of_f16 = loss_scale.map_or("", |_| ADVICE_F16);
        write!(text, ". {}. {of_f16}{advice}", checkpoints.newest_checkpoint())?;
        Ok(text)
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
