//! `--eval`, `--gradcheck`, and the samples that a run prints.

use std::time::Instant;

use anyhow::Context;
use candle_core::Tensor;
use fsdp_candle::{ContextParallel, FsdpModule, GradcheckOptions, ReduceOp, World, gradcheck, no_grad};
use fsdp_train::console::Console;
use fsdp_train::data::{Batches, Text};
use fsdp_train::generate::{SampleOptions, fill, sample};
use fsdp_train::metrics::{EvalRecord, Rewards};
use fsdp_train::models::{Batch, LanguageModel};

use crate::args::Args;
use crate::objective::Objective;

/// Steps after which the model is evaluated.
pub(crate) struct Schedule {
    every: usize,
    last: usize,
}

impl Schedule {
    pub(crate) fn new(args: &Args) -> Self {
        Schedule { every: args.eval_every.unwrap_or(args.steps), last: args.steps }
    }

    /// Returns whether the model is evaluated after `step` steps.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        step.is_multiple_of(self.every) || step == self.last
    }
}

/// Evaluation data and schedule.
pub(crate) struct Evaluation {
    pub(crate) batches: Batches,
    pub(crate) schedule: Schedule,
    tensor: usize,
    context: Option<ContextParallel>,
}

impl Evaluation {
    pub(crate) fn new(args: &Args, batches: Batches, context: Option<ContextParallel>) -> Self {
        Evaluation { batches, schedule: Schedule::new(args), tensor: args.tensor_parallel, context }
    }

    /// Measures the mean loss over all counted targets of the data, the same on every rank. Collective.
    pub(crate) fn run(
        &self,
        model: &FsdpModule<LanguageModel>,
        objective: &Objective,
        step: usize,
        world: &World,
    ) -> anyhow::Result<EvalRecord> {
        let start = Instant::now();
        let (mut sum, mut counted, mut weight) = (0., 0, 0);
        let mut rewards = Rewards::default();
        for round in 0..self.batches.rounds() {
            let batch = Batch::new(self.batches.pass(round)?, world.device(), self.context.as_ref())?;
            (counted, weight) = (counted + batch.counted, weight + batch.terms());
            // A rank without a sequence computes on an empty batch, because all ranks must gather the parameters.
            let (loss, of_batch) = objective.evaluate(model, &batch).context("can't evaluate")?;
            sum += f64::from(loss.to_scalar::<f32>()?);
            rewards = rewards + of_batch.unwrap_or_default();
        }
        let own = [&[sum, counted as f64, weight as f64][..], &rewards.values()].concat();
        let sums = world.all_reduce(&own, ReduceOp::Sum)?;
        let eval_loss = sums[0] / sums[2];
        let is_tokens = matches!(objective, Objective::Tokens);
        let rewards = Rewards::from(std::array::from_fn(|i| sums[3 + i] / sums[2]));
        Ok(EvalRecord {
            step,
            eval_loss,
            eval_perplexity: is_tokens.then(|| eval_loss.exp()),
            // Tensor-parallel ranks count the same tokens.
            eval_tokens: sums[1] as u64 / self.tensor as u64,
            eval_time_s: start.elapsed().as_secs_f64(),
            rewards: (!is_tokens).then(|| rewards.into()),
        })
    }
}

/// Number of prompt tokens in the sample of a run on a stream.
const PROMPT_TOKENS: usize = 16;
const SAMPLE_TOKENS: usize = 48;
/// Tokens that the model sees when it continues a sample.
pub(crate) const SAMPLE_CONTEXT: usize = 64;
/// Distance between masked tokens in the sample of a masked model.
const MASK_EVERY: usize = 8;
/// Maximal number of tokens in an answer.
const ANSWER_TOKENS: usize = 128;

/// A model with its tokenizer, for samples.
pub(crate) struct Sampler<'a> {
    pub(crate) model: &'a FsdpModule<LanguageModel>,
    pub(crate) text: &'a Text,
    /// Maximal sequence length of the model.
    pub(crate) positions: usize,
}

impl Sampler<'_> {
    /// Continues the first tokens of the stream. For a masked model, fills in masked tokens. Collective.
    pub(crate) fn continue_stream(&self, batches: &Batches, world: &World) -> anyhow::Result<String> {
        let context = self.positions.min(SAMPLE_CONTEXT);
        if let Some(masking) = batches.masking() {
            let prompt = batches.prompt(context)?;
            let hidden: Vec<usize> = (MASK_EVERY / 2..prompt.len()).step_by(MASK_EVERY).collect();
            let filled = no_grad(|| fill(self.model, &prompt, &hidden, masking.mask_token, world.device()))
                .context("can't fill in a sample")?;
            let starts = std::iter::once(0).chain(hidden.iter().map(|at| at + 1));
            let ends = hidden.iter().copied().chain([prompt.len()]);
            let seen = starts.zip(ends).map(|(start, end)| self.text.decode(&prompt[start..end]));
            let seen = seen.collect::<anyhow::Result<Vec<_>>>()?.join("[MASK]");
            return Ok(format!("{seen:?} -> {:?}", self.text.decode(&filled)?));
        }
        let options = SampleOptions { tokens: SAMPLE_TOKENS, context, temperature: 0.8, seed: 0, stops: &[] };
        self.generate(&batches.prompt(PROMPT_TOKENS)?, &options, world)
    }

    /// Returns the most likely answer to the prompt of the first example. Collective.
    pub(crate) fn answer_example(&self, batches: &Batches, world: &World) -> anyhow::Result<String> {
        let options = SampleOptions {
            tokens: ANSWER_TOKENS,
            context: self.positions,
            temperature: 0.,
            seed: 0,
            stops: batches.stops(),
        };
        let prompt = batches.prompt(0)?;
        if prompt.is_empty() {
            return Ok("no example has a prompt, so none can be answered".into());
        }
        self.generate(&prompt, &options, world)
    }

    fn generate(&self, prompt: &[u32], options: &SampleOptions<'_>, world: &World) -> anyhow::Result<String> {
        let ids = no_grad(|| sample(self.model, prompt, options, world.device())).context("can't generate a sample")?;
        Ok(format!("{:?} -> {:?}", self.text.decode(prompt)?, self.text.decode(&ids)?))
    }
}

/// Compares the gradients of a loss with finite differences. Collective.
pub(crate) fn run_gradcheck(
    model: &FsdpModule<LanguageModel>,
    world: &World,
    loss: impl Fn(&FsdpModule<LanguageModel>) -> candle_core::Result<Tensor>,
) -> anyhow::Result<()> {
    let checked = gradcheck(model, &GradcheckOptions::default(), loss).context("--gradcheck")?;
    if world.rank() == 0 {
        Console::Stderr.line(format_args!("gradcheck: the gradients of {} units are right", checked.len()));
    }
    Ok(())
}
