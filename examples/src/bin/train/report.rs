//! Output of a run: measurements of each step, and the error for a step with infinite or NaN values.

use std::fmt::Write;

use candle_core::backprop::GradStore;
use fsdp_candle::{Error, NonFinite, ShardedOptimizer, ShardedVarMap, ValuesOf, World, check_finite};
use fsdp_train::console::Console;
use fsdp_train::metrics::{DataRecord, EvalRecord, MetricsFile, Rewards, SourceRecord, StepRecord};
use fsdp_train::progress::Progress;
use fsdp_train::tensorboard::EventFile;
use indicatif::HumanCount;

use crate::args::Args;
use crate::checkpoint::Checkpoints;
use crate::task::Evaluated;

/// Outputs of rank 0's measurements: --metrics, --tensorboard, and progress on stderr.
pub(crate) struct StepLog {
    metrics: Option<MetricsFile>,
    events: Option<EventFile>,
    progress: Progress,
    use_of_data: UseOfData,
}

/// Use of corpora since the start of this process.
#[derive(Default)]
struct UseOfData {
    last: Option<DataRecord>,
    waited: f64,
    time: f64,
}

impl StepLog {
    /// Opens the files of a run that has taken `done` steps.
    pub(crate) fn open(args: &Args, done: usize) -> anyhow::Result<Self> {
        Ok(StepLog {
            metrics: args.metrics.as_deref().map(|path| MetricsFile::open(path, done)).transpose()?,
            events: args.tensorboard.as_deref().map(|directory| EventFile::open(directory, done)).transpose()?,
            progress: Progress::new(done, args.steps),
            use_of_data: UseOfData::default(),
        })
    }

    /// Writes a step. Stops writing to a file that fails, with a warning: training goes on.
    pub(crate) fn step(&mut self, record: &StepRecord) {
        write_or_give_up(&mut self.metrics, |metrics| metrics.write(record));
        write_or_give_up(&mut self.events, |events| events.write(record));
        self.progress.step(record);
        if let Some(data) = &record.data {
            self.use_of_data.waited += data.data_wait_s;
            self.use_of_data.time += record.step_time_s;
            self.use_of_data.last = Some(data.clone());
        }
    }

    /// Describes the use of corpora, if `--data` is one, once the display of progress is over.
    pub(crate) fn data_summary(self) -> Option<String> {
        let UseOfData { last, waited, time } = self.use_of_data;
        let sources = last?.sources.into_iter().map(|SourceRecord { name, tokens, epochs, .. }| {
            format!("{} tokens of {name} (epoch {})", HumanCount(tokens), epochs + 1)
        });
        let sources = sources.collect::<Vec<_>>().join(", ");
        Some(format!("data: {sources}; waiting for it took {:.1} % of the steps", 100. * waited / time))
    }

    /// Writes an evaluation, as [`StepLog::step`] writes a step.
    pub(crate) fn eval(&mut self, evaluated: &Evaluated) {
        match evaluated {
            Evaluated::Language(record) => {
                write_or_give_up(&mut self.metrics, |metrics| metrics.write(record));
                write_or_give_up(&mut self.events, |events| events.write_eval(record));
                let EvalRecord { step, eval_loss, eval_perplexity, eval_tokens, rewards, .. } = record;
                let tokens = HumanCount(*eval_tokens);
                let more = match (eval_perplexity, rewards.map(Rewards::from)) {
                    (_, Some(Rewards { accuracies, margins, .. })) => {
                        format!(", reward accuracy {accuracies:.2}, margin {margins:.4}")
                    }
                    (Some(perplexity), None) => format!(", perplexity {perplexity:.2}"),
                    (None, None) => String::new(),
                };
                self.note(*step, &format!("evaluation loss {eval_loss:.4}{more}, over {tokens} tokens"));
            }
            Evaluated::Texts(record) => {
                write_or_give_up(&mut self.metrics, |metrics| metrics.write(record));
                write_or_give_up(&mut self.events, |events| events.write_task_eval(record));
                let scores = record.scores().into_iter();
                let scores: String =
                    scores.map(|(name, score)| format!(", {} {score:.4}", name.replace('_', " "))).collect();
                let (loss, records) = (record.eval_loss, HumanCount(record.eval_records));
                self.note(record.step, &format!("evaluation loss {loss:.4}{scores}, over {records} records"));
            }
        }
    }

