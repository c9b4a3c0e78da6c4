//! A model of any family, its input batches and its losses.

use candle_core::{Device, Module, Result, Tensor};
use fsdp_candle::nn::{CrossEntropyOptions, Documents, IGNORED, Reduction};
use fsdp_candle::{ContextParallel, FsdpModule, upload};

use crate::data::MicroBatch;
use crate::models::rows::Rows;
use crate::models::{bert, decoder, gpt2};

/// A language model: maps token ids `[batch, time]` to logits `[batch, time, vocabulary]`.
pub enum LanguageModel {
    /// A decoder such as Llama.
    Decoder(decoder::Decoder),
    /// GPT-2.
    Gpt2(gpt2::Gpt2),
    /// BERT.
    Bert(bert::Bert),
}

impl LanguageModel {
    /// Turns dropout on or off, as PyTorch's `train()` and `eval()` do. Off at first.
    pub fn set_training(&self, training: bool) {
        match self {
            LanguageModel::Decoder(model) => &model.drops,
            LanguageModel::Gpt2(model) => &model.drops,
            LanguageModel::Bert(model) => &model.drops,
        }
        .set_training(training);
    }

    /// Returns the tokens of each expert in the forwards that trained since the last call, and forgets them: `[layers with
    /// experts, E]`, f32, of this rank. Counts each token once for each of its experts. `None` without such forwards, and for
    /// models whose configuration does not [count them](crate::models::ModelConfig::count_expert_tokens).
    pub fn take_expert_tokens(&self) -> Option<Tensor> {
        match self {
            LanguageModel::Decoder(model) => model.take_expert_tokens(),
            LanguageModel::Gpt2(_) | LanguageModel::Bert(_) => None,
        }
    }

    /// Returns the logits, and an auxiliary loss if the model has one.
    pub(super) fn outputs(&self, ids: &Tensor, rows: &Rows) -> Result<(Tensor, Option<Tensor>)> {
        match self {
            LanguageModel::Decoder(model) => model.forward(ids, rows),
            LanguageModel::Gpt2(model) => Ok((model.forward(ids, rows)?, None)),
            LanguageModel::Bert(model) => Ok((model.forward(ids, rows)?, None)),
        }
    }

    /// Returns the cross-entropy of a batch's targets, and an auxiliary loss if the model has one.
    fn cross_entropy(&self, ids: &Tensor, rows: &Rows, targets: &Tensor, reduction: Reduction) -> Result<Losses> {
        let options = CrossEntropyOptions { reduction, ..Default::default() };
        match self {
            LanguageModel::Decoder(model) => model.cross_entropy(ids, rows, targets, &options),
            LanguageModel::Gpt2(model) => {
                Ok((model.output.head()?.cross_entropy(&model.hidden(ids, rows)?, targets, &options)?, None))
            }
            LanguageModel::Bert(model) => {
                let (head, input) = model.output.head(&model.hidden(ids, rows)?)?;
                Ok((head.cross_entropy(&input, targets, &options)?, None))
            }
        }
    }
}

/// The cross-entropy, and an auxiliary loss if the model has one.
type Losses = (Tensor, Option<Tensor>);

/// Returns all logits on every rank.
impl Module for LanguageModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            LanguageModel::Decoder(model) => model.logits(ids),
            _ => Ok(self.outputs(ids, &Rows::default())?.0),
        }
    }
}

/// Sequences and their targets as tensors.
#[derive(Clone)]
pub struct Batch {
    /// Token ids `[batch, time]`, u32: this rank's part of the rows.
    pub ids: Tensor,
    /// Id that follows each token, or [`IGNORED`](fsdp_candle::nn::IGNORED). `[batch, time]`, u32.
    pub targets: Tensor,
    /// Number of targets of this rank that are not ignored.
    pub counted: u64,
    /// Number of preference pairs, if the rows are pairs.
    pub pairs: Option<u64>,
    /// Contents of the rows.
    pub rows: Rows,
}

impl Batch {
    /// Creates the tensors of a micro-batch, or of this rank's part of it.
    pub fn new(read: MicroBatch, device: &Device, context: Option<&ContextParallel>) -> Result<Self> {
        let MicroBatch { inputs, targets, mut counted, documents, filled, pairs } = read;
        let seq_len = inputs.len() / filled.len().max(1);
        let shape = (filled.len(), seq_len);
        let rows = Rows {
            documents: documents.map(Documents::new).transpose()?,
            filled: filled.iter().any(|&tokens| tokens < seq_len).then(|| filled.into()),
            context: context.cloned(),
            ..Rows::default()
        };
        let ids = rows.own(&Tensor::from_vec(inputs, shape, &Device::Cpu)?, 1)?;
        // The loss reads targets on the host, on any device.
        let targets = rows.own(&Tensor::from_vec(targets, shape, &Device::Cpu)?, 1)?;
        if context.is_some() {
            let own = targets.flatten_all()?.to_vec1::<u32>()?;
            counted = own.iter().filter(|&&target| target != IGNORED).count() as u64;
        }
        Ok(Batch { ids: upload(&ids, device)?, targets, counted, pairs, rows })
    }

    /// Returns the number of terms in the sum of the losses on this rank: preference pairs, or counted targets.
    pub fn terms(&self) -> u64 {
        self.pairs.unwrap_or(self.counted)
    }

    /// Returns the weight of the batch's mean loss, in terms of the ranks' average: each of the ranks that share rows has
    /// the loss of whole pairs, but only that of its own targets.
    pub fn weight(&self) -> u64 {
        self.pairs.unwrap_or(self.counted * self.rows.ranks() as u64)
    }
}

/// Returns the sum of the losses of all counted targets.
pub fn cross_entropy_sum(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    Ok(losses(model, batch, Reduction::Sum)?.0)
}

/// Returns the mean loss over the counted targets, or 0 without any.
pub fn cross_entropy(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    Ok(losses(model, batch, mean_of(batch))?.0)
}

/// Returns [`cross_entropy`] plus the load-balancing loss of experts, if the configuration has one.
pub fn loss(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    match losses(model, batch, mean_of(batch))? {
        (loss, Some(auxiliary)) => loss + auxiliary,
        (loss, None) => Ok(loss),
    }
}

fn mean_of(batch: &Batch) -> Reduction {
    // The mean over no target is NaN, and the sum is 0.
    if batch.counted > 0 { Reduction::Mean } else { Reduction::Sum }
}

/// Returns the cross-entropy of the batch's targets, and the auxiliary loss.
pub(super) fn losses(model: &FsdpModule<LanguageModel>, batch: &Batch, reduction: Reduction) -> Result<Losses> {
    let input = (batch.ids.clone(), batch.rows.clone());
    model.call_with(input, |model, (ids, rows)| model.cross_entropy(&ids, &rows, &batch.targets, reduction))
}
