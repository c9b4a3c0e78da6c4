//! What a run minimises: the cross-entropy of tokens, or with `--dpo` the loss of preference pairs against a reference
//! model.

use anyhow::{Context, ensure};
use candle_core::Tensor;
use fsdp_candle::nn::without_adapters;
use fsdp_candle::{FsdpModule, ShardedVarMap, no_grad};
use fsdp_train::metrics::Rewards;
use fsdp_train::models::{self, Batch, LanguageModel, PairLogProbs};

use crate::agreement::Fields;
use crate::args::Args;
use crate::setup;

/// Default for --dpo-beta.
pub(crate) const DPO_BETA: f64 = 0.1;

/// What a run minimises.
pub(crate) enum Objective {
    /// The cross-entropy of counted tokens, and the auxiliary loss of experts.
    Tokens,
    /// The loss of preference pairs.
    Preference(Preference),
}

/// Preference tuning of a run.
pub(crate) struct Preference {
    pub(crate) beta: f64,
    pub(crate) reference: Reference,
    /// Fingerprints of the weights before the first step.
    pub(crate) start: Fields,
}

/// The model before the first step of preference tuning.
pub(crate) enum Reference {
    /// The trained model without its adapters.
    Base,
    /// A frozen copy, with its parameters.
    Copy(Box<FsdpModule<LanguageModel>>, ShardedVarMap),
}

/// Loss of a batch.
pub(crate) struct BatchLoss {
    /// Mean over the counted tokens, pairs or records; 0 without one.
    pub(crate) loss: Tensor,
    /// Weight of the loss in the average over ranks: the number of them on this rank, times the ranks that share sequences.
    pub(crate) weight: u64,
    /// Mean rewards of the pairs.
    pub(crate) rewards: Option<Rewards>,
}

impl Objective {
    /// Returns the bytes of the reference model's shards on this rank.
    pub(crate) fn shard_bytes(&self) -> u64 {
        match self {
            Objective::Preference(Preference { reference: Reference::Copy(_, vars), .. }) => setup::shard_bytes(vars),
            _ => 0,
        }
    }

    /// Returns the reference model's log probabilities of a batch of pairs, without a graph. `None` without a
    /// reference.
    pub(crate) fn reference(
        &self,
        model: &FsdpModule<LanguageModel>,
        batch: &Batch,
    ) -> anyhow::Result<Option<PairLogProbs>> {
        let Objective::Preference(Preference { reference, .. }) = self else { return Ok(None) };
        let log_probs = match reference {
            Reference::Base => without_adapters(|| PairLogProbs::new(model, batch)),
            Reference::Copy(copy, _) => no_grad(|| PairLogProbs::new(copy, batch)),
        };
        log_probs.map(Some).context("can't compute the reference model's log probabilities")
    }

    /// Returns the loss of a batch. `reference` is the result of [`Objective::reference`].
    pub(crate) fn loss(
        &self,
        model: &FsdpModule<LanguageModel>,
        batch: &Batch,
        reference: Option<&PairLogProbs>,
    ) -> candle_core::Result<BatchLoss> {
        let (Objective::Preference(Preference { beta, .. }), Some(reference)) = (self, reference) else {
            return Ok(BatchLoss { loss: models::loss(model, batch)?, weight: batch.weight(), rewards: None });
        };
        let pairs = PairLogProbs::new(model, batch)?.dpo(reference, *beta, batch)?;
        let each = 1. / batch.terms().max(1) as f64;
        let rewards = Some(pairs.rewards()? * each);
        Ok(BatchLoss { loss: (&pairs.loss * each)?, weight: batch.weight(), rewards })
    }

    /// Returns the sum of the losses of a batch without auxiliary losses, for evaluation, and the sums of the rewards.
    pub(crate) fn evaluate(
        &self,
        model: &FsdpModule<LanguageModel>,
        batch: &Batch,
    ) -> anyhow::Result<(Tensor, Option<Rewards>)> {
        let Objective::Preference(Preference { beta, .. }) = self else {
            return Ok((no_grad(|| models::cross_entropy_sum(model, batch))?, None));
        };
        let reference = self.reference(model, batch)?.context("a preference has a reference")?;
        let pairs = no_grad(|| PairLogProbs::new(model, batch))?.without_auxiliary().dpo(&reference, *beta, batch)?;
        Ok((pairs.loss.clone(), Some(pairs.rewards()?)))
    }
}

/// Fails unless the run has weights to compare with.
pub(crate) fn check_weights(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.dpo.is_none() || setup::pretrained(args)?.is_some(),
        "--dpo needs the weights of a trained model, which the tuned model is compared with: pass --model DIR with \
         model.safetensors or other weights"
    );
    Ok(())
}
