//! The text of a record, and messages about records without one.

use anyhow::{Error, Result, anyhow, bail};
use jiter::{Jiter, JiterError, Peek};

/// Fields that a message names at most.
const NAMED: usize = 20;

/// Returns the text of a JSON object's field: `None` if it is null.
///
/// Like Python's `json`, it accepts NaN, and the last of several fields of one name counts.
pub(super) fn text_of(object: &[u8], field: &str) -> Result<Option<String>> {
    let mut json = Jiter::new(object).with_allow_inf_nan();
    let kind = json.peek().map_err(|error| invalid(&json, error))?;
    if kind != Peek::Object {
        bail!("expected a JSON object, found {}", named(kind));
    }
    let mut found = None;
    let mut key = json.known_object().map(|key| key.map(|key| key == field));
    loop {
        let is_field = match key {
            Ok(Some(is_field)) => is_field,
            Ok(None) => break,
            Err(error) => return Err(invalid(&json, error)),
        };
        let value = json.peek().map_err(|error| invalid(&json, error))?;
        match value {
            Peek::String if is_field => {
                let text = json.known_str().map(str::to_owned);
                found = Some(Some(text.map_err(|error| invalid(&json, error))?));
            }
            _ => {
                json.known_skip(value).map_err(|error| invalid(&json, error))?;
                if is_field {
                    match value {
                        Peek::Null => found = Some(None),
                        _ => bail!("the field `{field}` is {}, but a text was expected", named(value)),
                    }
                }
            }
        }
        key = json.next_key().map(|key| key.map(|key| key == field));
    }
    json.finish().map_err(|error| invalid(&json, error))?;
    match found {
        Some(text) => Ok(text),
        None => Err(missing(field, &keys(object))),
    }
}

/// Returns the fields of a JSON object that was parsed before.
fn keys(object: &[u8]) -> Vec<String> {
    let mut json = Jiter::new(object).with_allow_inf_nan();
    let mut keys = Vec::new();
    let mut key = json.next_object().map(|key| key.map(str::to_owned));
    while let Ok(Some(name)) = key {
        keys.push(name);
        if json.next_skip().is_err() {
            break;
        }
        key = json.next_key().map(|key| key.map(str::to_owned));
    }
    keys
}

/// Makes the error for records without a field of this name. Conversations and preference pairs are recognised by
/// their fields.
pub(super) fn missing(field: &str, fields: &[String]) -> Error {
    let has = |name: &str| fields.iter().any(|field| field == name);
    let flag = if has("chosen") && has("rejected") {
        Some(("preference pairs", "--dpo"))
    } else if has("messages") || has("conversations") {
        Some(("conversations", "--sft"))
    } else if has("prompt") && has("completion") || has("instruction") && has("output") {
        Some(("prompts and completions", "--sft"))
    } else {
        None
    };
    let named = fields.iter().take(NAMED).map(|field| format!("`{}`", field.escape_debug()));
    let mut named = named.collect::<Vec<_>>().join(", ");
    match fields.len() {
        0 => named = "none".into(),
        more if more > NAMED => named += &format!(" and {} more", more - NAMED),
        _ => {}
    }
    match flag {
        Some((kind, flag)) => anyhow!(
            "the record does not have a field `{field}`. Its fields ({named}) are the fields of {kind}: pass the file as \
             {flag} FILE"
        ),
        None => anyhow!(
            "the record does not have a field `{field}`. Its fields are {named}: pass one of them as --text-field NAME"
        ),
    }
}

/// Makes the error for invalid JSON.
fn invalid(json: &Jiter<'_>, error: JiterError) -> Error {
    let description = error.description(json);
    let cut = if description.contains("EOF") { ". The file seems to be cut off" } else { "" };
    anyhow!("invalid JSON: {description}{cut}")
}

fn named(kind: Peek) -> &'static str {
    match kind {
        Peek::Null => "null",
        Peek::True | Peek::False => "a bool",
        Peek::String => "a string",
        Peek::Array => "an array",
        Peek::Object => "an object",
        _ if kind.is_num() => "a number",
        _ => "no JSON",
    }
}
