//! Special tokens, and which of them begin and end a text.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value as Json;

use crate::gguf::config::Config;
use crate::gguf::metadata::{Metadata, Value};

/// Names in `tokenizer_config.json`, and keys in the file. "seperator" is llama.cpp's spelling.
const NAMES: [(&str, &str); 7] = [
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("unk", "unknown_token_id"),
    ("sep", "seperator_token_id"),
    ("pad", "padding_token_id"),
    ("cls", "cls_token_id"),
    ("mask", "mask_token_id"),
];

/// Ids of special tokens, and which of them are added.
#[derive(Debug, Default)]
pub(super) struct SpecialTokens {
    ids: HashMap<&'static str, u32>,
    begins: bool,
    ends: bool,
    /// Whether a separator ends a text, as in BERT.
    separates: bool,
}

/// Files that describe special tokens.
pub(super) struct Sources<'a> {
    pub(super) tokenizer_config: Option<&'a Json>,
    /// Texts of the configured tokens by their names, such as `eos_token`.
    pub(super) named: &'a BTreeMap<String, String>,
    pub(super) post_processor: Option<&'a Json>,
    /// Text of the unknown token in the tokenizer's model.
    pub(super) unknown: Option<&'a str>,
}

impl SpecialTokens {
    /// Finds the tokens by their texts in the tokenizer's files, then by their ids in `config.json`.
    pub(super) fn new(sources: &Sources<'_>, config: &Config, id_of: impl Fn(&str) -> Option<u32>) -> Self {
        let mut ids = HashMap::new();
        for (name, _) in NAMES {
            let named = sources.named.get(&format!("{name}_token"));
            let text = named.map(String::as_str).or(if name == "unk" { sources.unknown } else { None });
            let of_config = || config.token_ids.iter().find(|(known, _)| *known == name).map(|(_, id)| *id);
            if let Some(id) = text.and_then(&id_of).or_else(of_config) {
                ids.insert(name, id);
            }
        }
        // BERT's tokenizers name the first token of a text `cls`, and the last one `sep`.
        for (missing, instead) in [("bos", "cls"), ("eos", "sep")] {
            if !ids.contains_key(missing)
                && let Some(id) = ids.get(instead).copied()
            {
                ids.insert(missing, id);
            }
        }
        let mut special = SpecialTokens { ids, ..SpecialTokens::default() };
        let flag = |name: &str| sources.tokenizer_config?.get(name)?.as_bool();
        special.begins = flag("add_bos_token").unwrap_or(false);
        special.ends = flag("add_eos_token").unwrap_or(false);
        for processor in processors(sources.post_processor) {
            special.apply(processor, &id_of);
        }
        special
    }

    /// Reads the tokens that a post-processor adds.
    fn apply(&mut self, processor: &Json, id_of: impl Fn(&str) -> Option<u32>) {
        match processor.get("type").and_then(Json::as_str) {
            Some("TemplateProcessing") => {
                let pieces = processor.get("single").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
                let id = |piece: Option<&Json>| id_of(piece?.get("SpecialToken")?.get("id")?.as_str()?);
                let last = if pieces.len() > 1 { id(pieces.last()) } else { None };
                self.add(id(pieces.first()), last);
            }
            Some("BertProcessing" | "RobertaProcessing") => {
                let id = |name: &str| id_of(processor.get(name)?.get(0)?.as_str()?);
                self.add(id("cls"), id("sep"));
            }
            _ => {}
        }
    }

    fn add(&mut self, first: Option<u32>, last: Option<u32>) {
        if let Some(first) = first {
            self.ids.entry("bos").or_insert(first);
        }
        self.begins = first.is_some();
        if let Some(last) = last {
            self.ids.entry("eos").or_insert(last);
            self.separates = self.ids.get("sep") == Some(&last);
        }
        self.ends = last.is_some() && !self.separates;
    }

    /// Adds the ids and flags. llama.cpp has other defaults, so every flag is written. `tokens` is the vocabulary's
    /// size.
    pub(super) fn add_to(&self, metadata: &mut Metadata, tokens: usize) {
        for (name, key) in NAMES {
            if let Some(id) = self.ids.get(name).filter(|id| (**id as usize) < tokens) {
                metadata.add(format!("tokenizer.ggml.{key}"), Value::U32(*id));
            }
        }
        for (key, added) in [("bos", self.begins), ("eos", self.ends), ("sep", self.separates)] {
            metadata.add(format!("tokenizer.ggml.add_{key}_token"), Value::Bool(added));
        }
    }
}

/// Returns a post-processor, or the ones of a sequence.
fn processors(processor: Option<&Json>) -> Vec<&Json> {
    match processor.and_then(|processor| processor.get("processors")).and_then(Json::as_array) {
        Some(list) => list.iter().collect(),
        None => processor.into_iter().collect(),
    }
}
