//! `--eval`: the loss on data that is not trained on.

use std::time::Instant;

use anyhow::Context;
use fsdp_candle::{FsdpModule, ReduceOp, World, no_grad};
use fsdp_examples::data::Batches;
use fsdp_examples::metrics::EvalRecord;
use fsdp_examples::models::{self, Batch, LanguageModel};

use crate::args::Args;

/// The data to evaluate on, and when.
pub(crate) struct Evaluation {
    pub(crate) batches: Batches,
    seq_len: usize,
    tensor: usize,
    every: usize,
    last: usize,
}

impl Evaluation {
    pub(crate) fn new(args: &Args, batches: Batches) -> Self {
        let every = args.eval_every.unwrap_or(args.steps);
        Evaluation { batches, seq_len: args.seq_len, tensor: args.tensor_parallel, every, last: args.steps }
    }

    /// Whether the loss is measured after `step` steps.
    pub(crate) fn is_due(&self, step: usize) -> bool {
        step.is_multiple_of(self.every) || step == self.last
    }

    /// The mean loss after `step` steps over all targets of the data that count. All ranks share the data, and get the
    /// same. Collective.
    pub(crate) fn run(
        &self,
        model: &FsdpModule<LanguageModel>,
        step: usize,
        world: &World,
    ) -> anyhow::Result<EvalRecord> {
        let start = Instant::now();
        let (mut sum, mut counted) = (0., 0);
        for round in 0..self.batches.rounds() {
            let batch = Batch::new(self.batches.pass(round)?, self.seq_len, world.device())?;
            counted += batch.counted;
            // A rank that has no sequence left computes on nothing: it takes part in gathering the parameters.
            let loss = no_grad(|| models::cross_entropy_sum(model, &batch)).context("can't evaluate")?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        let sums = world.all_reduce(&[sum, counted as f64], ReduceOp::Sum)?;
        let eval_loss = sums[0] / sums[1];
        Ok(EvalRecord {
            step,
            eval_loss,
            eval_perplexity: eval_loss.exp(),
            // Ranks that compute layers together have the same ones.
            eval_tokens: sums[1] as u64 / self.tensor as u64,
            eval_time_s: start.elapsed().as_secs_f64(),
        })
    }
}
