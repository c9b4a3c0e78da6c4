//! A line of a file of examples.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail, ensure};
use minijinja::Value;
use minijinja::value::ValueKind;

use super::template::Template;
use super::turns::conversation;
use crate::data::text::Marked;

/// What a line may be.
const FORMS: &str = "a line is {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, ..]} or \
                     {\"prompt\": \"...\", \"completion\": \"...\"}";

/// The text of a line, and what of it is to be learnt.
///
/// # Errors
/// It is neither form of example, or the template refuses it.
pub(super) fn read(line: &str, template: &Template, specials: &[String]) -> Result<Marked> {
    let fields: BTreeMap<String, Value> =
        serde_json::from_str(line).map_err(|error| anyhow!("it is no JSON object ({error}); {FORMS}"))?;
    let found = || fields.keys().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
    match (fields.get("messages"), fields.get("prompt"), fields.get("completion")) {
        (Some(messages), None, None) => {
            let messages = messages_of(messages)?;
            let mut others = fields.clone();
            others.remove("messages");
            conversation(template, &messages, &others, specials)
        }
        (None, Some(prompt), Some(completion)) => {
            let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) else {
                bail!(
                    "prompt is {} and completion is {}, but both must be text: write conversations as \"messages\"",
                    prompt.kind(),
                    completion.kind()
                )
            };
            ensure!(!completion.is_empty(), "the completion is empty, so there is nothing to learn: remove the line");
            let text = format!("{prompt}{completion}");
            let completion = prompt.len()..text.len();
            Ok(Marked { text, learnt: Vec::from([completion]), bare: true })
        }
        _ if fields.is_empty() => bail!("it has no keys; {FORMS}"),
        _ => bail!("it has the keys {}; {FORMS}", found()),
    }
}

/// The messages of a line, and its other fields.
#[cfg(test)]
pub(super) fn messages(line: &str) -> Result<(Vec<Value>, BTreeMap<String, Value>)> {
    let mut fields: BTreeMap<String, Value> = serde_json::from_str(line)?;
    let messages = messages_of(&fields.remove("messages").unwrap_or_default())?;
    Ok((messages, fields))
}

/// The messages, without fields that are null, as transformers has them.
fn messages_of(messages: &Value) -> Result<Vec<Value>> {
    ensure!(messages.kind() == ValueKind::Seq, "messages is {}, but must be a list; {FORMS}", messages.kind());
    let messages: Vec<Value> = messages.try_iter()?.collect();
    ensure!(!messages.is_empty(), "messages is empty; {FORMS}");
    messages.into_iter().enumerate().map(|(i, message)| message_of(i + 1, &message)).collect()
}

fn message_of(number: usize, message: &Value) -> Result<Value> {
    ensure!(message.kind() == ValueKind::Map, "message {number} is {}, but must be an object; {FORMS}", message.kind());
    let role = message.get_attr("role")?;
    ensure!(role.as_str().is_some(), "message {number} has no role that is text; {FORMS}");
    let mut fields = Vec::new();
    for key in message.try_iter()? {
        let value = message.get_item(&key)?;
        if !value.is_none() {
            fields.push((key, value));
        }
    }
    ensure!(
        fields.iter().any(|(key, _)| matches!(key.as_str(), Some("content" | "tool_calls"))),
        "message {number} has no content; {FORMS}"
    );
    Ok(Value::from_pairs(fields))
}
