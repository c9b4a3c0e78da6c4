//! Outputs of a model: logits of each token over the vocabulary, or classes and embeddings of whole sequences.
//!
//! Names of the classifiers are those of Hugging Face's `BertForSequenceClassification` (in `bert`) and
//! `LlamaForSequenceClassification`.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fsdp_candle::FsdpModule;
use fsdp_candle::nn::Linear;
use serde_json::Value;

use crate::input::read_text;
use crate::models::LanguageModel;
use crate::models::layers::linear;
use crate::models::rows::Rows;

/// Output of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// Logits over the vocabulary, for each token.
    #[default]
    Vocabulary,
    /// Logits over this number of classes, for each sequence.
    Classes(usize),
    /// An embedding of each sequence.
    Embedding(Pooling),
}

impl Head {
    /// Returns the name of a decoder's last module with parameters.
    pub(super) fn module(self) -> &'static str {
        match self {
            Head::Vocabulary => "lm_head",
            Head::Classes(_) => "score",
            Head::Embedding(_) => "model.norm",
        }
    }
}

/// Reduction of a sequence's hidden states to one embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over the sequence's tokens.
    #[default]
    Mean,
    /// Hidden state of the first token.
    Cls,
    /// Hidden state of the last token.
    LastToken,
}

/// Pooling modes with the names in `1_Pooling/config.json`, new and old.
const POOLINGS: [(Pooling, &str, &str); 3] = [
    (Pooling::Mean, "mean", "pooling_mode_mean_tokens"),
    (Pooling::Cls, "cls", "pooling_mode_cls_token"),
    (Pooling::LastToken, "lasttoken", "pooling_mode_lasttoken"),
];
/// Prefix of the old names.
const OLD_MODE: &str = "pooling_mode_";

impl Pooling {
    /// Returns sentence-transformers' name of the mode.
    pub fn name(self) -> &'static str {
        POOLINGS.iter().find(|(pooling, ..)| *pooling == self).map_or("", |(_, name, _)| name)
    }

    /// Returns sentence-transformers' flags, which versions before 5.4 read.
    pub fn flags(self) -> impl Iterator<Item = (&'static str, bool)> {
        POOLINGS.iter().map(move |(pooling, _, flag)| (*flag, *pooling == self))
    }

    /// Reads `1_Pooling/config.json` of a model directory. Returns `None` without the file.
    ///
    /// # Errors
    /// Fails for a mode that is not supported, and for several modes.
    pub fn from_dir(model: &Path) -> anyhow::Result<Option<Self>> {
        let path = model.join("1_Pooling/config.json");
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let read = || -> anyhow::Result<Self> {
            let config: Value = serde_json::from_str(&read_text(&path)?)?;
            Self::parse(&config)
        };
        Ok(Some(read().with_context(|| format!("can't use {}", path.display()))?))
    }

    fn parse(config: &Value) -> anyhow::Result<Self> {
        let modes: Vec<String> = match &config["pooling_mode"] {
            Value::String(mode) => vec![mode.clone()],
            Value::Array(modes) => modes.iter().map(|mode| mode.as_str().unwrap_or("?").into()).collect(),
            _ => {
                let flags = config.as_object().into_iter().flatten();
                let set = flags.filter(|(name, value)| name.starts_with(OLD_MODE) && **value == Value::Bool(true));
                set.map(|(name, _)| match POOLINGS.iter().find(|(.., flag)| flag == name) {
                    Some((_, mode, _)) => (*mode).to_owned(),
                    None => name.trim_start_matches(OLD_MODE).to_owned(),
                })
                .collect()
            }
        };
        let expected = "expected one of mean, cls and lasttoken";
        match &modes[..] {
            [] => Ok(Pooling::Mean),
            [mode] => match POOLINGS.iter().find(|(_, name, _)| name == mode) {
                Some((pooling, ..)) => Ok(*pooling),
                None => bail!("the pooling mode \"{mode}\" is not supported; {expected}"),
            },
            modes => bail!("it has the pooling modes {}; {expected}", modes.join(", ")),
        }
    }

    /// Reduces hidden states `[B, T, C]` to embeddings `[B, C]`.
    pub(super) fn pool(self, x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
        match self {
            Pooling::Mean => mean(x_btc, rows.filled.as_deref()),
            Pooling::Cls => first_token(x_btc),
            Pooling::LastToken => last_token(x_btc, rows),
        }
    }
}

