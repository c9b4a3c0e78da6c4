//! The special tokens that a model directory names.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::data::text::Text;

/// What ends a turn where tokens are bytes: the one that is in no text.
const END_OF_BYTES: &str = "\0";

/// Special tokens by the names that templates know them by, `bos_token` and its like, and what ends a text.
#[derive(Debug, Default)]
pub(super) struct Specials {
    pub(super) named: BTreeMap<String, String>,
    /// What is put after a completion.
    pub(super) end: Option<u32>,
    /// The ids that end an answer.
    pub(super) stops: Vec<u32>,
}

impl Specials {
    /// Of `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and `config.json` in a model
    /// directory, as far as they are there; of bytes, where there is no tokenizer.
    pub(super) fn new(model: Option<&Path>, text: &Text) -> Result<Self> {
        if text.is_bytes() {
            let named = BTreeMap::from([("eos_token".to_owned(), END_OF_BYTES.to_owned())]);
            return Ok(Specials { named, end: Some(0), stops: vec![0] });
        }
        let mut named = BTreeMap::new();
        let mut stops = Vec::new();
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let Some(Value::Object(fields)) = read_json(model, name)? else { continue };
            for (key, value) in fields.iter().filter(|(key, _)| key.ends_with("_token")) {
                if let Some(token) = value.as_str().or_else(|| value.get("content")?.as_str()) {
                    named.insert(key.clone(), token.to_owned());
                }
            }
        }
        if let Some(id) = named.get("eos_token").and_then(|token| text.id_of(token)) {
            stops.push(id);
        }
        for name in ["generation_config.json", "config.json"] {
            let ids = read_json(model, name)?.and_then(|fields| fields.get("eos_token_id").cloned());
            let ids = match ids {
                Some(Value::Array(ids)) => ids,
                Some(id) => vec![id],
                None => vec![],
            };
            stops.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        }
        let end = stops.first().copied();
        if let (None, Some(token)) = (named.get("eos_token"), end.and_then(|id| text.token_of(id))) {
            named.insert("eos_token".into(), token);
        }
        Ok(Specials { named, end, stops })
    }

    /// The text of a special token.
    pub(super) fn token(&self, name: &str) -> Option<&str> {
        self.named.get(name).map(String::as_str)
    }
}

/// A file of the model directory, if it is there.
pub(super) fn read_json(model: Option<&Path>, name: &str) -> Result<Option<Value>> {
    let Some(path) = model.map(|model| model.join(name)).filter(|path| path.exists()) else { return Ok(None) };
    let read = || -> Result<Value> { Ok(serde_json::from_str(&std::fs::read_to_string(&path)?)?) };
    read().map(Some).with_context(|| format!("cannot read {}", path.display()))
}
