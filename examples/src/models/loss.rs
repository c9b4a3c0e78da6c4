//! Losses of a model on a batch.

use candle_core::{Result, Tensor};
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::{self, CrossEntropyOptions, Reduction};

use super::batch::Batch;
use super::language_model::LanguageModel;

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
