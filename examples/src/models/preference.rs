//! Preference tuning: log probabilities of completions, and the loss of DPO (Rafailov et al., 2023, arXiv:2305.18290).
//!
//! With the log probability `l` of a completion under the model, and `r` under the reference model, the completion's
//! reward is `beta * (l - r)`. The loss of a pair is `-log sigmoid(reward of chosen - reward of rejected)`.

use candle_core::{Result, Tensor};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::Reduction;
use fsdp_candle::nn::loss::binary_cross_entropy_with_logit;

use crate::metrics::Rewards;
use crate::models::language_model::{Batch, LanguageModel, losses};

/// Log probabilities of a batch of pairs, `[pairs, 2]`: chosen and rejected.
pub struct PairLogProbs {
    log_probs: Tensor,
    /// Auxiliary loss, if the model has one.
    auxiliary: Option<Tensor>,
}

/// Sums over the pairs of a batch.
pub struct PairLoss {
    /// The losses.
    pub loss: Tensor,
    /// Rewards `[pairs, 2]` of all rows, without a graph.
    rewards: Tensor,
    pairs: usize,
}

impl PairLogProbs {
    /// Computes the sum of the log probabilities of each row's counted targets.
    pub fn new(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Self> {
        let (losses, auxiliary) = losses(model, batch, Reduction::None)?;
        let of_rows = batch.rows.sum(losses.sum(1)?)?;
        Ok(PairLogProbs { log_probs: of_rows.neg()?.reshape(((), 2))?, auxiliary })
    }

    /// Leaves out the auxiliary loss.
    pub fn without_auxiliary(self) -> Self {
        PairLogProbs { auxiliary: None, ..self }
    }

    /// Returns the loss, and the rewards, against a reference model's log probabilities of the same batch.
    pub fn dpo(&self, reference: &Self, beta: f64, batch: &Batch) -> Result<PairLoss> {
        let rewards = ((&self.log_probs - reference.log_probs.detach())? * beta)?;
        let margins = (rewards.narrow(1, 0, 1)? - rewards.narrow(1, 1, 1)?)?;
        let pairs = batch.terms() as usize;
        // Pairs that fill up a batch have no targets.
        let mut loss = match pairs {
            0 => margins.zeros_like()?.sum_all()?,
            _ => {
                let margins = margins.narrow(0, 0, pairs)?.contiguous()?;
                (binary_cross_entropy_with_logit(&margins, &margins.ones_like()?)? * pairs as f64)?
            }
        };
        if let Some(auxiliary) = &self.auxiliary {
            loss = (loss + (auxiliary * pairs as f64)?)?;
        }
        Ok(PairLoss { loss, rewards: rewards.detach(), pairs })
    }
}

impl PairLoss {
    /// Returns the sums of rewards, of pairs with a higher reward for the chosen completion, and of margins.
    pub fn rewards(&self) -> Result<Rewards> {
        let mut sums = Rewards::default();
        for pair in self.rewards.to_vec2::<f32>()?.iter().take(self.pairs) {
            let [chosen, rejected] = [pair[0], pair[1]].map(f64::from);
            sums.chosen += chosen;
            sums.rejected += rejected;
            sums.accuracies += f64::from(u8::from(chosen > rejected));
            sums.margins += chosen - rejected;
        }
        Ok(sums)
    }
}
