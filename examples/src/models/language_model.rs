//! A model of any of the families.
//! What a model learns from at once.
//! Losses of a model on a batch.

use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor};
use fsdp_candle::nn::{self, CrossEntropyOptions, Documents, Reduction};
use fsdp_candle::{FsdpModule, Tensors};
use fsdp_core::ProcessGroup;

use crate::data::MicroBatch;
use crate::models::{bert, decoder, gpt2};

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

/// Contents of a batch's rows of tokens.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// Where documents lie packed in the rows, if they do.
    pub documents: Option<Documents>,
    /// The number of each row's tokens that are data, if padding follows them in any row.
    pub filled: Option<Arc<[usize]>>,
}

/// `Rows` holds no tensor.
impl Tensors for Rows {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

/// Sequences with what is to be predicted, as tensors.
#[derive(Clone)]
pub struct Batch {
    /// Token ids `[batch, time]`, u32.
    pub ids: Tensor,
    /// The id that follows each, or [`IGNORED`](fsdp_candle::nn::IGNORED), `[batch, time]`, u32.
    pub targets: Tensor,
    /// How many targets are not ignored.
    pub counted: u64,
    /// Contents of the rows.
    pub rows: Rows,
}

impl Batch {
    /// The tensors of what was read, in rows of `seq_len` tokens.
    ///
    /// # Errors
    /// When there is no memory on the device, or documents and rows differ.
    pub fn new(read: MicroBatch, seq_len: usize, device: &Device) -> Result<Self> {
        let MicroBatch { inputs, targets, counted, documents, filled } = read;
        let shape = (inputs.len() / seq_len, seq_len);
        Ok(Batch {
            ids: Tensor::from_vec(inputs, shape, device)?,
            // The host reads them, wherever the model is.
            targets: Tensor::from_vec(targets, shape, &Device::Cpu)?,
            counted,
            rows: Rows {
                documents: documents.map(Documents::new).transpose()?,
                filled: filled.iter().any(|&tokens| tokens < seq_len).then(|| filled.into()),
            },
        })
    }
}

/// The sum of the losses of all targets that count.
///
/// # Errors
/// Those of the model.
pub fn cross_entropy_sum(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    reduced(model, &outputs(model, batch)?.0, batch, Reduction::Sum)
}

/// The mean loss over the targets that count, 0 where none does.
///
/// # Errors
/// Those of the model.
pub fn cross_entropy(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    mean(model, &outputs(model, batch)?.0, batch)
}

/// [`cross_entropy`], with the loss that keeps experts equally busy where the configuration asks for it.
///
/// # Errors
/// Those of the model.
pub fn loss(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<Tensor> {
    let (logits, auxiliary) = outputs(model, batch)?;
    let loss = mean(model, &logits, batch)?;
    match auxiliary {
        Some(auxiliary) => loss + auxiliary,
        None => Ok(loss),
    }
}

fn mean(model: &FsdpModule<LanguageModel>, logits: &Tensor, batch: &Batch) -> Result<Tensor> {
    // The mean of nothing is no number, its sum is 0.
    let reduction = if batch.counted > 0 { Reduction::Mean } else { Reduction::Sum };
    reduced(model, logits, batch, reduction)
}

fn outputs(model: &FsdpModule<LanguageModel>, batch: &Batch) -> Result<(Tensor, Option<Tensor>)> {
    let input = (batch.ids.clone(), batch.rows.clone());
    model.call_with(input, |model, (ids, rows)| model.outputs(&ids, &rows))
}

fn reduced(model: &FsdpModule<LanguageModel>, logits: &Tensor, batch: &Batch, reduction: Reduction) -> Result<Tensor> {
    let options = CrossEntropyOptions { reduction, ..Default::default() };
    match model.inner().vocabulary_group() {
        Some(group) => nn::vocab_parallel_cross_entropy(logits, &batch.targets, group, &options),
        None => nn::cross_entropy_with(logits, &batch.targets, &options),
    }
}