/// Fails if `modules.json` of a sentence-transformers model lists modules other than the model, pooling and
/// normalization. Returns whether it normalizes embeddings.
pub fn normalizes(model: &Path) -> anyhow::Result<bool> {
    let path = model.join("modules.json");
    if path.symlink_metadata().is_err() {
        return Ok(false);
    }
    let read = || -> anyhow::Result<Vec<String>> {
        let modules: Vec<Value> = serde_json::from_str(&read_text(&path)?)?;
        Ok(modules.iter().map(|module| module["type"].as_str().unwrap_or_default().to_owned()).collect())
    };
    let modules = read().with_context(|| format!("can't read {}", path.display()))?;
    let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_owned();
    for module in &modules {
        ensure!(
            ["Transformer", "Pooling", "Normalize"].contains(&last(module).as_str()),
            "{} lists the module {module}, which train does not support; expected Transformer, Pooling and Normalize",
            path.display()
        );
    }
    Ok(modules.iter().any(|module| last(module) == "Normalize"))
}

/// Last layers of a decoder.
pub(super) enum Output {
    Vocabulary(Linear),
    /// A classifier of each sequence's last token.
    Score(Linear),
    Pooled(Pooling),
}

impl Output {
    /// Creates the layers. `vocabulary` makes the head of a language model.
    pub(super) fn new(
        head: Head,
        (width, stdev): (usize, f64),
        vb: &VarBuilder,
        vocabulary: impl FnOnce() -> Result<Linear>,
    ) -> Result<Self> {
        Ok(match head {
            Head::Vocabulary => Output::Vocabulary(vocabulary()?),
            Head::Classes(classes) => Output::Score(linear(width, classes, false, stdev, vb.pp("score"))?),
            Head::Embedding(pooling) => Output::Pooled(pooling),
        })
    }

    /// Returns the outputs for normalized hidden states `[B, T, C]`: logits `[B, T, V]`, logits `[B, L]` or embeddings
    /// `[B, C]`.
    pub(super) fn forward(&self, x_btc: Tensor, rows: &Rows) -> Result<Tensor> {
        match self {
            Output::Vocabulary(head) => head.forward(&x_btc),
            Output::Score(score) => score.forward(&last_token(&rows.whole(x_btc)?, rows)?),
            Output::Pooled(pooling) => pooling.pool(&rows.whole(x_btc)?, rows),
        }
    }

    /// Returns the head over the vocabulary.
    pub(super) fn head(&self) -> Result<&Linear> {
        match self {
            Output::Vocabulary(head) => Ok(head),
            Output::Score(_) | Output::Pooled(_) => Err(no_vocabulary()),
        }
    }
}

pub(super) fn no_vocabulary() -> candle_core::Error {
    candle_core::Error::Msg("a model of classes or embeddings has no loss over a vocabulary".into()).bt()
}

/// Returns the first hidden state of each row, `[B, C]`.
pub(super) fn first_token(x_btc: &Tensor) -> Result<Tensor> {
    x_btc.narrow(1, 0, 1)?.squeeze(1)
}

/// Returns the hidden state of each row's last token, `[B, C]`.
fn last_token(x_btc: &Tensor, rows: &Rows) -> Result<Tensor> {
    let (batch, steps, width) = x_btc.dims3()?;
    let last = |row: usize| rows.last.as_ref().and_then(|last| last.get(row).copied()).unwrap_or(steps - 1);
    let at: Vec<u32> = (0..batch).map(|row| (row * steps + last(row)) as u32).collect();
    let at = Tensor::from_vec(at, batch, x_btc.device())?;
    x_btc.reshape((batch * steps, width))?.index_select(&at, 0)
}

