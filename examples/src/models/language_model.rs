//! A model of any of the families.

use candle_core::{Module, Result, Tensor};
use fsdp_core::ProcessGroup;

use super::batch::Rows;
use super::{bert, decoder, gpt2};

/// A language model: token ids `[batch, time]` to logits `[batch, time, vocabulary]`.
pub enum LanguageModel {
    /// A Llama, or one of its like.
    Decoder(decoder::Decoder),
    /// A GPT-2.
    Gpt2(gpt2::Gpt2),
    /// A BERT.
    Bert(bert::Bert),
}

impl LanguageModel {
    /// Whether dropout drops anything from now on: PyTorch's `train()` and `eval()`. A model is built not to.
    pub fn set_training(&self, training: bool) {
        match self {
            LanguageModel::Decoder(model) => model.drops(),
            LanguageModel::Gpt2(model) => model.drops(),
            LanguageModel::Bert(model) => model.drops(),
        }
        .set_training(training);
    }

    /// The ranks of which each has the logits of a part of the vocabulary, where there are such.
    pub(super) fn vocabulary_group(&self) -> Option<&ProcessGroup> {
        match self {
            LanguageModel::Decoder(model) => model.vocabulary_group(),
            LanguageModel::Gpt2(_) | LanguageModel::Bert(_) => None,
        }
    }

    /// Logits, and what is to be added to their loss, if anything.
    pub(super) fn outputs(&self, ids: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        match self {
            LanguageModel::Decoder(model) => model.forward(ids, rows),
            LanguageModel::Gpt2(model) => Ok((model.forward(ids, rows)?, None)),
            LanguageModel::Bert(model) => Ok((model.forward(ids, rows)?, None)),
        }
    }
}

/// On every rank all logits.
impl Module for LanguageModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            LanguageModel::Decoder(model) => model.logits(ids),
            _ => Ok(self.outputs(ids, &Rows::default())?.0),
        }
    }
}