    /// Prints a line about a step.
    pub(crate) fn note(&self, step: usize, text: &str) {
        self.progress.note(&format!("step {step}: {text}"));
    }
}

fn write_or_give_up<T>(file: &mut Option<T>, write: impl FnOnce(&mut T) -> anyhow::Result<()>) {
    if let Some(Err(error)) = file.as_mut().map(write) {
        *file = None;
        Console::Stderr.line(format_args!("warning: {error:#}; training continues without writing there"));
    }
}

/// Advice for values that grow without bound.
pub(crate) const ADVICE: &str = "Lower --lr, raise --warmup-steps, or look at the data of that step";

/// Returns the non-finite values among `of`, the same on every rank. Collective.
pub(crate) fn find_non_finite(vars: &ShardedVarMap, of: &[ValuesOf<'_>]) -> anyhow::Result<Option<NonFinite>> {
    match check_finite(vars, of) {
        Ok(()) => Ok(None),
        Err(Error::NonFinite(found)) => Ok(Some(found)),
        Err(error) => Err(error.into()),
    }
}

/// Advice before any step was taken.
const ADVICE_BEFORE_STEPS: &str = "No step has been taken, so --lr is not the cause: look at the model's weights, its \
                                   dtype and the data";

/// Advice for values that are too large for f16.
const ADVICE_F16: &str = "f16 ends at 65504: pass --param-dtype bf16, which has the range of f32. ";

/// A step whose loss or gradient norm is not finite, and which is not taken, or was taken in backward.
pub(crate) struct NonFiniteStep<'a> {
    pub(crate) step: usize,
    /// Mean loss over all ranks.
    pub(crate) loss: f64,
    /// Loss of this rank.
    pub(crate) own_loss: f64,
    pub(crate) norm: f64,
    /// `None` if the optimizer stepped in backward.
    pub(crate) grads: Option<&'a GradStore>,
    /// Loss scale of a run in f16.
    pub(crate) loss_scale: Option<f64>,
}

impl NonFiniteStep<'_> {
    /// Returns the same error message on every rank: the values, the ranks, the last good checkpoint and advice.
    /// Collective.
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
        let mut text = match grads {
            Some(_) => format!("step {step} was not taken: "),
            None => format!("step {step} was taken in backward (--optimizer-in-backward): "),
        };
        if ranks.is_empty() {
            write!(text, "the loss is {loss}, and the gradients' norm is {norm}{at_scale}")?;
            if let Some(grads) = grads {
                let found = find_non_finite(vars, &[ValuesOf::Gradients(grads)])?;
                write!(text, ": {}", found.map_or_else(|| "each value is finite".into(), |found| found.to_string()))?;
            }
        } else {
            let on =
                if ranks.len() == world.size() { "every rank".into() } else { format!("rank {}", ranks.join(", ")) };
            write!(text, "the loss is {loss} (on {on}), and the gradients' norm is {norm}{at_scale}")?;
        }
        match find_non_finite(vars, &[ValuesOf::Parameters, ValuesOf::Moments(optim)])? {
            Some(found) => {
                let since = checkpoints.finite_after;
                write!(text, ". The weights became non-finite after step {since}: {found}")?;
            }
            None if grads.is_none() => text.push_str(". The weights are finite"),
            None => write!(text, ". The weights are those of step {} and finite", step - 1)?,
        }
        let advice = if step == 1 && grads.is_some() { ADVICE_BEFORE_STEPS } else { ADVICE };
        let of_f16 = loss_scale.map_or("", |_| ADVICE_F16);
        write!(text, ". {}. {of_f16}{advice}", checkpoints.newest_checkpoint())?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_file_is_not_written_again() {
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
