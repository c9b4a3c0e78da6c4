//! Weights that a model's head shares with its embedding.

use fsdp_core::DType;
use fsdp_core::layout::Region;
use serde::Deserialize;

use crate::store::Store;
use crate::{Error, Result, TensorSource, read_as};

/// Elements to compare at once.
const BLOCK: usize = 1 << 20;

/// Names of tied weights, each with the name of the weight that it shares. A file may have either.
const TIED: [(&str, &str); 6] = [
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "embed_tokens.weight"),
    ("lm_head.weight", "wte.weight"),
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
];

/// Model types that tie weights unless `config.json` says otherwise.
const TIED_BY_DEFAULT: [&str; 4] = ["gpt2", "bert", "gemma2", "gemma3_text"];

/// Largest size of a configuration.
const MAX_CONFIG: u64 = 1 << 24;

#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
    tie_word_embeddings: Option<bool>,
}

/// Returns the names of the weights that share `weight` in a model with tied weights.
pub(super) fn others(weight: &str) -> impl Iterator<Item = &'static str> {
    TIED.into_iter().filter_map(move |(a, b)| match weight {
        _ if weight == a => Some(b),
        _ if weight == b => Some(a),
        _ => None,
    })
}

/// Returns whether the `config.json` of a directory ties weights; false without one.
pub(super) fn is_tied(store: &dyn Store) -> Result<bool> {
    const FILE: &str = "config.json";
    let Some(text) = store.read(FILE, MAX_CONFIG)? else { return Ok(false) };
    let config: Config = serde_json::from_slice(&text).map_err(|error| Error::Malformed {
        path: store.path().join(FILE),
        item: None,
        reason: format!("it can't be read: {error}"),
    })?;
    let by_default = config.model_type.is_some_and(|name| TIED_BY_DEFAULT.contains(&name.as_str()));
    Ok(config.tie_word_embeddings.unwrap_or(by_default))
}

/// Returns whether two tensors have the same shape and the same values in f32. Reads both as far as they are equal.
///
/// # Errors
/// The errors of [`read_as`].
pub fn same_values(source: &dyn TensorSource, a: &str, b: &str) -> Result<bool> {
    let (shape, other) = (&source.tensor(a)?.shape, &source.tensor(b)?.shape);
    if shape != other {
        return Ok(false);
    }
    for region in Region::whole(shape).pieces(BLOCK) {
        let read = |name: &str| -> Result<Vec<f32>> {
            let mut bytes = vec![0; region.elements() * DType::F32.size()];
            read_as(source, name, &region, DType::F32, &mut bytes)?;
            Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
        };
        if read(a)? != read(b)? {
            return Ok(false);
        }
    }
    Ok(true)
}
