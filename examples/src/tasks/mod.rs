//! Training of models on whole texts: classification and embeddings.
//!
//! A model with [`Head::Classes`](crate::models::Head) or [`Head::Embedding`](crate::models::Head) maps a
//! [`TextBatch`] to one row for each text. `classify` and `embed` compute losses and scores from these rows, and
//! `export` the files that transformers and sentence-transformers read.

use candle_core::{Device, Result, Tensor};
use fsdp_candle::nn::Documents;
use fsdp_candle::{ContextParallel, FsdpModule, upload};
use serde::Serialize;

use crate::data::records::RecordBatch;
use crate::data::with_padding;
use crate::models::{LanguageModel, Rows, sequence_outputs};

pub mod classify;
pub mod embed;
pub mod export;

/// Texts as tensors.
pub struct TextBatch {
    /// Token ids `[rows, steps]`, u32.
    pub ids: Tensor,
    /// Contents of the rows.
    pub rows: Rows,
    /// Class of each record, or [`IGNORED`](fsdp_candle::nn::IGNORED). `[records]`, u32.
    pub labels: Tensor,
    /// Number of records that are not missing. They come first.
    pub counted: usize,
}

impl TextBatch {
    /// Creates the tensors, or this rank's part of the token ids. Padding is a separate document, which texts do not attend
    /// to.
    pub fn new(read: RecordBatch, device: &Device, context: Option<&ContextParallel>) -> Result<Self> {
        let RecordBatch { ids, types, steps, filled, last, labels, counted } = read;
        let is_padded = filled.iter().any(|&filled| filled < steps);
        let documents = is_padded
            .then(|| Documents::new(filled.iter().map(|&filled| with_padding(filled, steps)).collect()))
            .transpose()?;
        let (rows, records) = (filled.len(), labels.len());
        let ids = Tensor::from_vec(ids, (rows, steps), &Device::Cpu)?;
        let rows = Rows {
            documents,
            filled: Some(filled.into()),
            last: Some(last.into()),
            types: types.map(Into::into),
            context: context.cloned(),
        };
        Ok(TextBatch {
            ids: upload(&rows.own(&ids, 1)?, device)?,
            rows,
            labels: Tensor::from_vec(labels, records, &Device::Cpu)?,
            counted,
        })
    }

    /// Returns the model's row for each text, f32.
    pub fn outputs(&self, model: &FsdpModule<LanguageModel>) -> Result<Tensor> {
        sequence_outputs(model, &self.ids, &self.rows)
    }
}

/// Measurements of an evaluation of classes or embeddings, on their own line of the metrics.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskEvalRecord {
    /// Number of steps taken.
    pub step: usize,
    /// Mean loss over the records of the evaluation data.
    pub eval_loss: f64,
    /// Share of records with the right class, or of anchors whose positive is more similar than every other text. A
    /// tie is wrong.
    pub eval_accuracy: f64,
    /// Mean of the classes' F1 scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_macro_f1: Option<f64>,
    /// Mean cosine similarity of anchors and their positives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_cosine: Option<f64>,
    /// Number of records.
    pub eval_records: u64,
    /// Duration in seconds.
    pub eval_time_s: f64,
}

impl TaskEvalRecord {
    /// Returns the scores with their names, without the loss.
    pub fn scores(&self) -> Vec<(&'static str, f64)> {
        let optional = [("macro_f1", self.eval_macro_f1), ("cosine", self.eval_cosine)];
        let optional = optional.into_iter().filter_map(|(name, score)| Some((name, score?)));
        [("accuracy", self.eval_accuracy)].into_iter().chain(optional).collect()
    }
}
