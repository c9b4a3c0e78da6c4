//! Tokens in the configuration of a tokenizer, and the files of tokenizers.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::Result;
use crate::placeholder::broken_link;
use crate::store::{as_local, location};

/// File name of a tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Files beside or instead of `tokenizer.json`.
const OTHERS: [&str; 13] = [
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.bpe",
    "encoder.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
];
/// Number of the files in [`OTHERS`] from which transformers makes a tokenizer.
const VOCABULARIES: usize = 10;

/// Returns why a model directory has no `tokenizer.json` although its model has a tokenizer, with the way out. `None` if
/// it has the file, or no file of a tokenizer at all.
///
/// # Errors
/// [`Error::NotFound`](crate::Error::NotFound) if there is no such directory; [`Error::Io`](crate::Error::Io).
pub fn missing_tokenizer(dir: impl AsRef<Path>) -> Result<Option<String>> {
    let dir = dir.as_ref();
    let there = location(dir)?.store()?.list()?;
    if there.iter().any(|name| name == TOKENIZER) {
        return Ok(None);
    }
    let path = dir.join(TOKENIZER);
    if as_local(&path)?.is_some_and(|path| path.symlink_metadata().is_ok()) {
        return Ok(Some(format!("{}: {}", path.display(), broken_link(&path))));
    }
    let is_unfinished = |name: &&String| name.starts_with(TOKENIZER) && name.len() > TOKENIZER.len();
    let advice = "download it from where the model comes from";
    if let Some(name) = there.iter().find(is_unfinished) {
        return Ok(Some(format!("{} has {name}, but no {TOKENIZER}: {advice}", dir.display())));
    }
    let Some(at) = OTHERS.iter().position(|other| there.iter().any(|name| name == other)) else { return Ok(None) };
    let advice = match at < VOCABULARIES {
        true => format!(
            "make it with transformers: python -c 'from transformers import AutoTokenizer; \
             AutoTokenizer.from_pretrained(\"{0}\").save_pretrained(\"{0}\")'",
            dir.display()
        ),
        false => advice.into(),
    };
    Ok(Some(format!("{} has {}, but no {TOKENIZER}: {advice}", dir.display(), OTHERS[at])))
}

/// A token that is added to a tokenizer's vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Text.
    pub content: String,
    /// Whether it matches whole words only.
    pub single_word: bool,
    /// Whether it includes the white space before it.
    pub lstrip: bool,
    /// Whether it includes the white space after it.
    pub rstrip: bool,
    /// Whether it matches the normalized text.
    pub normalized: bool,
    /// Whether it is a special token.
    pub special: bool,
}

/// Tokens in the configuration of a tokenizer, as transformers 5 reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfiguredTokens {
    /// Texts of special tokens by their names, such as `eos_token`.
    pub named: BTreeMap<String, String>,
    /// Tokens to add to the tokenizer in this order. They replace added tokens of the same text.
    pub added: Vec<AddedToken>,
    /// Special tokens to add in this order after [`added`](Self::added), except the tokenizer's own added tokens.
    pub special: Vec<AddedToken>,
}

/// Names of special tokens that every tokenizer may have, in the order in which they are added.
const STANDARD: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const DECODER: &str = "added_tokens_decoder";
/// Lists of more special tokens, new and old.
const EXTRA: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

impl ConfiguredTokens {
    /// Reads the contents of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`. The latter two
    /// count only if the first has no `added_tokens_decoder`, and the second then replaces fields of the first.
    ///
    /// ```
    /// use fsdp_ckpt::hf::ConfiguredTokens;
    /// use serde_json::json;
    ///
    /// let config = json!({ "eos_token": "</s>", "added_tokens_decoder": { "7": { "content": "<|end|>", "special": true } } });
    /// let tokens = ConfiguredTokens::new(Some(&config), None, None)?;
    /// assert_eq!(tokens.named["eos_token"], "</s>");
    /// assert_eq!((&*tokens.added[0].content, &*tokens.special[0].content), ("<|end|>", "</s>"));
    /// # Ok::<_, String>(())
    /// ```
    ///
    /// # Errors
    /// The file and the entry that is not a token.
    pub fn new(
        tokenizer_config: Option<&Value>,
        special_tokens_map: Option<&Value>,
        added_tokens: Option<&Value>,
    ) -> Result<Self, String> {
        let object = |json: Option<&Value>| json.and_then(Value::as_object).cloned().unwrap_or_default();
        let mut fields = object(tokenizer_config);
        let mut added = Vec::new();
        let decoder = fields.get(DECODER).and_then(Value::as_object).cloned();
        if decoder.is_none() {
            fields.extend(object(special_tokens_map));
        }
        let mut tokens = ConfiguredTokens::default();
        tokens.read_special(&fields)?;
        match decoder {
            Some(decoder) => {
                for (id, value) in &decoder {
                    let token = id.parse::<u64>().ok().zip(token(value, false));
                    added.push(token.ok_or_else(|| format!("{DECODER} of tokenizer_config.json has {id:?}: {value}"))?);
                }
            }
            None => {
                for (content, id) in &object(added_tokens) {
                    let id = id.as_u64().ok_or_else(|| format!("added_tokens.json has {content:?}: {id}"))?;
                    let special = tokens.special.iter().any(|token| token.content == *content);
                    added.push((id, AddedToken { special, normalized: !special, ..plain(content) }));
                }
            }
        }
        added.sort_by_key(|(id, _)| *id);
        tokens.added = added.into_iter().map(|(_, token)| token).collect();
        Ok(tokens)
    }

    /// Reads the special tokens among the fields of `tokenizer_config.json`.
    fn read_special(&mut self, fields: &Map<String, Value>) -> Result<(), String> {
        let others = fields.keys().map(String::as_str).filter(|name| !STANDARD.contains(name));
        for name in STANDARD.into_iter().chain(others.filter(|name| name.ends_with("_token"))) {
            match fields.get(name).map(|value| (value, token(value, true))) {
                Some((_, Some(token))) => {
                    self.named.insert(name.to_string(), token.content.clone());
                    self.special.push(token);
                }
                Some((value, None)) if STANDARD.contains(&name) && !value.is_null() => {
                    return Err(format!(
                        "{name} of tokenizer_config.json is {value}, expected a text or an added token"
                    ));
                }
                _ => {}
            }
        }
        let extra = EXTRA.iter().filter_map(|name| Some((*name, fields.get(*name)?)));
        for (name, value) in extra {
            let listed: Vec<&Value> = match value {
                Value::Array(list) => list.iter().collect(),
                Value::Object(named) => named.values().collect(),
                Value::Null => continue,
                other => return Err(format!("{name} of tokenizer_config.json is {other}, expected a list")),
            };
            for value in listed {
                let token = token(value, true);
                self.special.push(token.ok_or_else(|| format!("{name} of tokenizer_config.json has {value}"))?);
            }
        }
        Ok(())
    }
}

fn plain(content: &str) -> AddedToken {
    let content = content.to_string();
    AddedToken { content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true }
}

/// Reads a token: its text, or an object with `content`. `special` is the default of the field.
fn token(value: &Value, special: bool) -> Option<AddedToken> {
    if let Value::String(content) = value {
        return Some(plain(content));
    }
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(special);
    Some(AddedToken {
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!special),
        special,
        ..plain(value.get("content")?.as_str()?)
    })
}
