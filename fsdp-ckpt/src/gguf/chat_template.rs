//! Chat templates.

use std::path::Path;

use serde_json::Value as Json;

use crate::Result;
use crate::gguf::metadata::{Metadata, Value};
use crate::text_file::{malformed, read_json, read_text};

/// The chat templates of a tokenizer, each with a name.
#[derive(Debug, Default)]
pub(super) struct ChatTemplates(Vec<(String, String)>);

const DEFAULT: &str = "default";

impl ChatTemplates {
    /// Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config` or `chat_template.json`, like
    /// transformers.
    pub(super) fn read(dir: &Path, tokenizer_config: Option<&Json>) -> Result<Self> {
        if let Some(text) = read_text(dir, "chat_template.jinja")? {
            return Ok(ChatTemplates(vec![(DEFAULT.into(), text)]));
        }
        let of_json = |json: Option<&Json>| json?.get("chat_template").cloned();
        let found = match of_json(tokenizer_config) {
            Some(found) => Some(found),
            None => of_json(read_json::<Json>(dir, "chat_template.json")?.as_ref()),
        };
        match found {
            None | Some(Json::Null) => Ok(ChatTemplates::default()),
            Some(Json::String(text)) => Ok(ChatTemplates(vec![(DEFAULT.into(), text)])),
            Some(Json::Array(list)) => {
                let named = |entry: &Json| {
                    let text = |key: &str| entry.get(key)?.as_str().map(str::to_string);
                    Some((text("name")?, text("template")?))
                };
                let named: Option<Vec<_>> = list.iter().map(named).collect();
                let path = dir.join("tokenizer_config.json");
                let reason = "it is a list whose entries lack a name or a template, expected both as text";
                named.map(ChatTemplates).ok_or_else(|| malformed(&path, Some("chat_template"), reason))
            }
            Some(_) => {
                let path = dir.join("tokenizer_config.json");
                Err(malformed(&path, Some("chat_template"), "it is not text, and not a list of texts with names"))
            }
        }
    }

    /// Adds the default template, and the others by their names.
    pub(super) fn add_to(&self, metadata: &mut Metadata) {
        let named = self.0.iter().filter(|(name, _)| name != DEFAULT);
        let names: Vec<String> = named.clone().map(|(name, _)| key_of(name)).collect();
        if let Some((_, text)) = self.0.iter().find(|(name, _)| name == DEFAULT) {
            metadata.add("tokenizer.chat_template", &text[..]);
        }
        for (name, text) in named {
            metadata.add(format!("tokenizer.chat_template.{}", key_of(name)), &text[..]);
        }
        if !names.is_empty() {
            metadata.add("tokenizer.chat_templates", Value::Texts(names));
        }
    }
}

/// Returns a name with only letters and digits, as keys have.
fn key_of(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect()
}