/// Returns the mean hidden state of each row's tokens, `[B, C]`, f32. 0 for a row without tokens.
fn mean(x_btc: &Tensor, filled: Option<&[usize]>) -> Result<Tensor> {
    let (batch, steps, _) = x_btc.dims3()?;
    let tokens = |row: usize| filled.and_then(|filled| filled.get(row).copied()).unwrap_or(steps);
    let share = |row: usize, step: usize| if step < tokens(row) { 1. / tokens(row) as f32 } else { 0. };
    let shares: Vec<f32> = (0..batch).flat_map(|row| (0..steps).map(move |step| share(row, step))).collect();
    let shares = Tensor::from_vec(shares, (batch, 1, steps), x_btc.device())?;
    shares.matmul(&x_btc.to_dtype(DType::F32)?)?.squeeze(1)
}

/// Returns the outputs of a model with classes or embeddings for ids `[B, T]`, in f32.
pub fn sequence_outputs(model: &FsdpModule<LanguageModel>, ids: &Tensor, rows: &Rows) -> Result<Tensor> {
    let input = (ids.clone(), rows.clone());
    model.call_with(input, |model, (ids, rows)| model.outputs(&ids, &rows))?.0.to_dtype(DType::F32)
}

/// Layers that a checkpoint of the model without a classifier lacks.
const NEW_LAYERS: [&str; 3] = ["classifier.", "score.", POOLER];
/// BERT's layer between the first token and a classifier.
pub(super) const POOLER: &str = "bert.pooler.";

/// Returns whether a parameter belongs to a classifier, so that it may start from random weights.
pub fn is_classifier(name: &str) -> bool {
    NEW_LAYERS.iter().any(|layer| name.starts_with(layer))
}

/// Returns whether a parameter is kept for exports only: embeddings do not use BERT's pooler.
pub fn is_unused_by_embeddings(name: &str) -> bool {
    name.starts_with(POOLER)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use serde_json::json;

    use super::*;

    #[test]
    fn pooling_modes_are_read() {
        for (config, expected) in [
            (json!({}), Pooling::Mean),
            (json!({ "pooling_mode": "cls" }), Pooling::Cls),
            (json!({ "pooling_mode": ["lasttoken"] }), Pooling::LastToken),
            (json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false }), Pooling::Cls),
            (json!({ "word_embedding_dimension": 8, "pooling_mode_mean_tokens": true }), Pooling::Mean),
        ] {
            assert_eq!(Pooling::parse(&config).unwrap(), expected, "{config}");
        }
        for (config, message) in [
            (json!({ "pooling_mode": "max" }), "the pooling mode \"max\" is not supported"),
            (json!({ "pooling_mode_max_tokens": true }), "\"max_tokens\" is not supported"),
            (json!({ "pooling_mode": ["cls", "mean"] }), "it has the pooling modes cls, mean"),
        ] {
            let error = Pooling::parse(&config).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn padding_is_not_pooled() {
        let x = Tensor::arange(0f32, 12., &Device::Cpu).unwrap().reshape((2, 3, 2)).unwrap();
        let rows = Rows { filled: Some([2, 3].into()), last: Some([1, 2].into()), ..Rows::default() };
        let pooled = |pooling: Pooling| pooling.pool(&x, &rows).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(pooled(Pooling::Cls), [[0., 1.], [6., 7.]]);
        assert_eq!(pooled(Pooling::LastToken), [[2., 3.], [10., 11.]]);
        assert_eq!(pooled(Pooling::Mean), [[1., 2.], [8., 9.]]);
        let empty = Rows { filled: Some([0, 3].into()), ..Rows::default() };
        assert_eq!(Pooling::Mean.pool(&x, &empty).unwrap().to_vec2::<f32>().unwrap()[0], [0., 0.]);
    }
}
